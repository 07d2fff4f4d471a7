"""What the transport suites share: a holder's store, an end of a transport, patterns to compare, bounded waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from kvpool.transport.base import BlockWant, HeldBlock, Peer, ReadRequest, Transport
from kvpool.types import BlockHash, WorkerEpoch, WorkerId, WorkerKey

POISON = 0xA5
S = 1_000_000_000
MS = 1_000_000


def block_hash(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def pattern(number: int, block_bytes: int) -> np.ndarray:
    """Bytes of block ``number``: the same in every process, different for every block."""
    return np.random.Generator(np.random.PCG64(number)).integers(0, 256, block_bytes, dtype=np.uint8)


class RigStore:
    """A segment of consecutive blocks 0..n, served from where they lie; counts its pins."""

    def __init__(self, blocks: int, block_bytes: int, *, filled: bool) -> None:
        self.block_bytes = block_bytes
        self.segment = np.full(blocks * block_bytes, POISON, dtype=np.uint8)
        self.held: dict[BlockHash, HeldBlock] = {}
        self.leases: dict[int, int] = {}
        self.pins = self.renewals = 0
        self.on_pin: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        for number in range(blocks if filled else 0):
            self.put(number, number)

    def put(self, number: int, slot: int) -> None:
        at = slot * self.block_bytes
        data = pattern(number, self.block_bytes)
        self.segment[at : at + self.block_bytes] = data
        self.held[block_hash(number)] = HeldBlock(at, xxhash.xxh3_64_intdigest(data))

    def pin(self, reader: WorkerKey, hashes: Sequence[BlockHash]) -> tuple[int, tuple[HeldBlock | None, ...]]:
        with self._lock:
            self.pins += 1
            self.leases[self.pins] = len(hashes)
            lease = self.pins
        self.on_pin()
        return lease, tuple(self.held.get(item) for item in hashes)

    def renew(self, lease_id: int) -> None:
        with self._lock:
            assert lease_id in self.leases, "a lease was renewed after it was released"
            self.renewals += 1

    def unpin(self, lease_id: int) -> None:
        with self._lock:
            self.leases.pop(lease_id, None)


@dataclass
class End:
    """One started transport with its store."""

    transport: Transport
    store: RigStore
    key: WorkerKey
    closed: bool = field(default=False)

    @property
    def peer(self) -> Peer:
        return Peer(self.key, self.transport.address)

    def slot(self, number: int) -> np.ndarray:
        size = self.store.block_bytes
        return self.store.segment[number * size : (number + 1) * size]


def start_end(transport: Transport, name: str, *, blocks: int, block_bytes: int, filled: bool, epoch: int = 1) -> End:
    store = RigStore(blocks, block_bytes, filled=filled)
    key = WorkerKey(WorkerId(name), WorkerEpoch(epoch))
    transport.start(key, memoryview(store.segment), block_bytes, store)
    return End(transport, store, key)


def request(
    peer: Peer,
    numbers: Sequence[int],
    block_bytes: int,
    *,
    slots: Sequence[int] | None = None,
    deadline_ns: int = 20 * S,
    stall_ns: int = 10 * S,
    urgency_ns: int = 0,
) -> ReadRequest:
    slots = numbers if slots is None else slots
    wants = tuple(BlockWant(block_hash(n), slot * block_bytes) for n, slot in zip(numbers, slots, strict=True))
    return ReadRequest(peer, wants, deadline_ns, stall_ns, urgency_ns)


def eventually(condition: Callable[[], bool], what: str, limit_s: float = 10.0) -> None:
    """Poll a condition with a limit; for effects that another thread or process brings about."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {limit_s} s: {what}")
        time.sleep(0.002)
