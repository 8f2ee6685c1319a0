"""Load a tokenizer from a folder or a file, together with the settings next to it.

Reads tokenizer.json, or vocab.txt (BERT), or vocab.json + merges.txt (GPT-2, RoBERTa), or spiece.model (T5, XLNet,
ALBERT), or sentencepiece.bpe.model (XLM-R); and, if present in the same folder, tokenizer_config.json,
special_tokens_map.json and added_tokens.json.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from allmask.errors import CheckpointError
from allmask.files import parse_json, read_json, read_text
from allmask.text import kinds
from allmask.text.kinds import (
    ALBERT_SPECIALS,
    BERT_SPECIALS,
    GPT2_SPECIALS,
    PLAIN_SPECIALS,
    ROBERTA_SPECIALS,
    ROLES,
    T5_SPECIALS,
    XLNET_SPECIALS,
    Merges,
)
from allmask.text.limits import (
    MAX_BYTES,
    MAX_NAMES,
    MAX_PIECES,
    check_added,
    check_charsmap,
    check_frame,
    check_growth,
    check_longest_word,
    check_pieces,
)
from allmask.text.sentencepiece import USER_DEFINED, Pieces, read_pieces

Specials = dict[str, str]  # role -> piece, for the roles that exist
Settings = dict[str, Any]
T = TypeVar("T")

XLMR = "sentencepiece.bpe.model"  # a unigram model, in spite of its name
VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", XLMR)  # the first that exists is read

# Other classes use the same file names for other rules; reading those as BERT or GPT-2 would give wrong ids.
_BERT_LIKE = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer", "PreTrainedTokenizer")
_GPT2_LIKE = ("GPT2Tokenizer", "PreTrainedTokenizer")
_T5_LIKE = ("T5Tokenizer", "MT5Tokenizer", "PreTrainedTokenizer")
_XLNET_LIKE = ("XLNetTokenizer",)
_ROBERTA_LIKE = ("RobertaTokenizer",)
_ALBERT_LIKE = ("AlbertTokenizer",)
_XLMR_LIKE = ("XLMRobertaTokenizer",)
_SENTINEL = re.compile(r"<extra_id_\d+>")
_CUT_OFF = "the file may be cut off: copy it again"
_MAX_ID = 10_000_000
_PROBE = "A probe, 试一试: é ñ 1 \U0001f600"


def read(source: str | Path, lowercase: bool | None = None) -> tuple[Backend, Specials]:
    """Load the tokenizer in a folder or file; `lowercase` overrides the settings, which old BERT folders lack."""
    path = _find(Path(source))
    settings = _settings(path.parent)
    _refuse_jieba(path, settings)
    if lowercase is not None:
        settings["do_lower_case"] = lowercase
    if path.suffix == ".txt":
        reader = _read_wordpiece
    elif path.suffix in (".model", ".spm"):
        reader = _read_sentencepiece
    else:
        reader = _read_byte_bpe if path.name == "vocab.json" else _read_tokenizer_json
    backend, specials = reader(path, settings)
    _register(backend, specials, path, settings)
    guard(path, lambda: check_frame(path, [backend.num_special_tokens_to_add(pair) for pair in (False, True)]))
    # Some faults show only in use; better here, where the file can be named
    guard(path, lambda: (backend.encode(_PROBE), backend.encode(_PROBE, _PROBE), backend.to_str()))
    return backend, specials


def guard(where: Path | str, action: Callable[[], T]) -> T:
    """Call `action` and turn errors of the Rust library into CheckpointErrors. Its panics are BaseExceptions."""
    try:
        return action()
    except (KeyboardInterrupt, SystemExit, CheckpointError):
        raise
    except BaseException as error:
        hint = "the file may be damaged: copy it again"
        raise CheckpointError(f"{where}: not a usable tokenizer: {error}", hint) from error


def _find(source: Path) -> Path:
    if source.is_file():
        return source
    if not source.is_dir():
        hint = "give a model folder, a tokenizer.json or a vocab.txt"
        raise CheckpointError(f"{source}: no such file or folder", hint)
    for name in VOCABULARIES:
        if (source / name).is_file():
            return source / name
    raise CheckpointError(f"{source}: none of {', '.join(VOCABULARIES)} is in this folder")


# ---- settings ------------------------------------------------------------------------------------------------------


def _settings(folder: Path) -> Settings:
    """Read tokenizer_config.json, completed by the older files for special and added tokens."""
    config, special, added = (
        read_json(folder / name, unique=True) if (folder / name).is_file() else {}
        for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    )
    settings = {**special, **config}
    decoder = settings.setdefault("added_tokens_decoder", {})
    if not isinstance(decoder, dict):
        what = "added_tokens_decoder is not an object of ids and tokens"
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: {what}")
    listed = {entry.get("content") for entry in decoder.values() if isinstance(entry, dict)}
    decoder.update({str(id): {"content": piece} for piece, id in added.items() if piece not in listed})
    return settings


def _flag(settings: Settings, name: str, default: bool | None) -> bool | None:
    value = settings.get(name, default)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"tokenizer_config.json: {name} is {value!r}; expected true or false")
    return default if value is None else value


def _content(value: Any) -> str | None:
    """Return the text of a special token, which is written as a string or as an object with its content."""
    return value.get("content") if isinstance(value, dict) else value


def _declared(settings: Settings) -> Specials:
    """Return the special tokens that the settings declare, by role."""
    found = {role: _content(settings.get(f"{role}_token")) for role in ROLES}
    for role, piece in found.items():
        if piece is not None and (not isinstance(piece, str) or not piece):
            raise CheckpointError(f"tokenizer_config.json: {role}_token is {piece!r}; expected a piece of text")
    return {role: piece for role, piece in found.items() if piece}


def _expect_class(path: Path, settings: Settings, known: tuple[str, ...]) -> None:
    name = settings.get("tokenizer_class")
    if name is not None and str(name).removesuffix("Fast") not in known:
        raise CheckpointError(
            f"{path}: tokenizer_config.json says {name}, whose rules are not in this file",
            "save it as tokenizer.json first (transformers: AutoTokenizer.from_pretrained(…).save_pretrained(…))",
        )


def _refuse_jieba(path: Path, settings: Settings) -> None:
    """Refuse the tokenizer of a RoFormer: it splits words with jieba, which none of its files says."""
    file = path.with_name("config.json")
    model = read_json(file) if file.is_file() and "tokenizer_class" not in settings else {}
    usual = "RoFormerTokenizer" if model.get("model_type") == "roformer" else None
    name = settings.get("tokenizer_class") or model.get("tokenizer_class") or usual
    if str(name).startswith("RoFormerTokenizer"):
        raise CheckpointError(
            f"{path}: the tokenizer of a RoFormer splits words with jieba, which is not supported",
            "to load the model without a tokenizer, give a folder that holds only config.json and the weights",
        )


def _expect_specials(path: Path, known: set[str], specials: Specials, roles: tuple[str, ...], unit: str) -> None:
    """Refuse a vocabulary that lacks a special token; `unit` is a line or a piece of the file."""
    for role in roles:
        if specials[role] not in known:
            hint = "is the file complete, and of this kind? Other special tokens are named in tokenizer_config.json"
            raise CheckpointError(f"{path}: no {unit} is {specials[role]} (the {role} token)", hint)


# ---- one reader per format -----------------------------------------------------------------------------------------


def _read_wordpiece(path: Path, settings: Settings) -> tuple[Backend, Specials]:
    _expect_class(path, settings, _BERT_LIKE)
    vocabulary = _read_vocab_txt(path)
    declared = _declared(settings)
    _expect_specials(path, set(vocabulary), BERT_SPECIALS | declared, ("unk", "cls", "sep"), "line")
    specials = {role: piece for role, piece in BERT_SPECIALS.items() if piece in vocabulary} | declared
    backend = kinds.wordpiece(
        vocabulary,
        specials,
        lowercase=bool(_flag(settings, "do_lower_case", True)),
        strip_accents=_flag(settings, "strip_accents", None),
        chinese_characters=bool(_flag(settings, "tokenize_chinese_chars", True)),
    )
    return backend, specials


def _read_byte_bpe(path: Path, settings: Settings) -> tuple[Backend, Specials]:
    _expect_class(path, settings, (*_GPT2_LIKE, *_ROBERTA_LIKE))
    vocabulary = read_json(path, unique=True, limit=MAX_BYTES, names=MAX_NAMES)
    check_pieces(path, vocabulary)
    _check_ids(path, vocabulary)
    merges_path = path.with_name("merges.txt")
    if not merges_path.is_file():
        raise CheckpointError(f"{merges_path}: no such file", "a byte-level BPE needs vocab.json and merges.txt")
    merges = _read_merges(merges_path, vocabulary)
    prefix_space, name = bool(_flag(settings, "add_prefix_space", False)), settings.get("tokenizer_class")
    if set(ROBERTA_SPECIALS.values()) <= vocabulary.keys() if name is None else str(name).startswith(_ROBERTA_LIKE):
        specials = ROBERTA_SPECIALS | _declared(settings)
        _expect_specials(path, set(vocabulary), specials, ("pad", "unk", "cls", "sep", "mask"), "piece")
        backend = guard(path, lambda: kinds.roberta_bpe(vocabulary, merges, specials, prefix_space=prefix_space))
        _expect_bytes(backend, path)
        # the space before it belongs to it, as in the published tokenizer.json
        backend.add_special_tokens([AddedToken(specials["mask"], lstrip=True, normalized=False)])
        return backend, specials
    specials = {role: piece for role, piece in GPT2_SPECIALS.items() if piece in vocabulary} | _declared(settings)
    before = specials.get("bos") if _flag(settings, "add_bos_token", False) else None
    backend = guard(path, lambda: kinds.byte_bpe(vocabulary, merges, prefix_space=prefix_space, before=before))
    _expect_bytes(backend, path)
    return backend, specials


def _read_sentencepiece(path: Path, settings: Settings) -> tuple[Backend, Specials]:
    _expect_class(path, settings, (*_T5_LIKE, *_XLNET_LIKE, *_ALBERT_LIKE, *_XLMR_LIKE))
    found, name = read_pieces(path), settings.get("tokenizer_class")
    known = {piece for piece, _ in found.pieces}
    check_pieces(path, known, unigram=True)
    check_charsmap(path, found.charsmap)
    # without the name of a class, the special tokens around a text identify it
    if path.name == XLMR if name is None else str(name).startswith(_XLMR_LIKE):
        return _read_xlmr(path, settings, found)
    for specials, like in ((XLNET_SPECIALS, _XLNET_LIKE), (ALBERT_SPECIALS, _ALBERT_LIKE)):
        if {specials["sep"], specials["cls"]} <= known if name is None else str(name).startswith(like):
            return _read_xlnet(path, settings, found, is_albert=specials is ALBERT_SPECIALS)
    count = settings.get("extra_ids", kinds.SENTINELS)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= 10_000:
        raise CheckpointError(f"tokenizer_config.json: extra_ids is {count!r}; expected a whole number")
    # T5's sentinels are usually not in the file
    pieces = found.pieces + ([] if any(map(_SENTINEL.fullmatch, known)) else kinds.sentinels(count))
    specials = dict(T5_SPECIALS) | _declared(settings)
    _expect_specials(path, {piece for piece, _ in pieces}, specials, ("pad", "eos", "unk"), "piece")
    options = {"prefix_space": found.prefix_space, "trims": found.trims, "byte_fallback": found.bytes}
    backend = guard(path, lambda: kinds.unigram(pieces, specials, charsmap=found.charsmap, **options))
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in found.of_kind(USER_DEFINED)])
    backend.add_special_tokens([piece for piece, _ in pieces if _SENTINEL.fullmatch(piece)])
    return backend, specials


def _read_xlnet(path: Path, settings: Settings, found: Pieces, is_albert: bool) -> tuple[Backend, Specials]:
    """Read XLNet's vocabulary or that of ALBERT, which has other special tokens and, by default, no capitals."""
    specials = (ALBERT_SPECIALS if is_albert else XLNET_SPECIALS) | _declared(settings)
    _expect_specials(path, {piece for piece, _ in found.pieces}, specials, ("pad", "unk", "cls", "sep"), "piece")
    options = {
        "lowercase": bool(_flag(settings, "do_lower_case", is_albert)),
        "keep_accents": bool(_flag(settings, "keep_accents", False)),
    }
    make = kinds.albert_unigram if is_albert else kinds.xlnet_unigram
    backend = guard(path, lambda: make(found.pieces, specials, charsmap=found.charsmap, **options))
    known = [piece for piece in kinds.XLNET_OTHERS if backend.token_to_id(piece) is not None]
    backend.add_special_tokens([AddedToken(specials["mask"], lstrip=True, normalized=False), *known])
    return backend, specials


