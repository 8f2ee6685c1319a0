"""D7. The Jacobian of softmax is diag(p) - ppᵀ, and vanishes where p is sure.

Statement: ∂p/∂z = diag(p) - ppᵀ. It is symmetric, has eigenvalues between 0 and ½, and does not notice a shift of all
    scores. As the scores grow, p approaches one-hot and the Jacobian 0, so that attention stops learning. The gradient
    of the cross-entropy, p - y, does not vanish with it if the answer is wrong.
Source: textbooks; the reason for the 1/√d of Vaswani et al. 2017, section 3.2.1.
Criterion: Over five seeds and scores of deviation 0.1 to 100 over 64 keys, the formula agrees with autograd to 1e-12,
    its rows sum to 0 and its eigenvalues are within [0, ½], to 1e-12. The median norm falls by at least 10⁶ from its
    largest value to scores of deviation 100; |p - y| for a wrong answer is then still above 1.
"""

from __future__ import annotations

from statistics import median

import torch
from torch import Tensor

from allmask.claims.claim import Numbers, Trial, Verdict, judged

KEYS, SIZES, QUERIES = 64, (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0), 20


def measure(trial: Trial, whole: bool = True) -> Numbers:
    """`whole`: otherwise the second term of the formula is left out."""
    found: Numbers = {"error": 0.0, "rows": 0.0, "lowest": 0.0, "highest": 0.0, "norm": [], "cross-entropy": []}
    for size in SIZES:
        norms, wrong = [], []
        for seed in trial.seeds(5):
            rng = torch.Generator().manual_seed(seed)
            scores = size * torch.randn(QUERIES, KEYS, generator=rng, dtype=torch.float64)
            p = scores.softmax(-1)
            jacobian = torch.diag_embed(p) - (p[:, :, None] * p[:, None, :] if whole else 0)
            exact = torch.stack([torch.func.jacrev(lambda z: z.softmax(-1))(row) for row in scores])
            values = torch.linalg.eigvalsh(jacobian)
            found["error"] = max(found["error"], largest(jacobian - exact))
            found["rows"] = max(found["rows"], largest(jacobian.sum(-1)))
            found["lowest"] = min(found["lowest"], values.min().item())
            found["highest"] = max(found["highest"], values.max().item())
            norms += jacobian.flatten(1).norm(dim=1).tolist()
            least = torch.nn.functional.one_hot(p.argmin(-1), KEYS)  # the answer that the model thinks least of
            wrong += (p - least).norm(dim=1).tolist()
        found["norm"].append(median(norms))
        found["cross-entropy"].append(median(wrong))
    return found


def largest(x: Tensor) -> float:
    return x.abs().max().item()


def judge(numbers: Numbers) -> Verdict:
    exact = max(numbers["error"], numbers["rows"], -numbers["lowest"], numbers["highest"] - 0.5)
    falls, wrong = max(numbers["norm"]) / max(numbers["norm"][-1], 1e-300), numbers["cross-entropy"][-1]
    return judged(
        exact < 1e-12 and falls > 1e6 and wrong > 1,
        f"formula exact to {numbers['error']:.0e}, eigenvalues up to {numbers['highest']:.2f}; its median norm falls "
        f"by {falls:.0e} as scores grow, |p - y| stays at {wrong:.2f}",
    )


def draw(axes, numbers: Numbers) -> None:
    axes.plot(SIZES, numbers["norm"], "o-", label="Jacobian of softmax, median norm")
    axes.plot(SIZES, numbers["cross-entropy"], "s-", label="p - y, wrong answer")
    axes.set(xlabel="deviation of the scores", xscale="log", yscale="log", ylim=(1e-14, 10))
    axes.legend(frameon=False)
