"""Tasks with a RoBERTa and its relatives: filling gaps, pairs, words and titles, with their own special tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import ByteLevelBPETokenizer

import allmask
from allmask.model import Model, load
from allmask.tasks.common.reading import Frame
from allmask.tasks.tag import read_words
from allmask.text import Tokenizer
from tests import tiny
from tests.relatives import relatives


@pytest.fixture(scope="module")
def roberta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A RoBERTa that fills gaps, with vocab.json and merges.txt."""
    folder = tmp_path_factory.mktemp("models")
    trainer, marks = ByteLevelBPETokenizer(), ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    texts = [row["source"] for row in [*tiny.english(40), *tiny.chinese(40)]]
    trainer.train_from_iterator(texts, 400, special_tokens=marks, show_progress=False)
    trainer.save_model(str(folder))
    tokenizer = Tokenizer.load(folder)
    config = replace(relatives(tiny.SMALL, "roberta")["roberta"], vocab_size=tokenizer.size)
    model = Model.fresh(config, ["lm"], torch.Generator().manual_seed(0))
    model.tokenizer = tokenizer
    for text in (" cat", "runs", " bird"):  # whole words, not bytes
        model.lm_head.bias.data[tokenizer.encode(text, special=False).ids] = 4.0
    model.save(folder / "roberta")
    return folder / "roberta"


@pytest.mark.parametrize("text", ["red <mask> runs", "北京<mask>迎你", "<mask> cat"])
@torch.no_grad()
def test_gaps_are_filled_as_by_transformers(roberta: Path, text: str, cli):
    model = transformers.RobertaForMaskedLM.from_pretrained(roberta)
    tokenizer = transformers.AutoTokenizer.from_pretrained(roberta)
    inputs = tokenizer(text, return_tensors="pt")
    place = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
    shares = model(**inputs).logits[0, place].softmax(-1)
    shares[tokenizer.all_special_ids] = 0
    best = shares.topk(3)
    filled = allmask.pipeline("fill", roberta)(text, top=3)
    assert [answer.token for answer in filled.gaps[0]] == [tokenizer.decode(id) for id in best.indices]
    assert [answer.probability for answer in filled.gaps[0]] == pytest.approx(best.values.tolist(), rel=1e-4)
    whole = inputs["input_ids"][0, 1:-1]
    whole[place - 1] = best.indices[0]
    assert filled.text == tokenizer.decode(whole).strip() and filled.source == text
    assert allmask.pipeline("fill", roberta)(text.replace("<mask>", "[MASK]"), top=3).text == filled.text
    assert cli("fill", roberta, text).out.splitlines()[0] == filled.text


def test_a_pair_has_two_separators_between_its_texts(roberta: Path):
    model, theirs = load(roberta), transformers.AutoTokenizer.from_pretrained(roberta)
    assert model.tokenizer is not None
    frame, texts = Frame.of(model.tokenizer, model.config), ("red cat", "北京 runs")
    row = frame.row(*(model.tokenizer.encode(text, special=False).ids for text in texts))
    assert row.ids.tolist() == theirs(*texts)["input_ids"] and not row.segments.any()
    assert frame.room(len(row), 2) == len(row) - 4


def test_words_have_a_space_before_them(roberta: Path):
    model = load(roberta)
    words = ["red", "cat", "runs", "here"]
    theirs = transformers.AutoTokenizer.from_pretrained(roberta, add_prefix_space=True)
    ((window,),) = read_words(model.tokenizer, model.config, [words], 40)
    expected = theirs(words, is_split_into_words=True)
    assert window.example.ids.tolist() == expected["input_ids"]
    firsts = [expected.word_ids().index(number) for number in range(len(words))]
    assert window.places.tolist() == firsts
    ((chinese,),) = read_words(model.tokenizer, model.config, [list("北京")], 40)
    alone = [model.tokenizer.encode(character, special=False).ids for character in "北京"]
    assert chinese.example.ids.tolist() == [0, *alone[0], *alone[1], 2]


@pytest.mark.parametrize("family", ["roberta", "albert", "roformer"])
def test_titles_are_learnt_and_written(roberta: Path, family: str, tmp_path: Path, cli):
    folder = roberta
    if family != "roberta":
        tokenizer = Tokenizer.load(roberta)
        config = replace(relatives(tiny.SMALL, family)[family], vocab_size=tokenizer.size, pad_token=1)
        model = Model.fresh(config, ["lm"], torch.Generator().manual_seed(0))
        model.tokenizer, folder = tokenizer, tmp_path / family
        model.save(folder)
    data = tiny.write_jsonl(tmp_path / "train.jsonl", tiny.english(24))
    options = ("--steps", 3, "--batch-tokens", 128, "--lr", 0.01, "--max-target", 8, "--quote", 0)
    ran = cli("finetune", folder, "--task", "title", "--data", data, "--out", tmp_path / "run", *options)
    assert ran.code == 0, ran.err
    final = tmp_path / "run" / "final"
    assert load(final).config.family == family
    if family != "roformer":  # whose tokens were numbered anew
        getattr(transformers, {"roberta": "RobertaForMaskedLM", "albert": "AlbertForMaskedLM"}[family]).from_pretrained(
            final
        )
    found = [cli("predict", final, data, "-o", "-", "--precision", name).out for name in ("fp32", "auto")]
    assert len(found[0].splitlines()) == 24 and len(found[1].splitlines()) == 24
