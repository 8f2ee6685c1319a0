"""`allmask finetune`: fine-tune a pretrained model for a task."""

from __future__ import annotations

from allmask.cli._run import Training

EXAMPLES = """
    allmask finetune --data titles.jsonl --out runs/title
    allmask finetune allmask-en --task title --data train.jsonl --eval dev.jsonl --out runs/title
    allmask finetune --task classify --data reviews.csv --eval dev.csv --out runs/reviews
    allmask finetune allmask-zh --task choose --data questions.jsonl --eval dev.jsonl --out runs/c3
    allmask finetune bert-base-chinese --data 标题.csv --epochs 2 --batch-tokens 8192 --out runs/zh
    allmask finetune t5-folder --task translate --data de-en.jsonl --eval dev.jsonl --lr 3e-4 --out runs/de-en
    allmask finetune --config run.yaml --lr 2e-4 --out runs/again
    allmask finetune --task classify --data few.csv --eval dev.csv --seeds 5 --out runs/five
    allmask finetune --task classify --data few.csv --eval dev.csv --search --out runs/search
    allmask finetune --resume --out runs/title
"""

command = Training(
    "finetune",
    """Fine-tune MODEL for a task: write titles or translations, classify texts or pairs of texts, choose between
answers, tag words, or find the answer to a question in a text.""",
)
