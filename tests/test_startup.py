"""Starting up is quick because torch is imported late: `import allmask` and every `--help` do without it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
import typer

from allmask import cli
from allmask.cli.main import COMMANDS

HEAVY = (
    "torch",
    "numpy",
    "matplotlib",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "transformers",
    "rich",
    "pydantic",
)
REPORT = f"import sys; print('HEAVY', *[name for name in {HEAVY} if name in sys.modules])"
FORKS = f"""
import os, sys
from allmask.cli.main import main
for line in sys.argv[1:]:
    if not os.fork():
        code = main(line.split())
        print("HEAVY", *[name for name in {HEAVY} if name in sys.modules], "code", code, flush=True)
        os._exit(0)
    os.wait()
    print("\\n@", flush=True)
"""
HELP = "import sys\nfrom allmask.cli.main import main\ncode = main(sys.argv[1:])\n" + REPORT + "\nsys.exit(code)"


def python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=300)


def test_import_is_light():
    ran = python("import allmask; allmask.__version__; dir(allmask)\n" + REPORT)
    assert (ran.returncode, ran.stdout.strip()) == (0, "HEAVY"), ran.stderr


def test_names_resolve_on_first_use_and_a_model_is_loaded_without_the_compiler():
    code = "import sys, allmask; print(allmask.Mask.__name__, 'torch' in sys.modules); allmask.load('allmask-en')\n"
    ran = python(code + "print('torch._dynamo' in sys.modules)")
    assert ran.stdout.split() == ["Mask", "True", "False"], ran.stderr


WITHOUT_COMPILER = """
import os
import sys
from allmask.cli._torch import ABOVE, LEFT_OUT, import_torch
import_torch()
import torch
from allmask import presets
from allmask.nn.build import empty_parameters
for name in presets.PRESETS:
    assert empty_parameters(presets.PRESETS[name](), ("lm",))
torch.rand(2, generator=torch.Generator().manual_seed(0))
print(*[name for name in (LEFT_OUT, *ABOVE) if name in sys.modules], flush=True)
for wanted in sys.argv[1:]:
    if os.fork():
        os.wait()
        continue
    exec(wanted)
    module = sys.modules[LEFT_OUT]
    print(module.__file__ is not None, torch._meta_registrations is module, torch._decomp.__spec__.origin is not None)
    print(torch.linalg.svd(torch.empty(3, 4, device="meta"))[0].shape[0], flush=True)
    os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_what_torch_needs_for_its_compiler_is_imported_when_it_is_wanted():
    """By whatever wants it first; a fork for each, with torch imported."""
    compiled = "torch.compile(torch.sin, backend='eager')(torch.ones(2))"
    ran = python(WITHOUT_COMPILER, compiled, "import torch._refs", "import torch._decomp")
    assert ran.stdout.splitlines() == ["", *["True True True", "3"] * 3], ran.stdout + ran.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_help():
    """`allmask --help`, and that of every command: it succeeds, imports nothing heavy and closes with examples."""
    lines = ["--help"]
    for name, (module, _) in COMMANDS.items():
        command = import_module(module).command
        subcommands = command.registered_commands if isinstance(command, typer.Typer) else []
        lines += [f"{name} --help", *(f"{name} {one.name or one.callback.__name__} --help" for one in subcommands)]
    ran = python(FORKS, *lines)  # a fork for each, with nothing but the table of commands imported
    assert ran.returncode == 0, ran.stderr
    answers = ran.stdout.split("\n@\n")[:-1]
    assert len(answers) == len(lines)
    for line, said in zip(lines, answers, strict=True):
        *text, last = said.strip().splitlines()
        assert last == "HEAVY code 0", f"allmask {line}: {last}, of which heavy modules were imported\n{ran.stderr}"
        assert "Examples:" in said and text[-1].strip().startswith("allmask "), line


