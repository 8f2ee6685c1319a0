"""The files of a tokenizer, written so that other libraries load them and give the same ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "spiece.model",
)  # fmt: skip


def write(backend: Backend, specials: dict[str, str], folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json; for BERT's and GPT-2's shape also the vocabulary files of old."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = json.loads(backend.to_str())
    settings: dict[str, Any] = {f"{role}_token": piece for role, piece in specials.items()}
    settings["added_tokens_decoder"] = {str(token.pop("id")): token for token in parts["added_tokens"]}
    if _is_bert(parts, specials):
        settings |= _bert_settings(parts)
        _write(folder / "vocab.txt", "".join(f"{piece}\n" for piece in _in_order(parts)))
    elif _is_gpt2(parts, specials):
        settings |= _gpt2_settings(parts)
        _write(
            folder / "vocab.json",
            json.dumps({piece: id for id, piece in enumerate(_in_order(parts))}, ensure_ascii=False),
        )
        _write(folder / "merges.txt", "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in parts["model"]["merges"]))
    else:
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if "cls" in specials and _framing(parts)[-1:] == [specials["cls"]]:
        settings["padding_side"] = "left"  # as XLNet pads, whose last token stands for a text
    _write(folder / "tokenizer_config.json", json.dumps(settings, ensure_ascii=False, indent=2) + "\n")
    _write(folder / "tokenizer.json", backend.to_str(pretty=True) + "\n")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def _in_order(parts: dict[str, Any]) -> list[str]:
    vocabulary = parts["model"]["vocab"]
    return sorted(vocabulary, key=vocabulary.__getitem__)


def _has_no_gaps(parts: dict[str, Any]) -> bool:
    vocabulary = parts["model"]["vocab"]
    return max(vocabulary.values()) + 1 == len(vocabulary)


def _type(part: dict[str, Any] | None) -> str | None:
    return None if part is None else part["type"]


def _framing(parts: dict[str, Any]) -> list[str]:
    """What stands around one text, as pieces and "A"."""
    processor = parts["post_processor"] or {}
    if _type(parts["post_processor"]) == "BertProcessing":
        return [processor["cls"][0], "A", processor["sep"][0]]
    return [next(iter(part.values()))["id"] for part in processor.get("single", [])]


def _is_bert(parts: dict[str, Any], specials: dict[str, str]) -> bool:
    """Whether vocab.txt and the settings say all there is to say, as transformers' BertTokenizer assumes."""
    model, normalizer = parts["model"], parts["normalizer"]
    return (
        _type(model) == "WordPiece"
        and (model["continuing_subword_prefix"], model["max_input_chars_per_word"]) == ("##", 100)
        and _type(normalizer) == "BertNormalizer"
        and normalizer["clean_text"]
        and _type(parts["pre_tokenizer"]) == "BertPreTokenizer"
        and _framing(parts) == [specials.get("cls"), "A", specials.get("sep")]
        and _has_no_gaps(parts)
    )


def _bert_settings(parts: dict[str, Any]) -> dict[str, Any]:
    normalizer = parts["normalizer"]
    return {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": normalizer["lowercase"],
        "strip_accents": normalizer["strip_accents"],
        "tokenize_chinese_chars": normalizer["handle_chinese_chars"],
    }


def _is_gpt2(parts: dict[str, Any], specials: dict[str, str]) -> bool:
    """The same for GPT2Tokenizer: nothing but bytes, its own way to cut words, and at most a token in front."""
    model, cut = parts["model"], parts["pre_tokenizer"]
    return (
        _type(model) == "BPE"
        and not any(model[name] for name in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
        and not model["byte_fallback"]
        and not model["ignore_merges"]
        and parts["normalizer"] is None
        and _type(cut) == "ByteLevel"
        and cut["use_regex"]
        and {"unk", "bos", "eos"} <= specials.keys()  # GPT2Tokenizer adds those it misses
        and _framing(parts) in ([], ["A"], [specials["bos"], "A"])
        and _has_no_gaps(parts)
    )


def _gpt2_settings(parts: dict[str, Any]) -> dict[str, Any]:
    return {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": parts["pre_tokenizer"]["add_prefix_space"],
        "add_bos_token": len(_framing(parts)) == 2,
    }
