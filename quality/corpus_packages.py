"""Packages by name: apt-get, pip and npm download them; they are unpacked, never installed or executed."""

from __future__ import annotations

import contextlib
import gzip
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

BATCH = 40  # packages that one command brings


class Unavailable(Exception):
    """A package client could not bring a package."""


def download_all(packages: list[str], folder: Path) -> Iterator[tuple[str, Path | Unavailable]]:
    """Bring packages by name, many with one command; a package that cannot be had comes with the reason."""
    for kind in ("deb", "pip", "npm"):
        missing = [p for p in packages if p.startswith(f"{kind}:") and not archives(place_of(p, folder))]
        for first in range(0, len(missing), BATCH) if len(missing) > 1 else ():
            batch = missing[first : first + BATCH]
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                with contextlib.suppress(Unavailable):  # what is missing then is asked for by itself
                    run(kind, [p.split(":", 1)[1] for p in batch], Path(scratch))
                by_name = {package_name(archive): archive for archive in archives(Path(scratch))}
                for package in batch:
                    if archive := by_name.get(archive_name(package)):
                        shutil.rmtree(place_of(package, folder), ignore_errors=True)
                        place_of(package, folder).mkdir(parents=True)
                        archive.replace(place_of(package, folder) / archive.name)
    for package in packages:
        try:
            yield package, download(package, folder)
        except Unavailable as error:
            yield package, error


def download(package: str, folder: Path) -> Path:
    """Bring one package by its name into `folder` with its own client; return the archive."""
    kind, name = package.split(":", 1)
    place = place_of(package, folder)
    if not (found := archives(place)):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        if kind == "lists":
            write(place / "apt.conf", private_lists(name, place.resolve()))
        run(kind, [name], place)
        if not (found := archives(place)):
            raise Unavailable(f"{package}: nothing was downloaded")
    return found[0]


def run(kind: str, names: list[str], place: Path) -> None:
    """Call the client of a kind of package in the folder `place`."""
    command = {
        "lists": ["apt-get", "-q", "-c", "apt.conf", "update"],
        "deb": ["apt-get", "download", "-q", *names],
        # wheels only: for a source archive pip would run the package's own code
        "pip": [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", *names],
        "npm": ["npm", "pack", "--silent", "--ignore-scripts", *names],
    }[kind]
    try:
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=900)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{kind}:{names[0]}: {error}") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "nothing was downloaded").splitlines()[-1]
        raise Unavailable(f"{kind}:{names[0]}: {last}")


def place_of(package: str, folder: Path) -> Path:
    return folder / re.sub(r"\W+", "-", package)


def archive_name(package: str) -> str:
    """How the name of a package's archive begins, in the form that `package_name` gives."""
    kind, name = package.split(":", 1)
    if kind == "pip":
        return re.sub(r"[-_.]+", "-", name).lower()
    return name.removeprefix("@").replace("/", "-")


def package_name(archive: Path) -> str:
    """The name of the package in an archive's name."""
    if archive.suffix == ".deb":
        return archive.name.split("_")[0]
    if archive.suffix == ".whl":
        return re.sub(r"[-_.]+", "-", archive.name.split("-")[0]).lower()
    return re.sub(r"-\d+\.\d+\..*$", "", archive.name)


def private_lists(name: str, place: Path) -> str:
    """Configuration of apt with lists and cache of its own, so that the system's are not touched.

    `name` is the language of the descriptions, or dep11: the catalogue of applications (AppStream).
    """
    for folder in ("lists/partial", "cache/archives/partial"):
        (place / folder).mkdir(parents=True)
    wanted = f'Acquire::Languages {{ "{name}"; }};\n'
    if name == "dep11":
        wanted = (
            'Acquire::Languages { "none"; };\nAcquire::IndexTargets::deb::DEP-11 { DefaultEnabled "true"; '
            'MetaKey "$(COMPONENT)/dep11/Components-amd64.yml"; ShortDescription "Components"; '
            'Description "$(RELEASE)/$(COMPONENT) DEP-11"; KeepCompressed "false"; };\n'
        )
    return (
        f'#clear Acquire::Languages;\n{wanted}Acquire::GzipIndexes "false";\n'
        f'APT::Sandbox::User "root";\nDir::State::lists "{place}/lists";\nDir::Cache "{place}/cache";\n'
    )


def archives(folder: Path) -> list[Path]:
    packages = sorted(p for p in folder.glob("*") if p.suffix in (".deb", ".whl", ".tgz"))
    lists = [*folder.glob("lists/*_main_i18n_Translation-*"), *folder.glob("lists/*_main_dep11_Components-*")]
    return packages or sorted(lists, key=lambda path: -path.stat().st_size)


def unpack(archive: Path, folder: Path, only: str = "") -> Path:
    """Unpack without executing anything; entries that point out of the folder are refused.

    With `only`, a regular expression, just the regular files whose path it finds; "templates" are the questions of a
    Debian package, which stand beside its files.
    """
    folder.mkdir(parents=True)
    if "_dists_" in archive.name:
        shutil.copy(archive, folder / "list")
    elif archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as file:
            # extractall drops leading slashes and ".."
            file.extractall(folder, [name for name in file.namelist() if re.search(only, name)])
    elif archive.suffix == ".deb" and only == "templates":
        asked = subprocess.run(["dpkg-deb", "--info", str(archive), "templates"], capture_output=True)
        (folder / "templates").write_bytes(asked.stdout)  # none where the package has no questions
    elif archive.suffix == ".deb" and only:
        command = ["dpkg-deb", "--fsys-tarfile", str(archive)]
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE) as process,
            tarfile.open(fileobj=process.stdout, mode="r|") as file,
        ):
            file.extractall(folder, matching(file, only), filter="data")
    elif archive.suffix == ".deb":
        subprocess.run(["dpkg-deb", "-x", str(archive), str(folder)], check=True, capture_output=True)
    else:
        with tarfile.open(archive) as file:
            file.extractall(folder, matching(file, only) if only else None, filter="data")
    return folder


def matching(file: tarfile.TarFile, only: str) -> Iterator[tarfile.TarInfo]:
    return (member for member in file if member.isreg() and re.search(only, member.name))


def version(archive: Path) -> str:
    """The version in an archive's name."""
    if suite := re.search(r"_dists_(.+?)_main_(?:i18n|dep11)", archive.name):
        return suite.group(1)
    stem = archive.name.removesuffix(archive.suffix).replace("%3a", ":")
    if archive.suffix == ".deb":
        return stem.split("_")[1]
    if archive.suffix == ".whl":
        return stem.split("-")[1]
    return re.sub(r"^.*?-(?=\d+\.\d)", "", stem)


def read_text(path: Path) -> str:
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    return data.decode("utf-8", errors="replace")


def files(folder: Path, pattern: str) -> Iterator[Path]:
    """Regular files under `folder`, in a fixed order; links are left out (a file counts once, and inside only)."""
    return (p for p in sorted(folder.glob(pattern)) if p.is_file() and not p.is_symlink())


def write(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
