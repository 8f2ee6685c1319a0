"""Errors as problem+json (RFC 9457), in the words of the command line.

{"type": "about:blank", "title": "Unprocessable Content", "status": 422,
 "detail": "input 2: no \"source\"; found \"sorce\"", "hint": "did you mean \"source\" by \"sorce\"? …", "kind": "data"}
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse, Response

from allmask.errors import AllmaskError, DataError, ResourceError, UsageError

log = logging.getLogger("allmask")
UNPROCESSABLE, LEFT = 422, 499
PHRASES = {UNPROCESSABLE: "Unprocessable Content", LEFT: "Client Closed Request"}  # those that Python lacks or renamed


class Problem(AllmaskError):
    """An error that belongs to HTTP: its status, and headers of the answer."""

    kind = "request"

    def __init__(self, status: int, message: str, hint: str | None = None, headers: dict[str, str] | None = None):
        super().__init__(message, hint)
        self.status, self.headers = status, headers


def status_of(error: AllmaskError) -> int:
    if isinstance(error, Problem):
        return error.status
    if isinstance(error, UsageError | DataError):
        return UNPROCESSABLE
    return 503 if isinstance(error, ResourceError) else 500


def problem_of(error: BaseException) -> AllmaskError:
    """Return what to tell the client; of an error that is not for users, the details go to the log only."""
    if isinstance(error, AllmaskError):
        return error
    if isinstance(error, MemoryError):
        return ResourceError("out of memory", "ask for less at a time")
    log.error("a request failed", exc_info=error)
    return AllmaskError("the server failed at this request", "its log says why")


def as_response(error: BaseException) -> Response:
    known = problem_of(error)
    status = status_of(known)
    content: dict[str, Any] = {"type": "about:blank", "title": _phrase(status), "status": status}
    content |= {"detail": known.message, **({"hint": known.hint} if known.hint else {}), "kind": known.kind}
    content["error"] = {"message": str(known), "type": known.kind, "code": status}  # as clients of OpenAI read it
    headers = getattr(known, "headers", None)
    return JSONResponse(content, status, headers, media_type="application/problem+json")


def _phrase(status: int) -> str:
    return PHRASES.get(status) or HTTPStatus(status).phrase
