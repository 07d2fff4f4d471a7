"""Ends what a cluster leaves behind, also when its launcher is killed.

Every process of an embedded cluster inherits ``KVPOOL_CLUSTER_DIR`` or writes its log below that directory (Ray renames
its processes, which wipes the environment others can read). `reap` ends them all and removes the directory. The
guardian process waits for its standard input to close, which happens when the launcher is gone for whatever reason,
and then reaps; after an orderly end it finds nothing left to do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from kvpool.wallclock import CLUSTER_DIR_VARIABLE

RAY_TITLE = "ray::"
GRACE_S = 3.0


def spawn_guardian(cluster_dir: Path) -> subprocess.Popen[bytes]:
    """Start the guardian of ``cluster_dir``; closing its standard input makes it reap and end."""
    environment = {name: value for name, value in os.environ.items() if name != CLUSTER_DIR_VARIABLE}
    return subprocess.Popen(
        [sys.executable, "-m", "kvpool.cluster.guardian", str(cluster_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )


def reap(cluster_dir: Path, *, grace_s: float = GRACE_S) -> int:
    """End every process of the cluster and remove its directory; returns how many processes had to be ended.

    Blocks at most about ``2 * grace_s``.
    """
    found = cluster_processes(cluster_dir)
    for process in found:
        _signal(process, psutil.Process.terminate)
    _, alive = psutil.wait_procs(found, timeout=grace_s)
    for process in alive:
        _signal(process, psutil.Process.kill)
    psutil.wait_procs(alive, timeout=grace_s)
    _remove(cluster_dir, time.monotonic() + grace_s)
    return len(found)


def cluster_processes(cluster_dir: Path) -> list[psutil.Process]:
    """Processes that belong to a cluster directory, without this one and without zombies."""
    return [process for process in psutil.process_iter() if _belongs(process, str(cluster_dir))]


def _belongs(process: psutil.Process, cluster_dir: str) -> bool:
    if process.pid == os.getpid():
        return False
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        if process.environ().get(CLUSTER_DIR_VARIABLE) == cluster_dir:
            return True
        # Programs that are connected to the cluster write a log there too; only Ray's own processes end with it.
        is_rays = "".join(process.cmdline()[:1]).startswith(RAY_TITLE)
        return is_rays and any(item.path.startswith(cluster_dir + "/") for item in process.open_files())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False  # gone, or another user's: not ours to end


def _signal(process: psutil.Process, action: Callable[[psutil.Process], None]) -> None:
    try:
        action(process)
    except psutil.NoSuchProcess:
        return


def _remove(cluster_dir: Path, deadline_s: float) -> None:
    while cluster_dir.exists():
        shutil.rmtree(cluster_dir, ignore_errors=True)  # a dying process may still write a log; try again
        if time.monotonic() > deadline_s:
            return
        time.sleep(0.05)


def main() -> None:
    """Wait for the launcher to go, then reap."""
    sys.stdin.buffer.read()
    reap(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
