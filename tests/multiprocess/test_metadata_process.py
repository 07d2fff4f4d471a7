"""The metadata service as real processes: start, stop, restart, replicas, freezes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from kvpool.cluster.processes import MetadataProcesses
from kvpool.config import MetadataConfig
from kvpool.metadata.client import MetadataClient
from kvpool.metadata.publisher import MetadataPublisher
from kvpool.metadata.watcher import MetadataWatcher
from kvpool.types import BlockHash, Tier
from tests.contract.metadata_support import WAIT_S, Owner, hashes, member, sees

SERVICE = "kvpool.v1.MetadataService"


class ServerProcess:
    """``python -m kvpool.metadata.server`` on a port of its own."""

    def __init__(self, port: int = 0, *options: str) -> None:
        command = [sys.executable, "-m", "kvpool.metadata.server", "--port", str(port), "--exit-with-parent", *options]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.ready = dict(json.loads(line)) if line else {}
        self.address = str(self.ready.get("address", ""))
        self.port = int(self.address.rpartition(":")[2] or 0)

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        code = self.process.wait(WAIT_S)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        return code

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def _server(stack: ExitStack, port: int = 0, *options: str) -> ServerProcess:
    server = ServerProcess(port, *options)
    stack.callback(server.end)
    return server


def _publisher(stack: ExitStack, addresses: list[str], worker_id: str, owner: Owner) -> MetadataPublisher:
    publisher = MetadataPublisher(addresses, member(worker_id), owner.snapshot, lambda reason: None)
    stack.callback(publisher.close, leave=False)
    publisher.start()
    return publisher


def _watcher(stack: ExitStack, addresses: list[str]) -> MetadataWatcher:
    watcher = MetadataWatcher(addresses)
    stack.callback(watcher.close)
    watcher.start()
    return watcher


# -- the process ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "stdin"])
def test_the_server_ends_with_code_0_on_signals_and_when_its_parent_goes(stack: ExitStack, how: str) -> None:
    server = _server(stack)
    assert server.process.stdin is not None
    if how == "stdin":
        server.process.stdin.close()
    else:
        server.process.send_signal(getattr(signal, how))
    assert server.process.wait(WAIT_S) == 0


def test_it_ends_in_time_while_watched_and_published_to(stack: ExitStack) -> None:
    server = _server(stack)
    _publisher(stack, [server.address], "w0", Owner(hashes(10)))
    assert _watcher(stack, [server.address]).wait_ready(WAIT_S)
    server.process.terminate()
    assert server.process.wait(5) == 0


def test_a_port_in_use_ends_it_with_code_2_and_names_the_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "kvpool.metadata.server", "--port", str(port)],
            capture_output=True, text=True, timeout=WAIT_S, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert f"127.0.0.1:{port}" in done.stderr.strip().splitlines()[-1]
    assert "--port" in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("options", [["--port", "70000"], ["--lease-ms", "1"], ["--max-entries", "0"]])
def test_wrong_arguments_end_it_with_code_2_and_name_the_argument(options: list[str]) -> None:
    command = [sys.executable, "-m", "kvpool.metadata.server", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 2
    assert options[0] in done.stderr


def test_health_checks_and_reflection_answer(stack: ExitStack) -> None:
    server = _server(stack)
    channel = stack.enter_context(grpc.insecure_channel(server.address))
    checks = health_pb2_grpc.HealthStub(channel)
    reply = checks.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=WAIT_S)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
    assert SERVICE in ProtoReflectionDescriptorDatabase(channel).get_services()


def test_metrics_are_served_and_follow_the_state(stack: ExitStack) -> None:
    server = _server(stack, 0, "--metrics-port", "0")
    publisher = _publisher(stack, [server.address], "w0", Owner(hashes(10)))
    assert publisher.flush(WAIT_S)
    with urllib.request.urlopen(f"http://{server.ready['metrics']}/metrics", timeout=WAIT_S) as reply:
        lines = reply.read().decode().splitlines()
    assert 'kvpool_metadata_members{state="alive"} 1.0' in lines
    assert 'kvpool_metadata_held_blocks{tier="device"} 10.0' in lines
    assert "kvpool_metadata_snapshots_total 1.0" in lines
    taken = server.ready["metrics"].rpartition(":")[2]
    command = [sys.executable, "-m", "kvpool.metadata.server", "--metrics-port", taken]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 2
    assert "--metrics-port" in done.stderr.strip().splitlines()[-1]


# -- soft state -----------------------------------------------------------------------------------------------------


def _truth(watcher: MetadataWatcher, chains: dict[str, list[BlockHash]]) -> bool:
    """Wait until the copy is exactly what the workers hold."""

    def whole() -> bool:
        index = watcher.view.index
        return watcher._connected and index.entries == sum(map(len, chains.values())) == index.blocks

    if not watcher.wait_for(whole, WAIT_S):
        return False
    return all(
        watcher.prefixes(chain) == {member(worker_id).key: {Tier.DEVICE: len(chain)}}
        for worker_id, chain in chains.items()
    )


def test_after_sigkill_and_restart_100000_blocks_are_whole_again_without_loss_or_phantom(stack: ExitStack) -> None:
    server = _server(stack)
    chains = {f"w{number}": hashes(33_400) for number in range(3)}
    owners = {worker_id: Owner(chain) for worker_id, chain in chains.items()}
    for worker_id, owner in owners.items():
        _publisher(stack, [server.address], worker_id, owner)
    watcher = _watcher(stack, [server.address])
    assert _truth(watcher, chains)
    server.process.kill()
    server.process.wait(WAIT_S)
    gone = owners["w0"].remove(chains["w0"][30_000:])  # the truth moves on while nobody listens
    chains["w0"] = chains["w0"][:30_000]
    assert len(gone) == 3400
    again = _server(stack, server.port)
    assert _truth(watcher, chains)
    counters = MetadataClient([again.address]).describe()["counters"]
    assert counters["joins"] == counters["snapshots"] == 3


# -- replicas -------------------------------------------------------------------------------------------------------


def test_one_replica_dies_and_lookups_watchers_and_publishers_go_on(stack: ExitStack) -> None:
    first, second = _server(stack), _server(stack)
    addresses = [first.address, second.address]
    chain, owner = hashes(300), Owner()
    publisher = _publisher(stack, addresses, "w0", owner)
    watcher, client = _watcher(stack, addresses), stack.enter_context(MetadataClient(addresses))
    publisher.stored(Tier.DEVICE, owner.store(chain[:100]))
    assert sees(watcher, chain, member("w0").key, 100)
    assert publisher.flush(WAIT_S)

    first.process.kill()
    publisher.stored(Tier.DEVICE, owner.store(chain[100:200]))
    assert sees(watcher, chain, member("w0").key, 200)
    assert watcher.status()["address"] == second.address
    assert client.lookup(chain) == {member("w0").key: {Tier.DEVICE: 200}}
    assert client.failovers >= 1

    first.process.wait(WAIT_S)
    _server(stack, first.port)
    second.process.kill()
    publisher.stored(Tier.DEVICE, owner.store(chain[200:]))
    assert sees(watcher, chain, member("w0").key, 300)
    assert client.lookup(chain) == {member("w0").key: {Tier.DEVICE: 300}}


def test_a_drain_reaches_replicas_that_were_down_and_survives_restarts(stack: ExitStack) -> None:
    first, second = _server(stack), _server(stack)
    publisher = _publisher(stack, [first.address, second.address], "w0", Owner(hashes(3)))
    second.process.kill()
    second.process.wait(WAIT_S)
    with MetadataClient([first.address]) as client:
        client.drain(member("w0").key.worker_id)
    assert _eventually(lambda: publisher.draining)
    _server(stack, second.port)
    with MetadataClient([second.address]) as client:
        assert _eventually(lambda: [item["state"] for item in client.describe()["members"]] == ["draining"])


def test_a_frozen_replica_is_given_up_and_catches_up_after_it_thaws(stack: ExitStack) -> None:
    first, second = _server(stack), _server(stack)
    addresses = [first.address, second.address]
    chain, owner = hashes(200), Owner()
    publisher = _publisher(stack, addresses, "w0", owner)
    watcher = _watcher(stack, addresses)
    assert watcher.wait_ready(WAIT_S)
    frozen = first if watcher.status()["address"] == first.address else second
    frozen.freeze()
    publisher.stored(Tier.DEVICE, owner.store(chain))
    assert sees(watcher, chain, member("w0").key, 200)
    assert watcher.status()["address"] != frozen.address
    frozen.thaw()
    with MetadataClient([frozen.address]) as client:
        assert _eventually(lambda: client.lookup(chain) == {member("w0").key: {Tier.DEVICE: 200}})


def test_while_all_replicas_are_down_a_router_goes_on_with_what_it_knows(stack: ExitStack) -> None:
    server = _server(stack)
    chain = hashes(50)
    publisher = _publisher(stack, [server.address], "w0", Owner(chain))
    watcher = _watcher(stack, [server.address])
    assert sees(watcher, chain, member("w0").key, 50)
    server.process.kill()
    assert watcher.wait_for(lambda: not watcher._connected, WAIT_S)
    assert watcher.prefixes(chain) == {member("w0").key: {Tier.DEVICE: 50}}
    assert not watcher.connected
    assert (watcher.age_ns or 0) > 0
    assert list(watcher.members()) == [member("w0").key]
    assert _eventually(lambda: not publisher.status()["endpoints"][server.address]["connected"])
    assert publisher.status()["endpoints"][server.address]["last_error"]


def test_heartbeats_keep_a_worker_alive_while_its_process_is_busy(stack: ExitStack) -> None:
    """Pure Python work holds the interpreter lock as badly as anything may, for four leases."""
    server = _server(stack, 0, "--lease-ms", "500")
    _publisher(stack, [server.address], "w0", Owner(hashes(10)))
    end_s = time.monotonic() + 2
    threads = [threading.Thread(target=_spin, args=(end_s,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with MetadataClient([server.address]) as client:
        described = client.describe()
    assert [item["worker_id"] for item in described["members"]] == ["w0"]
    assert described["counters"]["expired"] == 0


def _spin(end_s: float) -> None:
    count = 0
    while time.monotonic() < end_s:
        count += sum(range(1000))


def _eventually(condition: object) -> bool:
    """Poll a condition that nothing announces, until it holds or the time is over."""
    assert callable(condition)
    pause, end_s = threading.Event(), time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        if condition():
            return True
        pause.wait(0.02)
    return False


def test_a_killed_launcher_leaves_no_server_behind(stack: ExitStack) -> None:
    """The launcher dies without a chance to clean up; the server's stdin ends and it goes."""
    code = (
        "import os, subprocess, sys; "
        "child = subprocess.Popen([sys.executable, '-m', 'kvpool.metadata.server', '--exit-with-parent'], "
        "stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True); "
        "child.stdout.readline(); print(child.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=False)
    pid = int(done.stdout)
    assert _eventually(lambda: not os.path.exists(f"/proc/{pid}") or _is_zombie(pid))


def _is_zombie(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "Z"


def test_the_replicas_of_a_cluster_serve_metrics_on_the_ports_they_are_told(tmp_path: Path) -> None:
    with socket.socket() as one, socket.socket() as other:  # two free neighbours, as far as anybody can know
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
        other.bind(("127.0.0.1", port + 1))
    servers = MetadataProcesses(MetadataConfig(replicas=2, metrics_port=port), tmp_path)
    try:
        servers.start()
        for at in (port, port + 1):
            with urllib.request.urlopen(f"http://127.0.0.1:{at}/metrics", timeout=WAIT_S) as answer:
                assert "kvpool_metadata_members" in answer.read().decode()
    finally:
        servers.close()
