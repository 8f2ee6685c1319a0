"""POST /v1/tasks/{task}: a task of a model, by its name in the registry, with the options of the command line.

{"input": "…" or {"source": "…"} or a list of those, "model": "titles", "beams": 4}
{"model": "titles", "task": "title", "output": what `allmask predict` writes, or a list of it}
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from allmask.data import DataFile
from allmask.errors import CheckpointError, UsageError
from allmask.files import did_you_mean
from allmask.options import SAMPLING, described
from allmask.runs.options import hints_of
from allmask.serve.batching import Closed, Compute, Job
from allmask.serve.models import Models, ServedModel, count_tokens
from allmask.serve.problems import LEFT, Problem
from allmask.serve.settings import Settings
from allmask.tasks.task import Predictor

INPUT = Path("input")  # what messages call an input: "input 2: no "source"; …"
INLINE = 20_000  # characters that are tokenized at once; more, in another thread
REMEMBERED = 256  # options of requests, by model
DISCARDED = 8  # times the limit of a body: so much is read of a larger one, so that the client reads the answer


async def post_task(request: Request) -> Response:
    state, task = request.app.state, request.path_params["task"]
    request.scope["allmask.task"] = task
    body = await read_json(request, state.settings)
    name, given = body.pop("model", None), body.pop("input", None)
    if given is None:
        raise UsageError('there is no "input"', 'pass {"input": "…"}, or a list of inputs')
    inputs = given if isinstance(given, list) else [given]

    def compute(predictor: Predictor, options: dict[str, Any]) -> Compute:
        return lambda records: predictor.predict(records, **options)

    model, found, _ = await run(request, Call(task, name, inputs, body, compute))
    content = {"model": model.name, "task": task, "output": found if isinstance(given, list) else found[0]}
    return as_json(content)


def as_json(content: Any) -> Response:
    try:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise not_numbers() from None
    return Response(text, media_type="application/json")


def not_numbers() -> CheckpointError:
    return CheckpointError("the result is not a number", "the weights are damaged, or overflow in bf16")


# ---- the way of a request, the same for all tasks ----------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """What a request asks of a model. Calls of the same task, kind and options are computed together."""

    task: str
    model: Any  # its name, unchecked; None: the first that can do the task
    inputs: Sequence[Any]  # unchecked
    options: Mapping[str, Any]  # unchecked
    compute: Callable[[Predictor, dict[str, Any]], Compute]  # may refuse options
    kind: str = "predict"
    # an input of `compute`: a record, its number, and its encoded texts (ServedModel.encode)
    wrap: Callable[[Any, int, list[Any]], Any] = lambda record, number, encoded: record


async def run(request: Request, call: Call) -> tuple[ServedModel, list[Any], list[int]]:
    """Check a call, wait for the results, and return them with the number of tokens of each input."""
    model, job, tokens = await submit(request, call)
    try:
        return model, await answered(request, job), tokens
    finally:
        job.cancel()  # no effect if it is done


async def submit(request: Request, call: Call) -> tuple[ServedModel, Job, list[int]]:
    """Check a call, and put its inputs into the queue of a model."""
    models: Models = request.app.state.models
    settings: Settings = request.app.state.settings
    while True:
        model, predictor = models.find(call.task, _name(call.model))
        request.scope["allmask.model"] = model.name
        options, new = known_options(model, call.task, predictor, call.options)
        compute = call.compute(predictor, options)
        if not 1 <= len(call.inputs) <= settings.max_items:
            hint = "split it" if call.inputs else 'pass {"input": "…"}'
            raise UsageError(f"{len(call.inputs)} inputs; expected 1 to {settings.max_items}", hint)
        model.batcher.expect_room(len(call.inputs))  # first: what is refused should cost little
        records = list(predictor.read(DataFile(INPUT, items=call.inputs)))
        length = sum(map(_characters, records))
        if length > INLINE:
            encoded = await asyncio.to_thread(model.encode, records)
        else:
            encoded = model.encode(records)
        tokens = [count_tokens(one) for one in encoded]
        total = sum(tokens) + new * len(records)
        if total > settings.max_tokens:
            split = f"{sum(tokens):,} to read and up to {new * len(records):,} to write"
            raise UsageError(
                f"{total:,} tokens ({split}); a request has {settings.max_tokens:,} at most", "ask for less"
            )
        key = call.task, call.kind, tuple(sorted(options.items()))
        entries = [call.wrap(record, number, encoded[number]) for number, record in enumerate(records)]
        try:
            job = model.batcher.submit(key, entries, [count + new for count in tokens], compute)
        except Closed:
            if models.get(model.name) is model:
                raise Problem(503, "the server is stopping", "try again", {"Retry-After": "1"}) from None
            continue  # the model was replaced meanwhile
        model.read.inc(sum(tokens))
        return model, job, tokens


def _name(name: Any) -> str | None:
    if name is not None and not isinstance(name, str):
        raise UsageError("the model is not a text", "GET /v1/models lists the names")
    return name


def _characters(record: Any) -> int:
    values = (value for value in record.fields.values() if value)
    return sum(len(value) if isinstance(value, str) else sum(map(len, value)) for value in values)


async def answered(request: Request, job: Job) -> list[Any]:
    """Wait for the results; give up after --timeout, and if the client leaves."""
    timeout = request.app.state.settings.timeout
    gone = asyncio.ensure_future(disconnected(request))
    gone.add_done_callback(lambda done: done.cancelled() or job.deliver(Problem(LEFT, "the client left")))
    timer = gone.get_loop().call_later(timeout, lambda: job.deliver(too_late(timeout)))
    try:
        return await job.future
    finally:
        timer.cancel()
        gone.cancel()


def too_late(timeout: float) -> Problem:
    return Problem(504, f"no result within {timeout:g} s", "ask for less, or raise --timeout")


async def disconnected(request: Request) -> None:
    """Return when the client closes the connection; the body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