def _read_xlmr(path: Path, settings: Settings, found: Pieces) -> tuple[Backend, Specials]:
    """Read XLM-R's vocabulary: its ids are those of fairseq, with <pad> at 1 and the pieces of the file from 4 on."""
    specials = ROBERTA_SPECIALS | _declared(settings)
    marks = [(specials[role], 0.0) for role in ("cls", "pad", "sep", "unk")]
    own = {piece for piece, _ in marks}
    ordinary = [(piece, score) for piece, score in found.pieces if piece not in own]
    if [piece for piece, _ in found.pieces[:3]] != [specials[role] for role in ("unk", "cls", "sep")]:
        raise CheckpointError(f"{path}: the first pieces are not <unk>, <s> and </s>", "is it the file of an XLM-R?")
    pieces = [*marks, *ordinary, (specials["mask"], 0.0)]
    backend = guard(path, lambda: kinds.xlmr_unigram(pieces, specials, charsmap=found.charsmap))
    backend.add_special_tokens([AddedToken(specials["mask"], lstrip=True, normalized=False)])
    return backend, specials


def _read_tokenizer_json(path: Path, settings: Settings) -> tuple[Backend, Specials]:
    text = read_text(path, MAX_BYTES)
    added = _check_tokenizer_json(path, text)  # what it has parsed is gone when the library parses it again
    backend = guard(path, lambda: Backend.from_str(text))
    # Padding and truncation belong to a batch, not to a vocabulary: a file that has them would cut text silently
    backend.no_padding()
    backend.no_truncation()
    for entry in added:  # the library numbers them itself, without an error if ids differ
        if entry["content"]:
            _expect_id(backend, entry["content"], entry["id"], path)
    _expect_bytes(backend, path)
    old = backend.normalizer
    if isinstance(old, normalizers.BertNormalizer):  # tokenizer_config.json overrides it, as in transformers
        backend.normalizer = normalizers.BertNormalizer(
            clean_text=old.clean_text,
            handle_chinese_chars=bool(_flag(settings, "tokenize_chinese_chars", old.handle_chinese_chars)),
            strip_accents=_flag(settings, "strip_accents", old.strip_accents),
            lowercase=bool(_flag(settings, "do_lower_case", old.lowercase)),
        )
    # A file without settings gets the special tokens of the first family that it has all of
    families = (
        BERT_SPECIALS, ALBERT_SPECIALS, XLNET_SPECIALS, ROBERTA_SPECIALS, PLAIN_SPECIALS, T5_SPECIALS, GPT2_SPECIALS,
    )  # fmt: skip
    complete = (one for one in families if all(backend.token_to_id(piece) is not None for piece in one.values()))
    return backend, dict(next(complete, {})) | _declared(settings)


