"""The wall clock, for the few places that need one: numbers of incarnations and the age of what was saved.

Deadlines, leases and everything else that waits use monotonic clocks; a wall clock may jump either way. Inside an
embedded cluster a fault run makes it jump (`set_offset`): every process of the cluster reads the offset from a file in
the cluster's directory.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

CLUSTER_DIR_VARIABLE = "KVPOOL_CLUSTER_DIR"
"""Names the directory of the embedded cluster that a process belongs to; set by the launcher."""

_FILE_NAME = "clock-offset-ns"


def unix_ns() -> int:
    """Nanoseconds since 1970, as this process believes."""
    return time.time_ns() + _offset_ns()


def set_offset(cluster_dir: Path, offset_ns: int) -> None:
    """Move the wall clock of every process of an embedded cluster; 0 puts it right."""
    path = cluster_dir / _FILE_NAME
    part = path.with_suffix(".part")
    part.write_text(str(offset_ns))
    part.replace(path)


def _offset_ns() -> int:
    cluster_dir = os.environ.get(CLUSTER_DIR_VARIABLE)
    if not cluster_dir:
        return 0
    try:
        return int((Path(cluster_dir) / _FILE_NAME).read_text())
    except (OSError, ValueError):
        return 0  # nobody moved it
