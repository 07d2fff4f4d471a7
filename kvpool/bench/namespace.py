"""A second host on this machine: a network namespace behind a veth pair whose rate can be limited.

Needs root and iproute2. UCX reads the routes once per process: start what uses the link after the namespace is there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "kvpool-bench-"
_PID = os.getpid()  # two runs on one machine must not meet
NAME, OUR_LINK, THEIR_LINK = f"{_PREFIX}{_PID}", f"kvpb{_PID}a", f"kvpb{_PID}b"
OUR_ADDRESS, THEIR_ADDRESS = f"10.77.{_PID % 250}.1/24", f"10.77.{_PID % 250}.2/24"
INSIDE = ("ip", "netns", "exec", NAME)
"""Prefix of a command that is to run there."""

OURS = {"TLS": "tcp", "NET_DEVICES": OUR_LINK}
THEIRS = {"TLS": "tcp", "NET_DEVICES": THEIR_LINK}
"""UCX settings of the two ends."""

WHY_NOT = "needs root and iproute2"


def available() -> bool:
    """Whether a namespace can be made here."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    probe = subprocess.run(["ip", "netns", "add", NAME], check=False, capture_output=True)
    _remove()
    return probe.returncode == 0


@contextlib.contextmanager
def second_host() -> Iterator[None]:
    """The namespace and both ends of the link, up. Those of runs that were killed are removed."""
    _remove()
    _remove_orphans()
    run("ip", "netns", "add", NAME)
    try:
        run("ip", "link", "add", OUR_LINK, "type", "veth", "peer", "name", THEIR_LINK, "netns", NAME)
        run("ip", "addr", "add", OUR_ADDRESS, "dev", OUR_LINK)
        run("ip", "link", "set", OUR_LINK, "up")
        run(*INSIDE, "ip", "addr", "add", THEIR_ADDRESS, "dev", THEIR_LINK)
        run(*INSIDE, "ip", "link", "set", THEIR_LINK, "up")
        yield
    finally:
        _remove()


@contextlib.contextmanager
def slowed(rate_mbit: int, burst_kb: int = 64) -> Iterator[None]:
    """Limit what the second host sends."""
    shape = ("rate", f"{rate_mbit}mbit", "burst", f"{burst_kb}kb", "latency", "50ms")
    run(*INSIDE, "tc", "qdisc", "add", "dev", THEIR_LINK, "root", "tbf", *shape)
    try:
        yield
    finally:
        run(*INSIDE, "tc", "qdisc", "del", "dev", THEIR_LINK, "root")


def run(*command: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(command, check=True, capture_output=True)


def _remove() -> None:
    """Idempotent; the veth pair goes with the namespace."""
    subprocess.run(["ip", "link", "del", OUR_LINK], check=False, capture_output=True)
    subprocess.run(["ip", "netns", "del", NAME], check=False, capture_output=True)


def _remove_orphans() -> None:
    listed = subprocess.run(["ip", "netns", "list"], check=False, capture_output=True, text=True).stdout
    for name in (line.split()[0] for line in listed.splitlines() if line.startswith(_PREFIX)):
        if not Path(f"/proc/{name.removeprefix(_PREFIX)}").exists():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
