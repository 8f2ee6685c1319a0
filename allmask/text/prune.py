"""keep_tokens: a smaller vocabulary that tokenizes the given text exactly as the large one does.

WordPiece takes the longest matching piece. Removing pieces that a text does not use changes nothing for it: at each
position the piece that was used is still there, and no longer one matches. Unknown words ([UNK]) are different: without
the pieces that matched first, another split might succeed. So those pieces are kept for the unknown words of a corpus.

BPE merges pairs in a fixed order. A kept token needs all tokens that it is merged from. Then every merge in a text of
kept tokens happens as before: its merges remain in their order, and no removed merge ever came first.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from operator import itemgetter
from typing import Any, Protocol

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from allmask.errors import UsageError
from allmask.text.kinds import byte_alphabet

Ids = tuple[int, ...]
_BATCH = 1000
_PRUNABLE = ("WordPiece", "BPE", "WordLevel")


def prune(backend: Backend, ids: Iterable[int], always: Iterable[int]) -> tuple[Backend, list[int]]:
    """Return the tokenizer with `ids`, `always` and the ids that these need, renumbered in order; and the ids kept."""
    parts = json.loads(backend.to_str())
    _expect_prunable(parts["model"])
    framing = _framing_ids(parts["post_processor"])
    kept = sorted(_closure(parts["model"], backend, {*ids, *always, *framing}))
    new = {old: index for index, old in enumerate(kept)}
    _prune_model(parts["model"], new)
    parts["added_tokens"] = [{**token, "id": new[token["id"]]} for token in parts["added_tokens"] if token["id"] in new]
    _renumber(parts["post_processor"], new)
    return Backend.from_str(json.dumps(parts)), kept


def _expect_prunable(model: dict[str, Any]) -> None:
    if model["type"] not in _PRUNABLE:
        raise UsageError(f"a {model['type']} vocabulary cannot be pruned; expected one of {', '.join(_PRUNABLE)}")


def _prune_model(model: dict[str, Any], new: Mapping[int, int]) -> None:
    vocabulary = {piece: new[id] for piece, id in model["vocab"].items() if id in new}
    model["vocab"] = vocabulary
    if "merges" in model:
        made = _joiner(model)
        model["merges"] = [
            [a, b] for a, b in model["merges"] if a in vocabulary and b in vocabulary and made(a, b) in vocabulary
        ]


def _renumber(processor: dict[str, Any] | None, new: Mapping[int, int]) -> None:
    for token in _framing(processor):
        token["ids"] = [new[id] for id in token["ids"]]
    for part in _parts(processor):
        part |= {name: [part[name][0], new[part[name][1]]] for name in ("cls", "sep") if name in part}


def _framing_ids(processor: dict[str, Any] | None) -> set[int]:
    """Return the ids of the special tokens around every text."""
    named = {part[name][1] for part in _parts(processor) for name in ("cls", "sep") if name in part}
    return named.union(*(token["ids"] for token in _framing(processor)))


def _framing(processor: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the special tokens of templates; older processors have a [piece, id] under "cls" and "sep" instead."""
    return [token for part in _parts(processor) for token in part.get("special_tokens", {}).values()]


def _parts(processor: dict[str, Any] | None) -> list[dict[str, Any]]:
    return [] if processor is None else processor.get("processors", [processor])


def _joiner(model: dict[str, Any]):
    """Return how a BPE joins two pieces: the second may have a prefix that marks the inside of a word."""
    mark = len(model.get("continuing_subword_prefix") or "")
    return lambda a, b: a + b[mark:]


def _parents(model: dict[str, Any]) -> dict[str, list[str]]:
    """Return, for each merged piece, the pieces of all merges that produce it."""
    made, parents = _joiner(model), {}
    for a, b in model.get("merges", ()):
        parents.setdefault(made(a, b), []).extend((a, b))
    return parents


