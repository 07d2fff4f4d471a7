"""The disk tier of one worker: blocks that were evicted from memory, one file each, until the space is used up.

Blocks are written behind on a thread of their own and read back on another; nobody else waits for a disk. What cannot
be queued, written or read is dropped and counted: a miss is always correct. A file is visible under its name only when
it is whole (write aside, rename), and is believed only after its checksum, its identity and its layout were compared
(`kvpool.store.blockfile`). Files survive the worker: the next one with the same directory and layout goes on with them.

The directory belongs to one process at a time, by a lock on a file in it. The least recently used files leave first;
eviction from memory goes leaves first, so the tail of a chain is on disk before its head and leaves before it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kvpool.errors import CapacityError, IntegrityError, StaleError, UnavailableError
from kvpool.store.answers import Victim
from kvpool.store.blockfile import HEADER_BYTES, BlockFile, check_payload, decode_header, encode_header
from kvpool.store.disk_load import DiskLoad
from kvpool.store.worth import Block
from kvpool.types import BlockHash

SUFFIX, ASIDE = ".kvb", ".aside"
MAX_QUEUE_BYTES = 64 << 20
MAX_READS = 64
"""Loads that wait for the reading thread; more are refused, and redone."""

JOIN_S = 10.0
TAKE_S, TAKE_POLL_S = 3.0, 0.1
TOTALS = (
    *("written", "dropped", "write_errors", "read", "read_errors", "corrupt", "removed_for_space", "removed_at_start"),
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """Where and how much.

    Attributes:
        path: directory of one worker; made when it is missing.
        max_bytes: bound on the files in it.
        block_bytes: of one block.
        fingerprint: of the layout.
        max_queue_bytes: blocks that wait to be written, in bytes.
    """

    path: Path
    max_bytes: int
    block_bytes: int
    fingerprint: str
    max_queue_bytes: int = MAX_QUEUE_BYTES


@dataclass(slots=True)
class _Entry:
    parent: BlockHash | None
    tenant: str
    file_bytes: int
    used_ns: int


class DiskTier:
    """See the module's docstring. `start` once, `close` when done.

    Args:
        config: where and how much.
        on_stored, on_removed: told which blocks are on disk from now on, and no longer; called under a lock, in order,
            from any thread; must not block.
        clock_ns: monotonic clock.

    Raises:
        UnavailableError: another process uses the directory, or it cannot be used at all.
    """

    def __init__(
        self,
        config: DiskConfig,
        *,
        on_stored: Callable[[Sequence[BlockHash]], None],
        on_removed: Callable[[Sequence[BlockHash]], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.config = config
        self._on_stored = on_stored
        self._on_removed = on_removed
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._reads_wake = threading.Condition(self._lock)
        self._entries: OrderedDict[BlockHash, _Entry] = OrderedDict()  # least recently used first
        self._used_bytes = self._queued_bytes = 0
        self._queue: deque[tuple[Victim, int, bytes]] = deque()
        self._queued: dict[BlockHash, Victim] = {}  # those being written, too
        self._reads: deque[DiskLoad] = deque()
        self._closing = False
        self._memory: memoryview | None = None
        self._totals: Counter[str] = Counter()
        self._last_error = ""
        self._lock_file = _take_directory(config.path)
        self._scan()
        self._threads = [
            threading.Thread(target=self._write_all, name="kvpool-disk-write", daemon=True),
            threading.Thread(target=self._read_all, name="kvpool-disk-read", daemon=True),
        ]

    def start(self, memory: memoryview) -> None:
        """Begin to write and read. ``memory``: where blocks are read to; the caller keeps it valid until `close`."""
        self._memory = memory
        with self._lock:
            if self._entries:
                self._on_stored(list(self._entries))
        for thread in self._threads:
            thread.start()

    def close(self) -> bool:
        """End reads and writes, wait for both threads, let go of the directory. Queued blocks are lost. May be
        repeated.

        Returns:
            False when a thread did not end: the memory may still be written and must stay mapped.
        """
        with self._lock:
            self._closing = True
            self._work.notify_all()
            self._reads_wake.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(JOIN_S)
        self._lock_file.close()
        return not any(thread.is_alive() for thread in self._threads)

    # -- looking, from any thread

    def run(self, chain: Sequence[BlockHash], start: int) -> int:
        """How many blocks of ``chain`` from ``start`` on are on disk without a gap. Nothing is touched."""
        with self._lock:
            stop = start
            while stop < len(chain) and chain[stop] in self._entries:
                stop += 1
            return stop - start

    def origin(self, block_hash: BlockHash) -> tuple[BlockHash | None, str] | None:
        """Parent and tenant of a block on disk, None when it is not there."""
        with self._lock:
            entry = self._entries.get(block_hash)
            return None if entry is None else (entry.parent, entry.tenant)

    def held_hashes(self) -> list[BlockHash]:
        """Every block that is on disk, for a snapshot to the directory."""
        with self._lock:
            return list(self._entries)

    def blocks(self) -> list[Block]:
        """Every block on disk or on its way there, for a selection."""
        with self._lock:
            sources = ((item, source) for held in (self._entries, self._queued) for item, source in held.items())
            return [
                Block(block_hash=item, parent=source.parent, tenant=source.tenant, used_ns=source.used_ns)
                for item, source in sources
            ]

    def status(self) -> dict[str, Any]:
        """Sizes and running totals."""
        with self._lock:
            return {
                "blocks": len(self._entries),
                "bytes": self._used_bytes,
                "max_bytes": self.config.max_bytes,
                "queued_bytes": self._queued_bytes,
                "running": all(thread.is_alive() for thread in self._threads),
                "last_error": self._last_error,
                **{name: self._totals[name] for name in TOTALS},
            }

    def counters(self) -> dict[str, int]:
        """Running totals for reports."""
        with self._lock:
            lost = ("dropped", "write_errors", "read_errors", "corrupt")
            return {
                "disk_blocks_read": self._totals["read"],
                "disk_blocks_written": self._totals["written"],
                "disk_blocks_lost": sum(self._totals[name] for name in lost),
            }

    # -- changing, from any thread; never waits for the disk

    def offer(self, victim: Victim, checksum: int, payload: memoryview) -> None:
        """A block leaves memory: copy its bytes and write them soon. Dropped, and counted, when too much waits."""
        with self._lock:
            entry = self._entries.get(victim.block_hash)
            if entry is not None:
                entry.used_ns = victim.used_ns
                self._entries.move_to_end(victim.block_hash)
                return
            if victim.block_hash in self._queued:
                return
            if self._closing or self._queued_bytes + len(payload) > self.config.max_queue_bytes:
                self._totals["dropped"] += 1
                return
            self._queue.append((victim, checksum, bytes(payload)))
            self._queued[victim.block_hash] = victim
            self._queued_bytes += len(payload)
            self._work.notify()

    def load(self, wants: Mapping[int, tuple[BlockHash, int]], deadline_ns: int) -> DiskLoad:
        """Read blocks into memory.

        Args:
            wants: chain index → block and byte offset in the memory; read in this order. The caller keeps the pages
                out of other use until the load is terminal.
            deadline_ns: budget from now.

        Raises:
            CapacityError: too many loads wait.
            UnavailableError: the tier is closed.
        """
        now_ns = self._clock_ns()
        load = DiskLoad(wants, now_ns + deadline_ns, now_ns)
        with self._lock:
            if self._closing:
                raise UnavailableError("the disk tier is closed")
            if len(self._reads) >= MAX_READS:
                raise CapacityError(f"{MAX_READS} loads wait for the disk already", waiting=MAX_READS)
            self._reads.append(load)
            self._reads_wake.notify()
        return load

    def remove(self, hashes: Iterable[BlockHash]) -> int:
        """Remove blocks, those that wait to be written too; returns how many there were."""
        with self._lock:
            gone = [item for item in hashes if item in self._entries or item in self._queued]
            for item in gone:
                self._queued.pop(item, None)  # the writer passes over what is not there
            held = [item for item in gone if item in self._entries]
            self._forget(held)
        for item in held:
            self._unlink(item)
        return len(gone)

    # -- the writing thread

    def _write_all(self) -> None:
        while True:
            with self._lock:
                self._work.wait_for(lambda: self._queue or self._closing)
                if self._closing:
                    return
                victim, checksum, payload = self._queue.popleft()
                self._queued_bytes -= len(payload)
                if victim.block_hash not in self._queued:
                    continue
            self._write(victim, checksum, payload)

    def _write(self, victim: Victim, checksum: int, payload: bytes) -> None:
        header = encode_header(
            BlockFile(
                victim.block_hash,
                victim.parent,
                victim.tenant,
                victim.work,
                self.config.fingerprint,
                len(payload),
                checksum,
            )
        )
        file_bytes = len(header) + len(payload)
        path = self._path(victim.block_hash)
        aside = path.with_suffix(ASIDE)
        self._make_room(file_bytes)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(header)
                file.write(payload)
            os.replace(aside, path)
        except OSError as error:
            self._failed("write_errors", error)
            with contextlib.suppress(OSError):
                aside.unlink()
            with self._lock:
                self._queued.pop(victim.block_hash, None)
            return
        with self._lock:
            wanted = self._queued.pop(victim.block_hash, None) is not None
            if wanted:
                self._totals["written"] += 1
                self._put(victim.block_hash, _Entry(victim.parent, victim.tenant, file_bytes, victim.used_ns))
                self._on_stored([victim.block_hash])
        if not wanted:  # removed while it was being written
            self._unlink(victim.block_hash)

    def _make_room(self, file_bytes: int) -> None:
        while True:
            with self._lock:
                if not self._entries or self._used_bytes + file_bytes <= self.config.max_bytes:
                    return
                oldest = next(iter(self._entries))
                self._totals["removed_for_space"] += 1
                self._forget([oldest])
            self._unlink(oldest)

    # -- the reading thread

    def _read_all(self) -> None:
        while True:
            with self._lock:
                self._reads_wake.wait_for(lambda: self._reads or self._closing)
                if self._closing:
                    left, self._reads = list(self._reads), deque()
                else:
                    left = [self._reads.popleft()]
            for load in left:
                self._carry_out(load)
            if self._closing:
                return

    def _carry_out(self, load: DiskLoad) -> None:
        for index, (block_hash, offset) in load.wants.items():
            if self._closing or load.cancelled.is_set():
                load.advance(failure="cancelled")
                break
            if self._clock_ns() >= load.deadline_ns:
                load.advance(failure="deadline_exceeded")
                break
            try:
                self._read(block_hash, offset)
            except (OSError, IntegrityError, StaleError) as error:
                self._unreadable(block_hash, error)
                load.advance(failure=getattr(error, "code", "disk"))
                break  # what lies behind a gap is of no use to anybody
            load.advance(arrived=index, num_bytes=self.config.block_bytes)
        with self._lock:
            for block_hash, _ in reversed(list(load.wants.values())):  # the tail older than the head
                if block_hash in self._entries:
                    self._entries.move_to_end(block_hash)
                    self._entries[block_hash].used_ns = self._clock_ns()
        load.finish(self._clock_ns())

    def _read(self, block_hash: BlockHash, offset: int) -> None:
        """Read, verify, and only then copy."""
        with self._lock:
            if block_hash not in self._entries:
                raise StaleError("the block has left the disk", block=block_hash.hex())
        with self._path(block_hash).open("rb") as file:  # whatever lies there now, no more than a block is read of it
            raw = memoryview(file.read(HEADER_BYTES + self.config.block_bytes + 1))
        item, start = decode_header(raw)
        payload = raw[start:]
        if item.block_hash != block_hash or not self._is_ours(item):
            raise IntegrityError("a block file holds another block", block=block_hash.hex())
        check_payload(item, payload)
        assert self._memory is not None
        self._memory[offset : offset + len(payload)] = payload
        with self._lock:
            self._totals["read"] += 1

    def _unreadable(self, block_hash: BlockHash, error: Exception) -> None:
        if isinstance(error, StaleError):
            return
        self._failed("corrupt" if isinstance(error, IntegrityError) else "read_errors", error)
        with self._lock:
            self._forget([block_hash])
        self._unlink(block_hash)

    # -- private

    def _scan(self) -> None:
        """Take over what an earlier process left, as far as it is whole and of our layout; remove the rest."""
        found: list[tuple[float, int, BlockFile]] = []
        for path in self.config.path.glob(f"*/*{ASIDE}"):
            _discard(path)
        for path in self.config.path.glob(f"*/*{SUFFIX}"):
            try:
                stat = path.stat()
                with path.open("rb") as file:
                    item, start = decode_header(file.read(HEADER_BYTES))
                whole = stat.st_size == start + item.payload_bytes and path.stem == item.block_hash.hex()
                if not whole or not self._is_ours(item):
                    raise IntegrityError("not a block of this layout")
            except (OSError, IntegrityError) as error:
                self._totals["removed_at_start"] += 1
                self._last_error = f"{path.name}: {error}"
                _discard(path)
                continue
            found.append((stat.st_mtime, stat.st_size, item))
        found.sort(key=lambda entry: entry[0])
        now_ns = self._clock_ns()
        for _, size, item in found:
            self._put(item.block_hash, _Entry(item.parent, item.tenant, size, now_ns))
        self._make_room(0)

    def _is_ours(self, item: BlockFile) -> bool:
        return item.fingerprint == self.config.fingerprint and item.payload_bytes == self.config.block_bytes

    def _put(self, block_hash: BlockHash, entry: _Entry) -> None:
        self._entries[block_hash] = entry
        self._used_bytes += entry.file_bytes

    def _forget(self, hashes: Sequence[BlockHash]) -> None:
        gone = [item for item in hashes if item in self._entries]
        for item in gone:
            self._used_bytes -= self._entries.pop(item).file_bytes
        if gone and self._memory is not None:
            self._on_removed(gone)

    def _path(self, block_hash: BlockHash) -> Path:
        name = block_hash.hex()
        return self.config.path / name[:2] / f"{name}{SUFFIX}"

    def _unlink(self, block_hash: BlockHash) -> None:
        _discard(self._path(block_hash))

    def _failed(self, total: str, error: Exception) -> None:
        log.warning("disk tier %s: %s", self.config.path, error)
        with self._lock:
            self._totals[total] += 1
            self._last_error = str(error)


def _take_directory(path: Path) -> IO[bytes]:
    """Make the directory and lock it for this process.

    Raises:
        UnavailableError: it cannot be made, or another process has it.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock_file = (path / "lock").open("ab")
    except OSError as error:
        raise UnavailableError(f"the disk tier's directory {path} cannot be used: {error.strerror}") from error
    deadline_s = time.monotonic() + TAKE_S
    while True:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if time.monotonic() < deadline_s:
                time.sleep(TAKE_POLL_S)  # an earlier incarnation is still on its way out
                continue
            lock_file.close()
            raise UnavailableError(f"another process uses the disk tier's directory {path}") from error
        return lock_file


def _discard(path: Path) -> None:
    """Remove what lies there; what cannot be removed is overwritten or found out when it is read."""
    with contextlib.suppress(OSError):
        path.unlink()
