"""C11. Half of the vocabulary is enough, and nothing else changes.

Statement: A BERT writes with a fraction of its vocabulary. Keeping only the tokens that are needed shrinks the
    embedding and the output layer, and leaves the logits of the kept tokens unchanged.
Source: bert4keras, which keeps 13,584 of the 21,128 tokens of the Chinese BERT.
Criterion: For allmask-zh, dropping [unused] tokens and Chinese characters inside words (##汉) leaves fewer than 14,000
    of 21,128 tokens, and for a text the logits of the kept tokens differ by at most 1e-4.
"""

from __future__ import annotations

import torch

from allmask import Model, load
from allmask.claims.claim import Numbers, Trial, Verdict, judged

TEXT = "北京是中华人民共和国的首都，也是全国的政治中心和文化中心。"


def measure(trial: Trial, same: bool = True) -> Numbers:
    """`same`: otherwise one of the kept embeddings is changed, too."""
    model = load("allmask-zh")
    assert model.tokenizer is not None
    kept = [id for id in range(model.config.vocab_size) if needed(model.tokenizer.id_to_token(id) or "")]
    small = model.keep_tokens(kept)
    assert small.tokenizer is not None
    if not same:
        with torch.no_grad():
            small.body.embedding.tokens.weight[small.tokenizer.encode(TEXT).ids[1]] += 0.1
    with torch.inference_mode():
        before, after = (logits(one)[:, ids] for one, ids in ((model, torch.tensor(kept)), (small, slice(None))))
    return {
        "before": model.config.vocab_size,
        "after": len(kept),
        "parameters": [sum(w.numel() for w in one.parameters()) for one in (model, small)],
        "difference": (before - after).abs().max().item(),
    }


def needed(token: str) -> bool:
    return not token.startswith("[unused") and not (token.startswith("##") and "\u4e00" <= token[2:3] <= "\u9fff")


def logits(model: Model) -> torch.Tensor:
    assert model.tokenizer is not None
    return model(torch.tensor([model.tokenizer.encode(TEXT).ids])).logits[0]


def judge(numbers: Numbers) -> Verdict:
    saved = 100 * (1 - numbers["parameters"][1] / numbers["parameters"][0])
    return judged(
        numbers["after"] < 14_000 and numbers["difference"] < 1e-4,
        f"{numbers['after']:,} of {numbers['before']:,} tokens, {saved:.0f} % fewer parameters; logits differ by "
        f"{numbers['difference']:.0e}",
    )


def draw(axes, numbers: Numbers) -> None:
    axes.bar(["all tokens", "kept tokens"], [count / 1e6 for count in numbers["parameters"]])
    axes.set(ylabel="million parameters")
