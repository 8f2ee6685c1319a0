"""The addresses under /play/api: JSON in, JSON out, sizes limited, errors in the words of the command line.

A request names a model of the list, never a path. One computation runs at a time; a few may wait for it.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from allmask.claims.claim import Claim, Result, Trial, all_claims, named
from allmask.claims.report import plot
from allmask.errors import AllmaskError, DataError, UsageError
from allmask.mask.grid import png_bytes
from allmask.mask.prover import prove
from allmask.play.board import MAX_LAYERS, MAX_TOKENS, Board, Fields
from allmask.play.weights import NEW, Shelf, words_of
from allmask.tasks.seq2seq import SOURCE_MASKS

log = logging.getLogger("allmask")

MAX_BODY = 256 * 1024  # bytes of a request
MAX_BOARD_TEXT, MAX_TEXT = 1000, 20_000  # characters
MAX_BEAMS = 6
WAITING = 8  # computations that may wait
_TRAINS = re.compile(r"allmask\.(claims\.learning|vision\.training)\b")  # modules that a claim imports


class Busy(Exception):
    """Too many computations wait."""


class Refused(Exception):
    """A request that is not even read: its status, and what is wrong."""

    def __init__(self, status: int, detail: str):
        super().__init__(detail)
        self.status, self.detail = status, detail


class Desk:
    """Lets one computation run at a time, and a few wait."""

    def __init__(self, waiting: int = WAITING):
        self.free = threading.Semaphore(waiting + 1)
        self.lock = threading.Lock()

    @contextmanager
    def place(self):
        if not self.free.acquire(blocking=False):
            raise Busy
        try:
            with self.lock:
                yield
        finally:
            self.free.release()


class Api:
    """The answers to all requests; each takes the fields of one and returns what is sent back."""

    def __init__(self, shelf: Shelf):
        self.shelf, self.desk = shelf, Desk()
        self.results: dict[str, tuple[Claim, Result]] = {}

    def routes(self) -> list[Route]:
        posts: dict[str, Callable[[Fields], Any]] = {
            "tokens": self.tokens,
            "prove": self.prove,
            "picture": self.picture,
            "fill": self.fill,
            "write": self.write,
            "attention": self.attention,
            "audit": self.audit,
            "steps": self.steps,
            "beams": self.beams,
            "titles": self.titles,
            "claims": self.run_claim,
        }
        gets: dict[str, Callable[[Request], Any]] = {
            "models": self.models,
            "claims": self.claims,
            "claims/{name}.svg": self.claim_plot,
        }
        return [
            *(Route(f"/api/{path}", self._getting(answer), methods=["GET"]) for path, answer in gets.items()),
            *(Route(f"/api/{path}", self._posting(answer), methods=["POST"]) for path, answer in posts.items()),
        ]

    # ---- masks ---------------------------------------------------------------------------------------------------

    def tokens(self, fields: Fields) -> dict[str, Any]:
        """How the model splits a source and a target; words and characters, if its weights are not installed."""
        source, target = _texts(fields)
        name = fields.text("model", 200, "auto")
        if name == "auto" and not self.shelf.has(source + target):
            return {**words_of(source, target), "model": None}
        weights = self.shelf.find(name, source + target)
        return {**weights.tokens(source, target), "model": weights.facts()}

    def prove(self, fields: Fields) -> dict[str, Any]:
        board = Board.of(fields)
        layers = fields.whole("layers", 1, MAX_LAYERS, default=None)
        scored = fields.wholes("scored", 0, len(board) - 1, MAX_TOKENS, default=list(range(len(board))))
        names = fields.given.get("tokens")
        if names is not None and (
            not isinstance(names, list) or len(names) != len(board) or not all(isinstance(name, str) for name in names)
        ):
            raise UsageError(f"tokens: expected {len(board)} texts")
        import torch

        flags = torch.zeros(len(board), dtype=torch.bool)
        flags[scored] = True
        proof = prove(board.mask, layers, flags)
        return {**proof.to_dict(), "visible": proof.visible.int().tolist(), "text": proof.text(names)}

    def picture(self, fields: Fields) -> Response:
        board = Board.of(fields)
        form = fields.one_of("format", ("svg", "png"))
        names = fields.given.get("tokens")
        if not isinstance(names, list) or len(names) != len(board):
            raise UsageError(f"tokens: expected {len(board)} texts")
        shown = [str(name)[:40] for name in names]
        drawing = board.mask.show(shown, fields.text("title", 200, ""))
        if form == "svg":
            return Response(drawing.canvas.svg(), media_type="image/svg+xml")
        return Response(png_bytes(drawing.canvas), media_type="image/png")

    # ---- the same weights under the mask of the board --------------------------------------------------------------

    def models(self, request: Request) -> dict[str, Any]:
        facts = [weights.facts() for weights in self.shelf.weights.values()]
        limits = {"tokens": MAX_TOKENS, "text": MAX_BOARD_TEXT, "long_text": MAX_TEXT, "new": NEW, "beams": MAX_BEAMS}
        return {"models": facts, "chosen": self.shelf.chosen, "limits": limits}

    def fill(self, fields: Fields) -> dict[str, Any]:
        weights, text, board = self._board(fields)
        hidden = fields.wholes("hidden", 0, text.ids.shape[1] - 1, MAX_TOKENS, default=[])
        return weights.fill(text, board, hidden)

    def write(self, fields: Fields) -> dict[str, Any]:
        weights, text, board = self._board(fields)
        how = fields.one_of("how", ("title", "continue"))
        return weights.titled(text, board) if how == "title" else weights.continued(text, board)

    def attention(self, fields: Fields) -> dict[str, Any]:
        weights, _, board = self._board(fields)
        return weights.attention(*_texts(fields), board)

    def audit(self, fields: Fields) -> dict[str, Any]:
        weights, text, board = self._board(fields)
        return weights.audit(text, board)

    def _board(self, fields: Fields) -> tuple[Any, Any, Board]:
        source, target = _texts(fields)
        weights = self.shelf.find(fields.text("model", 200, "auto"), source + target)
        return weights, weights.text(source, target), Board.of(fields)

    # ---- writing ---------------------------------------------------------------------------------------------------

    def steps(self, fields: Fields) -> dict[str, Any]:
        source, weights = self._source(fields, MAX_BOARD_TEXT)
        forced = fields.wholes("forced", 0, 10**7, NEW, default=[])
        return weights.steps(source, fields.one_of("kind", tuple(SOURCE_MASKS), "prefix"), forced)

    def beams(self, fields: Fields) -> dict[str, Any]:
        source, weights = self._source(fields, MAX_BOARD_TEXT)
        kind = fields.one_of("kind", tuple(SOURCE_MASKS), "prefix")
        return weights.beams(source, kind, fields.whole("beams", 2, MAX_BEAMS, 3))

    def titles(self, fields: Fields) -> dict[str, Any]:
        source, weights = self._source(fields, MAX_TEXT)
        count = fields.whole("count", 1, MAX_BEAMS, 3)
        beams = max(count, fields.whole("beams", 1, MAX_BEAMS, 4))
        return {"model": weights.name, "titles": weights.write_titles(source, beams, count)}

    def _source(self, fields: Fields, longest: int) -> tuple[str, Any]:
        source = fields.text("source", longest)
        if not source.strip():
            raise UsageError("no text was given", "type or paste one")
        return source, self.shelf.find(fields.text("model", 200, "auto"), source)

    # ---- claims ----------------------------------------------------------------------------------------------------

    def claims(self, request: Request) -> list[dict[str, Any]]:
        return [self._tile(claim) for claim in all_claims()]

    def run_claim(self, fields: Fields) -> dict[str, Any]:
        (claim,) = named([fields.text("name", 10)])
        if not _is_quick(claim):
            raise UsageError(f"{claim.name} trains models, which takes minutes", f"allmask claims {claim.name}")
        self.results[claim.name] = claim, claim.run(Trial())
        return self._tile(claim)

    def claim_plot(self, request: Request) -> Response:
        (claim,) = named([request.path_params["name"]])
        if claim.name not in self.results or not self.results[claim.name][1].numbers:
            raise UsageError(f"{claim.name} has not run here", "run it first")
        return Response(plot(*self.results[claim.name]), media_type="image/svg+xml")

    def _tile(self, claim: Claim) -> dict[str, Any]:
        tile: dict[str, Any] = {
            name: getattr(claim, name) for name in ("name", "title", "statement", "source", "criterion")
        }
        tile["quick"] = _is_quick(claim)
        if claim.name in self.results:
            result = self.results[claim.name][1]
            verdict = {"level": result.verdict.level, "words": result.verdict.words, "figure": result.verdict.figure}
            tile["result"] = {**verdict, "seconds": result.seconds, "plot": bool(result.numbers)}
        return tile

    # ---- requests --------------------------------------------------------------------------------------------------

    def _posting(self, answer: Callable[[Fields], Any]) -> Callable:
        async def endpoint(request: Request) -> Response:
            try:
                fields = Fields(await _read(request))
            except Refused as refused:
                return problem(refused.status, "usage", refused.detail)
            return await run_in_threadpool(self._answered, answer, fields)

        return endpoint

    def _getting(self, answer: Callable[[Request], Any]) -> Callable:
        async def endpoint(request: Request) -> Response:
            return await run_in_threadpool(self._answered, answer, request)

        return endpoint

    def _answered(self, answer: Callable[[Any], Any], given: Any) -> Response:
        try:
            with self.desk.place():
                found = answer(given)
        except Busy:
            return problem(429, "resources", "the playground is busy", "wait a moment", {"Retry-After": "2"})
        except (UsageError, DataError) as error:
            return problem(422, error.kind, error.message, error.hint)
        except AllmaskError as error:
            return problem(503, error.kind, error.message, error.hint)
        except Exception:
            log.exception("the playground failed")
            return problem(500, "internal", "something went wrong here", "the terminal of the server has the traceback")
        return found if isinstance(found, Response) else JSONResponse(found)


def _is_quick(claim: Claim) -> bool:
    """Whether a claim takes seconds: those that train networks take minutes."""
    return not _TRAINS.search(claim.path.read_text(encoding="utf-8"))


def _texts(fields: Fields) -> tuple[str, str]:
    source, target = (fields.text(name, MAX_BOARD_TEXT, "") for name in ("source", "target"))
    return source, target if target.strip() else ""


async def _read(request: Request) -> dict[str, Any]:
    """The JSON object of a request. Only application/json is taken: no other site can make a browser send that."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused(415, "expected Content-Type: application/json")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise Refused(413, f"the request is longer than {MAX_BODY:,} bytes")
    try:
        found = json.loads(bytes(body))
    except (ValueError, RecursionError):
        raise Refused(400, "the request is not JSON") from None
    if not isinstance(found, dict):
        raise Refused(400, "the request is not a JSON object")
    return found


def problem(status: int, kind: str, detail: str, hint: str | None = None, headers: Any = None) -> JSONResponse:
    """An error as application/problem+json (RFC 9457)."""
    content = {"title": kind, "status": status, "detail": detail, "hint": hint}
    return JSONResponse(content, status, headers, media_type="application/problem+json")
