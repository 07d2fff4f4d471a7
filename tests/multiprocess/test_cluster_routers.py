"""Two real routers over the same workers: both decide, and the death of one costs no request and no token."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpool.client import AsyncKVPoolClient
from kvpool.cluster.launcher import Cluster
from kvpool.cluster.routers import Routers
from kvpool.config import ClusterConfig, EngineConfig, MetadataConfig, RouterConfig, WorkerConfig
from kvpool.errors import RequestError
from kvpool.request import GenerateResult
from kvpool.types import RequestId
from tests.multiprocess.cluster_kit import ClusterKit, free_ports, wait_until
from workers.engine.reference import PlainModel

pytestmark = pytest.mark.cluster

NAMES = FIRST, SECOND = "router", "router-1"
RESTART_S = 60.0


@pytest.fixture(scope="module")
def kit(tiny_model_path: Path) -> Iterator[ClusterKit]:
    """Two workers with a tiny model, and two routers."""
    engine = EngineConfig(model=str(tiny_model_path), num_blocks=256)
    port = free_ports(3)
    config = ClusterConfig(
        workers=(WorkerConfig(count=2, engine=engine),),
        router=RouterConfig(count=2, metrics_port=port),
        metadata=MetadataConfig(metrics_port=port + 2),
    )
    kit = ClusterKit(Cluster.start(config, name="routers"))
    yield kit
    kit.close()


@pytest.fixture(scope="module")
def plain(tiny_model_path: Path) -> PlainModel:
    """The unchanged model."""
    return PlainModel(tiny_model_path)


def _prompt(seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(100, 40_000) for _ in range(40))


def _ids_of(router: str, count: int, word: str) -> list[str]:
    """Ids of requests that ask ``router`` first."""
    routers = Routers()
    routers.learn(NAMES)
    every = (f"{word}-{number}" for number in range(1000))
    return [name for name in every if routers.order(name, 0.0)[0] == router][:count]


async def _all(kit: ClusterKit, ids: list[str], tokens: int) -> list[GenerateResult]:
    asked = (
        kit.client.generate(_prompt(seed), max_tokens=tokens, ignore_eos=True, request_id=name)
        for seed, name in enumerate(ids)
    )
    return list(await asyncio.gather(*asked))


def _assert_equal(results: list[GenerateResult], plain: PlainModel, tokens: int) -> None:
    for seed, result in enumerate(results):
        assert result.tokens == tuple(item.token for item in plain.greedy(_prompt(seed), tokens))


def _router_of(kit: ClusterKit, request_id: str) -> str:
    found: dict[str, Any] = kit.run(kit.client.explain(request_id))
    return str(found["router"])


def test_requests_spread_over_both_routers_and_nothing_is_counted_twice(kit: ClusterKit, plain: PlainModel) -> None:
    ids = _ids_of(FIRST, 3, "calm") + _ids_of(SECOND, 3, "calm")
    _assert_equal(kit.run(_all(kit, ids, 6)), plain, 6)
    assert [_router_of(kit, name) for name in ids] == [FIRST] * 3 + [SECOND] * 3
    assert {line.count('"router": "') for line in kit.run(kit.client.records())} == {1}
    wait_until(lambda: kit.status()["router"]["goodput"]["met"] == len(ids), 10.0, "every request is counted once")
    status = kit.status()
    assert sum(status["router"]["decisions"].values()) == len(ids)
    assert [status["routers"][name]["share_of_decisions"] for name in NAMES] == [0.5, 0.5]
    assert [status["routers"][name]["members"] for name in NAMES] == [2, 2]
    wait_until(lambda: kit.status()["router"]["counters"].get("outcomes") == len(ids), 10.0, "outcomes find home")
    learned = [kit.cluster.cluster_dir / f"{name}-learned" for name in NAMES]
    wait_until(lambda: all(path.exists() for path in learned), 20.0, "each keeps what it learned")


def _scrape(url: str) -> dict[str, float]:
    """Samples of one exporter, labels in the name as they are written."""
    with urllib.request.urlopen(url, timeout=10.0) as reply:
        lines = [line for line in reply.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_status_tells_where_every_router_and_server_has_its_metrics_and_a_failover_is_seen_there(
    kit: ClusterKit,
) -> None:
    status = kit.status()
    urls = [status["routers"][name]["metrics"] for name in NAMES]
    before = [_scrape(url) for url in urls]
    assert sum(value for name, value in before[0].items() if name.startswith("kvpool_router_decisions_total")) == 3
    assert all(told["kvpool_router_decision_seconds_count"] == 3 for told in before)
    assert all(told['kvpool_router_workers{state="alive"}'] == 2 for told in before)
    assert all(told["kvpool_router_ttft_ratio_count"] == 3 for told in before)
    (server,) = status["metadata"].values()
    assert _scrape(server["metrics"])["kvpool_metadata_watchers"] >= 2
    orphan = _ids_of(SECOND, 1, "failover")[0]
    request = replace(kit.request(_prompt(0), max_tokens=1), request_id=RequestId(orphan))
    kit.run(kit.connection.call(FIRST, "route", request, frozenset()))  # as when the other one is down
    kit.run(kit.connection.call(FIRST, "release", orphan))
    after = _scrape(urls[0])
    assert after['kvpool_router_failovers_total{failed="router"}'] == 1
    assert sum(value for name, value in after.items() if name.startswith("kvpool_router_unfollowed_total")) == 1


def test_a_stopped_router_is_named_at_once_and_what_it_decides_when_it_goes_on_is_not_counted(kit: ClusterKit) -> None:
    router = kit.status()["router"]
    decided, before = sum(router["decisions"].values()), sum(router["unfollowed"].values())
    known = _ids_of(FIRST, 1, "calm")[0]
    orphan = _ids_of(SECOND, 1, "stopped")[0]
    client = AsyncKVPoolClient.of(kit.cluster.connection())  # one that has not been waiting for anybody yet
    kit.run(client.info())
    stopped = kit.signal(SECOND, signal.SIGSTOP)
    try:
        kit.run(client.generate(_prompt(0), max_tokens=2, request_id=orphan))
        status = kit.status()
        assert "silent for" in status["routers"][SECOND]["error"]
        assert status["routers"][FIRST]["decisions"] == sum(status["router"]["decisions"].values())
        assert _router_of(kit, known) == FIRST
        assert all('"router": "router"' in line for line in kit.run(kit.client.records()))
    finally:
        os.kill(stopped, signal.SIGCONT)
    wait_until(lambda: "error" not in kit.status()["routers"][SECOND], 20.0, "it goes on")

    def only_the_followed_count() -> bool:
        router = kit.status()["router"]
        # One that stood still for long knows of no healthy worker at first, and decides nothing that nobody follows.
        unfollowed = sum(router["unfollowed"].values()) - before
        return sum(router["decisions"].values()) == decided + 1 and unfollowed in (0, 1)

    wait_until(only_the_followed_count, 20.0, "what it decided for nobody is not counted")


def test_a_router_killed_under_load_loses_no_request_and_the_other_one_takes_its_traffic(
    kit: ClusterKit, plain: PlainModel
) -> None:
    ids = _ids_of(FIRST, 2, "run") + _ids_of(SECOND, 2, "run")
    orphans = _ids_of(SECOND, 4, "orphan")
    known = _ids_of(FIRST, 1, "calm") + _ids_of(SECOND, 1, "calm")
    pid = kit.pid_of(SECOND)

    async def kill_it_meanwhile() -> list[list[GenerateResult]]:
        running = asyncio.ensure_future(_all(kit, ids, 60))
        await asyncio.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
        return list(await asyncio.gather(running, _all(kit, orphans, 60)))

    before, after = kit.run(kill_it_meanwhile())
    _assert_equal(before, plain, 60)
    _assert_equal(after, plain, 60)
    assert FIRST in {_router_of(kit, name) for name in orphans}
    wait_until(lambda: "decisions" in kit.status()["routers"][SECOND], RESTART_S, "the killed router is back")
    assert kit.pid_of(SECOND) != pid
    assert _router_of(kit, known[0]) == FIRST
    with pytest.raises(RequestError, match=known[1]):  # its record died with its router
        _router_of(kit, known[1])
    status = kit.status()
    rows = [status["routers"][name] for name in NAMES]
    assert sum(row["decisions"] for row in rows) == sum(status["router"]["decisions"].values())
    assert sum(row["share_of_decisions"] for row in rows) == pytest.approx(1.0)
    wait_until(lambda: kit.all_serve(2), RESTART_S, "everybody is known again")
