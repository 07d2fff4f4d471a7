"""What a worker does for the pool beside serving requests: a thread that asks the directory every other second.

It learns which of the blocks that are near to leave live elsewhere too, so that eviction can prefer them; which
prefixes should stay; and which it should copy. Answers are hints and requests: nothing waits for them, a directory that
is down costs accuracy only, and every pull has a deadline.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvpool.errors import KVPoolError
from kvpool.metadata.pins import Duty, Pin, PinBook, Tending
from kvpool.store.segment import Segment
from kvpool.types import BlockHash, WorkerKey
from workers.puller import PullOrder, PullResult, PullSource

PERIOD_S = 2.0
MAX_PERIOD_S = 10.0
MAX_HINTS = 256
"""Blocks asked about at a time; a worker that evicts faster evicts the rest without hints."""

FULL_DIVISOR = 2
PULL_DEADLINE_NS = 10_000_000_000
JOIN_S = 15.0

log = logging.getLogger(__name__)


class Directory(Protocol):
    """What housekeeping asks; see `kvpool.metadata.client.MetadataClient`."""

    def tend(self, key: WorkerKey, hashes: Sequence[BlockHash], pins_digest: int, pins: Sequence[Pin] = ()) -> Tending:
        """One round."""


class Housekeeper:
    """Keeps one worker's house; `start` once, `close` when done.

    Args:
        key: the worker.
        directory: whom to ask.
        segment: whose blocks.
        keep_blocks: most blocks that pins may protect.
        pull: carries out one pull and waits for it.
    """

    def __init__(
        self,
        key: WorkerKey,
        directory: Directory,
        segment: Segment,
        keep_blocks: int,
        pull: Callable[[PullOrder], PullResult],
    ) -> None:
        self._key = key
        self._directory = directory
        self._segment = segment
        self._keep_blocks = keep_blocks
        self._pull = pull
        self._book = PinBook()
        self._behind = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kvpool-house-{key.worker_id}", daemon=True)
        self._counters = dict.fromkeys(("rounds", "failures", "duties", "duties_failed", "refused_pins"), 0)
        self._last_error = ""

    def start(self) -> None:
        """Begin, in the background."""
        self._thread.start()

    def close(self) -> None:
        """End the thread. May be repeated."""
        self._stopping.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    def status(self) -> dict[str, Any]:
        """Pins and counters, as JSON-able data."""
        return {
            "pins": len(self._book.active()),
            "keep_blocks": self._keep_blocks,
            "last_error": self._last_error,
            **self._counters,
        }

    def round(self) -> None:
        """Ask once and do what the answer says.

        Raises:
            KVPoolError: the directory did not answer.
        """
        counts = self._segment.counts()
        full = counts.free * FULL_DIVISOR < counts.total  # who has room evicts nothing soon
        near = self._segment.candidates(MAX_HINTS) if full else []
        told = self._book.all() if self._behind else ()
        answer = self._directory.tend(self._key, near, self._book.digest, told)
        self._segment.set_spare(near, {item for item, spare in zip(near, answer.spare, strict=True) if spare})
        self._merge(answer)
        self._counters["rounds"] += 1
        for duty in answer.duties:
            if self._stopping.is_set():
                return
            self._carry_out(duty)

    def _merge(self, answer: Tending) -> None:
        changed, refused = self._book.merge(answer.pins)
        self._counters["refused_pins"] += refused
        if changed:
            self._segment.set_wanted(self._book.wanted(self._keep_blocks))
        self._behind = answer.pins_digest != self._book.digest  # it lacks something that is known here: tell it

    def _carry_out(self, duty: Duty) -> None:
        pin = self._book.get(duty.pin_id)
        if pin is None:
            return  # taken back meanwhile
        sources = tuple(
            PullSource(holder.key, holder.transport, holder.data_address, holder.blocks) for holder in duty.holders
        )
        self._counters["duties"] += 1
        try:
            result = self._pull(PullOrder(pin.tenant, pin.chain, sources, PULL_DEADLINE_NS))
        except KVPoolError as error:
            self._note(error)
            self._counters["duties_failed"] += 1
            return
        self._counters["duties_failed"] += result.held < result.blocks

    def _run(self) -> None:
        wait_s = PERIOD_S
        while not self._stopping.wait(wait_s):
            try:
                self.round()
                wait_s, self._last_error = PERIOD_S, ""
            except KVPoolError as error:
                self._counters["failures"] += 1
                self._note(error)
                wait_s = min(2 * wait_s, MAX_PERIOD_S)

    def _note(self, error: KVPoolError) -> None:
        self._last_error = str(error)
        log.warning("housekeeping of %s: %s", self._key, error)
