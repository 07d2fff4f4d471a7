"""Progress of a run that is never silent for long: what goes on is said again when nothing was said for a while."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

QUIET_S = 8.0
"""After so much silence the last line is said again."""
BEAT_S = 1.0

Clock = Callable[[], float]


@dataclass(slots=True)
class Heartbeat:
    """Calls ``tell`` with every line that it is called with, and in `beating` also without one.

    Attributes:
        tell: told what is going on.
        clock: monotonic seconds.
        detail: how far the last line's work is, for when it is said again; forgotten with the next line.
    """

    tell: Callable[[str], None]
    clock: Clock
    detail: str = ""
    _line: str = ""
    _began_s: float = 0.0
    _said_s: float = 0.0

    def __call__(self, line: str) -> None:
        """Say what begins now."""
        self._line, self.detail = line, ""
        self._began_s = self._said_s = self.clock()
        self.tell(line)

    def beat(self) -> None:
        """Say it again when there was silence since; does nothing before the first line."""
        now_s = self.clock()
        if not self._line or now_s - self._said_s < QUIET_S:
            return
        self._said_s = now_s
        detail = f", {self.detail}" if self.detail else ""
        self.tell(f"{self._line}: {now_s - self._began_s:.0f} s so far{detail}")

    @contextlib.asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Inside, no silence is longer than `QUIET_S` + `BEAT_S` while the event loop runs."""
        task = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self.beat()
