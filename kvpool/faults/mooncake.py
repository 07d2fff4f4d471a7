"""Mooncake Store under faults of ours, for comparison: a master, a holder that offers memory, and a reader.

    start ─▶ steady gets ─▶ the fault ─▶ healed ─▶ gets until they are good again, or the time is over ─▶ kill all

The three run as processes of their own, from the installation that `kvpool.bench.metadata_peers` finds; the reader is
`kvpool.bench.fault_peer_script`. Every wait here has a deadline; a call that hangs inside Mooncake is an outcome. The
master is run with our membership lease as its ``client_ttl``, everything else as it comes.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvpool.bench import peer_tools
from kvpool.bench.metadata_peers import peer_python
from kvpool.errors import UnavailableError
from kvpool.faults.beside import Comparison, Outcome, Times, calls_of, recovered_after_ns, tally
from kvpool.faults.measures import Bounds
from kvpool.faults.nemesis import PAUSE_LEASES

SYSTEM = "Mooncake Store"
VALUE_BYTES = 256 << 10
GETS_PER_S = 20
BASELINE_S = 3.0
RECOVERY_LIMIT_S = 20.0
READY_LIMIT_S = 30.0
END_LIMIT_S = 5.0
POLL_S = 0.25

_SCRIPT = Path(peer_tools.__file__).with_name("fault_peer_script.py")


class _Client:
    """A process with a client of the store. `kill` on every path."""

    def __init__(self, python: str, role: str, *arguments: object) -> None:
        self._role = role
        self._ready = threading.Event()
        self._lines: list[Any] = []
        self._process = subprocess.Popen(
            [python, str(_SCRIPT), role, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith("\n"):
                return  # cut by a kill
            if self._ready.is_set():
                self._lines.append(json.loads(line))
            self._ready.set()

    def wait_ready(self) -> None:
        """Until it is connected, and the reader has put its values.

        Raises:
            UnavailableError: it is not, within `READY_LIMIT_S`.
        """
        end_s = time.monotonic() + READY_LIMIT_S
        while not self._ready.wait(POLL_S):
            if self.has_ended() or time.monotonic() > end_s:
                raise UnavailableError(f"{SYSTEM}'s {self._role} did not start; run {_SCRIPT.name} by hand to see why")

    def lines(self) -> list[Any]:
        """What it wrote so far."""
        return list(self._lines)

    def has_ended(self) -> bool:
        """By itself, unless it was killed."""
        return self._process.poll() is not None

    def send(self, number: signal.Signals) -> None:
        """A signal, to a process that may have ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        """End it, stopped or not. May be repeated."""
        self._process.kill()
        self._process.wait(END_LIMIT_S)
        self._thread.join(END_LIMIT_S)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


class _Store:
    """A whole store. Use as a context manager."""

    def __init__(self, python: str, lease_s: float) -> None:
        self._python = python
        self._port = peer_tools.free_port()
        self._ttl = f"--client_ttl={_ttl_s(lease_s)}"
        self._address = f"127.0.0.1:{self._port}"
        self.pause_s = PAUSE_LEASES * lease_s
        self._clients: list[_Client] = []
        self._master = self._new_master()

    def __enter__(self) -> _Store:
        try:
            self.holder = self._new_client("holder")
            self.reader = self._new_client("reader", VALUE_BYTES, GETS_PER_S)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process. May be repeated."""
        for client in self._clients:
            client.kill()
        self._master.kill()
        self._master.wait(END_LIMIT_S)

    def kill_holder(self) -> None:
        """SIGKILL, and a successor."""
        self.holder.send(signal.SIGKILL)
        self.holder = self._new_client("holder")

    def pause_holder(self) -> None:
        """SIGSTOP for as long as a worker of ours."""
        self.holder.send(signal.SIGSTOP)
        try:
            time.sleep(self.pause_s)
        finally:
            self.holder.send(signal.SIGCONT)

    def restart_master(self) -> None:
        """SIGKILL, and a successor at the same port."""
        self._master.kill()
        self._master.wait(END_LIMIT_S)
        self._master = self._new_master()

    def _new_master(self) -> subprocess.Popen[bytes]:
        try:
            return peer_tools.mooncake_master(self._python, self._port, self._ttl)
        except OSError as error:
            raise UnavailableError(f"{SYSTEM}'s master did not start: {error}") from error

    def _new_client(self, role: str, *options: object) -> _Client:
        client = _Client(self._python, role, self._address, *options)
        self._clients.append(client)
        client.wait_ready()
        return client


@dataclass(frozen=True, slots=True)
class _Fault:
    """How a scenario of ours is repeated here; see `tally` about ``detectable``."""

    strike: Callable[[_Store], None]
    detectable: bool = True


FAULTS = {
    "kill-holder": _Fault(_Store.kill_holder),
    "pause-holder": _Fault(_Store.pause_holder),
    "kill-metadata": _Fault(_Store.restart_master, detectable=False),
}
"""By the name of the scenario of ours."""


def compare(
    scenarios: Sequence[str], lease_s: float, progress: Callable[[str], None], bounds: Bounds | None = None
) -> Comparison | None:
    """Repeat on Mooncake Store those scenarios that it can have; None when there is none among them.

    Args:
        scenarios: names of ours.
        lease_s: membership lease that ours had.
        progress: told what is going on.
        bounds: as for our own runs.
    """
    faults = [name for name in FAULTS if name in scenarios]
    if not faults:
        return None
    load = f"gets of {VALUE_BYTES >> 10} KiB at {GETS_PER_S}/s from one holder over TCP"
    settings = f"{load}, client_ttl {_ttl_s(lease_s)} s"
    try:
        python = peer_python("mooncake")
    except UnavailableError as error:
        return Comparison(SYSTEM, settings, why_not=str(error))
    outcomes = []
    for name in faults:
        progress(f"beside: {name} on {SYSTEM}")
        try:
            outcomes.append(_measure(name, python, lease_s, bounds or Bounds()))
        except UnavailableError as error:
            outcomes.append(Outcome(name, SYSTEM, note=str(error)))
    return Comparison(SYSTEM, settings, tuple(outcomes))


def _measure(name: str, python: str, lease_s: float, bounds: Bounds) -> Outcome:
    fault = FAULTS[name]
    with _Store(python, lease_s) as store:
        time.sleep(BASELINE_S)
        fault_ns = time.monotonic_ns()
        fault.strike(store)
        heal_ns = time.monotonic_ns()
        for now_ns in _ticks(heal_ns + int(RECOVERY_LIMIT_S * 1e9)):
            times = Times(fault_ns, heal_ns, now_ns)
            if recovered_after_ns(calls_of(store.reader.lines()), times, bounds) is not None:
                break
        times = Times(fault_ns, heal_ns, time.monotonic_ns())
        note = "its reader ended by itself" if store.reader.has_ended() else None
        store.reader.kill()
        calls = calls_of(store.reader.lines())
    return replace(tally(name, SYSTEM, calls, times, bounds, detectable=fault.detectable), note=note)


def _ttl_s(lease_s: float) -> int:
    return max(1, math.ceil(lease_s))


def _ticks(until_ns: int) -> Iterator[int]:
    while (now_ns := time.monotonic_ns()) < until_ns:
        yield now_ns
        time.sleep(POLL_S)
