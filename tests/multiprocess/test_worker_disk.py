"""A worker with a disk tier: what was evicted comes back from disk, also after a restart, and never changes a token.

With the fake engine, whose output depends on every byte of KV, and with the torch engine, tokens and log-probabilities.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvpool.config import StoreConfig, WorkerConfig
from kvpool.hashing import block_hashes
from kvpool.plan import REDO, LoadSlice, Plan, PlanKind
from kvpool.reports import WorkerReport
from kvpool.request import GenerateRequest
from kvpool.store.disk import DiskConfig, DiskTier
from kvpool.store.selection import Selection
from kvpool.types import BlockHash, Tier, WorkerEpoch, WorkerId, WorkerKey
from tests.engine_parity import save_random_model, tiny_llama
from tests.multiprocess.cluster_kit import wait_until
from tests.multiprocess.worker_core_support import BLOCK_TOKENS, FAKE, Pool, load_plan, make_kind
from tests.worker_support import make_request
from workers.assemble import WorkerSpec, _open_disk
from workers.core import WorkerCore
from workers.disk_loads import DISK, DiskSpeed, with_disk


@dataclass
class Disks:
    """Makes disk tiers for the workers of a pool."""

    path: Path
    pool: Pool
    announced: set[BlockHash] = field(default_factory=set)

    def open(self, name: str = "w", max_blocks: int = 1000) -> DiskTier:
        layout = self.pool.kind.make().layout
        room = max_blocks * (layout.block_bytes + 600)
        config = DiskConfig(self.path / name, room, layout.block_bytes, layout.fingerprint())
        return DiskTier(config, on_stored=self.announced.update, on_removed=self.announced.difference_update)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tiny_llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=["fake over memory", "torch over ucx"])
def pool(request: pytest.FixtureRequest, llama: Path) -> Iterator[Pool]:
    made = Pool(make_kind(request.param, llama))
    yield made
    made.close()


@pytest.fixture
def fake_pool() -> Iterator[Pool]:
    made = Pool(FAKE)
    yield made
    made.close()


def disk_of(core: WorkerCore) -> DiskTier:
    assert core._parts.disk is not None
    return core._parts.disk


def flood(pool: Pool, core: WorkerCore, prompts: int = 5) -> None:
    """Push everything else out of a small segment, and wait until it is on disk."""
    for number in range(prompts):
        pool.run(core, make_request(f"flood-{number}", pool.prompt(28), 1))
    settle(core)


def settle(core: WorkerCore) -> None:
    wait_until(lambda: not disk_of(core)._queued, 10, "what was evicted is on disk")


def blocks_by_source(reports: list[WorkerReport]) -> Counter[object]:
    blocks: Counter[object] = Counter()
    for sample in (sample for report in reports for sample in report.loads):
        blocks[sample.holder, sample.tier, sample.failure] += sample.blocks
    return blocks


def ask(name: str, prompt: list[int]) -> GenerateRequest:
    return make_request(name, prompt, 6, ignore_eos=True, logprobs=1)


def test_what_was_evicted_comes_back_from_disk_with_equal_tokens_and_log_probabilities(
    pool: Pool, tmp_path: Path
) -> None:
    core = pool.add(num_blocks=12, disk=Disks(tmp_path, pool).open())
    prompt = pool.prompt(30)
    first = pool.run(core, ask("first", prompt))
    flood(pool, core)
    assert core.segment.match(chain_of(core, prompt)) == []
    again = pool.run(core, ask("again", prompt))
    assert again.tokens == first.tokens == pool.kind.plain(ask("plain", prompt))
    assert [item.logprob for item in again.logprobs] == pytest.approx([item.logprob for item in first.logprobs])
    assert again.stats is not None
    assert (again.stats.tokens_loaded, again.stats.tokens_redone) == (28, 2)
    assert core.status()["disk"]["read"] == 7
    own = (core._parts.key, Tier.DISK, None)
    assert pool.publishers[0].wait_for(lambda reports: blocks_by_source(reports) == {own: 7}), "routers hear of reads"
    flood(pool, core)
    assert pool.run(core, ask("third", prompt)).tokens == first.tokens


def test_a_restarted_worker_goes_on_with_the_files_of_the_one_before(pool: Pool, tmp_path: Path) -> None:
    disks = Disks(tmp_path, pool)
    core = pool.add(num_blocks=12, disk=disks.open())
    prompt = pool.prompt(30)
    first = pool.run(core, ask("first", prompt))
    flood(pool, core)
    core.close()
    core = pool.add(num_blocks=12, disk=disks.open())
    assert set(chain_of(core, prompt)[:7]) <= set(core.disk_hashes())
    again = pool.run(core, ask("again", prompt))
    assert again.tokens == first.tokens
    assert [item.logprob for item in again.logprobs] == pytest.approx([item.logprob for item in first.logprobs])
    assert again.stats is not None
    assert again.stats.tokens_redone == 2


def test_a_damaged_file_costs_a_redo_and_nothing_else(pool: Pool, tmp_path: Path) -> None:
    core = pool.add(num_blocks=12, disk=Disks(tmp_path, pool).open())
    prompt = pool.prompt(30)
    first = pool.run(core, ask("first", prompt))
    flood(pool, core)
    chain = chain_of(core, prompt)
    path = tmp_path / "w" / chain[3].hex()[:2] / f"{chain[3].hex()}.kvb"
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 0x40
    path.write_bytes(raw)
    again = pool.run(core, ask("again", prompt))
    assert again.tokens == first.tokens
    assert again.stats is not None
    assert again.stats.tokens_loaded == 3 * BLOCK_TOKENS
    assert again.stats.load_failures == ("integrity",)
    assert core.status()["disk"]["corrupt"] == 1
    assert not path.exists()


def test_a_plan_may_take_the_front_from_disk_and_the_rest_from_a_peer(pool: Pool, tmp_path: Path) -> None:
    core, peer = pool.add(num_blocks=14, disk=Disks(tmp_path, pool).open()), pool.add()
    prompt = pool.prompt(46)
    pool.run(core, ask("front", prompt[:25]))
    flood(pool, core)
    expected = pool.run(peer, ask("whole", prompt)).tokens
    served = pool.run(core, ask("both", prompt), load_plan(pool.slice(1, 6, 11)))
    assert served.tokens == expected
    assert served.stats is not None
    assert served.stats.tokens_loaded == 44
    assert core.counters()["bytes_loaded"] == 11 * core.segment.config.block_bytes


def test_a_plan_may_leave_the_own_disk_alone(pool: Pool, tmp_path: Path) -> None:
    core, peer = pool.add(num_blocks=14, disk=Disks(tmp_path, pool).open()), pool.add()
    prompt = pool.prompt(30)
    first = pool.run(core, ask("first", prompt))
    pool.run(peer, ask("peer", prompt))
    flood(pool, core)
    got = pool.run(core, ask("loaded", prompt), load_plan(pool.slice(1, 0, 7))._replace(own_disk=False))
    assert got.tokens == first.tokens
    assert got.stats is not None
    assert got.stats.tokens_loaded == 28
    assert core.status()["disk"]["read"] == 0
    flood(pool, core)
    alone = pool.run(core, ask("alone", prompt), REDO._replace(own_disk=False))  # there is nobody else to ask
    assert alone.tokens == first.tokens
    assert core.status()["disk"]["read"] == 7


def test_what_a_peer_asks_for_in_vain_is_promoted_for_the_next_one(pool: Pool, tmp_path: Path) -> None:
    core, first, second = pool.add(num_blocks=16, disk=Disks(tmp_path, pool).open()), pool.add(), pool.add()
    prompt = pool.prompt(30)
    expected = pool.run(core, ask("warm", prompt)).tokens
    flood(pool, core, 8)
    early = pool.run(first, ask("early", prompt), load_plan(pool.slice(0, 0, 7)))
    assert early.tokens == expected
    wait_until(lambda: len(core.segment.match(chain_of(core, prompt))) >= 7, 10, "the disk's blocks are in memory")
    late = pool.run(second, ask("late", prompt), load_plan(pool.slice(0, 0, 7)))
    assert late.tokens == expected
    assert late.stats is not None
    assert late.stats.tokens_loaded == 28
    assert core.counters()["promotions"] == 1


def test_pinned_blocks_on_disk_outlive_an_eviction_by_hand(fake_pool: Pool, tmp_path: Path) -> None:
    disks = Disks(tmp_path, fake_pool)
    core = fake_pool.add(num_blocks=12, disk=disks.open())
    prompt = fake_pool.prompt(30)
    fake_pool.run(core, ask("first", prompt))
    flood(fake_pool, core)
    chain = chain_of(core, prompt)
    core.segment.set_wanted(chain[:3])
    purge, removed = core.evict(Selection(chain=chain[:2]))
    assert (len(purge.victims), purge.kept, removed) == (0, 3, 5)
    assert set(chain) & disks.announced == set(chain[:3])
    core.segment.set_wanted(())
    assert core.evict(Selection(chain=chain[:2]))[1] == 3


def test_evicting_by_hand_reaches_the_disk(fake_pool: Pool, tmp_path: Path) -> None:
    disks = Disks(tmp_path, fake_pool)
    core = fake_pool.add(num_blocks=12, disk=disks.open())
    prompt = fake_pool.prompt(30)
    fake_pool.run(core, ask("first", prompt))
    flood(fake_pool, core)
    chain = chain_of(core, prompt)
    assert set(chain) <= disks.announced
    purge, removed = core.evict(Selection(chain=chain[:2]))
    assert (len(purge.victims), removed) == (0, 8)  # and the block of its answer that continues it
    assert not set(chain) & disks.announced
    again = fake_pool.run(core, ask("again", prompt))
    assert again.stats is not None
    assert again.stats.tokens_redone == 30


def test_random_requests_over_a_small_memory_and_a_small_disk_with_damage_equal_the_plain_run(
    fake_pool: Pool, tmp_path: Path
) -> None:
    rng = Random(11)
    disks = Disks(tmp_path, fake_pool)
    core = fake_pool.add(num_blocks=16, disk=disks.open(max_blocks=40))
    prompts = [fake_pool.prompt(rng.randrange(8, 50)) for _ in range(12)]
    loaded = 0
    for number in range(120):
        request = make_request(f"r{number}", rng.choice(prompts), rng.randrange(1, 6), ignore_eos=True)
        served = fake_pool.run(core, request)
        assert served.tokens == fake_pool.kind.plain(request)
        assert served.stats is not None
        loaded += served.stats.tokens_loaded
        files = sorted(tmp_path.glob("w/*/*.kvb"))
        if files and rng.random() < 0.2:
            damage(rng.choice(files), rng)
        if number == 60:
            settle(core)
            core.close()
            core = fake_pool.add(num_blocks=16, disk=disks.open(max_blocks=40))
    assert loaded > 0
    settle(core)
    assert disks.announced == set(core.disk_hashes())


def damage(path: Path, rng: Random) -> None:
    try:
        raw = bytearray(path.read_bytes())
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        path.write_bytes(raw[: rng.choice([len(raw), len(raw) // 2])])
    except FileNotFoundError:
        return  # it left meanwhile


def chain_of(core: WorkerCore, prompt: list[int]) -> list[BlockHash]:
    return list(block_hashes(prompt, core._parts.namespace_for("")))


def test_a_plan_with_disk_covers_what_the_plan_covered() -> None:
    me, peer = WorkerKey(WorkerId("me"), WorkerEpoch(1)), WorkerKey(WorkerId("peer"), WorkerEpoch(1))
    piece = LoadSlice(4, 20, peer, "ucx", b"a", Tier.HOST)
    plan = Plan(PlanKind.SPLIT, (piece,), 64, load_deadline_ns=10**9, stall_ns=10**8, predicted_load_ns=10**7)
    mixed = with_disk(plan, 2, 9, me, 5 * 10**7)
    assert [(part.start, part.stop, part.holder) for part in mixed.loads] == [(2, 9, me), (9, 20, peer)]
    assert (mixed.kind, mixed.split_tokens, mixed.predicted_load_ns) == (PlanKind.LOAD, None, 5 * 10**7)
    inside = with_disk(plan, 6, 9, me, 1)
    assert [(part.start, part.stop) for part in inside.loads] == [(4, 6), (6, 9), (9, 20)]
    alone = with_disk(REDO, 0, 3, me, 1)
    assert [(part.start, part.stop, part.transport, part.tier) for part in alone.loads] == [(0, 3, DISK, Tier.DISK)]
    assert alone.load_deadline_ns > 0
    assert alone.stall_ns > 0


def test_the_speed_of_the_disk_is_learned() -> None:
    speed = DiskSpeed()
    before = speed.expect_ns(10**6)
    for _ in range(30):
        speed.observe(10**6, 22_000_000)
    assert before < 10**7 < speed.expect_ns(10**6) < 3 * 10**7


def test_a_worker_whose_disk_cannot_be_used_serves_and_its_status_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    store = StoreConfig(disk_path=str(tmp_path / "file"))
    spec = WorkerSpec(WorkerId("w0"), WorkerConfig(store=store), (), 1)
    publisher: Any = None  # nobody is told of a tier that there is not
    disk, why = _open_disk(spec, FAKE.make().layout, publisher)
    assert disk is None
    assert "cannot be used" in why
    pool = Pool(FAKE)
    core = pool.add()
    core._parts = replace(core._parts, disk_error=why)
    assert core.status()["disk"] == {"error": why}
    pool.close()
