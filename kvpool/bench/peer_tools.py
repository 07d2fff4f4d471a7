"""What the scripts share that run peers in a Python of their own, where kvpool need not be: ports, Mooncake, answers.

A script that lies here imports this as a neighbour (``import peer_tools``), not as a part of kvpool.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import Any, TextIO

READY_TIMEOUT_S = 30.0
BUFFER_BYTES = 64 << 20
"""What a Mooncake client sets aside for transfers."""
_TIE = """
import ctypes, os, sys
PR_SET_PDEATHSIG, SIGKILL = 1, 9
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
if os.getppid() == int(sys.argv[1]):  # else the owner has gone meanwhile
    os.execv(sys.argv[2], sys.argv[2:])
"""


def answers() -> TextIO:
    """Standard output, for answers alone: what peers log there goes to standard error from now on."""
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return stream


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tied(*command: str) -> list[str]:
    """A command that the kernel kills when the thread that starts it ends, for a program that would outlive a killed
    owner. For main threads, which end with their process."""
    return [sys.executable, "-c", _TIE, str(os.getpid()), *command]


def mooncake_master(python: str, port: int, *options: str) -> subprocess.Popen[bytes]:
    """Mooncake's master, from the installation that a Python belongs to, listening at a port of this host.

    It is started again when it ends at once, as it does while its predecessor's connections still hold the port.

    Raises:
        OSError: there is no such program, or it does not listen within `READY_TIMEOUT_S`.
    """
    program = os.path.join(os.path.dirname(python), "mooncake_master")
    if not os.path.isfile(program):
        raise FileNotFoundError(f"there is no {program}")
    end = time.monotonic() + READY_TIMEOUT_S
    while True:
        command = tied(program, f"--rpc_port={port}", f"--metrics_port={free_port()}", *options)
        master = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if _listens(master, port, end):
            return master
        master.kill()
        master.wait()
        if time.monotonic() > end:
            raise OSError(f"mooncake_master does not listen at port {port}")


def _listens(master: subprocess.Popen[bytes], port: int, end: float) -> bool:
    """Waits until it does, it has ended, or the time (of the monotonic clock, in seconds) is over."""
    while master.poll() is None and time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return True
        except OSError:
            time.sleep(0.05)
    return False


def mooncake_store(master: str, segment_bytes: int) -> Any:
    """A client of Mooncake Store over TCP; with a segment of 0 bytes it offers no memory."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    if store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, BUFFER_BYTES, "tcp", "", master):
        raise RuntimeError("the store cannot be set up")
    return store


def offer_segment(master: str, segment_bytes: int, said: TextIO) -> None:
    """Offer a segment and say so, until standard input ends."""
    store = mooncake_store(master, segment_bytes)
    print('{"ready": true}', file=said, flush=True)
    sys.stdin.read()
    del store
    os._exit(0)  # its threads may crash an orderly exit
