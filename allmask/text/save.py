"""Write the files of a tokenizer so that other libraries load them and give the same ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from allmask.text.kinds import ROBERTA_SPECIALS

FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip


def write(backend: Backend, specials: dict[str, str], folder: Path, more: Mapping[str, Any]) -> None:
    """Write tokenizer.json and tokenizer_config.json; for BERT and GPT-2 tokenizers also their vocabulary files.

    `more` are settings for tokenizer_config.json besides those that follow from the tokenizer.
    """
    parts = json.loads(backend.to_str())
    settings: dict[str, Any] = {f"{role}_token": piece for role, piece in specials.items()}
    settings["added_tokens_decoder"] = {str(token.pop("id")): token for token in parts["added_tokens"]}
    vocabulary, frame, files = parts["model"]["vocab"], _frame(parts), {}
    if _is_bert(parts, specials):
        files["vocab.txt"] = "".join(f"{piece}\n" for piece in sorted(vocabulary, key=vocabulary.__getitem__))
        settings |= {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": parts["normalizer"]["lowercase"],
            "strip_accents": parts["normalizer"]["strip_accents"],
            "tokenize_chinese_chars": parts["normalizer"]["handle_chinese_chars"],
        }
    elif kind := _kind_of_byte_bpe(parts, specials):
        in_order = dict(sorted(vocabulary.items(), key=lambda item: item[1]))
        files["vocab.json"] = json.dumps(in_order, ensure_ascii=False)
        files["merges.txt"] = "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in parts["model"]["merges"])
        settings |= {"tokenizer_class": kind, "add_prefix_space": parts["pre_tokenizer"]["add_prefix_space"]}
        settings |= {"add_bos_token": len(frame) == 2} if kind == "GPT2Tokenizer" else {}
    else:
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if "cls" in specials and frame[-1:] == [specials["cls"]]:
        settings["padding_side"] = "left"  # as in XLNet, where the last token represents the text
    files["tokenizer_config.json"] = json.dumps(settings | dict(more), ensure_ascii=False, indent=2) + "\n"
    files["tokenizer.json"] = backend.to_str(pretty=True) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8", newline="\n")


def _has_no_gaps(parts: dict[str, Any]) -> bool:
    vocabulary = parts["model"]["vocab"]
    return max(vocabulary.values()) + 1 == len(vocabulary)


def _type(part: dict[str, Any] | None) -> str | None:
    return None if part is None else part["type"]


def _frame(parts: dict[str, Any]) -> list[str]:
    """Return the special tokens around one text, as pieces, with "A" for the text."""
    processor = parts["post_processor"] or {}
    if _type(parts["post_processor"]) in ("BertProcessing", "RobertaProcessing"):
        return [processor["cls"][0], "A", processor["sep"][0]]
    return [next(iter(part.values()))["id"] for part in processor.get("single", [])]


def _is_bert(parts: dict[str, Any], specials: dict[str, str]) -> bool:
    """Whether vocab.txt and the settings define the tokenizer completely for transformers' BertTokenizer."""
    model, normalizer = parts["model"], parts["normalizer"]
    return (
        _type(model) == "WordPiece"
        and (model["continuing_subword_prefix"], model["max_input_chars_per_word"]) == ("##", 100)
        and _type(normalizer) == "BertNormalizer"
        and normalizer["clean_text"]
        and _type(parts["pre_tokenizer"]) == "BertPreTokenizer"
        and _frame(parts) == [specials.get("cls"), "A", specials.get("sep")]
        and _has_no_gaps(parts)
    )


def _kind_of_byte_bpe(parts: dict[str, Any], specials: dict[str, str]) -> str | None:
    """The class of transformers for which vocab.json and merges.txt define a byte-level BPE completely, or None.

    Words are split as by GPT-2. A GPT2Tokenizer has at most one token in front of a text.
    """
    model, split, frame = parts["model"], parts["pre_tokenizer"], _frame(parts)
    plain = (
        _type(model) == "BPE"
        and not any(model[name] for name in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
        and not model["byte_fallback"]
        and not model["ignore_merges"]
        and parts["normalizer"] is None
        and _type(split) == "ByteLevel"
        and split["use_regex"]
        and {"unk", "bos", "eos"} <= specials.keys()  # both add those that are missing
        and _has_no_gaps(parts)
    )
    if plain and _type(parts["post_processor"]) == "RobertaProcessing" and specials == ROBERTA_SPECIALS:
        return "RobertaTokenizer"
    return "GPT2Tokenizer" if plain and frame in ([], ["A"], [specials["bos"], "A"]) else None
