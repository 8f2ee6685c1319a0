"""`allmask pretrain`: train a model on plain text."""

from __future__ import annotations

from allmask.cli._run import Training

EXAMPLES = """
    allmask tokenizer train corpus/*.txt --size 8000 --out tok/
    allmask pretrain --objective mlm --data corpus/ --tokenizer tok/ --preset bert-small --out runs/a
    allmask pretrain --objective mlm:0.5,causal:0.5 --data a.txt b.jsonl.gz --tokenizer tok/ --out runs/both
    allmask pretrain --objective causal,reverse --data corpus/ --tokenizer tok/ --preset elmo-tiny --out runs/elmo
    allmask pretrain --objective causal --data 文集/ --tokenizer tok/ --preset gpt2 --layers 6 --out runs/zh
    allmask pretrain --objective mlm,nsp --data corpus/ --from allmask-en --steps 2000 --out runs/more
    allmask pretrain --resume --out runs/a
"""

command = Training(
    "pretrain",
    """Train a model on plain text. The objective chooses the attention mask and the tokens to predict:

\b
mlm          hidden tokens, from both sides (BERT)
nsp          the same, and whether a second text follows the first
causal       the next token (GPT-2)
reverse      the previous token; with causal, both directions of ELMo
permutation  tokens in a random order (XLNet)
prefix       the end of a text, from all of its beginning
unilm        hidden tokens under four masks: both sides, left to right, right to left, prefix (UniLM)
mass         a hidden span, with an encoder–decoder (MASS)
span         several hidden spans, with an encoder–decoder (T5)

The tokens of the text are stored in the folder of the run.""",
)