def _check_tokenizer_json(path: Path, text: str) -> list[Any]:
    """Refuse what no tokenizer has: steps, ids, numbers of pieces, merges, added tokens. Return the added tokens."""
    data = parse_json(path, text, unique=True, names=MAX_NAMES)
    model = data.get("model")
    if not isinstance(model, dict):
        hint = "give a tokenizer.json or a model folder"
        raise CheckpointError(f'{path}: no tokenizer in it ("model" is missing)', hint)
    vocabulary, merges = model.get("vocab"), model.get("merges")
    if isinstance(vocabulary, dict):
        check_pieces(path, vocabulary, merges=len(merges) if isinstance(merges, list) else 0)
        _check_ids(path, vocabulary)
    elif isinstance(vocabulary, list):  # of a unigram model
        check_pieces(path, [str(entry[0]) for entry in vocabulary if isinstance(entry, list) and entry], unigram=True)
    check_longest_word(path, model.get("max_input_chars_per_word"))
    for name in ("normalizer", "decoder"):
        check_growth(path, name, data.get(name))
    added = data.get("added_tokens") or []
    check_added(path, [str(entry["content"]) for entry in added if isinstance(entry, dict) and "content" in entry])
    return added


def _expect_bytes(backend: Backend, path: Path) -> None:
    """Refuse a byte-level BPE without a piece for every byte: text would lose characters.

    Thirteen bytes never occur in UTF-8 and may be missing.
    """
    if not isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel) or not isinstance(backend.model, models.BPE):
        return
    never = {0xC0, 0xC1, *range(0xF5, 0x100)}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    order = printable + [byte for byte in range(256) if byte not in printable]
    alphabet = zip(order, kinds.byte_alphabet(), strict=True)
    missing = [byte for byte, piece in alphabet if byte not in never and backend.token_to_id(piece) is None]
    if missing:
        shown = ", ".join(f"0x{byte:02x}" for byte in missing[:5])
        what = f"{len(missing)} of 256 bytes have no piece ({shown} …)"
        raise CheckpointError(f"{path}: {what}", "text would lose characters")


