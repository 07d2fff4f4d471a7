"""Signals to processes of this machine, and who listens at one of its ports."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator

import psutil

from kvpool.errors import UnavailableError


@contextlib.asynccontextmanager
async def stopped(pid: int) -> AsyncIterator[None]:
    """A process is stopped inside; it runs on behind, whatever happens."""
    send(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        send(pid, signal.SIGCONT)


def send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # another strike, or its own fence, was first
    except PermissionError as error:
        raise UnavailableError(f"process {pid} belongs to another user; run as that user", pid=pid) from error


def listener(address: str) -> int:
    """Process of this machine that listens at an address.

    Raises:
        UnavailableError: none does.
    """
    port = int(address.rpartition(":")[2])
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied as error:
        raise UnavailableError("this user may not see who listens at which port") from error
    for item in connections:
        if item.status == psutil.CONN_LISTEN and item.laddr and item.laddr.port == port and item.pid:
            return int(item.pid)
    raise UnavailableError(f"no process of this machine listens at {address}")
