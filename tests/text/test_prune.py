"""keep_tokens: the pieces of kept text never change, and nothing needed is ever lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allmask.errors import UsageError
from allmask.text import Tokenizer, propose_keep_tokens
from tests.text.references import CORPUS, TEXTS, any_text

NAMES = ["uncased", "cased", "byte_bpe", "plain_bpe"]


@pytest.fixture(params=NAMES)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)


def wordpiece(folder: Path, *pieces: str) -> Tokenizer:
    folder.joinpath("vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *pieces]), encoding="utf-8")
    return Tokenizer.load(folder)


@settings(max_examples=150)
@given(data=st.data(), text=any_text, pair=any_text)
@pytest.mark.parametrize("name", NAMES)
def test_text_of_kept_tokens_is_cut_as_before(request, name: str, data: st.DataObject, text: str, pair: str):
    old: Tokenizer = request.getfixturevalue(name)
    before = old.encode(text, pair)
    if name in ("uncased", "cased") and old.unk_id in before.ids:
        return  # an unknown word has no pieces that could be kept; see the test of unknown words
    more = data.draw(st.sets(st.integers(0, old.size - 1), max_size=40))
    new, kept = old.keep({*before.ids, *more})
    after = new.encode(text, pair)
    assert [kept[id] for id in after.ids] == before.ids
    assert (after.tokens, after.segments, after.offsets) == (before.tokens, before.segments, before.offsets)
    assert new.decode(after.ids) == old.decode(before.ids)


@settings(max_examples=60)
@given(texts=st.lists(any_text, max_size=6), others=st.lists(any_text, max_size=3))
@pytest.mark.parametrize("name", NAMES)
def test_the_proposal_cuts_the_corpus_as_before(request, name: str, texts: list[str], others: list[str]):
    old: Tokenizer = request.getfixturevalue(name)
    proposed = propose_keep_tokens(old, [*texts, *others])
    new, kept = old.keep(proposed)
    assert kept == proposed
    for text in texts:
        assert new.encode(text).tokens == old.encode(text).tokens


@settings(max_examples=60)
@given(texts=st.lists(any_text, min_size=1, max_size=8), minimum=st.integers(2, 5))
@pytest.mark.parametrize("name", NAMES)
def test_a_rare_word_keeps_a_spelling(request, name: str, texts: list[str], minimum: int):
    old: Tokenizer = request.getfixturevalue(name)
    new, kept = old.keep(propose_keep_tokens(old, texts, minimum))
    assert set(kept) <= set(old.keep(propose_keep_tokens(old, texts))[1]) | single_characters(old)
    for text in texts:
        unknown = old.encode(text).ids.count(old.unk_id)
        assert new.encode(text).ids.count(new.unk_id) <= unknown
        if not unknown:
            assert new.decode(new.encode(text).ids) == old.decode(old.encode(text).ids)


def single_characters(tokenizer: Tokenizer) -> set[int]:
    vocabulary = tokenizer.backend.get_vocab()
    return {id for piece, id in vocabulary.items() if len(piece.removeprefix("##")) == 1}


def test_new_ids_follow_the_order_of_the_old(tokenizer: Tokenizer):
    chosen = [tokenizer.size - 3, 30, 20, 20, tokenizer.size - 40]
    new, kept = tokenizer.keep(chosen)
    assert kept == sorted(set(kept)) and set(chosen) <= set(kept)
    assert new.size == len(kept)
    assert new.tokens(range(new.size)) == tokenizer.tokens(kept)
    assert {kept[id] for id in new.special_ids} == set(tokenizer.special_ids)


def test_special_tokens_are_always_kept(tokenizer: Tokenizer):
    new, kept = tokenizer.keep([])
    assert set(kept) >= tokenizer.special_ids
    assert new.specials == tokenizer.specials
    if tokenizer.kind == "wordpiece":
        assert kept == [0, 1, 2, 3, 4]
        assert new.encode("anything", "at all").tokens == ["[CLS]", "[UNK]", "[SEP]", "[UNK]", "[UNK]", "[SEP]"]


def test_keeping_all_changes_nothing(tokenizer: Tokenizer):
    assert tokenizer.keep(range(tokenizer.size)) == (tokenizer, list(range(tokenizer.size)))


@settings(max_examples=100)
@given(corpus=st.lists(any_text, max_size=3), text=any_text)
@pytest.mark.parametrize("name", NAMES)
def test_with_all_characters_no_other_text_becomes_unknown(request, name: str, corpus: list[str], text: str):
    old: Tokenizer = request.getfixturevalue(name)
    new, _ = old.keep(propose_keep_tokens(old, corpus, characters=True))
    before, after = old.encode(text), new.encode(text)
    assert after.ids.count(new.unk_id) <= before.ids.count(old.unk_id)
    if old.unk_id not in before.ids:
        assert new.decode(after.ids) == old.decode(before.ids)


def test_chinese_characters_are_kept_as_words_not_inside_of_them(tmp_path: Path):
    old = wordpiece(tmp_path, *"北京a", "##北", "##京", "##a", "##b", "aa", "!", "##!")
    _, kept = old.keep(propose_keep_tokens(old, ["aa"], characters=True))
    assert [old.id_to_token(id) for id in kept[4:]] == ["北", "京", "a", "##a", "##b", "aa", "!"]


def test_a_pruned_byte_bpe_still_writes_any_text(byte_bpe: Tokenizer):
    new, kept = byte_bpe.keep([])
    assert len(kept) == 257
    for text in TEXTS:
        if "<|" not in text:
            assert new.decode(new.encode(text).ids) == text


def test_a_kept_merge_brings_what_it_is_merged_from(byte_bpe: Tokenizer):
    model = json.loads(byte_bpe.backend.to_str())["model"]
    deep = max(model["vocab"], key=lambda piece: len(piece) if not piece.startswith("<|") else 0)
    new, kept = byte_bpe.keep([model["vocab"][deep]])
    made_from = {a + b: (a, b) for a, b in model["merges"]}
    todo = [deep]
    while todo:
        piece = todo.pop()
        assert new.token_to_id(piece) is not None, piece
        todo += made_from.get(piece, ())
    assert len(kept) < byte_bpe.size


def test_a_word_unknown_in_the_corpus_stays_unknown(tmp_path: Path):
    old = wordpiece(tmp_path, "a", "ab", "##bc")
    assert old.encode("abc", special=False).tokens == ["[UNK]"]  # "ab" is longest, and then nothing fits
    without, _ = old.keep([4, 6])
    assert without.encode("abc", special=False).tokens == ["a", "##bc"]  # nothing leads it astray any more
    new, kept = old.keep([*propose_keep_tokens(old, ["abc"]), 4, 6])
    assert kept == [0, 1, 2, 3, 4, 5, 6]
    assert new.encode("abc", special=False).tokens == ["[UNK]"]


def test_a_rare_word_falls_back_to_its_characters(tmp_path: Path):
    old = wordpiece(tmp_path, "read", "reader", "r", "##e", "##a", "##d", "##r", "##er", "##x", "北", "京")
    texts = ["read", "read", "reader", "北"]
    proposed = propose_keep_tokens(old, texts, minimum=2)
    assert old.tokens(proposed)[4:] == ["read", "r", "##e", "##a", "##d", "##r", "北"]
    new, _ = old.keep(proposed)
    assert new.encode("reader", special=False).tokens == ["read", "##e", "##r"]


def test_where_characters_do_not_suffice_the_pieces_stay(tmp_path: Path):
    old = wordpiece(tmp_path, "read", "##ers", "##e", "r")
    new, _ = old.keep(propose_keep_tokens(old, ["readers"], minimum=2))
    assert new.encode("readers", special=False).tokens == ["read", "##ers"]


def test_a_pruned_tokenizer_is_saved_and_loaded(tokenizer: Tokenizer, tmp_path: Path):
    from transformers import AutoTokenizer

    new, _ = tokenizer.keep(propose_keep_tokens(tokenizer, CORPUS[:3]))
    new.save(tmp_path)
    assert Tokenizer.load(tmp_path) == new
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == new.encode(text).ids


def test_added_tokens_are_renumbered_with_the_rest(uncased: Tokenizer, tmp_path: Path):
    uncased.save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] |= {str(200 + n): {"content": f"<{letter}>"} for n, letter in enumerate("abc")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    old = Tokenizer.load(tmp_path)
    proposed = propose_keep_tokens(old, ["read <b> 北京"], minimum=2)
    new, kept = old.keep([*proposed, 202])
    assert kept[-2:] == [201, 202]
    assert [kept[id] for id in new.encode("北<c><b>").ids] == old.encode("北<c><b>").ids


def test_the_real_vocabulary_shrinks_and_cuts_the_same(minilm: Path):
    old = Tokenizer.load(minilm)
    new, kept = old.keep(propose_keep_tokens(old, [*CORPUS, *TEXTS]))
    assert len(kept) < old.size // 50
    for text in [*CORPUS, *TEXTS]:
        assert [kept[id] for id in new.encode(text, "and").ids] == old.encode(text, "and").ids


@pytest.mark.parametrize("processor", ["BertProcessing", "RobertaProcessing", "Sequence"])
def test_every_way_to_frame_a_text_is_renumbered(tmp_path: Path, processor: str):
    from tokenizers import processors

    tokenizer = wordpiece(tmp_path, "a", "b", "c", "<s>", "</s>")
    sep, cls = ("</s>", 8), ("<s>", 7)
    tokenizer.backend.post_processor = {
        "BertProcessing": lambda: processors.BertProcessing(sep, cls),
        "RobertaProcessing": lambda: processors.RobertaProcessing(sep, cls),
        "Sequence": lambda: processors.Sequence([processors.ByteLevel(), processors.BertProcessing(sep, cls)]),
    }[processor]()
    new, kept = tokenizer.keep([6])
    assert kept == [0, 1, 2, 3, 6, 7, 8]
    assert [kept[id] for id in new.encode("c", "c").ids] == tokenizer.encode("c", "c").ids
    assert new.encode("c").tokens == ["<s>", "c", "</s>"]


def test_ids_that_are_not_there_are_refused(uncased: Tokenizer):
    with pytest.raises(UsageError, match="no token with id 200"):
        uncased.keep([5, 200])


def test_a_unigram_vocabulary_is_refused(tmp_path: Path):
    model = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]], "byte_fallback": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.kind, tokenizer.encode("a").ids) == ("unigram", [1])
    with pytest.raises(UsageError, match="Unigram"):
        tokenizer.keep([1])
    with pytest.raises(UsageError, match="Unigram"):
        propose_keep_tokens(tokenizer, ["a"])
