"""A transport whose sockets live in a network namespace of their own, so that its links can be cut in the kernel.

For fault runs only. A thread leaves the process's network for a fresh one and makes the inner transport there: sockets
belong to the network of the thread that opens them, and threads to that of the thread that starts them, so the data
plane moves as a whole and nothing else of the process does. A veth pair joins it to a *hub*, a named namespace with a
bridge, which `kvpool.faults.network` keeps and on which it cuts, delays and mutes. Shared memory is switched off, or no
byte would cross the link. When the process ends, the kernel removes its namespace and both ends of the pair.

Needs root and iproute2. One such transport a process: names and addresses come from the process id.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvpool.errors import UnavailableError
from kvpool.transport.base import BlockSource, ReadHandle, ReadRequest, Transport, TransportStats
from kvpool.types import WorkerKey

LINK = "kvlink"
"""The end of the pair inside a transport's namespace."""

BRIDGE = "bridge"
"""Of a hub."""

COMMAND_LIMIT_S = 10.0
POLL_S = 0.01
SETTINGS = {"TLS": "tcp", "NET_DEVICES": LINK}

_CLONE_NEWNS, _CLONE_NEWNET = 0x0002_0000, 0x4000_0000
_MS_REC, _MS_SLAVE = 1 << 14, 1 << 19
_libc = ctypes.CDLL(None, use_errno=True)


def port_of(pid: int) -> str:
    """The hub's end of the pair of a process."""
    return f"kvp{pid}"


def address_of(pid: int) -> str:
    """IPv4 address of a process's end."""
    number = pid % 65_000 + 1
    return f"10.78.{number >> 8}.{number & 255}"


def command(*words: str) -> None:
    """Run a program that must succeed, within `COMMAND_LIMIT_S`.

    Raises:
        UnavailableError: it is missing, failed or did not end.
    """
    try:
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=COMMAND_LIMIT_S)
    except subprocess.CalledProcessError as error:
        raise UnavailableError(f"'{' '.join(words)}' failed: {error.stderr.strip()}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"'{' '.join(words)}' failed: {error}") from error


def leave() -> None:
    """Move the calling thread, and it alone, into a network namespace with nothing in it.

    UCX finds devices below ``/sys``, which shows those of the network in which it was mounted; so the thread also gets
    a mount of its own there.

    Raises:
        UnavailableError: this user may not.
    """
    failed: bool = (
        _libc.unshare(_CLONE_NEWNS | _CLONE_NEWNET)
        or _libc.mount(b"none", b"/", b"none", ctypes.c_ulong(_MS_REC | _MS_SLAVE), None)
        or _libc.mount(b"kvpool", b"/sys", b"sysfs", ctypes.c_ulong(0), None)
    )
    if failed:
        reason = os.strerror(ctypes.get_errno())
        raise UnavailableError(f"a thread cannot have a network namespace of its own here: {reason}; be root")


def _wait_until_up() -> None:
    """The kernel says with a delay that a link works, and until then UCX does not see it."""
    state = Path("/sys/class/net", LINK, "operstate")
    end_s = time.monotonic() + COMMAND_LIMIT_S
    while state.read_text().strip() != "up":
        if time.monotonic() > end_s:
            raise UnavailableError(f"the link {LINK} did not come up within {COMMAND_LIMIT_S:.0f} s")
        time.sleep(POLL_S)


class NamespacedTransport:
    """Makes ``inner`` in a namespace of its own; implements `kvpool.transport.base.Transport`.

    Args:
        hub: name of the namespace to be joined to.
        make: the inner transport, from the settings that keep it on the link.

    Raises:
        UnavailableError: this process may not, or there is no such hub.
    """

    def __init__(self, hub: str, make: Callable[[Mapping[str, str]], Transport]) -> None:
        self._inside = ThreadPoolExecutor(1, thread_name_prefix="kvpool-netns")
        try:
            self._inside.submit(leave).result()
            thread_id = self._inside.submit(threading.get_native_id).result()
            self._join(hub, thread_id)
            self._inner = self._inside.submit(make, SETTINGS).result()
        except BaseException:
            self._inside.shutdown(wait=False)
            raise

    def _join(self, hub: str, thread_id: int) -> None:
        port, address = port_of(os.getpid()), address_of(os.getpid())
        pair = ("type", "veth", "peer", "name", LINK, "netns", str(thread_id))
        command("ip", "-n", hub, "link", "add", port, *pair)
        command("ip", "-n", hub, "link", "set", port, "master", BRIDGE, "up")
        self._inside.submit(command, "ip", "addr", "add", f"{address}/16", "dev", LINK).result()
        self._inside.submit(command, "ip", "link", "set", LINK, "up").result()
        self._inside.submit(_wait_until_up).result()

    @property
    def name(self) -> str:
        """The inner transport's name: members need not know."""
        return self._inner.name

    @property
    def address(self) -> bytes:
        """The inner transport's address."""
        return self._inner.address

    def start(self, key: WorkerKey, segment: memoryview, block_bytes: int, source: BlockSource) -> None:
        """Start the inner transport; its threads are born inside."""
        self._inside.submit(self._inner.start, key, segment, block_bytes, source).result()

    def read(self, request: ReadRequest) -> ReadHandle:
        """Read through the inner transport."""
        return self._inner.read(request)

    def forget(self, peer: WorkerKey) -> None:
        """Forget in the inner transport."""
        self._inner.forget(peer)

    def stats(self) -> TransportStats:
        """The inner transport's counters."""
        return self._inner.stats()

    def close(self) -> None:
        """Close the inner transport. May be repeated."""
        self._inner.close()
        self._inside.shutdown(wait=False)
