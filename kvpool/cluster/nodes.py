"""More Ray nodes for an embedded cluster, on this machine: each a raylet of its own, with its own worker processes.

For fault runs that kill a whole node, and for trying placement without a second machine. A node's processes carry the
cluster's directory in their environment, so that the guardian ends them if everything else fails.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import ray

from kvpool.errors import UnavailableError
from kvpool.wallclock import CLUSTER_DIR_VARIABLE

JOIN_TIMEOUT_S = 60.0
END_TIMEOUT_S = 5.0
_POLL_S = 0.1


class ExtraNode:
    """One node besides the head's. `kill` may be repeated.

    Args:
        address: of the head (GCS).
        cluster_dir: for its log.
        num_cpus: what Ray may place there.
        object_store_bytes: of its object store.

    Raises:
        UnavailableError: it did not join in time.
    """

    def __init__(self, address: str, cluster_dir: Path, *, num_cpus: int, object_store_bytes: int) -> None:
        before = _alive_nodes()
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--address", address, "--block"]
        command += ["--num-cpus", str(num_cpus), "--object-store-memory", str(object_store_bytes)]
        command += ["--disable-usage-stats"]
        with (cluster_dir / "ray-node.log").open("a") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, CLUSTER_DIR_VARIABLE: str(cluster_dir)},
                start_new_session=True,  # a Ctrl-C at the terminal reaches the launcher, which ends it in order
            )
        deadline_s = time.monotonic() + JOIN_TIMEOUT_S
        while _alive_nodes() <= before:
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.kill()
                raise UnavailableError(
                    "another Ray node did not join; its log is ray-node.log", timeout_s=JOIN_TIMEOUT_S
                )
            time.sleep(_POLL_S)

    def pids(self) -> frozenset[int]:
        """Its processes now, those of the actors that Ray placed on it included."""
        return frozenset(process.pid for process in self._tree())

    def kill(self) -> None:
        """SIGKILL to every process of the node, as when its machine dies."""
        tree = self._tree()
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(tree, timeout=END_TIMEOUT_S)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)

    def _tree(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def _alive_nodes() -> int:
    return sum(node["Alive"] for node in ray.nodes())