USAGE_ERRORS = {  # the words of a command line, and part of what is said
    "finetune": "no folder for the run was named",
    "finetune --out {new}": "no data was named",
    "finetune minilm --out {new}": "no data was named",
    "finetune minilm --data {file} --out {new} --task titel": "did you mean title?",
    "finetune minilm --data {file} --out {new} --lr fast": "Invalid value for '--lr'",
    "finetune minilm --data {file} --out {new} --lr -1": "--lr is -1.0; it must be positive",
    "finetune minilm --data {file} --out {new} --schedule wavy": "--schedule is 'wavy'; expected one of linear",
    "finetune minilm --data {file} --out {new} --epoch 3": "Did you mean --epochs?",
    "finetune minilm --data {file} --out {new} --task classify --max-source 9": "not for classify",
    "finetune minilm --data {file} --out {new} --task classify --max-length 2": "--max-length is 2",
    "finetune minilm --data {file} --out {new} --truncate windows": "--truncate is 'windows'",
    "finetune minilm --data {file} --out {new} --freeze --lm-weight 0.5": "cannot be combined with --freeze",
    "finetune minilm --data {file} --out {new} --seeds 3": "name them with --eval",
    "finetune minilm --data {file} --out {new} --eval {file} --search --steps 9": "leave --steps out",
    "finetune minilm --data {file} --out {new} --average 5 --keep 2": "raise --keep",
    "finetune minilm --data {new} --out {new}": "no such file",
    "finetune minilm --data {file} --out {new} --config {new}": "cannot be read",
    "finetune minilm --data {file} --out {new} --config {yaml}": "did you mean epochs?",
    "finetune --resume --out {new}": "no run to resume",
    "train --out {new}": "no data was named",
    "train --data {file} --out {new} --preset transformer-smal": "did you mean transformer-small?",
    "train --data {file} --out {new} --tokenizer t --vocab-size 9": "--tokenizer brings its own vocabulary",
    "train --data {file} --out {new} --momentum 0.5": "--momentum is for --optimizer sgd",
    "train --task image --out {new} --preset resnet21": "there are: resnet18",
    "train --task image --out {new} --batch-images 2": "expected 4 or more",
    "train --task image --out {new} --layers 3": "--layers is for texts",
    "train --task gan --out {new} --preset toy --size 9": "for images, not for a toy",
    "pretrain --out {new}": "no data was named",
    "pretrain --data {file} --out {new}": "no tokenizer was named",
    "pretrain --data {file} --tokenizer t --out {new} --objective mlmm": "did you mean mlm?",
    "pretrain --data {file} --tokenizer t --out {new} --objective mlm:x": "the weight of mlm",
    "pretrain --data {file} --tokenizer t --out {new} --objective mlm,span": "cannot be trained in one model",
    "pretrain --data {file} --tokenizer t --out {new} --objective causal --whole-words": "for mlm, nsp",
    "pretrain --data {file} --tokenizer t --out {new} --preset t5-small": "expected one for mlm",
    "pretrain --data {file} --out {new} --from minilm --width 9": "has its own shape and tokenizer",
    "pretrain --data {file} --tokenizer t --out {new} --length 2": "needs at least 3",
    "finetune minilm --data {file} --eval {file} --out {new}": "also trained on",
    "finetune minlm --data {file} --out {new}": 'did you mean "minilm"?',
    "pretrain --data {file} --out {new} --from {new}": "no such folder or file",
    "check {new}.csv": "new.csv: no such file",
    "check {file} --task titel": "did you mean title?",
    "check {file} {new}": "no such folder or file",
    "check {file} --columns source": "is not FIELD=COLUMN",
    "generate": "no text was given",
    "generate minilm --beam 4": "Did you mean --beams?",
    "generate minilm --beams 0": "--beams is 0; expected at least 1",
    "evaluate minilm {file} --max-new 0": "--max-new is 0; expected at least 1",
    "generate minilm --text a --top-k 5": "no effect without --sample",
    "generate minilm --text a --sample --temperature -1": "temperature is -1.0",
    "generate minilm --text a --beams 2 --n-best 3": "n_best is 3 of 2 beams",
    "generate minilm --text a --stream --json": "exclude each other",
    "generate {new} --text a": "no such folder or file",
    "fill {new} a": "no such folder or file",
    "predict minilm {file} --columns body": "is not FIELD=COLUMN",
    "predict minilm {file} --encoding gb18031": "'gb18031' is unknown",
    "finetune minilm --data {file} --out {new} --columns source=": "is not FIELD=COLUMN",
    "finetune minilm --data {file} --out {new} --encoding klingon": "usual ones: utf-8, gb18030",
    "finetune minilm --data {file} --out {new} --label-names one": "one name only",
    "predict minilm {file} -o a.doc": "unknown file format",
    "predict minilm {file} -o {file}": "is the input itself",
    "predict {new} {file} -o -": "no such folder or file",
    "predict {trained} {new}.jsonl -o -": "new.jsonl: no such file",
    "evaluate {trained} {new}.jsonl": "new.jsonl: no such file",
    "evaluate minilm {file} --precision int3": "'int3' is not one of",
    "embed minilm": "expected a file or --text",
    "embed minilm {new}.txt -o a.npy": "new.txt: no such file",
    "embed minilm {file} -o a.csv": "unknown file format",
    "embed {new} {file} -o a.npy": "no such folder or file",
    "drift {file} {new}": "no such file or folder",
    "drift {file} {file} --folds 3": "for the permutation test only",
    "drift {file} {file} --alpha 2": "--alpha is 2.0",
    "drift {file} a": "a: no such file",
    "mask prefx --text a": "did you mean prefix?",
    "mask permutation --text a": "needs --order",
    "mask permutation --text a --order 1,2": "expected each of 0 to 0 once",
    "mask packed --text a --each prefx": "did you mean prefix?",
    "mask matrix --file {new}": "no such file",
    "mask matrix --file {yaml}": "expected 0 or 1",
    "mask": "no mask was named",
    "mask --order 0,x": "'x' is not a whole number",
    "mask causal --text a --animate a.png": "ends in .gif or .svg",
    "attention minilm": "no text was given",
    "attention minilm --text a --mask prefx": "did you mean prefix?",
    "attention minilm --text a --order 0,|,1": "no documents and no padding",
    "attention {new} --text a": "no such folder or file",
    "audit {new}": "no such folder or file",
    "audit minilm --mask prefx": "did you mean prefix?",
    "play {new}": "no such folder or file",
    "play --port 99999": "Invalid value for '--port'",
    "inspect": "name either a model or a --preset",
    "inspect --preset resnet21": "did you mean resnet",
    "inspect --preset bert-bas": "did you mean bert-base?",
    "inspect --preset bert-tiny --heads tail": "expected pooler, lm, nsp",
    "inspect --preset bert-tiny --text a": "a new model has none",
    "inspect resnet20 --text a": "--text is for language models",
    "inspect {new}": "no such folder or file",
    "tokenizer trian": "Did you mean 'train'?",
    "tokenizer train {file}": "Missing option '--out'",
    "average {new} --out {new}": "no such folder",
    "convert {new} --out {new}": "no such folder or file",
    "convert minilm --out {trained}": "already there",
    "convert minilm --out {new} --keep-tokens {new}": "no such file",
    "verify {new}": "no such folder",
    "verify {trained}": "no manifest.json",
    "finetune minilm --data {file} --out {trained}": "trained: already there",
    "finetune minilm --data {file} --out {file}": "a.jsonl: already there",
    "finetune minilm --data {empty} --out {new}": "the file is empty",
    "finetune minilm --data {trained} --out {new}": "is a folder",
    "finetune minilm --data {file} --out {new} --shard": "--shard needs several processes",
    "train --data {file} --out {trained}": "trained: already there",
    "train --data {file} --out {new} --tokenizer {new}": "new: no such folder or file",
    "train --task image --data {new} --out {new}": "give a folder with a subfolder for each class",
    "train --task image --eval {new} --out {new}": "new: does not exist",
    "train --task image --out {trained}": "trained: already there",
    "train --task gan --data {new} --out {new}": "new: does not exist",
    "train --task gan --judge {new} --out {new}": "the folder of an image classifier",
    "pretrain --data {file} --tokenizer {new} --out {new}": "new: no such folder or file",
    "pretrain --data {file} --from minilm --out {trained}": "trained: already there",
    "drift {file} {empty}": "the file is empty",
    "average {trained} --out {new}": "no run with checkpoints",
    "serve {new}": "no such folder or file",
    "serve {trained} {trained}": "two models are called 'trained'",
    "serve {trained} --tasks tittle": "did you mean title?",
    "serve {trained} --max-items 9 --queue 8": "more than the queue holds",
    "serve {trained} --port 70000": "expected 0 <= port <= 65535",
    "demo --minutes 0": "greater than or equal to 0.5",
    "demo --out {trained}": "not a finished demo",
    "demo --text {new}": "new: no such file",
    "demo --text {empty}": "the file is empty",
    "demo --text {trained}": "is a folder",
    "demo --text {file}": "too little text",
}


