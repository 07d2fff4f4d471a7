"""Damage to the files of disk tiers, and the end of their space, for fault runs.

Files are damaged in place, behind the back of the worker that wrote them. Space ends by a limit of the kernel on the
size of files that a process may write (``RLIMIT_FSIZE``): every write of a block fails, as on a full disk.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from kvpool.store.disk import SUFFIX

SMALLEST_FILE_BYTES = 64
"""A limit below any block file; a worker's own logs fail as well, which nobody waits for."""


def damage_files(folder: Path, rng: random.Random) -> int:
    """Flip a byte of every block file below ``folder``, or cut it, empty it, remove it, or give it another's content.

    Returns:
        How many there were.
    """
    paths = sorted(folder.rglob(f"*{SUFFIX}"))
    for path in paths:
        with contextlib.suppress(OSError):  # the worker was first: read, removed, or written anew
            _damage(path, rng.choice(paths), rng)
    return len(paths)


def _damage(path: Path, other: Path, rng: random.Random) -> None:
    raw = bytearray(path.read_bytes())
    match rng.randrange(8):
        case 0:
            path.unlink()
        case 1:
            path.write_bytes(b"")
        case 2:
            path.write_bytes(raw[: rng.randrange(len(raw) + 1)])
        case 3:
            path.write_bytes(other.read_bytes())
        case _ if raw:
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
            path.write_bytes(raw)


@contextlib.contextmanager
def no_space(pids: Iterable[int]) -> Iterator[None]:
    """Inside, these processes of ours cannot write a file of more than `SMALLEST_FILE_BYTES`."""
    before: list[tuple[psutil.Process, tuple[int, int]]] = []
    try:
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                soft, hard = process.rlimit(psutil.RLIMIT_FSIZE)
                process.rlimit(psutil.RLIMIT_FSIZE, (SMALLEST_FILE_BYTES, hard))
                before.append((process, (soft, hard)))
        yield
    finally:
        for process, limits in before:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.rlimit(psutil.RLIMIT_FSIZE, limits)
