"""One client of Mooncake Store, for `kvpool.faults.mooncake`; runs in a Python that has it, without kvpool.

``python fault_peer_script.py holder MASTER`` offers a segment. ``… reader MASTER VALUE_BYTES GETS_PER_S`` offers none:
it puts known values and gets them at a steady rate, and puts again what is not there, as an engine would that computed
it. Both say ``{"ready": true}`` and end when stdin ends. The reader then writes a line for every call as it begins and
as it ends, ``[number, "get" | "put" | "ask", key, at_ns, outcome]``, outcome null at the beginning, so that a call that
never ends is seen. ``at_ns`` is the machine's monotonic clock.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import json
import os
import queue
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from kvpool.bench import peer_tools
else:
    import peer_tools

KEYS = 32
SEGMENT_BYTES = 64 << 20
READERS = 4
ASK_PERIOD_S = 0.05
NOT_FOUND = -704
"""Of Mooncake's error codes the one for an object that its master does not know."""


def value_of(key: str, size_bytes: int) -> bytes:
    """What belongs to a key."""
    digest = hashlib.sha256(key.encode()).digest()
    return (digest * (size_bytes // len(digest) + 1))[:size_bytes]


class Reader:
    """Threads that get, one that puts again what is missing, one that asks whether the master still offers a key."""

    def __init__(self, store: Any, value_bytes: int, gets_per_s: float, said: TextIO) -> None:
        self._store = store
        self._period_s = 1 / gets_per_s
        self._said = said
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._missing: queue.Queue[str] = queue.Queue(KEYS)
        self._keys = [f"key-{number}" for number in range(KEYS)]
        self._values = {key: value_of(key, value_bytes) for key in self._keys}

    def fill(self) -> None:
        """Put every value.

        Raises:
            RuntimeError: one cannot be put.
        """
        for key, value in self._values.items():
            if self._store.put(key, value):
                raise RuntimeError(f"{key} cannot be put")

    def run(self) -> None:
        """Start all threads."""
        for target in (*(lambda at=at: self._get_all(at) for at in range(READERS)), self._put_missing, self._ask):
            threading.Thread(target=target, daemon=True).start()

    def _get_all(self, at: int) -> None:
        size = len(self._values[self._keys[0]])
        target = (ctypes.c_char * size)()
        place = ctypes.addressof(target)
        self._store.register_buffer(place, size)
        next_s = time.monotonic() + at * self._period_s
        for key in itertools.islice(itertools.cycle(self._keys), at, None, READERS):
            time.sleep(max(0.0, next_s - time.monotonic()))
            next_s = max(next_s + READERS * self._period_s, time.monotonic())
            ctypes.memset(place, 0, size)
            number = self._begin("get", key)
            code = self._store.get_into(key, place, size)
            outcome = "ok" if code == size else "missed" if code == NOT_FOUND else str(code)
            if outcome == "ok" and target.raw != self._values[key]:
                outcome = "wrong"
            self._end(number, "get", key, outcome)
            if outcome == "missed":
                with contextlib.suppress(queue.Full):  # it will be missed again
                    self._missing.put_nowait(key)

    def _put_missing(self) -> None:
        while True:
            key = self._missing.get()
            number = self._begin("put", key)
            code = self._store.put(key, self._values[key])
            self._end(number, "put", key, "ok" if code == 0 else str(code))

    def _ask(self) -> None:
        key = self._keys[0]
        while True:
            number = self._begin("ask", key)
            code = self._store.is_exist(key)
            self._end(number, "ask", key, {1: "there", 0: "missed"}.get(code, str(code)))
            time.sleep(ASK_PERIOD_S)

    def _begin(self, what: str, key: str) -> int:
        number = next(self._numbers)
        self._end(number, what, key, None)
        return number

    def _end(self, number: int, what: str, key: str, outcome: str | None) -> None:
        with self._lock:
            line = json.dumps([number, what, key, time.monotonic_ns(), outcome])
            print(line, file=self._said, flush=True)


def main(arguments: list[str]) -> None:
    """See the module's docstring."""
    role, master, *options = arguments
    said = peer_tools.answers()
    if role == "holder":
        peer_tools.offer_segment(master, SEGMENT_BYTES, said)
    value_bytes, gets_per_s = options
    reader = Reader(peer_tools.mooncake_store(master, 0), int(value_bytes), float(gets_per_s), said)
    reader.fill()
    print('{"ready": true}', file=said, flush=True)
    reader.run()
    sys.stdin.read()
    os._exit(0)  # a call may hang for ever


if __name__ == "__main__":
    main(sys.argv[1:])
