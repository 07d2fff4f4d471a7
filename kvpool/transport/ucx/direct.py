"""Reading the memory of another process of this host: `process_vm_readv`, one copy and no messages.

The holder names its process and the addresses of the runs it pinned; the reader's helper threads fetch them, many
fragments a call, and check every block right after the copy. Compared with a message per run this spares
both progress threads, and a call that returned writes nothing more, so that the fence needs nobody's help.

A process id says little about who is behind it. Every fetch therefore also fetches a random *cookie* that the holder
keeps at a known address as long as its transport is open: another process, another incarnation or a closed transport
has another value there, or nothing.

Not for hosts that share no process ids, nor where the kernel forbids it (`DirectMemory.reaches` finds out); there the
runs go as messages.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvpool.errors import KVPoolError, PeerGoneError
from kvpool.transport.host import host_id
from kvpool.transport.verify import Check
from kvpool.transport.wire import Window

CALL_BYTES = 1 << 20  # of several fragments: fits the cache of a core, so that the checksum reads what was just copied
CALL_FRAGMENTS = 512  # the kernel takes 1,024
SHARED_MEMORY_TLS = ("all", "cma", "sm", "shm")
_COOKIE_BYTES = 8


@dataclass(frozen=True, slots=True)
class Fragment:
    """Blocks that are neighbours on both sides.

    Attributes:
        address: of the first byte in the holder's process.
        offset: of the first byte in the reader's segment.
        check: the bytes they become here, and what they must be.
    """

    address: int
    offset: int
    check: Check

    @property
    def size_bytes(self) -> int:
        """Its length."""
        return len(self.check.data)


@dataclass(frozen=True, slots=True)
class Fetched:
    """What became of the fragments of one `Fetch`.

    Attributes:
        verdicts: per fragment, which blocks are intact; empty for one that was not fetched.
        error: why the fetch ended early, None when it did not, or when it was not wanted any more.
    """

    verdicts: tuple[tuple[bool, ...], ...]
    error: KVPoolError | None


class DirectMemory:
    """This process's side of it: what it shows to others, and its eyes on them.

    Args:
        segment: flat bytes; kept for as long as this object.
        settings: UCX settings. Where they leave shared memory out, this stays out too.
    """

    def __init__(self, segment: memoryview, settings: Mapping[str, str]) -> None:
        self._segment = np.frombuffer(segment, dtype=np.uint8)
        self._base = int(self._segment.ctypes.data)
        self._cookie = ctypes.c_uint64(int.from_bytes(os.urandom(_COOKIE_BYTES), "little") | 1)
        self.host = host_id() if _allows_shared_memory(settings) else 0

    def window(self, reader_host: int, offsets: Sequence[int]) -> Window | None:
        """Where a reader on ``reader_host`` finds these offsets of the segment; None for a reader elsewhere."""
        if not self.host or reader_host != self.host or not self._cookie.value:
            return None
        addresses = tuple(self._base + offset for offset in offsets)
        return Window(os.getpid(), ctypes.addressof(self._cookie), self._cookie.value, addresses)

    def reaches(self, window: Window) -> bool:
        """Whether the kernel lets this process read there, and the holder is who it says."""
        return self._fetch(window, ()) is None

    def fetch(self, window: Window, fragments: Sequence[Fragment], wanted: Callable[[], bool]) -> Fetched:
        """Fetch and check, front first. Blocks; for helper threads.

        Args:
            window: of the holder.
            fragments: into this segment.
            wanted: asked before every call into the kernel; when it says no, the rest stays unfetched.
        """
        verdicts: list[tuple[bool, ...]] = []
        error: KVPoolError | None = None
        for batch in _batches(fragments):
            if not wanted():
                break
            error = self._fetch(window, batch)
            if error is not None:
                break
            verdicts += [fragment.check.run() for fragment in batch]
        verdicts += [()] * (len(fragments) - len(verdicts))
        return Fetched(tuple(verdicts), error)

    def close(self) -> None:
        """Readers that still fetch notice that this end is over. May be repeated."""
        self._cookie.value = 0

    def _fetch(self, window: Window, fragments: Sequence[Fragment]) -> KVPoolError | None:
        cookie = ctypes.c_uint64(0)
        here: list[int] = []
        there: list[int] = []
        for fragment in fragments:
            here += (self._base + fragment.offset, fragment.size_bytes)
            there += (fragment.address, fragment.size_bytes)
        # Last: the holder removes it before it lets go of the blocks.
        here += (ctypes.addressof(cookie), _COOKIE_BYTES)
        there += (window.cookie_at, _COOKIE_BYTES)
        count, form = len(here) // 2, f"@{len(here)}N"
        got = _readv(window.pid, struct.pack(form, *here), count, struct.pack(form, *there), count, 0)
        if got != sum(here[1::2]):
            reason = os.strerror(ctypes.get_errno()) if got < 0 else f"only {got} bytes are there"
            return PeerGoneError(f"process {window.pid} cannot be read: {reason}", pid=window.pid)
        if cookie.value != window.cookie:
            return PeerGoneError(f"process {window.pid} is not the holder any more", pid=window.pid)
        return None


def _batches(fragments: Sequence[Fragment]) -> list[list[Fragment]]:
    """Cut into calls. A fragment longer than a call goes alone."""
    batches: list[list[Fragment]] = []
    size = CALL_BYTES
    for fragment in fragments:
        if size + fragment.size_bytes > CALL_BYTES or len(batches[-1]) == CALL_FRAGMENTS:
            batches.append([])
            size = 0
        batches[-1].append(fragment)
        size += fragment.size_bytes
    return batches


def _allows_shared_memory(settings: Mapping[str, str]) -> bool:
    chosen = settings.get("TLS", "all")
    if chosen.startswith("^"):
        return not set(chosen[1:].split(",")) & set(SHARED_MEMORY_TLS)
    return bool(set(chosen.split(",")) & set(SHARED_MEMORY_TLS))


_libc = ctypes.CDLL(None, use_errno=True)
_readv = _libc.process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = (
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)
