"""An LSTM encoder–decoder writes with the one decoder: what trying everything finds, in any batch, with any search."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from allmask.decoding import Decoding, PairWriter, generate, stream
from tests.nn.encoder_decoders import pairs
from tests.nn.test_recurrent import PAIRS, model_of

TINY = {"vocab_size": 6, "start_token": 2}
END = 3


def writer_of(name, **changes):
    return PairWriter(model_of(replace(PAIRS[name], **TINY, **changes)))


def all_targets(model, source, longest):
    """Every text of up to so many tokens that ends, or is cut off there, with its log-probability."""
    found = {}
    open_ones = [((), 0.0)]
    while open_ones:
        written, score = open_ones.pop()
        ids = torch.tensor([[*source, 2, *written]])
        mask = pairs([len(source)], [len(written) + 1])
        for token, more in enumerate(model(ids, mask).logits[0, -1].log_softmax(-1).tolist()):
            text = (*written, token)
            if token == END or len(text) == longest:
                found[text] = score + more
            else:
                open_ones.append((text, score + more))
    return found


@pytest.mark.parametrize("name", ["attention", "plain"])
def test_a_beam_that_is_wide_enough_finds_what_trying_everything_finds(name):
    writer, sources = writer_of(name), [[4, 1, 3], [5, 5, 0, 1, 3]]
    rules = Decoding(end=(END,), max_new=3, beams=40, n_best=5, length_penalty=0.0)
    for source, best in zip(sources, generate(writer, sources, rules), strict=True):
        everything = all_targets(writer.model, source, 3)
        expected = sorted(everything, key=everything.__getitem__, reverse=True)[:5]
        assert [tuple(h.tokens) for h in best] == [tuple(t for t in text if t != END) for text in expected]
        for hypothesis, text in zip(best, expected, strict=True):
            assert hypothesis.score == pytest.approx(everything[text], abs=1e-5)


@pytest.mark.parametrize("name", PAIRS)
def test_texts_are_the_same_alone_and_together(name):
    writer, sources = writer_of(name), [[4, 1, 3], [5, 5, 0, 1, 3], [1]]
    for rules in (
        Decoding(end=(END,), max_new=6),
        Decoding(end=(END,), max_new=6, beams=3, n_best=3),
        Decoding(end=(END,), max_new=6, sample=True, n_best=2),
    ):
        together = generate(writer, sources, rules)
        alone = [generate(writer, [source], rules)[0] for source in sources]
        if not rules.sample:
            assert [[h.tokens for h in found] for found in together] == [[h.tokens for h in found] for found in alone]
        assert all(len(found) == rules.n_best for found in together)
    rules = Decoding(end=(END,), max_new=6)
    written = [token for token in stream(writer, sources[0], rules) if token != END]
    assert written == list(generate(writer, sources[:1], rules)[0][0].tokens)
