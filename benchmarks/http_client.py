"""A small HTTP/1.1 client on asyncio: it costs little beside what it measures, and can send what is not HTTP."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Refused(OSError):
    """No connection was made: nobody listens."""


class Client:
    """One connection, kept alive; opened when it is first needed, and again when the server has closed it."""

    def __init__(self, url: str):
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        try:
            self.reader, self.writer = await asyncio.open_connection(self.host, self.port)
        except OSError as error:
            raise Refused(str(error)) from None

    async def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            with suppress(OSError):
                await self.writer.wait_closed()
        self.reader = self.writer = None

    async def post(self, path: str, content: Any, **headers: str) -> Answer:
        return await self.send("POST", path, json.dumps(content).encode(), **headers)

    async def get(self, path: str, **headers: str) -> Answer:
        return await self.send("GET", path, **headers)

    async def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        fields = {"Host": self.host, "Content-Type": "application/json", "Content-Length": str(len(body))}
        fields |= {name.replace("_", "-"): value for name, value in headers.items()}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return await self.raw(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body)

    async def raw(self, request: bytes) -> Answer:
        """Send bytes and read one answer; a connection that ends before it raises ConnectionError."""
        if self.writer is None:
            await self.open()
        assert self.writer is not None and self.reader is not None
        try:
            self.writer.write(request)
            await self.writer.drain()
            return await self._answer(self.reader, not request.startswith(b"HEAD "))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            await self.close()
            raise ConnectionError(f"no whole answer: {error}") from None

    async def _answer(self, reader: asyncio.StreamReader, has_body: bool = True) -> Answer:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(head[0].split()[1])
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        body = b""
        if not has_body:
            pass
        elif headers.get("transfer-encoding") == "chunked":
            while size := int(await reader.readline(), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readline()
        elif "content-length" in headers:
            body = await reader.readexactly(int(headers["content-length"]))
        else:
            body = b"" if status < 200 else await reader.read()
        if status < 200:  # 100 Continue
            return await self._answer(reader, has_body)
        if headers.get("connection") == "close":
            await self.close()
        return Answer(status, headers, body)
