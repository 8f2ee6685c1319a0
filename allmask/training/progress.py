"""Progress on stderr: a bar on a terminal, a line every ten seconds in a log."""

from __future__ import annotations

import sys
import time


class Progress:
    """Call `update` as often as you like: the bar is redrawn a few times a second, a log gets a line in ten."""

    def __init__(self, total: int, label: str, start: int = 0, quiet: bool = False):
        self.total, self.label, self.first = total, label, start
        self.began = self.shown = time.monotonic()
        self.quiet = quiet
        self.terminal = sys.stderr.isatty()

    def update(self, done: int, text: str = "") -> None:
        now = time.monotonic()
        if self.quiet or (now - self.shown < (0.2 if self.terminal else 10.0) and done < self.total):
            return
        self.shown = now
        self._show(f"{self.label} {done}/{self.total}{self._bar(done)} {text} {self._left(done, now)}")

    def _show(self, line: str) -> None:
        print(
            f"\r\x1b[K{line}" if self.terminal else line, end="" if self.terminal else "\n", file=sys.stderr, flush=True
        )

    def say(self, line: str) -> None:
        """Print a line of its own, above the bar."""
        if not self.quiet:
            print(f"\r\x1b[K{line}" if self.terminal else line, file=sys.stderr, flush=True)

    def _bar(self, done: int) -> str:
        if not self.terminal:
            return ""
        filled = 24 * done // max(1, self.total)
        return f" {'█' * filled}{'░' * (24 - filled)}"

    def _left(self, done: int, now: float) -> str:
        made = done - self.first
        if made <= 0 or done >= self.total:
            return f"{clock(now - self.began)} in all"
        return f"{clock((now - self.began) / made * (self.total - done))} left"

    def close(self) -> None:
        if self.terminal and not self.quiet:
            print(file=sys.stderr)


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
