"""The options of the server, declared once, and the names of its models; nothing here imports torch or the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from allmask.errors import UsageError
from allmask.options import Options, option

KEY_VARIABLE = "ALLMASK_API_KEY"
FINAL = ("final", "best")  # folders of a run, which is the better name


@dataclass(frozen=True)
class Settings(Options):
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 is all of this machine.", "server")
    port: int = option(8000, "Port to listen on; 0: any free one.", "server", minimum=0, maximum=65535)
    workers: int = option(1, "Processes, each with its own copy of the models.", "server", minimum=1)
    api_key: str | None = option(
        None, "Key that requests must send, as Authorization: Bearer KEY.", "server", metavar="KEY",
        shown_default=f"${KEY_VARIABLE}",
    )  # fmt: skip
    cors: tuple[str, ...] = option((), "Origin whose web pages may send requests; repeat it for more.", "server")
    queue: int = option(512, "Inputs that may wait for a model; more are refused with 429.", "limits", minimum=1)
    batch: int = option(32, "Inputs that are computed together.", "limits", minimum=1)
    batch_tokens: int = option(16_384, "Tokens that are computed together.", "limits", minimum=1)
    max_items: int = option(256, "Inputs of one request; more are refused with 422.", "limits", minimum=1)
    max_tokens: int = option(
        65_536, "Tokens that one request may have read and written; more are refused with 422.", "limits", minimum=1
    )
    max_body: int = option(1_000_000, "Bytes of the body of a request; more are refused with 413.", "limits", minimum=1)
    timeout: float = option(60.0, "Seconds until a request is given up, with 504.", "limits", above=0)
    grace: float = option(30.0, "Seconds that requests have to finish after SIGTERM.", "limits", minimum=0)

    def __post_init__(self):
        super().__post_init__()
        if self.max_items > self.queue:
            raise UsageError(f"max_items is {self.max_items}, more than the queue holds, {self.queue}")
        if self.api_key is not None and not self.api_key.strip():
            raise UsageError("the API key is blank", f"set {KEY_VARIABLE}, or leave --api-key out")


@dataclass(frozen=True)
class Source:
    """A model as the command line names it: FOLDER, or NAME=FOLDER."""

    name: str
    model: str

    @classmethod
    def parse(cls, given: str) -> Source:
        name, equals, model = given.partition("=")
        if equals and name and model and not Path(given).exists():
            return cls(name, model)
        path = Path(given.rstrip("/"))
        return cls(path.parent.name if path.name in FINAL and path.parent.name else path.name, given)

    @classmethod
    def parse_all(cls, given: Sequence[str]) -> list[Source]:
        found = [cls.parse(one) for one in given]
        for number, one in enumerate(found):
            if one.name in [other.name for other in found[:number]]:
                hint = f"name them: allmask serve first={one.model} second=…"
                raise UsageError(f"two models are called {one.name!r}", hint)
        return found
