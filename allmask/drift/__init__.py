"""The discriminator as a two-sample test (generative adversarial networks, arXiv 1406.2661, turned to use).

If two samples come from one distribution, no discriminator can tell which of the two an example is from that it has not
seen: its held-out accuracy is a coin's. One that does better than a coin has found a shift, and says by what.

verdict = compare_texts(last_month, today)                   # n-grams; or represent=embedder
verdict = compare_numbers(array, other, names=["age", "income"])
verdict = compare_images(read_images(Path("then"), 2000, "0"), read_images(Path("now"), 2000, "1"))
verdict.shifted, verdict.p, verdict.accuracy
"""

from allmask.drift.comparing import (
    Example,
    Giveaway,
    Settings,
    Verdict,
    compare_images,
    compare_numbers,
    compare_texts,
)
from allmask.drift.deciding import binomial_tail, needed
from allmask.drift.images import Pictures, read_images
from allmask.drift.sampling import Reservoir

__all__ = [
    "Example", "Giveaway", "Pictures", "Reservoir", "Settings", "Verdict", "binomial_tail", "compare_images",
    "compare_numbers", "compare_texts", "needed", "read_images",
]  # fmt: skip
