"""From a folder or a file to a running tokenizer, with the settings that lie beside it honoured.

What is read: tokenizer.json, or vocab.txt (BERT), or vocab.json + merges.txt (GPT-2), or spiece.model (T5, XLNet); and
beside them, when present, tokenizer_config.json, special_tokens_map.json and added_tokens.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from allmask.errors import CheckpointError
from allmask.text import kinds
from allmask.text.kinds import (
    BERT_SPECIALS,
    GPT2_SPECIALS,
    PLAIN_SPECIALS,
    ROLES,
    T5_SPECIALS,
    XLNET_SPECIALS,
    Merges,
)  # fmt: skip
from allmask.text.sentencepiece import USER_DEFINED, Pieces, read_pieces

Specials = dict[str, str]  # role -> piece, for the roles that exist
Settings = dict[str, Any]
T = TypeVar("T")

VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model")  # the first that is there is read

# Other classes use the same file names for other rules; reading those as BERT or GPT-2 would give wrong ids.
_BERT_LIKE = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer", "PreTrainedTokenizer")
_GPT2_LIKE = ("GPT2Tokenizer", "PreTrainedTokenizer")
_T5_LIKE = ("T5Tokenizer", "MT5Tokenizer", "PreTrainedTokenizer")
_XLNET_LIKE = ("XLNetTokenizer",)
_SENTINEL = re.compile(r"<extra_id_\d+>")
_DAMAGED = "the file may be damaged: copy it again"
_MAX_VOCABULARY = 10_000_000
_BOM = b"\xef\xbb\xbf"
_PROBE = "A probe, 试一试: é ñ 1 \U0001f600"


def read(source: str | Path, lowercase: bool | None = None) -> tuple[Backend, Specials]:
    """The tokenizer in a folder or file; `lowercase` overrides what the files say (old BERT folders say nothing)."""
    path = _find(Path(source))
    settings = _settings(path.parent)
    if lowercase is not None:
        settings["do_lower_case"] = lowercase
    reader = _read_byte_bpe if path.name == "vocab.json" else _read_tokenizer_json
    if path.suffix == ".txt":
        reader = _read_wordpiece
    if path.suffix in (".model", ".spm"):
        reader = _read_sentencepiece
    backend, specials = reader(path, settings)
    _register(backend, specials, path, settings)
    _try_out(backend, path)
    return backend, specials


def guard(where: Path | str, action: Callable[[], T]) -> T:
    """Run what may fail on the Rust side; its panics are no Exception, so they are caught by what they are not."""
    try:
        return action()
    except (KeyboardInterrupt, SystemExit, CheckpointError):
        raise
    except BaseException as error:
        raise CheckpointError(f"{where}: not a usable tokenizer: {error}", _DAMAGED) from error


def _find(source: Path) -> Path:
    if source.is_file():
        return source
    if not source.is_dir():
        raise CheckpointError(
            f"{source}: no such file or folder", "give a model folder, a tokenizer.json or a vocab.txt"
        )
    for name in VOCABULARIES:
        if (source / name).is_file():
            return source / name
    raise CheckpointError(f"{source}: none of {', '.join(VOCABULARIES)} is in this folder")


def _settings(folder: Path) -> Settings:
    """tokenizer_config.json, completed by the older files for special and added tokens."""
    config, special, added = (
        _read_json(folder / name) if (folder / name).is_file() else {}
        for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    )
    settings = {**special, **config}
    decoder = settings.setdefault("added_tokens_decoder", {})
    if not isinstance(decoder, dict):
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: added_tokens_decoder is no object of ids and tokens"
        )
    listed = {entry.get("content") for entry in decoder.values() if isinstance(entry, dict)}
    decoder.update({str(id): {"content": piece} for piece, id in added.items() if piece not in listed})
    return settings


def _flag(settings: Settings, name: str, default: bool | None) -> bool | None:
    value = settings.get(name, default)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"tokenizer_config.json: {name} is {value!r}; expected true or false")
    return default if value is None else value


def _content(value: Any) -> str | None:
    """A special token is written as a string or as an object with its content."""
    return value.get("content") if isinstance(value, dict) else value


def _declared(settings: Settings) -> Specials:
    found = {role: _content(settings.get(f"{role}_token")) for role in ROLES}
    for role, piece in found.items():
        if piece is not None and (not isinstance(piece, str) or not piece):
            raise CheckpointError(f"tokenizer_config.json: {role}_token is {piece!r}; expected a piece of text")
    return {role: piece for role, piece in found.items() if piece}


def _expect_class(path: Path, settings: Settings, known: tuple[str, ...]) -> None:
    name = settings.get("tokenizer_class")
    if name is not None and str(name).removesuffix("Fast") not in known:
        raise CheckpointError(
            f"{path}: tokenizer_config.json says {name}, whose rules are not in this file",
            "save it as tokenizer.json first (transformers: AutoTokenizer.from_pretrained(…).save_pretrained(…))",
        )


def _read_wordpiece(path: Path, settings: Settings) -> tuple[Backend, Specials]:
    _expect_class(path, settings, _BERT_LIKE)
    vocabulary = _read_vocab_txt(path)
    declared = _declared(settings)
    specials = {role: piece for role, piece in BERT_SPECIALS.items() if piece in vocabulary} | declared
    for role in ("unk", "cls", "sep"):
        piece = declared.get(role, BERT_SPECIALS[role])
        if piece not in vocabulary:
            raise CheckpointError(
                f"{path}: no line is {piece} (the {role} token)",
                "is it a BERT vocabulary, and complete? Other names for special tokens go into tokenizer_config.json",
            )
    backend = kinds.wordpiece(
        vocabulary,
        specials,
        lowercase=bool(_flag(settings, "do_lower_case", True)),
        strip_accents=_flag(settings, "strip_accents", None),
        chinese_characters=bool(_flag(settings, "tokenize_chinese_chars", True)),
    )
    return backend, specials


def _read_byte_bpe(path: Path, settings: Settings) -> tuple[Backend, Specials]:
    _expect_class(path, settings, _GPT2_LIKE)
    vocabulary = _read_vocab_json(path)
    merges_path = path.with_name("merges.txt")
    if not merges_path.is_file():
        raise CheckpointError(f"{merges_path}: no such file", "a byte-level BPE needs vocab.json and merges.txt")
    merges = _read_merges(merges_path, vocabulary)
    specials = {role: piece for role, piece in GPT2_SPECIALS.items() if piece in vocabulary} | _declared(settings)
    before = specials.get("bos") if _flag(settings, "add_bos_token", False) else None
    prefix_space = bool(_flag(settings, "add_prefix_space", False))
    backend = guard(path, lambda: kinds.byte_bpe(vocabulary, merges, prefix_space=prefix_space, before=before))
    _expect_bytes(backend, path)
    return backend, specials


def _read_sentencepiece(path: Path, settings: Settings) -> tuple[Backend, Specials]:
    _expect_class(path, settings, (*_T5_LIKE, *_XLNET_LIKE))
    found = read_pieces(path)
    if _is_xlnet(settings, found):
        return _read_xlnet(path, settings, found)
    specials = dict(T5_SPECIALS) | _declared(settings)
    pieces = found.pieces + _sentinels(settings, {piece for piece, _ in found.pieces})
    _expect_pieces(path, pieces, specials, ("pad", "eos", "unk"))
    options = {"prefix_space": found.prefix_space, "trims": found.trims, "byte_fallback": found.bytes}
    backend = guard(path, lambda: kinds.unigram(pieces, specials, charsmap=found.charsmap, **options))
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in found.of_kind(USER_DEFINED)])
    backend.add_special_tokens([piece for piece, _ in pieces if _SENTINEL.fullmatch(piece)])
    return backend, specials


def _expect_pieces(path: Path, pieces: list[tuple[str, float]], specials: Specials, roles: tuple[str, ...]) -> None:
    for role in roles:
        if specials[role] not in {piece for piece, _ in pieces}:
            raise CheckpointError(
                f"{path}: no piece is {specials[role]} (the {role} token)",
                "other names for special tokens go into tokenizer_config.json",
            )


def _is_xlnet(settings: Settings, found: Pieces) -> bool:
    """By its class, or, where nothing tells of one, by the pieces that frame its texts."""
    named = settings.get("tokenizer_class")
    marks = {XLNET_SPECIALS["sep"], XLNET_SPECIALS["cls"]}
    return (named is None and marks <= {piece for piece, _ in found.pieces}) or str(named).startswith(_XLNET_LIKE)


def _read_xlnet(path: Path, settings: Settings, found: Pieces) -> tuple[Backend, Specials]:
    specials = dict(XLNET_SPECIALS) | _declared(settings)
    _expect_pieces(path, found.pieces, specials, ("pad", "unk", "cls", "sep"))
    options = {
        "lowercase": bool(_flag(settings, "do_lower_case", False)),
        "keep_accents": bool(_flag(settings, "keep_accents", False)),
    }
    backend = guard(path, lambda: kinds.xlnet_unigram(found.pieces, specials, charsmap=found.charsmap, **options))
    known = [piece for piece in kinds.XLNET_OTHERS if backend.token_to_id(piece) is not None]
    backend.add_special_tokens([AddedToken(specials["mask"], lstrip=True, normalized=False), *known])
    return backend, specials


def _sentinels(settings: Settings, known: set[str]) -> list[tuple[str, float]]:
    """T5's, which are not in the file; how many there are the settings may say."""
    count = settings.get("extra_ids", kinds.SENTINELS)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= 10_000:
        raise CheckpointError(f"tokenizer_config.json: extra_ids is {count!r}; expected a whole number")
    return [] if any(_SENTINEL.fullmatch(piece) for piece in known) else kinds.sentinels(count)


