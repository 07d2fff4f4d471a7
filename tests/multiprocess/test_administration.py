"""Draining, evicting and pinning on one real cluster, by the Python client and by the command."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvpool.cli.administer import parse_age_s
from kvpool.cli.main import app
from kvpool.client import KVPoolClient
from kvpool.cluster.administration import Administrator
from kvpool.cluster.launcher import Cluster
from kvpool.config import ClusterConfig, EngineConfig, MetadataConfig, StoreConfig, WorkerConfig
from kvpool.errors import RequestError, UnavailableError
from kvpool.hashing import block_hashes
from kvpool.store.disk import SUFFIX
from kvpool.types import WorkerId, WorkerKey
from tests.multiprocess.cluster_kit import ClusterKit, wait_until

pytestmark = pytest.mark.cluster

W0, W1, W2 = (WorkerId(f"worker-{number}") for number in range(3))
NAME = "administered"


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all workers' disk tiers lie."""
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def kit(tiny_model_path: Path, disk: Path) -> Iterator[ClusterKit]:
    engine = EngineConfig(model=str(tiny_model_path), num_blocks=48)
    group = WorkerConfig(count=3, engine=engine, store=StoreConfig(tenant_quotas={"*": 6}, disk_path=str(disk)))
    config = ClusterConfig(workers=(group,), metadata=MetadataConfig(replicas=2))
    kit = ClusterKit(Cluster.start(config, name=NAME))
    yield kit
    kit.close()


@pytest.fixture(scope="module")
def client(kit: ClusterKit) -> Iterator[KVPoolClient]:
    with KVPoolClient.of(kit.cluster.connection()) as client:
        yield client


@pytest.fixture
def admin(client: KVPoolClient) -> Administrator:
    return client.admin


