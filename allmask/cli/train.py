"""`allmask train`: a new model learns to write, to classify images, or to make them."""

from __future__ import annotations

from allmask.cli._options import Request, Training
from allmask.cli._run import drive

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


def run(asked: Request) -> None:
    """Train a translator, an image classifier or a GAN from scratch.

    texts: an encoder–decoder writes a target for each source; one vocabulary for both is learnt from the data. --task
    image: a residual network classifies images. --task gan: a generator makes images, a discriminator tells them from
    real ones. The run's folder gets config.yaml, metrics.jsonl, loss.png (and confusion.png), checkpoints and final, a
    model folder. Ctrl-C saves; the same command with --resume continues, bit for bit as if it had not been stopped.
    With "torchrun --nproc-per-node 8 -m allmask train …" eight processes share each batch of texts; the run is the
    same. Add --task TASK to --help to see the options of one task.
    """
    drive("train", asked)


command = Training("train", run)