def _closure(model: dict[str, Any], backend: Backend, ids: set[int]) -> set[int]:
    """Return the ids and all others that must be kept with them."""
    vocabulary, parents = model["vocab"], _parents(model)
    todo = [piece for piece, id in backend.get_vocab(with_added_tokens=True).items() if id in ids]
    todo += [piece for piece in _bytes(model, backend) if piece in vocabulary]
    todo += [model["unk_token"]] if model.get("unk_token") in vocabulary else []
    done: set[str] = set()
    while todo:
        piece = todo.pop()
        if piece not in done:
            done.add(piece)
            todo += parents.get(piece, ())
    return ids | {vocabulary[piece] for piece in done if piece in vocabulary}


def _bytes(model: dict[str, Any], backend: Backend) -> Iterator[str]:
    """Yield the pieces that represent bytes; with all of them every text can be encoded."""
    if model["type"] == "BPE" and "ByteLevel" in str(backend.pre_tokenizer):
        yield from byte_alphabet()
    if model.get("byte_fallback"):
        yield from (f"<0x{byte:02X}>" for byte in range(256))


class Encoded(Protocol):
    @property
    def ids(self) -> list[int]: ...
    @property
    def raw(self) -> Encoding: ...


class Tokenizer(Protocol):
    """What `propose_keep_tokens` needs of a tokenizer; `allmask.text.Tokenizer` itself would be a circular import."""

    @property
    def backend(self) -> Backend: ...
    @property
    def special_ids(self) -> frozenset[int]: ...
    def special_id(self, role: str) -> int | None: ...
    def encode_batch(self, texts: Sequence[str], *, special: bool = True) -> Sequence[Encoded]: ...


def propose_keep_tokens(
    tokenizer: Tokenizer, texts: Iterable[str], minimum: int = 1, characters: bool = False
) -> list[int]:
    """Return the ids to keep for text like `texts`: those that occur at least `minimum` times, and those they need.

    After `tokenizer.keep(...)` a text of only such tokens is tokenized as before; with `minimum=1` that is every text
    given here. A word with a rarer piece is split into shorter ones: its characters are kept, so that no word becomes
    unknown. With `characters`, all characters of the vocabulary are kept: other texts may be split into shorter
    pieces, but what was known remains known, every Chinese character for example.
    """
    backend = tokenizer.backend
    model = json.loads(backend.to_str())["model"]
    _expect_prunable(model)
    speller = _Speller(model) if model["type"] == "WordPiece" else None
    words, unknown = _count(tokenizer, texts, speller, _pieces if minimum == 1 else _words)
    counts: Counter[int] = Counter()
    for word, count in words.items():
        counts.update({id: count for id in word})
    kept = {id for id, count in counts.items() if count >= minimum} | tokenizer.special_ids
    kept |= counts.keys() - model["vocab"].values()  # added tokens cannot be split
    dropped = [word for word in words if not kept.issuperset(word)]
    if speller:
        kept.update(id for path, count in unknown.items() if count >= minimum for id in path)
        _keep_spellings(speller, dropped, kept)
    elif model["type"] == "BPE":
        kept |= _characters(model, dropped)
    if characters:
        kept |= _alphabet(model, backend)
    return prune(backend, kept, tokenizer.special_ids)[1]


def _count(
    tokenizer: Tokenizer, texts: Iterable[str], speller: _Speller | None, cut: Callable[[Encoding], Iterable[Ids]]
) -> tuple[Counter[Ids], Counter[Ids]]:
    """Count words, as tuples of ids; and, for unknown words, the ids that matched before the split failed."""
    words: Counter[Ids] = Counter()
    unknown: Counter[Ids] = Counter()
    texts, unknown_id = iter(texts), tokenizer.special_id("unk")
    while batch := list(islice(texts, _BATCH)):
        for text, encoded in zip(batch, tokenizer.encode_batch(batch, special=False), strict=True):
            words.update(cut(encoded.raw))
            if speller and unknown_id in encoded.ids:
                unknown.update(speller.unknown_paths(tokenizer.backend, text))
    return words, unknown


def _words(encoding: Encoding) -> Iterator[Ids]:
    for _, group in groupby(zip(encoding.word_ids, encoding.ids, strict=True), key=itemgetter(0)):
        yield tuple(id for _, id in group)


