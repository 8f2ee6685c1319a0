"""`allmask train`: train a translator, an image classifier or a GAN from scratch."""

from __future__ import annotations

from allmask.cli._run import Training

EXAMPLES = """
    allmask train --task translate --data train.jsonl --eval dev.jsonl --out runs/de-en
    allmask train --data train.csv --eval dev.csv --preset transformer-base --vocab-size 16000 --average 5 --out runs/b
    allmask train --data 中英.jsonl --tokenizer tok/ --layers 2 --width 256 --steps 4000 --out runs/zh
    allmask train --task image --out runs/digits
    allmask train --task image --preset resnet56 --data cifar-10-batches-bin --epochs 60 --out runs/cifar
    allmask train --task image --data photos/ --size 64 --channels 3 --eval others/ --out runs/photos
    allmask train --task gan --preset toy --out runs/line
    allmask train --task gan --preset dcgan --data mnist/ --epochs 20 --out runs/gan
    allmask train --resume --out runs/de-en
"""

command = Training(
    "train",
    """Train a translator, an image classifier or a GAN from scratch.

\b
--task translate, title   an encoder–decoder that writes a target for each source; its vocabulary is trained, too
--task image              a residual network that classifies images
--task gan                a generator of images, and a discriminator that distinguishes them from real ones""",
)
