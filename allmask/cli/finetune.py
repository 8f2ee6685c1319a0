"""`allmask finetune`: teach a pretrained model a task."""

from __future__ import annotations

from allmask.cli._options import Request, Training
from allmask.cli._run import drive

EXAMPLES = """
    allmask finetune minilm --task title --data train.jsonl --eval dev.jsonl --out runs/title
    allmask finetune minilm --task classify --data reviews.csv --eval dev.csv --out runs/reviews
    allmask finetune bge-small-zh --task choose --data questions.jsonl --eval dev.jsonl --out runs/c3
    allmask finetune bert-base-chinese --data 标题.csv --epochs 2 --batch-tokens 8192 --out runs/zh
    allmask finetune t5-folder --task translate --data de-en.jsonl --eval dev.jsonl --lr 3e-4 --out runs/de-en
    allmask finetune minilm --config run.yaml --lr 2e-4 --out runs/again
    allmask finetune minilm --task classify --data few.csv --eval dev.csv --seeds 5 --out runs/five
    allmask finetune minilm --task classify --data few.csv --eval dev.csv --search --out runs/search
    allmask finetune --resume --out runs/title
"""


def run(asked: Request) -> None:
    """Fine-tune MODEL for a task: write a title or a translation, classify texts or pairs, choose an answer, tag words,
    find the answer to a question in a text.

    The run's folder gets config.yaml, metrics.jsonl, loss.png, checkpoints and final, a model folder. Ctrl-C saves; the
    same command with --resume continues, bit for bit as if it had not been stopped. With "torchrun --nproc-per-node 8
    -m allmask finetune …" eight processes share each batch; the run is the same. Add --task TASK to --help to see the
    options of one task.
    """
    drive("finetune", asked)


command = Training("finetune", run)