# ---- bodies and options ------------------------------------------------------------------------------------------


async def read_json(request: Request, settings: Settings) -> dict[str, Any]:
    """Return the JSON object in the body."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Problem(415, f"the body is {kind or 'of no type'}; expected application/json", "curl --json '{…}'")
    body, size = bytearray(), 0
    announced = request.headers.get("content-length", "0")
    if len(announced) > 18 or int(announced) > DISCARDED * settings.max_body:
        raise _too_large(settings)
    try:
        async with asyncio.timeout(settings.timeout):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= settings.max_body:
                    body += chunk
                elif size > DISCARDED * settings.max_body:
                    break
    except ClientDisconnect:
        raise Problem(LEFT, "the client left") from None
    except TimeoutError:
        raise Problem(408, "the body did not arrive in time", headers={"Connection": "close"}) from None
    if size > settings.max_body:
        raise _too_large(settings)
    try:
        found = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else error
        raise Problem(400, f"the body is not JSON: {what}", "check it with jq") from None
    if not isinstance(found, dict):
        raise UsageError("the body is not a JSON object", 'pass {"input": "…"}')
    return found


def _too_large(settings: Settings) -> Problem:
    message = f"the body has more than {settings.max_body:,} bytes"
    return Problem(413, message, "split it, or raise --max-body", {"Connection": "close"})


def known_options(
    model: ServedModel, task: str, predictor: Predictor, given: Mapping[str, Any]
) -> tuple[dict[str, Any], int]:
    """Return the options of a request, checked, and how many tokens may be written for a record with them.

    They are remembered, as most requests have the options of an earlier one.
    """
    key = task, *((name, type(given[name]), given[name]) for name in sorted(given))  # 1, 1.0 and true are equal
    try:
        found = model.options.get(key)
    except TypeError:  # a list, or an object
        found = key = None
    if found is None:
        options = check_options(predictor, given)
        found = options, predictor.new_tokens(**options)
        if key is not None:
            if len(model.options) >= REMEMBERED:
                model.options.clear()
            model.options[key] = found
    return dict(found[0]), found[1]


def check_options(predictor: Predictor, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a request as the predictor takes them; null is an option that is not given."""
    declared = options_of(predictor)
    for name in given:
        if name not in declared:
            known = sorted(declared)
            hint = did_you_mean(name, known) if known else "leave it out"
            raise UsageError(f"there is no option {name[:40]!r}; this model {predictor.does}", hint)
    options = {name: value for name, value in given.items() if value is not None}
    for name, value in options.items():
        entry, kind = declared[name]
        if not _is_of(kind, value):
            raise UsageError(f"{name} is {json.dumps(value)[:40]}; expected {WORDS[kind]}")
        described(entry).check(name, value)
    drawn = [name for name in SAMPLING if name in options]
    if drawn and not options.get("sample"):
        raise UsageError(f"{', '.join(drawn)}: no effect without sample", 'add "sample": true')
    predictor.check(options)
    return options


WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _is_of(kind: type, value: Any) -> bool:
    if kind in (int, float) and isinstance(value, bool):
        return False
    if kind is float:
        return isinstance(value, int | float) and abs(value) < 1e300 and math.isfinite(value)
    return isinstance(value, kind) and not (kind is int and abs(value) >= 1 << 62)


def options_of(predictor: Predictor) -> dict[str, tuple[Field[Any], type]]:
    """Return the declaration and the type of each option that a predictor takes."""
    return _declared_options(predictor.declared, predictor.options)


@cache
def _declared_options(declared: type, names: frozenset[str]) -> dict[str, tuple[Field[Any], type]]:
    hints = hints_of(declared)
    found = {}
    for entry in fields(declared):
        if entry.name in names:
            kind = hints[entry.name]
            if get_origin(kind) in (Union, UnionType):
                kind = next(one for one in get_args(kind) if one is not type(None))
            found[entry.name] = entry, kind
    return found
