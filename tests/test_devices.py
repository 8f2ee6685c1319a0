"""Where a model computes: what is refused, and that nothing of a model on another device stays on the CPU.

No GPU is needed: `simulated_device` computes on the CPU, and fails where a GPU would, at tensors of two devices.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import allmask
from allmask import devices, presets
from allmask.data import Record
from allmask.decoding.fast import engines
from allmask.devices import expect_device, find_device
from allmask.errors import UsageError
from allmask.inference.attention import attention_map
from allmask.losses import losses_of
from allmask.mask import audit
from allmask.model import Model, load
from allmask.nn.heads import Labels
from allmask.nn.init import signal_report
from allmask.tasks.answer import Answer, Answerer
from allmask.tasks.choose import Choose, Chooser
from allmask.tasks.classify import Classifier, Classify
from allmask.tasks.common.generator import TextGenerator
from allmask.tasks.continuation import Continuation
from allmask.tasks.embed import Embedder
from allmask.tasks.fill import Filler
from allmask.tasks.seq2seq import Title, Translate
from allmask.tasks.tag import Tag, Tagger
from allmask.training.process_group import SingleProcess, join
from tests import tiny
from tests.simulated_device import DEVICE, simulated

TEXTS = ["red cat runs here.", "blue dog sings there today.", "北京欢迎你。"]
COMMANDS = {
    "finetune": "--data x --out y", "train": "--data x --out y", "pretrain": "--data x --out y --from minilm",
    "generate": "minilm --text x", "fill": "minilm x", "predict": "minilm x.txt -o y.jsonl", "evaluate": "minilm x.csv",
    "embed": "minilm --text x", "drift": "x y", "audit": "minilm", "inspect": "minilm", "demo": "",
    "attention": "minilm --text x", "play": "--no-open", "serve": "minilm",
}  # fmt: skip


# ---- which device ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_computes_refuses_an_absent_device(cli, command: str, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    ran = cli(command, *COMMANDS[command].split(), "--device", "mps")
    assert ran.code == 2 and "--device mps: there is no Apple GPU" in ran.err


def test_it_is_refused_before_torch_is_imported():
    code = (
        "import sys; from allmask.cli.main import main; code = main(sys.argv[1:]); print(code, 'torch' in sys.modules)"
    )
    absent = "cuda" if sys.platform == "darwin" else "mps"
    words = [sys.executable, "-c", code, "embed", "minilm", "--text", "x", "--device", absent]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "2 False\n"


def test_names():
    assert expect_device("cpu") == "cpu" and find_device("cpu") == torch.device("cpu")
    with pytest.raises(UsageError, match="device is 'tpu'"):
        expect_device("tpu")


def test_auto_is_a_gpu_if_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device() == SingleProcess().device == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert find_device() == SingleProcess().device == torch.device("cuda", 3)
    assert SingleProcess(on="cpu").device == torch.device("cpu")


def test_a_driver_without_a_gpu(monkeypatch, tmp_path: Path):
    """The driver is there, so only torch knows."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(devices, "_DRIVERS", [str(tmp_path)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert expect_device("cuda") == "cuda"
    with pytest.raises(UsageError, match="no CUDA GPU"):
        find_device("cuda")


def test_several_processes_share_no_apple_gpu():
    with pytest.raises(UsageError, match="not an Apple GPU"):
        join(False, "mps", timedelta(minutes=1), timedelta(minutes=1))


def test_pipelines_and_the_device(tmp_path: Path):
    folder = tiny.bert(tmp_path / "bert")
    assert allmask.pipeline("embed", folder, device="cpu").model.device == torch.device("cpu")
    with pytest.raises(UsageError, match="device is 'gpu'"):
        allmask.pipeline("embed", folder, device="gpu")


# ---- on another device -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    root = tmp_path_factory.mktemp("models")
    bert = load(tiny.bert(root / "bert", ["lm", "pooler"]))
    heads = {
        "classify": Labels("single", ("好", "bad")), "tag": Labels("tag", ("O", "B-a", "I-a")),
        "chain": Labels("chain", ("O", "B-a", "I-a")), "answer": Labels("span", ("start", "end")),
        "choose": Labels("choice", ("score",)),
    }  # fmt: skip
    rng = torch.Generator().manual_seed(1)
    assert bert.tokenizer is not None
    sizes = {**tiny.SMALL, "decoder_layers": 1, "vocab_size": bert.tokenizer.size}
    pairs = Model.fresh(replace(presets.transformer_base(), **sizes, start_token=2, end_token=3), ["lm"], rng).eval()
    pairs.tokenizer = bert.tokenizer
    return {
        "bert": bert, "gpt2": load(tiny.gpt2(root / "gpt2")), "pairs": pairs,
        **{name: bert.with_labels(labels, rng) for name, labels in heads.items()},
    }  # fmt: skip


def answers(model: Model) -> Any:
    reply = Answerer(model, Answer(max_length=24), "fp32")("red cat?", "blue dog sings there today and the cat runs")
    return reply.text, reply.start


def probe(model: Model) -> Any:
    rng = torch.Generator().manual_seed(1)
    return audit.audit(audit.our_subject(model), audit.probe_mask("prefix", 8, rng), rng).depends.tolist()


def looks(model: Model) -> Any:
    found = attention_map(model, TEXTS[0], TEXTS[2])
    return found.weights.round(decimals=4).tolist(), found.looks_at("cat", layer=1, top=2)[0].token, found.text()


def signals(model: Model) -> Any:
    rng = torch.Generator().manual_seed(1)
    ids = torch.tensor([[2, 7, 9, 3]], device=model.device)
    return [round(row.gradient, 4) for row in signal_report(model, lambda: model(ids).hidden, rng)]


