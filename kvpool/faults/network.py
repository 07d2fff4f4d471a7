"""Links between the data planes of an embedded cluster, cut in the kernel: a hub, and faults on it.

The hub is a named network namespace with a bridge; every worker that runs `kvpool.transport.netns` hangs on it by a
veth pair, whose outer end bears the number of its process. Packets are really dropped, delayed and queued, and TCP
answers as it does. Needs root, iproute2 and util-linux; `why_not` says what is missing.

A process that ends takes its link along, so healing something that is gone is no error.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

from kvpool.errors import UnavailableError
from kvpool.interrupts import at_hard_end
from kvpool.transport.netns import BRIDGE, LINK, address_of, command, leave, port_of

_PREFIX = "kvpool-faults-"
_NOBODY = "02:00:00:00:00:01"
_PROGRAMS = ("ip", "tc", "nsenter")
MIN_RATE_BYTES_PER_S = 16_000.0
BURST_BYTES = 64 << 10


def why_not() -> str | None:
    """What keeps this machine from it; None when nothing does."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        return "needs root" if not missing else f"needs root and {', '.join(missing)}"
    failures: list[str] = []

    def attempt() -> None:
        try:
            leave()
            # Of what the faults need this is what a kernel may lack, and here nobody else is on the link.
            command("ip", "link", "add", BRIDGE, "type", "bridge")
            command("ip", "link", "add", LINK, "type", "veth", "peer", "name", "other")
            command("tc", *_shape("add", MIN_RATE_BYTES_PER_S))
        except UnavailableError as error:
            failures.append(error.message)

    thread = threading.Thread(target=attempt)  # what it made goes with it
    thread.start()
    thread.join()
    return failures[0] if failures else None


class Network:
    """One hub. `close` on every path.

    Raises:
        UnavailableError: it cannot be made.
    """

    def __init__(self) -> None:
        _remove_orphans()
        self.hub = f"{_PREFIX}{os.getpid()}"
        self._remove()
        command("ip", "netns", "add", self.hub)
        self._forget = at_hard_end(self._remove)
        try:
            command("ip", "-n", self.hub, "link", "add", BRIDGE, "type", "bridge")
            command("ip", "-n", self.hub, "link", "set", BRIDGE, "up")
        except UnavailableError:
            self.close()
            raise

    def close(self) -> None:
        """Remove the hub. May be repeated."""
        self._remove()
        self._forget()

    def _remove(self) -> None:
        with contextlib.suppress(UnavailableError):
            command("ip", "netns", "del", self.hub)

    @contextlib.contextmanager
    def dropped(self, holder: int) -> Iterator[None]:
        """Inside, nothing reaches or leaves the data plane of a process, and nobody is told."""
        port = port_of(holder)
        command("ip", "-n", self.hub, "link", "set", port, "nomaster")
        try:
            yield
        finally:
            _undo(holder, "ip", "-n", self.hub, "link", "set", port, "master", BRIDGE)

    @contextlib.contextmanager
    def slowed(self, holder: int, rate_bytes_per_s: float) -> Iterator[None]:
        """Inside, what a process sends leaves it at a rate, at least `MIN_RATE_BYTES_PER_S`."""
        inside = _inside(holder)
        command(*inside, "tc", *_shape("add", max(rate_bytes_per_s, MIN_RATE_BYTES_PER_S)))
        try:
            yield
        finally:
            _undo(holder, *inside, "tc", "qdisc", "del", "dev", LINK, "root")

    @contextlib.contextmanager
    def muted(self, holder: int, reader: int) -> Iterator[None]:
        """Inside, what one process sends to one other goes to nobody; the other direction stays clear."""
        inside = _inside(holder)
        neighbour = (address_of(reader), "dev", LINK)
        command(*inside, "ip", "neigh", "replace", *neighbour, "lladdr", _NOBODY, "nud", "permanent")
        try:
            yield
        finally:
            _undo(holder, *inside, "ip", "neigh", "del", *neighbour)


def has_network(pid: int) -> bool:
    """Whether a process is one that runs: the dead that nobody has buried have no network."""
    try:
        return bool(os.readlink(f"/proc/{pid}/ns/net"))
    except OSError:
        return False


def _shape(action: str, rate_bytes_per_s: float) -> tuple[str, ...]:
    limits = ("rate", f"{round(rate_bytes_per_s * 8)}bit", "burst", str(BURST_BYTES), "latency", "50ms")
    return ("qdisc", action, "dev", LINK, "root", "tbf", *limits)


def _inside(pid: int) -> tuple[str, ...]:
    """Prefix of a command that is to run in the network of a process's data plane.

    Raises:
        UnavailableError: it has none, or ended.
    """
    try:
        own = os.readlink(f"/proc/{pid}/ns/net")
        for task in Path(f"/proc/{pid}/task").iterdir():
            if os.readlink(task / "ns" / "net") != own:
                return ("nsenter", "-t", task.name, "-n")
    except OSError as error:
        raise UnavailableError(f"process {pid} cannot be looked at: {error.strerror}", pid=pid) from error
    raise UnavailableError(f"process {pid} has no data plane in a network namespace", pid=pid)


def _undo(pid: int, *words: str) -> None:
    try:
        command(*words)
    except UnavailableError:
        if has_network(pid):
            raise


def _remove_orphans() -> None:
    """Hubs of runs that were killed."""
    with contextlib.suppress(OSError):
        for path in Path("/run/netns").glob(f"{_PREFIX}*"):
            if not Path(f"/proc/{path.name.removeprefix(_PREFIX)}").exists():
                with contextlib.suppress(UnavailableError):  # another run removes it, too
                    command("ip", "netns", "del", path.name)
