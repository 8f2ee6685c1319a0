"""All routes as one ASGI application.

    models = load_models(["runs/title", "minilm"], settings)
    app = make_app(models, settings)          # for uvicorn, Ray Serve, or starlette.testclient

`app.state` has `models` (by name, see models.py), `settings` and `draining`, true once the server stops.
"""

from __future__ import annotations

import hmac
import time
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from allmask import play
from allmask.serve import docs
from allmask.serve.models import Models
from allmask.serve.openai import get_models, post_completions, post_embeddings
from allmask.serve.problems import LEFT, Problem, as_response, problem_of
from allmask.serve.settings import Settings
from allmask.serve.tasks import post_task

OPEN = ("/health", "/ready", "/docs", "/openapi.json")  # these need no key


def make_app(models: Models, settings: Settings | None = None, page: bool = False) -> Starlette:
    """Return the application; with `page`, also the playground of allmask.play, under /play."""
    routes: list[BaseRoute] = [
        Route("/v1/tasks/{task}", post_task, methods=["POST"]),
        Route("/v1/models", get_models),
        Route("/v1/embeddings", post_embeddings, methods=["POST"]),
        Route("/v1/completions", post_completions, methods=["POST"]),
        Route("/health", get_health),
        Route("/ready", get_ready),
        Route("/metrics", get_metrics),
        Route("/openapi.json", docs.get_openapi),
        Route("/docs", docs.get_docs),
        *(play.routes() if page else ()),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _not_found, Exception: _failed})
    app.router.redirect_slashes = False
    app.state.models, app.state.settings, app.state.draining = models, settings or Settings(), False
    app.add_middleware(Gate, app=app)
    if app.state.settings.cors:
        headers = ["Authorization", "Content-Type"]
        app.add_middleware(CORSMiddleware, allow_origins=app.state.settings.cors, allow_headers=headers)
    return app


# ---- state of the server -----------------------------------------------------------------------------------------


async def get_health(request: Request) -> Response:
    """The process lives, however busy it is."""
    return JSONResponse({"status": "ok"})


async def get_ready(request: Request) -> Response:
    """Requests are welcome; not once the server stops."""
    state = request.app.state
    alive = all(model.batcher.thread.is_alive() for model in state.models.values())
    if state.draining or not alive:
        return JSONResponse({"status": "stopping" if state.draining else "broken"}, 503)
    return JSONResponse({"status": "ready", "models": list(state.models)})


async def get_metrics(request: Request) -> Response:
    return request.app.state.models.metrics.response()


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    hint = "GET /docs lists what there is" if error.status_code == 404 else None
    message = f"{request.method} {request.url.path[:100]}: {error.detail}"
    return as_response(Problem(error.status_code, message, hint, dict(error.headers or {})))


async def _failed(request: Request, error: Exception) -> Response:
    return as_response(error)


# ---- what all requests pass --------------------------------------------------------------------------------------


class Gate:
    """Checks the key, turns errors into answers, counts, and closes connections once the server stops."""

    def __init__(self, inner: ASGIApp, app: Starlette):
        self.inner, self.state = inner, app.state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.inner(scope, receive, send)
            return
        start, status = time.perf_counter(), 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self.state.draining:
                    message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        try:
            self._expect_key(scope)
            await self.inner(scope, receive, sending)
        except Exception as error:
            if status == 0:
                known = problem_of(error)
                self.state.models.metrics.errors.labels(known.kind).inc()
                await as_response(known)(scope, receive, sending)
            elif not isinstance(error, OSError):  # the client left while it was answered
                raise
        finally:
            self._count(scope, status, time.perf_counter() - start)

    def _expect_key(self, scope: Scope) -> None:
        key: str | None = self.state.settings.api_key
        if key is None or scope["path"] in OPEN:
            return
        given = b" ".join(value for name, value in scope["headers"] if name == b"authorization")
        if not hmac.compare_digest(given, f"Bearer {key}".encode()):
            what = "the key is wrong" if given else "a key is needed"
            raise Problem(401, what, "send Authorization: Bearer KEY", {"WWW-Authenticate": "Bearer"})

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        task: Any = scope.get("allmask.task")
        model: Any = scope.get("allmask.model")
        if task is None:
            return
        known = task if model else "unknown"  # a name that a client made up is no label
        self.state.models.metrics.requests.labels(model or "none", known, str(status or LEFT)).inc()
        self.state.models.metrics.latency.labels(model or "none", known).observe(seconds)
