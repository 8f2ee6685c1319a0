"""C11. Half of the vocabulary is enough, and nothing else changes.

Statement: A BERT writes with a fraction of its vocabulary. Keeping only the tokens that are needed shrinks the
    embedding and the output layer, and leaves the logits of the kept tokens unchanged.
Source: bert4keras, which keeps 13,584 of the 21,128 tokens of the Chinese BERT.
Criterion: For allmask-zh, dropping [unused] tokens and Chinese characters inside words (##汉) leaves fewer than 14,000
    of 21,128 tokens, and for a text the logits of the kept tokens differ by at most 1e-4. The tokens that Python's own
    reference needs are fewer than half of those of allmask-en; it is tokenized as before, and the logits agree as well.
"""

from __future__ import annotations

from pydoc_data.topics import topics as python_topics

import torch

from allmask import Model, load
from allmask.claims.claim import Numbers, Trial, Verdict, judged
from allmask.text import Tokenizer, propose_keep_tokens

TEXTS = {
    "allmask-zh": "北京是中华人民共和国的首都，也是全国的政治中心和文化中心。",
    "allmask-en": "The value of an expression is an object, and the type of an object determines its operations.",
}


def measure(trial: Trial, same: bool = True) -> Numbers:
    """`same`: otherwise one of the kept embeddings is changed, too."""
    found: Numbers = {}
    corpus = list(python_topics.values())[: 5 if trial.brief else None]
    for name, text in TEXTS.items():
        model = load(name)
        large = tokenizer_of(model)
        kept = of_kind(large) if name == "allmask-zh" else propose_keep_tokens(large, [*corpus, text])
        small = model.keep_tokens(kept)
        ids = [tokenizer_of(one).encode(text).ids for one in (model, small)]
        if not same:
            with torch.no_grad():
                small.body.embedding.tokens.weight[ids[1][1]] += 0.1
        with torch.inference_mode():
            before, after = (one(torch.tensor([row])).logits[0] for one, row in zip((model, small), ids, strict=True))
        found[name] = {
            "before": model.config.vocab_size,
            "after": small.config.vocab_size,
            "parameters": [sum(w.numel() for w in one.parameters()) for one in (model, small)],
            "same tokens": split(large, corpus) == split(tokenizer_of(small), corpus) if name == "allmask-en" else True,
            "difference": (before[:, kept] - after).abs().max().item(),
        }
    return found


def tokenizer_of(model: Model) -> Tokenizer:
    assert model.tokenizer is not None
    return model.tokenizer


def of_kind(tokenizer: Tokenizer) -> list[int]:
    """All but [unused] tokens and Chinese characters inside words."""
    tokens = ((id, tokenizer.id_to_token(id) or "") for id in range(tokenizer.size))
    return [
        id
        for id, token in tokens
        if not token.startswith("[unused") and not (token.startswith("##") and "\u4e00" <= token[2:3] <= "\u9fff")
    ]


def split(tokenizer: Tokenizer, texts: list[str]) -> list[list[str]]:
    return [tokenizer.tokens(encoded.ids) for encoded in tokenizer.encode_batch(texts)]


def judge(numbers: Numbers) -> Verdict:
    kind, corpus = numbers.values()
    holds = kind["after"] < 14_000 and corpus["after"] < 0.5 * corpus["before"] and corpus["same tokens"]
    worst = max(found["difference"] for found in numbers.values())
    said = [
        f"{found['after']:,} of {found['before']:,} tokens by {by}"
        for by, found in (("kind", kind), ("corpus", corpus))
    ]
    saved = [100 * (1 - found["parameters"][1] / found["parameters"][0]) for found in numbers.values()]
    return judged(
        holds and worst < 1e-4,
        f"{' and '.join(said)}, {saved[0]:.0f} and {saved[1]:.0f} % fewer parameters; logits differ by {worst:.0e}",
    )


def draw(axes, numbers: Numbers) -> None:
    for number, which in enumerate(("all tokens", "kept tokens")):
        heights = [found["parameters"][number] / 1e6 for found in numbers.values()]
        axes.bar([place - 0.2 + 0.4 * number for place in range(len(numbers))], heights, 0.38, label=which)
    axes.set(ylabel="million parameters", xticks=range(len(numbers)), xticklabels=["zh, by kind", "en, by corpus"])
    axes.legend(frameon=False)