def _read_tokenizer_json(path: Path, settings: Settings) -> tuple[Backend, Specials]:
    data = _read_json(path)
    if not isinstance(data.get("model"), dict):
        raise CheckpointError(
            f'{path}: no tokenizer in it ("model" is missing)', "give a tokenizer.json or a model folder"
        )
    if isinstance(data["model"].get("vocab"), dict):
        _check_ids(path, data["model"]["vocab"])
    # Padding and truncation belong to a batch, not to a vocabulary: files that carry them would cut text silently.
    backend = guard(path, lambda: Backend.from_str(json.dumps({**data, "padding": None, "truncation": None})))
    _expect_same_ids(backend, data, path)
    _expect_bytes(backend, path)
    _follow_bert_settings(backend, settings)
    return backend, _usual_names(backend) | _declared(settings)


def _expect_same_ids(backend: Backend, data: dict[str, Any], path: Path) -> None:
    """The library numbers added tokens itself and says nothing when the file says otherwise."""
    for entry in data.get("added_tokens") or []:
        actual = backend.token_to_id(entry["content"])
        if entry["content"] and actual != entry["id"]:
            raise CheckpointError(
                f"{path}: the added token {entry['content']!r} has id {entry['id']} but would get {actual}"
            )


def _expect_bytes(backend: Backend, path: Path) -> None:
    """A byte without a piece would vanish from the text. (Thirteen bytes never occur in UTF-8 and may be missing.)"""
    if not isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel) or not isinstance(backend.model, models.BPE):
        return
    never = {0xC0, 0xC1, *range(0xF5, 0x100)}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    order = printable + [byte for byte in range(256) if byte not in printable]
    alphabet = zip(order, kinds.byte_alphabet(), strict=True)
    missing = [byte for byte, piece in alphabet if byte not in never and backend.token_to_id(piece) is None]
    if missing:
        shown = ", ".join(f"0x{byte:02x}" for byte in missing[:5])
        raise CheckpointError(
            f"{path}: {len(missing)} of 256 bytes have no piece ({shown} …)", "text would lose characters"
        )