# ---- special and added tokens --------------------------------------------------------------------------------------


def _register(backend: Backend, specials: Specials, path: Path, settings: Settings) -> None:
    """Register special and added tokens, so that they are recognized in text; their ids must be those in the files."""
    decoder = settings["added_tokens_decoder"]
    for id in decoder:
        if not id.isdecimal():
            raise CheckpointError(f"tokenizer_config.json: an added token has the id {id!r}; expected a whole number")
    added = {int(id): _added_token(decoder[id]) for id in sorted(decoder, key=int)}
    check_added(path, [token.content for token in added.values()] + _extra(settings))
    for special, tokens in groupby(added.values(), lambda token: token.special):  # in few calls: each one takes a while
        add = backend.add_special_tokens if special else backend.add_tokens
        add(list(tokens))
    for id, token in added.items():
        _expect_id(backend, token.content, id, path)
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens([piece for piece in [*specials.values(), *_extra(settings)] if piece not in known])


def _expect_id(backend: Backend, piece: str, id: int, path: Path) -> None:
    actual = backend.token_to_id(piece)
    if actual != id:
        raise CheckpointError(f"{path}: the added token {piece!r} has id {id} but would get {actual}")


def _extra(settings: Settings) -> list[str]:
    """Return the special tokens without a role, under the newer or the older name of the setting."""
    name = "extra_special_tokens" if settings.get("extra_special_tokens") else "additional_special_tokens"
    listed = settings.get(name) or []
    pieces = [_content(piece) for piece in (listed.values() if isinstance(listed, dict) else listed)]
    if not all(isinstance(piece, str) and piece for piece in pieces):
        raise CheckpointError(f"tokenizer_config.json: {name} is {listed!r}; expected a list of pieces")
    return [str(piece) for piece in pieces]


