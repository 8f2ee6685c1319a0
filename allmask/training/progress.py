"""Progress on stderr: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import logging
import sys
import time

from allmask.terminal import paint

log = logging.getLogger("allmask")


class Progress:
    """`update` may be called often: a bar is redrawn a few times per second, a log gets a line every ten seconds.

    The time that is left is estimated from the second update on: the first step may also compile kernels, and warm up.
    """

    def __init__(self, total: int, label: str, quiet: bool = False):
        self.total, self.label = total, label
        self.warm: tuple[float, int] | None = None  # when the first update came, and what was done then
        self.started = self.shown = time.monotonic()
        self.quiet = quiet
        self.terminal = sys.stderr.isatty()

    def update(self, done: int, text: str = "") -> None:
        now = time.monotonic()
        if self.warm is None:
            self.warm = now, done
        if self.quiet or (now - self.shown < (0.2 if self.terminal else 10.0) and done < self.total):
            return
        self.shown = now
        filled = 24 * done // max(1, self.total)
        bar = ""
        if self.terminal:
            bar = f" {paint('█' * filled, 'blue', sys.stderr)}{paint('░' * (24 - filled), 'dim', sys.stderr)}"
        since, made = now - self.warm[0], done - self.warm[1]
        if done >= self.total:
            clock_text = f"{clock(now - self.started)} in all"
        elif made <= 0:
            clock_text = f"{clock(now - self.started)} so far"
        else:
            clock_text = f"{clock(since / made * (self.total - done))} left"
        line = f"{self.label} {done}/{self.total}{bar} {text} {clock_text}"
        end = "" if self.terminal else "\n"
        print(f"\r\x1b[K{line}" if self.terminal else line, end=end, file=sys.stderr, flush=True)

    def say(self, line: str) -> None:
        """Print a line of its own, above the bar."""
        if not self.quiet:
            print(f"\r\x1b[K{line}" if self.terminal else line, file=sys.stderr, flush=True)

    def warn(self, line: str) -> None:
        """Log a warning, above the bar; also if this is quiet."""
        if self.terminal and not self.quiet:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        log.warning("%s", line)

    def close(self) -> None:
        if self.terminal and not self.quiet:
            print(file=sys.stderr)


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