def _follow_bert_settings(backend: Backend, settings: Settings) -> None:
    """tokenizer_config.json wins over tokenizer.json, as in the reference implementation."""
    old = backend.normalizer
    if not isinstance(old, normalizers.BertNormalizer):
        return
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=old.clean_text,
        handle_chinese_chars=bool(_flag(settings, "tokenize_chinese_chars", old.handle_chinese_chars)),
        strip_accents=_flag(settings, "strip_accents", old.strip_accents),
        lowercase=bool(_flag(settings, "do_lower_case", old.lowercase)),
    )


def _usual_names(backend: Backend) -> Specials:
    """The names special tokens usually have, for a tokenizer.json that comes alone."""
    vocabulary = backend.get_vocab(with_added_tokens=True).keys()
    families = (BERT_SPECIALS, XLNET_SPECIALS, PLAIN_SPECIALS, T5_SPECIALS, GPT2_SPECIALS)
    return next((dict(family) for family in families if vocabulary >= set(family.values())), {})


def _register(backend: Backend, specials: Specials, path: Path, settings: Settings) -> None:
    """Make special and added tokens known, so that text may hold them; ids must come out as the files state them."""
    for id, entry in sorted(settings["added_tokens_decoder"].items(), key=lambda item: _id(item[0])):
        token = _added_token(entry)
        backend.add_special_tokens([token]) if token.special else backend.add_tokens([token])
        if backend.token_to_id(token.content) != _id(id):
            actual = backend.token_to_id(token.content)
            raise CheckpointError(f"{path}: the added token {token.content!r} has id {id} but would get {actual}")
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens([piece for piece in [*specials.values(), *_extra(settings)] if piece not in known])


