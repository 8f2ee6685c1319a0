"""A classifier two-sample test: do two files come from one distribution?

A discriminator, as in a GAN (arXiv 1406.2661), is trained to distinguish the records of the two files. If both
are samples of one distribution, its accuracy on held-out records is that of a coin. A significantly higher accuracy is
a shift, and the discriminator's weights show what has shifted.

verdict = compare_texts(last_month, today)                   # n-grams; or represent=embedder
verdict = compare_numbers(array, other, names=["age", "income"])
verdict = compare_images(read_images(Path("then"), 2000, "0"), read_images(Path("now"), 2000, "1"))
verdict.shifted, verdict.p, verdict.accuracy

records.py      read texts, tables and images; draw a sample of them
features.py     n-grams of texts, ranks of numbers, measures of images
two_sample.py   balance the files, fit the discriminator, compute the p-value
compare.py      all of it in one call, and the differences that were found
"""

from allmask.drift.compare import Difference, Example, Settings, Verdict, compare_images, compare_numbers, compare_texts
from allmask.drift.records import Pictures, Reservoir, read_images
from allmask.drift.two_sample import binomial_tail, min_records

__all__ = [
    "Difference", "Example", "Pictures", "Reservoir", "Settings", "Verdict", "binomial_tail", "compare_images",
    "compare_numbers", "compare_texts", "min_records", "read_images",
]  # fmt: skip