def _added_token(entry: Any) -> AddedToken:
    if not isinstance(entry, dict) or not isinstance(entry.get("content"), str) or not entry["content"]:
        raise CheckpointError(f"tokenizer_config.json: not an added token: {entry!r}")
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(entry["content"], **{name: entry[name] for name in names if isinstance(entry.get(name), bool)})


# ---- vocabulary files: a wrong line is an error, never skipped, so that no id ever shifts --------------------------


def _read_vocab_txt(path: Path) -> dict[str, int]:
    """Read one piece per line; its id is the line number from 0. Windows line ends and final blank lines are fine."""
    lines = [line.removesuffix("\r") for line in _lines(path)]
    while lines and not lines[-1]:
        lines.pop()
    ids: dict[str, int] = {}
    for id, piece in enumerate(lines):
        hint = f"removing the line would shift all ids after it; write a placeholder such as [unused-{id}] there"
        if not piece.strip(" \t"):  # other white space is a piece: the Chinese BERT has a line separator, U+2028
            raise CheckpointError(f"{path}:{id + 1}: the line is blank", hint)
        if piece in ids:
            raise CheckpointError(f"{path}:{id + 1}: {piece!r} is already on line {ids[piece] + 1}", hint)
        ids[piece] = id
    if not ids:
        raise CheckpointError(f"{path}: no pieces in it", _CUT_OFF)
    check_pieces(path, ids)
    return ids


def _lines(path: Path) -> list[str]:
    """Read the lines of a file of pieces or merges; refuse more than there can be."""
    text = read_text(path, limit=MAX_BYTES)
    count = text.count("\n")
    if count > MAX_PIECES:
        raise CheckpointError(f"{path}: {count:,} lines; at most {MAX_PIECES:,} are read")
    return text.split("\n")


def _check_ids(path: Path, vocabulary: dict[str, Any]) -> None:
    """Refuse ids that are not whole numbers of sensible size, and ids that two pieces share."""
    for piece, id in vocabulary.items():
        if not isinstance(id, int) or isinstance(id, bool) or not 0 <= id < _MAX_ID:
            raise CheckpointError(f"{path}: the id of {piece!r} is {id!r}; expected 0 to {_MAX_ID - 1:,}")
    taken = bytearray(max(vocabulary.values(), default=0) + 1)  # a set of the ids would take as much as the vocabulary
    for piece, id in vocabulary.items():
        if taken[id]:
            owner = next(other for other, own in vocabulary.items() if own == id)
            raise CheckpointError(f"{path}: {owner!r} and {piece!r} both have the id {id}")
        taken[id] = 1
    if not vocabulary:
        raise CheckpointError(f"{path}: no pieces in it", _CUT_OFF)


def _read_merges(path: Path, vocabulary: dict[str, int]) -> Merges:
    """Read two pieces per line, in the order of merging; the first line may be a #version comment."""
    merges: Merges = []
    for number, line in enumerate(_lines(path), 1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        if len(parts) != 2 or not all(parts):
            raise CheckpointError(f"{path}:{number}: expected two pieces and one space between, found {line!r}")
        for piece in (*parts, "".join(parts)):
            if piece not in vocabulary:
                hint = "the two files must belong together"
                raise CheckpointError(f"{path}:{number}: {piece!r} is not in vocab.json", hint)
        merges.append((parts[0], parts[1]))
    return merges