def writes(task: Any, **options: Any) -> Callable[[Model], Any]:
    return lambda model: TextGenerator(model, task.fitted(model), "fp32")(TEXTS, **options)


def plays(model: Model) -> Any:
    """What the playground does with a model, under a mask with a clicked cell."""
    from allmask.play.board import Board
    from allmask.play.weights import Weights

    folder = type("Folder", (), {"model": model, "source": "x", "task": lambda self, name: Title(max_target=8)})()
    weights: Any = Weights(folder)
    text = weights.text(TEXTS[0], TEXTS[2])
    order = text.is_target.cumsum(1)
    board = Board(order, torch.zeros_like(order), edits=((1, order.shape[1] - 1),))
    looks = weights.attention(TEXTS[0], TEXTS[2], board)["weights"]
    steps = weights.steps(TEXTS[0], "prefix", [7, 9])
    return (
        weights.fill(text, board, [2]), weights.continued(text, board), weights.titled(text, board), len(looks),
        weights.audit(text, board), steps, weights.beams(TEXTS[0], "naive", 2),
    )  # fmt: skip


LONG, WINDOWS = "red cat " * 30, Classify(max_length=16, truncate="windows")
USES: dict[str, tuple[str, Callable[[Model], Any]]] = {
    "embed": ("bert", lambda model: Embedder(model, precision="fp32")(TEXTS).round(4).tolist()),
    "fill": ("bert", lambda model: [one.text for one in Filler(model)(["red [MASK] runs", "北[MASK]欢迎你"])]),
    "title": ("bert", writes(Title(max_target=8))),
    "beams": ("bert", writes(Title(max_target=8), beams=3, no_repeat_ngram=2, min_new=2)),
    "samples": ("bert", writes(Title(max_target=8), sample=True, top_k=20, top_p=0.9, end_bias=0.5, max_new=5)),
    "translate": ("pairs", writes(Translate(max_target=8), beams=2)),
    "continue": ("gpt2", writes(Continuation(max_source=20, max_target=8), beams=2)),
    "classify": ("classify", lambda model: [one.label for one in Classifier(model, WINDOWS, "fp32")([*TEXTS, LONG])]),
    "tag": ("tag", lambda model: list(map(str, Tagger(model, Tag(max_length=16), "fp32")(TEXTS)))),
    "chain": ("chain", lambda model: list(map(str, Tagger(model, Tag(max_length=16, crf=True), "fp32")(TEXTS)))),
    "answer": ("answer", answers),
    "choose": ("choose", lambda model: Chooser(model, Choose(max_length=24), "fp32")("red cat", ["runs", "北京"]).text),
    "audit": ("bert", probe),
    "attention": ("bert", looks),
    "play": ("bert", plays),
    "signals": ("bert", signals),
    "keep_tokens": ("bert", lambda model: model.keep_tokens(range(40)).body.embedding.tokens.weight.shape),
    "with_labels": ("bert", lambda model: model.with_labels(Labels("tag", ("a", "b"))).task_head.output.weight.shape),
}  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_a_model_on_another_device_does_the_same(models, use: str):
    name, run = USES[use]
    expected = run(models[name])
    with simulated():
        assert run(copy.deepcopy(models[name]).to(DEVICE)) == expected


def test_the_simulated_device_refuses_tensors_of_the_cpu():
    with simulated(), pytest.raises(RuntimeError, match="on the CPU"):
        torch.ones(2).to(DEVICE) + torch.ones(2)


TITLES = [Record(row, "titles") for row in tiny.english(4) + tiny.chinese(4)]
REVIEWS = [
    Record({"text": text, "text_b": None, "label": ("好", "bad")[n % 2]}, "x") for n, text in enumerate(TEXTS * 2)
]
WORDS = [Record({"tokens": list(text), "tags": ["O", "B-a"] * 20}, "x") for text in TEXTS]
for record in WORDS:
    record.fields["tags"] = record.fields["tags"][: len(record.fields["tokens"])]
LESSONS: dict[str, tuple[Any, list[Record]]] = {
    "bert": (Title(max_target=8), TITLES),
    "pairs": (Translate(max_target=8), TITLES),
    "classify": (Classify(max_length=16, pair=False, kind="single"), REVIEWS),
    "tag": (Tag(max_length=16, scheme="bio"), WORDS),
    "chain": (Tag(max_length=16, scheme="bio", crf=True), WORDS),
}


@pytest.mark.parametrize("name", LESSONS)
def test_training_and_evaluations_on_another_device(models, name: str, monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # it does not know the simulated device

    def learn(model: Model) -> list[float]:
        task, records = LESSONS[name]
        work = task.fitted(model).workload(model, records, records[:4], precision="fp32")
        found = []
        for frozen in (False, True) if name == "classify" else (False,):
            if frozen:
                work.cache_features(model, "fp32")
            loss = sum(loss for loss, _ in losses_of(model, work.batch(range(3), 0).to(model.device)).values())
            loss.backward()
            found += [loss.item(), sum(p.grad.norm().item() for p in model.parameters() if p.grad is not None)]
        return [*found, *work.evaluate(model).metrics.values()]

    expected = learn(copy.deepcopy(models[name]))
    with simulated():
        assert learn(copy.deepcopy(models[name]).to(DEVICE)) == pytest.approx(expected, rel=1e-4)


def test_what_only_a_cpu_can_do_steps_aside(models, caplog):
    """int8 and the compiled decoding step."""
    with simulated():
        for name, writer in (("bert", engines.writer_for), ("pairs", engines.pair_writer_for)):
            model = copy.deepcopy(models[name]).to(DEVICE)
            for precision in ("auto", "fp32", "int8"):
                assert "Fast" not in type(writer(model, precision)).__name__
                assert ("int8 is for CPUs" in caplog.text) == (precision == "int8")
            caplog.clear()
