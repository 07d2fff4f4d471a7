"""Helper threads of a transport: they check and copy, so that the progress thread never touches a block's bytes.

xxh3 runs at two to three times the speed of a copy and releases the GIL on large blocks; done on the progress thread
it would still take a quarter of a same-host load's time. Small batches are checked in place: a hand-over costs more.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import xxhash

log = logging.getLogger(__name__)

INLINE_BYTES = 128 * 1024
HELPERS = 2
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Check:
    """Bytes that arrived and the xxh3_64 each block of ``block_bytes`` must have, in order."""

    data: memoryview
    block_bytes: int
    expected: tuple[int, ...]

    def run(self) -> tuple[bool, ...]:
        """Which blocks are intact."""
        size = self.block_bytes
        return tuple(
            xxhash.xxh3_64_intdigest(self.data[index * size : (index + 1) * size]) == total
            for index, total in enumerate(self.expected)
        )


class Helpers:
    """Threads that take jobs in order.

    Args:
        name: of the threads.
        deliver: called on a thread with a function to run where the answer belongs.
    """

    def __init__(self, name: str, deliver: Callable[[Callable[[int], None]], None]) -> None:
        self._deliver = deliver
        self._jobs: queue.SimpleQueue[Callable[[], Callable[[int], None]] | None] = queue.SimpleQueue()
        for number in range(HELPERS):
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True).start()

    def submit(self, job: Callable[[], Answer], then: Callable[[Answer, int], None]) -> None:
        """Run ``job``, then deliver ``then(answer, now_ns)``. The bytes it works on must stay as they are until
        then."""
        self._jobs.put(lambda: functools.partial(then, job()))

    def stop(self) -> None:
        """End the threads after the jobs they have."""
        for _ in range(HELPERS):
            self._jobs.put(None)

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            self._deliver(_answer(job))
            del job  # what it holds must not wait for the next job to be let go


def _answer(job: Callable[[], Callable[[int], None]]) -> Callable[[int], None]:
    """What a job found. Its bug is raised where its answer belongs: a thread that ended would answer nothing at all."""
    try:
        return job()
    except BaseException as error:
        log.exception("a helper's job failed")
        failure = error

        def fail(_: int) -> None:
            raise failure

        return fail
