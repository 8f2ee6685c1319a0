"""`allmask pretrain`: a model learns objectives from plain text."""

from __future__ import annotations

from allmask.cli._options import Request, Training
from allmask.cli._run import drive

EXAMPLES = """
    allmask tokenizer train corpus/*.txt --size 8000 --out tok/
    allmask pretrain --objective mlm --data corpus/ --tokenizer tok/ --preset bert-small --out runs/a
    allmask pretrain --objective mlm:0.5,causal:0.5 --data a.txt b.jsonl.gz --tokenizer tok/ --out runs/both
    allmask pretrain --objective causal,reverse --data corpus/ --tokenizer tok/ --preset elmo-tiny --out runs/elmo
    allmask pretrain --objective causal --data 文集/ --tokenizer tok/ --preset gpt2 --layers 6 --out runs/zh
    allmask pretrain --objective mlm,nsp --data corpus/ --from minilm --steps 2000 --out runs/more
    allmask pretrain --resume --out runs/a
"""


def run(asked: Request) -> None:
    """Train a model on plain text: the objective decides by its masks which tokens see each other.

    The run's folder gets the tokens of the text, config.yaml, metrics.jsonl, loss.png, checkpoints and final, a model
    folder. Ctrl-C saves; the same command with --resume continues, bit for bit as if it had not been stopped. With
    "torchrun --nproc-per-node 8 -m allmask pretrain …" eight processes share each batch; the run is the same.
    """
    drive("pretrain", asked)


command = Training("pretrain", run)
