"""The routes of the playground with their headers, and its server."""

from __future__ import annotations

import mimetypes
import threading
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from allmask.errors import ResourceError

STATIC = Path(__file__).parent / "static"
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
try:
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import FileResponse, RedirectResponse, Response
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles
except ImportError as error:
    raise ResourceError("starlette is not installed", "pip install starlette uvicorn") from error


class SafeHeaders:
    """Adds the headers to every answer: the page loads nothing from elsewhere, and runs no script in its HTML."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        await self.app(scope, receive, sending)


def make_routes(models: Sequence[str] | None = None, device: str = "cpu") -> list[Any]:
    from allmask.play.api import Api
    from allmask.play.weights import Shelf

    mimetypes.add_type("text/javascript", ".js")  # Windows may say otherwise, and a browser then refuses the module

    def page(request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    def to_page(request: Request) -> Response:
        return RedirectResponse("/play/")

    inner = [Route("/", page), Mount("/static", StaticFiles(directory=STATIC)), *Api(Shelf(models, device)).routes()]
    return [Route("/play", to_page), Mount("/play", routes=inner, middleware=[Middleware(SafeHeaders)])]


def make_app(models: Sequence[str] | None = None, device: str = "cpu") -> Starlette:
    """The page alone. Requests must name this machine as their host: a foreign site cannot reach it by a name."""

    def to_page(request: Request) -> Response:
        return RedirectResponse("/play/")

    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost", "[::1]"])
    return Starlette(routes=[Route("/", to_page), *make_routes(models, device)], middleware=[hosts])


def run(
    models: Sequence[str] | None, port: int, open_browser: bool, say: Callable[[str], None], device: str = "cpu"
) -> None:
    """Serve on 127.0.0.1 until interrupted; port 0 is any free one."""
    try:
        import uvicorn
    except ImportError as error:
        raise ResourceError("uvicorn is not installed", "pip install starlette uvicorn") from error
    import socket

    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1", port))
        listening.listen(128)  # before the address is said: who comes early waits
    except OSError as error:
        raise ResourceError(f"port {port} cannot be used: {error.strerror}", "choose another with --port") from None
    address = f"http://127.0.0.1:{listening.getsockname()[1]}/play/"
    server = uvicorn.Server(uvicorn.Config(make_app(models, device), log_level="warning", server_header=False))
    say(address)
    if open_browser:
        threading.Timer(0.5, webbrowser.open, [address]).start()
    server.run(sockets=[listening])