def _pieces(encoding: Encoding) -> Iterator[Ids]:
    """Yield each piece once, as a word of its own: much faster, and enough if all pieces that occur are kept."""
    return ((id,) for id in set(encoding.ids))


class _Speller:
    """WordPiece on ids, to find how a word is split if only some pieces are kept."""

    def __init__(self, model: dict[str, Any]):
        self.ids: dict[str, int] = model["vocab"]
        self.pieces = {id: piece for piece, id in self.ids.items()}
        self.mark: str = model["continuing_subword_prefix"]
        self.longest: int = model["max_input_chars_per_word"]

    def spell(self, word: str, kept: set[int] | None = None) -> tuple[list[int], bool]:
        """Return the ids of the matching pieces, and whether they reach the end of the word."""
        path, start = [], 0
        while start < len(word):
            found = ((end, self.ids.get(self.form(word[start:end], start))) for end in range(len(word), start, -1))
            start, id = next((hit for hit in found if hit[1] in (self.pieces if kept is None else kept)), (0, None))
            if id is None:
                return path, False
            path.append(id)
        return path, True

    def form(self, text: str, start: int) -> str:
        return text if start == 0 else self.mark + text

    def text(self, word: Ids) -> str:
        pieces = [self.pieces[id] for id in word]
        return pieces[0] + "".join(piece.removeprefix(self.mark) for piece in pieces[1:])

    def unknown_paths(self, backend: Backend, text: str) -> Iterator[Ids]:
        """Yield, for each unknown word of a text, the ids that matched before the split failed."""
        clean = backend.normalizer.normalize_str(text) if backend.normalizer else text
        cut = backend.pre_tokenizer.pre_tokenize_str(clean) if backend.pre_tokenizer else [(clean, (0, 0))]
        for word, _ in cut:
            path, complete = self.spell(word) if len(word) <= self.longest else ([], True)
            if not complete:
                yield tuple(path)


def _keep_spellings(speller: _Speller, words: list[Ids], kept: set[int]) -> None:
    """Keep the characters of words that lost a piece; where they do not suffice, keep the word's own pieces."""
    texts = {speller.text(word): word for word in words}
    for text in texts:
        forms = (speller.form(character, start) for start, character in enumerate(text))
        kept.update(speller.ids[form] for form in forms if form in speller.ids)
    failing = True
    while failing:  # a piece kept for one word may match in another one, so repeat until no word is unknown
        failing = [word for text, word in texts.items() if not speller.spell(text, kept)[1]]
        kept.update(id for word in failing for id in word)


def _alphabet(model: dict[str, Any], backend: Backend) -> set[int]:
    """Return the ids of single characters: to begin a word, and inside of one if words have such characters inside."""
    if model["type"] == "BPE":
        parents = _parents(model)
        return {id for piece, id in model["vocab"].items() if piece not in parents}
    mark = model.get("continuing_subword_prefix") or ""
    inside = {piece.removeprefix(mark): id for piece, id in model["vocab"].items() if mark and piece.startswith(mark)}
    found = {id for piece, id in model["vocab"].items() if len(piece) == 1}
    return found | {id for sign, id in inside.items() if len(sign) == 1 and _joins(backend, sign)}


def _joins(backend: Backend, sign: str) -> bool:
    """Return whether a character can be inside of a word; BERT makes each Chinese character a word of its own."""
    text = backend.normalizer.normalize_str(f"a{sign}") if backend.normalizer else f"a{sign}"
    return backend.pre_tokenizer is None or len(backend.pre_tokenizer.pre_tokenize_str(text)) == 1


def _characters(model: dict[str, Any], words: list[Ids]) -> set[int]:
    """Return the ids of the unmerged pieces of the words."""
    vocabulary, parents = model["vocab"], _parents(model)
    ids = {id for word in words for id in word}
    todo = {piece for piece, id in vocabulary.items() if id in ids}
    done: set[str] = set()
    while todo:
        done |= todo
        todo = {parent for piece in todo for parent in parents.get(piece, ())} - done
    return {vocabulary[piece] for piece in done if piece not in parents}