def command(kit: ClusterKit, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Run ``kvpool`` in this process, which is connected already; returns its JSON."""
    result = CliRunner().invoke(app, [*arguments, "--address", kit.cluster.address, "--name", NAME, "--json"])
    assert result.exit_code == code, result.output
    return dict(json.loads(result.stdout))


def prompt(seed: int, tokens: int) -> list[int]:
    return [(seed * 131 + place * 17) % 1000 + 5 for place in range(tokens)]


def held(kit: ClusterKit, worker: WorkerId, tokens: list[int]) -> int:
    return kit.routes.held_blocks(worker, tuple(tokens))


def min_copies(admin: Administrator) -> list[int] | None:
    try:
        return [pin.min_copies for pin in admin.pins()]
    except UnavailableError:
        return None  # no server answers at the moment


def came_back(kit: ClusterKit, before: WorkerKey) -> bool:
    try:
        return kit.routes.member(W0).key != before
    except UnavailableError:
        return False


def kept(kit: ClusterKit) -> int:
    return sum(item["blocks"]["kept"] for item in kit.status()["workers"].values())


def test_evicting_a_prefix_removes_it_and_what_continues_it_everywhere(kit: ClusterKit, admin: Administrator) -> None:
    long, other = prompt(1, 64), prompt(2, 48)
    for worker in (W0, W1):
        kit.warm(worker, long)
    kit.warm(W0, other)
    answer = admin.evict(long[:32])
    assert (answer.evicted, answer.in_use, answer.kept, answer.needed) == (8, 0, 0, 0)
    assert answer.evicted_bytes > 0
    assert {worker: item.evicted for worker, item in answer.workers.items()} == {W0: 4, W1: 4, W2: 0}
    wait_until(lambda: held(kit, W0, long) == 0 == held(kit, W1, long), 5, "the directory shows the eviction")
    assert held(kit, W0, other) == 3
    tokens = ",".join(map(str, other))
    assert command(kit, "evict", "--tokens", tokens)["evicted"] == 3


def test_tenant_age_and_hash_select_too(kit: ClusterKit, admin: Administrator) -> None:
    kit.generate(prompt(3, 40), max_tokens=1, tenant="acme")
    kit.warm(W2, prompt(4, 40))
    assert admin.evict(tenant="nobody").evicted == 0
    assert admin.evict(older_than_s=3600).evicted == 0
    assert command(kit, "evict", "--tenant", "acme")["evicted"] == 2
    chain = block_hashes(prompt(4, 40), kit.info.namespace)
    assert command(kit, "evict", "--hash", chain[1].hex())["evicted"] == 1
    assert admin.evict(older_than_s=0).evicted >= 1


def test_mistakes_are_named(kit: ClusterKit, admin: Administrator) -> None:
    with pytest.raises(RequestError, match="less than one block of 16"):
        admin.evict([5, 6, 7])
    with pytest.raises(RequestError, match="less than one block of 16"):
        admin.pin("short")
    with pytest.raises(RequestError, match="no member is called 'worker-9'; members: worker-0, worker-1, worker-2"):
        admin.drain("worker-9")
    with pytest.raises(RequestError, match="say which blocks"):
        admin.evict()
    with pytest.raises(RequestError, match="there is no pin"):
        admin.unpin(prompt(5, 32))
    assert command(kit, "evict", "--hash", "xyz", code=2)["code"] == "invalid_request"
    assert command(kit, "drain", "nobody", code=2)["details"]["worker"] == "nobody"
    assert command(kit, "evict", "--older-than", "soon", code=2)["details"]["field"] == "older_than"
    assert (
        command(kit, "pin", "--min-copies", "0", "--tokens", "1," * 40 + "1", code=2)["details"]["field"]
        == "min_copies"
    )
    tokens = ("--tokens", "1," * 40 + "1")
    for field, arguments in {
        "timeout": ("pin", *tokens, "--timeout", "nan", "--min-copies", "9"),
        "min_copies": ("pin", *tokens, "--min-copies", "5000000000"),
        "tenant": ("evict", *tokens, "--tenant", "\udc80"),
    }.items():
        assert command(kit, *arguments, code=2)["details"]["field"] == field
    with pytest.raises(RequestError, match="timeout"):
        admin.drain("worker-0", timeout_s=float("nan"))
    with pytest.raises(RequestError, match="older_than"):
        admin.evict(older_than_s=float("inf"))


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("1.5s", 1.5), ("10m", 600), ("2h", 7200), ("1d", 86400)])
def test_ages_are_numbers_with_a_unit(text: str, seconds: float) -> None:
    assert parse_age_s(text) == seconds


def test_a_pin_makes_its_copies_survives_a_flood_and_an_eviction_and_ends_with_unpin(
    kit: ClusterKit, admin: Administrator
) -> None:
    wanted = prompt(6, 48)
    report = admin.pin(wanted, min_copies=2)
    assert (report.blocks, report.holders, report.longest_blocks) == (3, (), 0)  # nobody has it yet
    kit.warm(W0, wanted)
    report = admin.pin(wanted, min_copies=2, timeout_s=30)
    assert len(report.holders) == 2
    assert W0 in report.holders
    assert [pin["min_copies"] for pin in command(kit, "pins")["pins"]] == [2]
    wait_until(lambda: kept(kit) == 6, 10, "both holders know the pin")
    for seed in range(20, 32):
        kit.warm(W0, prompt(seed, 80))  # more than the segment holds
    assert held(kit, W0, wanted) == 3
    answer = admin.evict(wanted)
    assert (answer.evicted, answer.kept) == (0, 6)
    back = command(kit, "unpin", "--id", report.pin_id)
    assert back["pin_id"] == report.pin_id
    assert admin.pins() == []
    wait_until(lambda: kept(kit) == 0, 10, "the workers let go")
    assert admin.evict(wanted).evicted == 6


def test_a_tenant_over_its_quota_keeps_only_that_much_cached(kit: ClusterKit) -> None:
    for seed in range(40, 46):
        kit.generate(prompt(seed, 64), max_tokens=1, tenant="greedy")
    held_blocks = [item["tenants"].get("greedy", 0) for item in kit.status()["workers"].values()]
    assert max(held_blocks) <= 6
    assert sum(held_blocks) > 0


def test_a_pin_outlives_the_restart_of_every_metadata_server(kit: ClusterKit, admin: Administrator) -> None:
    wanted = prompt(7, 32)
    kit.warm(W1, wanted)
    admin.pin(wanted, min_copies=1)
    wait_until(lambda: kept(kit) == 2, 10, "the holder knows the pin")
    for pid in kit.cluster.metadata.pids:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: kit.cluster.metadata.restarts == 2, 20, "both servers are started again")
    wait_until(lambda: min_copies(admin) == [1], 20, "the workers bring the pin back")
    assert admin.unpin(wanted).holders in ((W1,), ())


def test_a_killed_worker_comes_back_with_what_it_had_on_disk(kit: ClusterKit, admin: Administrator, disk: Path) -> None:
    admin.evict(older_than_s=0)
    wanted = prompt(11, 64)
    request = kit.request(wanted, max_tokens=5, ignore_eos=True)
    expected = kit.run(kit.follow(kit.routes.redo(request.request_id, W0), request)).tokens
    files = [f"{item.hex()}{SUFFIX}" for item in block_hashes(wanted, kit.info.namespace)]
    seeds = itertools.count(80)

    def on_disk() -> bool:
        kit.warm(W0, prompt(next(seeds), 96))  # which blocks leave for it depends on how fast this machine computes
        return {path.name for path in disk.rglob(f"*{SUFFIX}")} >= set(files)

    wait_until(on_disk, 30, "the prefix has left memory for the disk")
    before = kit.routes.member(W0).key
    kit.signal(W0, signal.SIGKILL)
    wait_until(lambda: came_back(kit, before), 60, "the worker is a member again")
    kit.routes.wait_held(W0, tuple(wanted), 4, 10)
    for route in (
        lambda request: kit.routes.load(request.request_id, W1, holder=W0, blocks=(0, 4)),
        lambda request: kit.routes.redo(request.request_id, W0),
    ):
        request = kit.request(wanted, max_tokens=5, ignore_eos=True)
        served = kit.run(kit.follow(route(request), request))
        assert served.tokens == expected  # whatever of it was computed sooner than it came
    wait_until(lambda: kit.status()["workers"][W0]["disk"]["read"] > 0, 10, "the disk was read")


def test_a_drained_worker_hands_over_what_only_it_holds_and_leaves_for_good(
    kit: ClusterKit, admin: Administrator
) -> None:
    admin.evict(older_than_s=0)
    hot, cold, common = prompt(8, 64), prompt(9, 48), prompt(10, 32)
    for _ in range(2):
        kit.warm(W2, hot)
    kit.warm(W2, cold)
    for worker in (W1, W2, W2):
        kit.warm(worker, common)
    request = kit.request(hot, max_tokens=6, ignore_eos=True)
    expected = kit.run(kit.follow(kit.routes.redo(request.request_id, W2), request)).tokens
    lines: list[str] = []
    report = admin.drain(W2, timeout_s=30, progress=lines.append)
    assert (report.chains, report.moved_chains, report.sole_blocks, report.moved_blocks) == (1, 1, 4, 4)
    assert (report.cut_short, report.move_failures) == (0, {})
    assert lines[0] == "worker-2 takes no new requests"
    assert lines[-1] == "worker-2 has left"
    wait_until(lambda: max(held(kit, W0, hot), held(kit, W1, hot)) == 4, 5, "another worker has the hot chain")
    assert max(held(kit, W0, cold), held(kit, W1, cold)) == 0  # nobody asked for it twice
    heir = W0 if held(kit, W0, hot) else W1
    request = kit.request(hot, max_tokens=6, ignore_eos=True)
    again = kit.run(kit.follow(kit.routes.redo(request.request_id, heir), request))
    assert again.tokens == expected
    assert again.stats is not None
    assert again.stats.tokens_redone == 1
    assert kit.status()["workers"][W2]["state"] == "left"
    with pytest.raises(RequestError, match="no member is called"):
        admin.drain(W2)


def test_draining_under_load_loses_no_request_and_the_last_worker_is_not_drained_by_mistake(
    kit: ClusterKit, admin: Administrator
) -> None:
    async def both() -> list[Any]:
        async_admin = kit.client.admin
        requests = [kit.client.generate(prompt(60 + number, 40), max_tokens=24, ignore_eos=True) for number in range(8)]
        return await kit.gather([async_admin.drain(W1, timeout_s=60), *requests])

    report, *results = kit.run(both())
    assert report.cut_short == 0
    assert all(len(result.tokens) == 24 for result in results)
    with pytest.raises(RequestError, match="worker-0 is the last worker that takes requests"):
        admin.drain(W0)
    assert len(kit.generate(prompt(70, 20), max_tokens=3, ignore_eos=True).tokens) == 3
