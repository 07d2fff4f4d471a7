"""One huge-page-backed run of memory per segment.

Not a pool: it knows no blocks. Invariants: the memory is anonymous and private to this process (peers reach it only
through a transport), starts on a 2 MiB boundary, is touched before it is handed out (first writes into fresh memory
were up to 25 times slower), and is given back to the system on `close`.
"""

from __future__ import annotations

import ctypes
import mmap
from types import TracebackType

from kvpool.errors import CapacityError, RequestError

HUGE_PAGE_BYTES = 2 << 20


class Arena:
    """Anonymous memory of ``size_bytes`` bytes.

    Args:
        size_bytes: at least 1.
        touch: write one byte of every page now. Only ever done before anyone else sees the memory.

    Raises:
        RequestError: the size is not positive.
        CapacityError: the system has no room for it.
    """

    def __init__(self, size_bytes: int, *, touch: bool = True) -> None:
        if size_bytes < 1:
            raise RequestError(f"an arena needs at least 1 byte, got {size_bytes}", field="size_bytes")
        self._map = _map_private(size_bytes + HUGE_PAGE_BYTES)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = memoryview(self._map)
        start = _distance_to_boundary(self._map)
        self._view: memoryview | None = whole[start : start + size_bytes]
        whole.release()
        if touch:
            _touch(self._view)

    @property
    def memory(self) -> memoryview:
        """The bytes, writable. Owned by the arena and valid until `close`; slices must be dropped before.

        Raises:
            RequestError: the arena is closed.
        """
        if self._view is None:
            raise RequestError("the arena is closed")
        return self._view

    def close(self) -> None:
        """Give the memory back. May be repeated. Slices that still exist keep addresses valid but read as zero."""
        if self._view is None:
            return
        view, self._view = self._view, None
        self._map.madvise(mmap.MADV_DONTNEED)
        try:
            view.release()
            self._map.close()
        except BufferError:
            # Someone still holds a slice: the address range goes with the last of them, its memory is gone already.
            return

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _map_private(size_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise CapacityError(
            f"cannot map {size_bytes} bytes for the segment: {error}; lower engine.num_blocks", size_bytes=size_bytes
        ) from error


def _distance_to_boundary(area: mmap.mmap) -> int:
    anchor = ctypes.c_char.from_buffer(area)
    address = ctypes.addressof(anchor)
    del anchor  # an exported buffer would keep the map from closing
    return -address % HUGE_PAGE_BYTES


def _touch(view: memoryview) -> None:
    pages = len(range(0, len(view), mmap.PAGESIZE))
    view[:: mmap.PAGESIZE] = bytes(pages)