def _extra(settings: Settings) -> list[str]:
    """Special tokens without a role, under the newer or the older name."""
    name = "extra_special_tokens" if settings.get("extra_special_tokens") else "additional_special_tokens"
    listed = settings.get(name) or []
    pieces = [_content(piece) for piece in (listed.values() if isinstance(listed, dict) else listed)]
    if not all(isinstance(piece, str) and piece for piece in pieces):
        raise CheckpointError(f"tokenizer_config.json: {name} is {listed!r}; expected a list of pieces")
    return [str(piece) for piece in pieces]


def _id(text: str) -> int:
    if not text.isdecimal():
        raise CheckpointError(f"tokenizer_config.json: an added token has the id {text!r}; expected a whole number")
    return int(text)


def _added_token(entry: Any) -> AddedToken:
    if not isinstance(entry, dict) or not isinstance(entry.get("content"), str) or not entry["content"]:
        raise CheckpointError(f"tokenizer_config.json: not an added token: {entry!r}")
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(entry["content"], **{name: entry[name] for name in names if isinstance(entry.get(name), bool)})


def _try_out(backend: Backend, path: Path) -> None:
    """Some faults show only in use; better here, where the file can be named."""
    guard(path, lambda: (backend.encode(_PROBE), backend.encode(_PROBE, _PROBE), backend.to_str()))


# ---- vocabulary files: a line that is wrong is named, never skipped, so that no id ever shifts ---------------------


def _read_text(path: Path) -> str:
    """The file as text, without a byte-order mark; a byte that is not UTF-8 is an error that names its line."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return data.removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.removeprefix(_BOM).count(b"\n", 0, error.start) + 1
        raise CheckpointError(f"{path}:{line}: not UTF-8 text ({error.reason})", "save the file as UTF-8") from error


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; a name that occurs twice in one object is an error, as one of the two would be lost."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))
            raise CheckpointError(f"{path}: {twice!r} occurs twice in one object", "remove one of the two")
        return made

    try:
        data = json.loads(_read_text(path), object_pairs_hook=unique)
    except (json.JSONDecodeError, RecursionError) as error:
        where = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise CheckpointError(
            f"{path}{where}: not valid JSON ({error})", "the file may be cut off: copy it again"
        ) from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def _read_vocab_txt(path: Path) -> dict[str, int]:
    """One piece a line, its id the line's number from 0. Windows line ends and blank lines at the end do no harm."""
    lines = [line.removesuffix("\r") for line in _read_text(path).split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    ids: dict[str, int] = {}
    for id, piece in enumerate(lines):
        if not piece.strip(" \t"):  # other white space is a piece: the Chinese BERT has a line separator, U+2028
            raise CheckpointError(f"{path}:{id + 1}: the line is blank", _placeholder(id))
        if piece in ids:
            first = ids[piece] + 1
            raise CheckpointError(f"{path}:{id + 1}: {piece!r} is already on line {first}", _placeholder(id))
        ids[piece] = id
    if not ids:
        raise CheckpointError(f"{path}: no pieces in it", "the file may be cut off: copy it again")
    return ids


def _placeholder(id: int) -> str:
    return f"removing the line would shift all ids after it; write a placeholder such as [unused-{id}] there"


def _read_vocab_json(path: Path) -> dict[str, int]:
    """The pieces and ids of a byte-level BPE."""
    vocabulary = _read_json(path)
    _check_ids(path, vocabulary)
    return vocabulary


def _check_ids(path: Path, vocabulary: dict[str, Any]) -> None:
    """Every id a whole number of sensible size, and no two pieces with the same."""
    owner: dict[int, str] = {}
    for piece, id in vocabulary.items():
        if not isinstance(id, int) or isinstance(id, bool) or not 0 <= id < _MAX_VOCABULARY:
            raise CheckpointError(f"{path}: the id of {piece!r} is {id!r}; expected 0 to {_MAX_VOCABULARY - 1:,}")
        if id in owner:
            raise CheckpointError(f"{path}: {owner[id]!r} and {piece!r} both have the id {id}")
        owner[id] = piece
    if not owner:
        raise CheckpointError(f"{path}: no pieces in it", "the file may be cut off: copy it again")


def _read_merges(path: Path, vocabulary: dict[str, int]) -> Merges:
    """Two pieces a line, in the order in which they are merged; the first line may be a #version comment."""
    merges: Merges = []
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        if len(parts) != 2 or not all(parts):
            raise CheckpointError(f"{path}:{number}: expected two pieces and one space between, found {line!r}")
        for piece in (*parts, "".join(parts)):
            if piece not in vocabulary:
                raise CheckpointError(
                    f"{path}:{number}: {piece!r} is not in vocab.json", "the two files must belong together"
                )
        merges.append((parts[0], parts[1]))
    return merges
