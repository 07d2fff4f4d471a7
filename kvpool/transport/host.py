"""Which processes share this machine's memory."""

from __future__ import annotations

import os
from pathlib import Path

import xxhash


def host_id() -> int:
    """Equal for two processes exactly when each can name the other by its process id; 0 when that cannot be known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return xxhash.xxh3_64_intdigest(f"{boot} {os.stat('/proc/self/ns/pid').st_ino}".encode()) | 1
    except OSError:
        return 0
