"""Links cut in the kernel between two real processes; skipped where the machine does not allow it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvpool.errors import ConfigError, UnavailableError
from kvpool.faults import network as network_module
from kvpool.faults.network import Network, why_not
from kvpool.transport import create_transport
from kvpool.transport.netns import port_of
from tests.contract.transport_rig import S, eventually
from tests.multiprocess.namespace_peer import BLOCK_BYTES, BLOCKS, DEADLINE_NS, STALL_NS

REASON = why_not()
allowed = pytest.mark.skipif(REASON is not None, reason=f"no links by network namespaces here: {REASON}")
BATCH_BYTES = BLOCKS * BLOCK_BYTES


class Process:
    """A holder or a reader on the hub."""

    def __init__(self, name: str, hub: str) -> None:
        command = [sys.executable, "-m", "tests.multiprocess.namespace_peer", name, hub]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        self.address = str(self._answer()["address"])

    def read(self, holder: Process) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(holder.address + "\n")
        self._process.stdin.flush()
        return self._answer()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    network = Network()
    yield network
    network.close()


@pytest.fixture(scope="module")
def pair(network: Network) -> Iterator[tuple[Process, Process]]:
    holder = Process("holder", network.hub)
    reader = Process("reader", network.hub)
    yield holder, reader
    reader.kill()
    holder.kill()


def _sent(network: Network, process: Process) -> int:
    """Bytes that came from a process to the hub."""
    command = ["ip", "-n", network.hub, "-s", "-j", "link", "show", port_of(process.pid)]
    shown = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return int(shown[0]["stats64"]["rx"]["bytes"])


@allowed
def test_every_byte_of_a_read_crosses_the_link(network: Network, pair: tuple[Process, Process]) -> None:
    holder, reader = pair
    before = _sent(network, holder)
    answer = reader.read(holder)
    assert (answer["state"], answer["right"]) == ("done", True)
    assert _sent(network, holder) - before >= BATCH_BYTES


@allowed
@pytest.mark.parametrize("how", ["dropped", "muted"])
def test_a_cut_link_is_silence_until_the_stall_bound_and_heals(
    network: Network, pair: tuple[Process, Process], how: str
) -> None:
    holder, reader = pair
    assert reader.read(holder)["right"]
    with network.dropped(holder.pid) if how == "dropped" else network.muted(holder.pid, reader.pid):
        answer = reader.read(holder)
        assert answer["state"] == "failed"
        assert answer["elapsed_ns"] >= STALL_NS  # nobody told the reader
        assert not answer["right"]
    eventually(lambda: reader.read(holder)["right"], "blocks come again", limit_s=20)


@allowed
def test_a_slow_link_queues_and_loses_nothing(network: Network, pair: tuple[Process, Process]) -> None:
    holder, reader = pair
    with network.slowed(holder.pid, 4 * BATCH_BYTES):
        answer = reader.read(holder)
    assert (answer["state"], answer["right"]) == ("done", True)
    assert answer["elapsed_ns"] >= S / 5  # a quarter of a second, less what the burst lets through at once
    assert reader.read(holder)["right"]


@allowed
def test_a_dead_process_takes_its_link_along_and_healing_it_is_no_error(
    network: Network,
) -> None:
    holder = Process("holder", network.hub)
    with network.dropped(holder.pid), network.slowed(holder.pid, 1e6):
        holder.kill()
    with pytest.raises(UnavailableError), network.slowed(holder.pid, 1e6):
        pass


@allowed
def test_a_holder_that_does_not_answer_a_connection_fails_its_reads_in_time_and_holds_up_no_others(
    network: Network, pair: tuple[Process, Process]
) -> None:
    holder, reader = pair
    silent = Process("holder", network.hub)
    try:
        with network.dropped(silent.pid):
            answer = reader.read(silent)
            assert answer["state"] == "failed"
            assert STALL_NS <= answer["elapsed_ns"] < DEADLINE_NS
            assert reader.read(holder)["right"]
    finally:
        silent.kill()


@allowed
def test_hubs_of_killed_runs_are_removed_by_the_next(network: Network) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    orphan = f"{network_module._PREFIX}{ended.pid}"
    subprocess.run(["ip", "netns", "add", orphan], check=True)
    network_module._remove_orphans()
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    assert orphan not in listed
    assert network.hub in listed


def test_where_it_may_not_be_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_not() == "needs root"
    monkeypatch.setattr(network_module, "_PROGRAMS", ("no-such-program",))
    assert why_not() == "needs root and no-such-program"


def test_only_ucx_goes_into_a_namespace_and_only_onto_a_hub_that_is_there() -> None:
    with pytest.raises(ConfigError):
        create_transport("netns:hub:memory")
    before = os.readlink(f"/proc/self/task/{threading.get_native_id()}/ns/net")
    with pytest.raises(UnavailableError):
        create_transport("netns:no-such-hub:ucx")
    assert os.readlink(f"/proc/self/task/{threading.get_native_id()}/ns/net") == before
