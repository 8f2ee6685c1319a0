"""The weights that come with the project: one file, and what it does under each mask."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import allmask
from allmask import Mask
from allmask.checkpoints import default_model, resolve
from allmask.files import verify
from allmask.tasks.task import load_tasks

LARGEST = 48_000_000  # bytes
NAMES = ["allmask-en", "allmask-zh"]

pytestmark = pytest.mark.skipif(
    any(find_spec(name.replace("-", "_")) is None for name in NAMES),
    reason="the weights are not installed (make setup installs them)",
)


@pytest.mark.parametrize("name", NAMES)
def test_the_files_are_small_whole_and_of_16_bits(name: str):
    from safetensors import safe_open

    folder = resolve(name)
    assert verify(folder) is None
    assert (folder / "model.safetensors").stat().st_size <= LARGEST
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert {file.get_tensor(key).dtype for key in file.keys()} == {torch.float16}  # noqa: SIM118
    assert [task.name for task in load_tasks(folder)] == ["title", "continue"]


@pytest.mark.parametrize("name", NAMES)
def test_transformers_loads_them_and_agrees(name: str):
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    folder = resolve(name)
    theirs = AutoModelForMaskedLM.from_pretrained(folder).float().eval()
    words = AutoTokenizer.from_pretrained(folder)(["The mask decides every role.", "Paris"], padding=True)
    ids, valid = torch.tensor(words["input_ids"]), torch.tensor(words["attention_mask"])
    with torch.inference_mode():
        expected = theirs(ids, attention_mask=valid).logits[valid.bool()]
        found = allmask.load(name)(ids, Mask.bidirectional(valid.bool())).logits[valid.bool()]
    assert torch.allclose(found, expected, atol=1e-4, rtol=1e-5)  # logits are up to 20


def test_the_default_is_chosen_by_the_script_of_the_text(cli):
    assert default_model(["北京欢迎你，BERT 也欢迎你。"]) == "allmask-zh"
    assert default_model(["The word 北京 in an English sentence."]) == default_model(["123"]) == "allmask-en"
    text = "We present a parser that is trained on treebanks of eleven languages and needs no grammar."
    ran = cli("generate", "--text", text)
    named = cli("generate", "allmask-en", "--text", text)
    assert ran.code == 0 and ran.out == named.out and "model: allmask-en" in ran.err


def test_one_file_four_masks(cli, tmp_path: Path):
    """Better than chance under each mask; docs/weights.md has the figures."""
    fill = allmask.pipeline("fill", "allmask-en")
    assert fill("he was born in the united [MASK] of america.").text == "he was born in the united states of america."
    text = (
        "We present a new dataset for question answering in Chinese. It has ten thousand questions about news "
        "articles, and we compare several neural models on it."
    )
    title = allmask.pipeline("title", "allmask-en")(text, beams=4)
    assert 2 <= len(title.split()) <= 20 and "question answering" in title
    ran = cli("generate", "allmask-en", "--task", "continue", "--text", "in the united", "--max-new", 1)
    assert ran.code == 0 and ran.out.strip() == "states"
    embed = allmask.pipeline("embed", "allmask-en")
    vectors = torch.as_tensor(embed([text, title, "a cake with apples and cream"]))
    cosines = torch.nn.functional.normalize(vectors, dim=-1) @ torch.nn.functional.normalize(vectors[0], dim=-1)
    assert cosines[1] > cosines[2] + 0.2


def test_one_file_four_masks_in_chinese(cli):
    fill = allmask.pipeline("fill", "allmask-zh")
    gaps = {"北京欢[MASK]你。": "迎", "单击确[MASK]按钮。": "定", "我们提出了一种新的[MASK]法。": "方"}
    for sentence, gap in gaps.items():
        assert fill(sentence).text == sentence.replace("[MASK]", gap)
    text = (
        "本文提出了一种基于深度学习的图像识别方法，用于自动检测农作物病害。"
        "实验结果表明，该方法在多个数据集上优于传统方法。"
    )
    ran = cli("generate", "--text", text, "--beams", 4)
    title = ran.out.strip()
    assert ran.code == 0 and "model: allmask-zh" in ran.err
    assert 5 <= len(title) <= 30 and "识别" in title
    for start, more in {"点击确定按": "钮", "请打开文": "件"}.items():
        ran = cli("generate", "allmask-zh", "--task", "continue", "--text", start, "--max-new", 1)
        assert ran.code == 0 and ran.out.strip() == more
    vectors = torch.as_tensor(allmask.pipeline("embed", "allmask-zh")([text, title, "苹果蛋糕的做法"]))
    cosines = torch.nn.functional.normalize(vectors, dim=-1) @ torch.nn.functional.normalize(vectors[0], dim=-1)
    assert cosines[1] > cosines[2] + 0.2
