"""Tasks that write text, and text generation with a trained model: sources in, n-best texts out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, overload, runtime_checkable

from torch import Tensor

from allmask.data import Checker, DataFile, Record, read_records
from allmask.decoding import Decoding, Hypothesis, Writer, generate, stream
from allmask.decoding.search import expect_one_hypothesis
from allmask.errors import UsageError
from allmask.inference import precision_of
from allmask.mask import Mask
from allmask.model import Model
from allmask.tasks.common.evaluation import Evaluation
from allmask.tasks.common.writing import Prompts, Steady, Written, text_of, tokenizer_of
from allmask.tasks.task import Predictor, Task
from allmask.text import Tokenizer

BATCH = 32  # sources per batch


@runtime_checkable
class WritingTask(Task, Protocol):
    """A task that writes text. It also has the option `max_source`, the longest source in tokens."""

    use: ClassVar[str | None] = "generate"
    max_source: int

    def sized(self, max_new: int | None) -> Self:
        """Return the task with room for `max_new` new tokens; None: as many as before."""
        return self

    def prompts(self, tokenizer: Tokenizer, sources: Sequence[str]) -> Prompts: ...

    def mask_of(self, is_target: Tensor) -> Mask: ...

    def decoding(self, model: Model, **changes: Any) -> Decoding: ...

    def writer(self, model: Model, precision: str | None = None) -> Writer: ...

    def fields(self, targets: bool) -> dict[str, Checker]:
        """Return the required fields of a record; with `targets`, those to evaluate on."""
        ...

    def evaluation(self, written: Sequence[str], records: Sequence[Record], show: int = 0) -> Evaluation: ...

    def predictor(self, model: Model, precision: str = "auto") -> TextGenerator:
        return TextGenerator(model, self.fitted(model), precision)


@dataclass
class TextGenerator(Predictor):
    """A model, the task that it writes for, and its writer, which holds the weights ready for decoding."""

    model: Model
    task: WritingTask
    precision: str | None = "auto"  # fp32, bf16, int8; auto: the fastest here; None: the model itself
    writer: Writer | None = field(default=None, repr=False)  # None: that of the task
    cut: int = field(default=0, init=False)
    doubtful: int = field(default=0, init=False)

    does: ClassVar[str] = "writes"
    done: ClassVar[str] = "written"
    options: ClassVar[frozenset[str]] = frozenset(
        {"beams", "n_best", "length_penalty", "end_bias", "no_repeat_ngram", "min_new", "max_new"}
        | {"sample", "temperature", "top_k", "top_p", "seed"}
    )

    def __post_init__(self):
        self.writer = self.writer or self.task.writer(self.model, self.precision)
        self.leftwards = getattr(self.writer, "leftwards", False)  # it writes from right to left
        self.max_tokens = self.task.max_source
        usual = getattr(self.task, "usual_score", None)
        self.usual_score = -math.inf if usual is None else usual

    def computes_in(self) -> str:
        return precision_of(getattr(self.writer, "model", self.model))

    @overload
    def __call__(self, texts: str, **options: Any) -> str: ...
    @overload
    def __call__(self, texts: Sequence[str], **options: Any) -> list[str]: ...

    def __call__(self, texts: str | Sequence[str], **options: Any) -> Any:
        """Return the best text for each source; with n_best=N, a list of N texts; for a blank source a blank text.

        The options are those of `Decoding`.
        """
        single = isinstance(texts, str)
        several = options.get("n_best", 1) > 1
        found = [[text for text, _ in best] for best in self.write([texts] if single else list(texts), **options)]
        result = found if several else [best[0] if best else "" for best in found]
        return result[0] if single else result

    def write(self, texts: Sequence[str], batch: int = BATCH, **options: Any) -> Iterator[Written]:
        """Yield the n-best texts for each source with their hypotheses, which have the scores."""
        task = self.task.sized(options.get("max_new"))
        return self.search(texts, self.settings(**options), batch, task)

    def search(
        self, texts: Sequence[str], settings: Decoding, batch: int = BATCH, task: WritingTask | None = None
    ) -> Iterator[Written]:
        """Like `write`, with complete decoding settings."""
        assert self.writer is not None
        task, tokenizer = task or self.task, tokenizer_of(self.model)
        for start in range(0, len(texts), batch):
            some = texts[start : start + batch]
            numbers = [number for number, text in enumerate(some) if text.strip()]
            prompts = task.prompts(tokenizer, [some[number] for number in numbers])
            self.cut += prompts.cut
            result: list[Written] = [[] for _ in some]
            for number, found in zip(numbers, generate(self.writer, prompts.ids, settings), strict=True):
                step = -1 if self.leftwards else 1
                result[number] = [(text_of(tokenizer, one.tokens[::step]), one) for one in found]
                self.doubtful += not settings.sample and found[0].per_token < self.usual_score
            yield from result

    def stream(self, text: str, **options: Any) -> Iterator[str]:
        """Yield one text in pieces as it is written, greedy or sampled; joined, they equal the result of `write`."""
        return self._pieces(text, self.settings(**options), self.task.sized(options.get("max_new")))

    def _pieces(self, text: str, settings: Decoding, task: WritingTask) -> Iterator[str]:
        assert self.writer is not None
        if not text.strip():
            return
        self.expect_streamable()
        tokenizer = tokenizer_of(self.model)
        steady, tokens, prompts = Steady(), [], task.prompts(tokenizer, [text])
        self.cut += prompts.cut
        for token in stream(self.writer, prompts.ids[0], settings):
            tokens.append(token)
            yield steady.more(text_of(tokenizer, tokens))
        yield steady.rest(text_of(tokenizer, tokens))

    def stream_all(
        self, texts: Sequence[str], put: Callable[[int, str], None], **options: Any
    ) -> list[tuple[str, Hypothesis]]:
        """Write several texts at once, like `stream`: `put(number, piece)` is called for each piece of a text.

        The texts are not blank. Return them with their hypotheses.
        """
        assert self.writer is not None
        self.expect_streamable(**options)
        task, settings = self.task.sized(options.get("max_new")), self.settings(**options)
        tokenizer = tokenizer_of(self.model)
        prompts = task.prompts(tokenizer, texts)
        self.cut += prompts.cut
        tokens: list[list[int]] = [[] for _ in texts]
        steady = [Steady() for _ in texts]

        def on_token(number: int, token: int) -> None:
            tokens[number].append(token)
            put(number, steady[number].more(text_of(tokenizer, tokens[number])))

        found = [best[0] for best in generate(self.writer, prompts.ids, settings, on_token)]
        written = [(text_of(tokenizer, one.tokens), one) for one in found]
        for number, (text, _) in enumerate(written):
            put(number, steady[number].rest(text))
        return written

    def expect_streamable(self, **options: Any) -> None:
        """Refuse to write in pieces what is known only at the end."""
        expect_one_hypothesis(self.settings(**options))
        if self.leftwards:
            raise UsageError("this model writes from right to left, so the first words come last", "leave out --stream")

    def settings(self, **options: Any) -> Decoding:
        unknown = sorted(set(options) - set(Decoding.__dataclass_fields__))
        if unknown:
            known = ", ".join(Decoding.__dataclass_fields__)
            raise UsageError(f"decoding: there is no option {', '.join(unknown)}", f"known: {known}")
        return self.task.decoding(self.model, **options)

    def new_tokens(self, **options: Any) -> int:
        settings = self.settings(**options)
        return settings.max_new * max(settings.beams, settings.n_best)

    # ---- files ---------------------------------------------------------------------------------------------

    def check(self, options: dict[str, Any]) -> None:
        self.settings(**options)
        self.max_tokens = self.task.sized(options.get("max_new")).max_source

    def records(self, path: Path | DataFile, targets: bool, **how: Any) -> Iterator[Record]:
        return read_records(path, self.task.fields(targets), **how)

    def expect_lines(self) -> None:
        raise UsageError("this model writes text; for lines of stdin use allmask generate", "name a file")

    def predict(self, records: Sequence[Record], **options: Any) -> Iterator[dict[str, Any]]:
        """Yield predictions in the order of the records; sources of similar length share a batch."""
        sources = [record.fields["source"] for record in records]
        order = sorted(range(len(sources)), key=lambda number: len(sources[number]))
        found = dict(zip(order, self.write([sources[number] for number in order], BATCH, **options), strict=True))
        for number in range(len(sources)):
            best = [{"prediction": text, "score": one.score} for text, one in found[number]]
            yield {"predictions": best} if options.get("n_best", 1) > 1 else best[0]

    def evaluate(self, records: Iterable[Record], show: int = 0, quiet: bool = True, **options: Any) -> Evaluation:
        from allmask.training.progress import Progress  # the whole package is imported with it

        chosen = list(records)
        bar = Progress(len(chosen), self.done, quiet=quiet)
        written: list[str] = []
        for found in self.write([record.fields["source"] for record in chosen], **options):
            written.append(found[0][0])
            bar.update(len(written))
        bar.close()
        return replace(self.task.evaluation(written, chosen, show), cut=self.cut)
