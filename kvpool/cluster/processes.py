"""Metadata server processes: started, watched and restarted on their port, ended with their owner.

A server ends by itself when its standard input closes, so a killed launcher leaves no orphan. A server that dies is
started again on the same port, at most `MAX_RESTARTS` times in a row without a minute of health between.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from kvpool.config import MetadataConfig
from kvpool.errors import ConfigError, UnavailableError
from kvpool.wallclock import CLUSTER_DIR_VARIABLE

READY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0
WATCH_PERIOD_S = 0.2
MAX_RESTARTS = 20
HEALTHY_AFTER_S = 60.0
EXIT_BAD_INPUT = 2

log = logging.getLogger(__name__)


@dataclass
class _Server:
    process: subprocess.Popen[str]
    address: str
    started_s: float
    index: int
    restarts: int = 0
    failures: list[str] = field(default_factory=list)


class MetadataProcesses:
    """The metadata servers of one cluster. `start` before use, `close` on every path; both from one thread."""

    def __init__(self, config: MetadataConfig, log_dir: Path) -> None:
        self._config = config
        self._log_dir = log_dir
        self._servers: list[_Server] = []
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="kvpool-metadata-watch", daemon=True)

    @property
    def addresses(self) -> tuple[str, ...]:
        """``host:port`` of every replica, in order."""
        return tuple(server.address for server in self._servers)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Where every replica serves its metrics, in order; empty when none does."""
        host, port = self._config.host, self._config.metrics_port
        return () if port is None else tuple(f"http://{host}:{port + item.index}/metrics" for item in self._servers)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the replicas that run now, in order."""
        return tuple(server.process.pid for server in self._servers)

    @property
    def restarts(self) -> int:
        """How often a dead replica was started again."""
        return sum(server.restarts for server in self._servers)

    def start(self) -> None:
        """Start every replica and wait until it serves.

        Raises:
            ConfigError: a port is in use or an address cannot be bound.
            UnavailableError: a replica does not become ready.
        """
        try:
            for index in range(self._config.replicas):
                port = self._config.port + index if self._config.port else 0
                process, address = self._spawn(index, port)
                self._servers.append(_Server(process=process, address=address, started_s=time.monotonic(), index=index))
        except BaseException:
            self.close()
            raise
        self._watcher.start()

    def close(self) -> None:
        """End every replica: politely, then by force. May be repeated."""
        self._closing.set()
        if self._watcher.is_alive():
            self._watcher.join(timeout=READY_TIMEOUT_S)
        for server in self._servers:
            _stop(server.process)

    def _spawn(self, index: int, port: int, restarts: int = 0) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-m", "kvpool.metadata.server", "--host", self._config.host, "--port", str(port)]
        command += ["--lease-ms", str(self._config.lease_ms), "--max-entries", str(self._config.max_entries)]
        command += ["--restarts", str(restarts)]
        if self._config.metrics_port is not None:
            command += ["--metrics-port", str(self._config.metrics_port + index)]
        log_path = self._log_dir / f"metadata-{index}.log"
        with log_path.open("a") as log_file:
            process = subprocess.Popen(
                [*command, "--exit-with-parent"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                text=True,
                env={**os.environ, CLUSTER_DIR_VARIABLE: str(self._log_dir)},  # so that the guardian finds it
                start_new_session=True,  # a Ctrl-C at the terminal reaches the launcher, which ends them in order
            )
        try:
            return process, _read_address(process, log_path)
        except BaseException:
            _stop(process)
            raise

    def _watch(self) -> None:
        while not self._closing.wait(WATCH_PERIOD_S):
            for server in self._servers:
                if server.process.poll() is not None and not self._closing.is_set():
                    self._revive(server)

    def _revive(self, server: _Server) -> None:
        if time.monotonic() - server.started_s > HEALTHY_AFTER_S:
            server.failures.clear()
        if len(server.failures) >= MAX_RESTARTS:
            return
        server.failures.append(f"exit code {server.process.returncode}")
        log.warning("metadata server %s ended (%s); starting it again", server.address, server.failures[-1])
        _stop(server.process)
        try:
            port = int(server.address.rpartition(":")[2])
            server.process, server.address = self._spawn(server.index, port, server.restarts + 1)
        except (ConfigError, UnavailableError, OSError, ValueError, subprocess.SubprocessError) as error:
            # Whatever it is, no process table or memory left perhaps: this thread must live to try again.
            log.warning("metadata server %s did not come back: %s", server.address, error)
            return
        server.restarts += 1
        server.started_s = time.monotonic()


def _read_address(process: subprocess.Popen[str], log_path: Path) -> str:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(READY_TIMEOUT_S):
            raise UnavailableError("the metadata server did not become ready", timeout_s=READY_TIMEOUT_S)
    line = process.stdout.readline()
    if line:
        return str(json.loads(line)["address"])
    code = process.wait(STOP_TIMEOUT_S)
    reason = log_path.read_text(errors="replace").strip().splitlines()[-1:] or [f"exit code {code}"]
    kind = ConfigError if code == EXIT_BAD_INPUT else UnavailableError
    raise kind(f"the metadata server did not start: {reason[0]}")


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_TIMEOUT_S)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
