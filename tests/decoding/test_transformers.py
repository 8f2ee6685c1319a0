"""A tiny random GPT-2: the same texts, scores and distributions as transformers' generate."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import allmask
from allmask.decoding import Decoding, MaskWriter, generate

END, PAD = 5, 59
PROMPTS = [[1, 2, 3], [7, 8, 9, 10, 11], [4], [2, 3, 2, 3, 2]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 40}
    theirs = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=END, initializer_range=0.3)).eval()
    folder = tmp_path_factory.mktemp("gpt2")
    theirs.save_pretrained(folder)
    return theirs, MaskWriter(allmask.load(folder))


def their_texts(model, prompt, **options):
    options = {"max_new_tokens": 12, "pad_token_id": PAD, "output_scores": True, **options}
    out = model.generate(torch.tensor([prompt]), return_dict_in_generate=True, **options)
    return out, [row[len(prompt) :] for row in out.sequences.tolist()]


def same_text(ours, theirs):
    tokens = [*ours.tokens, *([END] if ours.finished else [])]
    return tokens == theirs[: len(tokens)] and all(token == PAD for token in theirs[len(tokens) :])


@pytest.mark.parametrize(
    "rules", [{}, {"no_repeat_ngram": 2}, {"min_new": 6}, {"no_repeat_ngram": 1, "min_new": 3}], ids=str
)
def test_greedy(pair, rules):
    model, writer = pair
    found = generate(writer, PROMPTS, Decoding(end=(END,), max_new=12, no_repeat_prompt=True, **rules))
    for prompt, [ours] in zip(PROMPTS, found, strict=True):
        ngram, least = rules.get("no_repeat_ngram", 0), rules.get("min_new")
        out, [theirs] = their_texts(
            model, prompt, do_sample=False, no_repeat_ngram_size=ngram, min_new_tokens=least, output_logits=True
        )
        assert same_text(ours, theirs)
        length = len(ours.tokens) + ours.finished
        steps = torch.stack(out.logits)[:length, 0].log_softmax(1)
        total = steps.gather(1, torch.tensor(theirs[:length])[:, None]).sum().item()
        assert abs(ours.log_probability - total) < 1e-4


@pytest.mark.parametrize("beams, penalty", [(2, 1.0), (3, 0.0), (4, 0.5), (4, 2.0), (5, -0.5)])
@pytest.mark.parametrize("ngram, least", [(0, None), (2, 3)])
def test_beams(pair, beams, penalty, ngram, least):
    model, writer = pair
    rules = Decoding(
        end=(END,), max_new=12, beams=beams, n_best=beams, length_penalty=penalty,
        no_repeat_ngram=ngram, no_repeat_prompt=True, min_new=least or 0,
    )  # fmt: skip
    for prompt, found in zip(PROMPTS, generate(writer, PROMPTS, rules), strict=True):
        out, texts = their_texts(
            model, prompt, do_sample=False, num_beams=beams, num_return_sequences=beams, length_penalty=penalty,
            no_repeat_ngram_size=ngram, min_new_tokens=least, early_stopping="never",
        )  # fmt: skip
        for ours, theirs, score in zip(found, texts, out.sequences_scores.tolist(), strict=True):
            assert same_text(ours, theirs) and abs(ours.score - score) < 1e-4


@pytest.mark.parametrize(
    "ours, theirs",
    [
        ({}, {"top_k": 0}),
        ({"temperature": 0.6, "top_k": 7}, {"temperature": 0.6, "top_k": 7}),
        ({"temperature": 1.4, "top_p": 0.8}, {"temperature": 1.4, "top_p": 0.8, "top_k": 0}),
    ],
    ids=["plain", "top k", "top p"],
)
def test_samples_are_drawn_from_their_distribution(pair, ours, theirs):
    """Our frequencies of the first token, against the probabilities transformers would draw it by."""
    model, writer = pair
    draws = 3000
    [found] = generate(writer, [PROMPTS[1]], Decoding(sample=True, max_new=1, n_best=draws, **ours))
    out, _ = their_texts(model, PROMPTS[1], do_sample=True, **{"max_new_tokens": 1, **theirs})
    expected = out.scores[0][0].softmax(0)
    share = torch.bincount(torch.tensor([one.tokens[0] for one in found]), minlength=60) / draws
    assert ((share - expected).abs() <= 5 * (expected * (1 - expected) / draws).sqrt() + 1e-9).all()