def test_usage_errors_are_answered_without_torch(tmp_path: Path):
    """Aimed at under 0.5 s each; here one process answers all of them."""
    (tmp_path / "a.jsonl").write_text('{"source": "a", "target": "b"}\n')
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "a.yaml").write_text("epoch: 3\n")
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "allmask.json").write_text('{"task": "title"}')
    names = {"file": "a.jsonl", "empty": "empty.jsonl", "yaml": "a.yaml", "new": "new", "trained": "trained"}
    places = {word: tmp_path / name for word, name in names.items()}
    lines = [words.format(**places) for words in USAGE_ERRORS]
    code = "import sys\nfrom allmask.cli.main import main\nfor line in sys.argv[1:]:\n"
    code += "    sys.stderr.write(f'\\n@{main(line.split())}\\n')\n"
    code += "    if 'torch' in sys.modules: sys.exit(f'torch was imported: {line}')\n"
    ran = python(code + REPORT, *lines)
    assert ran.returncode == 0, ran.stderr.splitlines()[-1]
    assert set(ran.stdout.split()) <= {"HEAVY", "pydantic"}, ran.stdout
    answers = re.split(r"\n@(\d+)\n", "\n" + ran.stderr)
    for words, said, status in zip(USAGE_ERRORS, answers[::2], answers[1::2], strict=False):
        assert status in "2345" and USAGE_ERRORS[words] in said, f"{words}: {said}"
    assert len(answers) // 2 == len(lines) and not (tmp_path / "new").exists()


def test_every_command_file_is_in_the_table():
    files = {path.stem for path in Path(cli.__file__).parent.glob("[!_]*.py")} - {"main"}
    assert files == set(COMMANDS)


def test_help_answers_soon():
    """Aimed at 0.3 s on an idle machine; ten times that is a bug on any."""
    start = time.perf_counter()
    python(HELP, "--help")
    assert time.perf_counter() - start < 3


def test_python_dash_m_is_the_same_command():
    ran = subprocess.run([sys.executable, "-m", "allmask", "--version"], capture_output=True, text=True, timeout=300)
    assert ran.stdout.startswith("allmask ") and ran.returncode == 0
