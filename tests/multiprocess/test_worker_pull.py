"""Loads that no request waits for, evictions by hand and housekeeping, on worker cores that serve meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvpool.errors import CapacityError, IncompatibleError, UnavailableError
from kvpool.hashing import block_hashes
from kvpool.metadata.membership import DirectoryLimits
from kvpool.metadata.pins import Pin, Tending
from kvpool.metadata.state import DirectoryState
from kvpool.plan import Plan, PlanKind
from kvpool.store.selection import Selection
from kvpool.transport.memory import MemoryTransport
from kvpool.types import BlockHash, Tier, WorkerEpoch, WorkerId, WorkerKey
from tests.contract.metadata_support import member
from tests.multiprocess.cluster_kit import wait_until
from tests.multiprocess.worker_core_support import BLOCK_TOKENS, FAKE, Pool
from tests.worker_support import make_request
from workers.core import WorkerCore
from workers.housekeeping import Housekeeper
from workers.puller import MAX_FAILED_LOOKS, MAX_FOLLOWED, PullOrder, PullSource

SECOND_NS = 1_000_000_000


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(FAKE)
    yield made
    made.close()


def chain_of(core: WorkerCore, prompt: Sequence[int], tenant: str = "") -> tuple[BlockHash, ...]:
    return block_hashes(prompt, core._parts.namespace_for(tenant))


def source(pool: Pool, holder: int, blocks: int, epoch: int = 1) -> PullSource:
    end = pool.transports[holder]
    return PullSource(WorkerKey(WorkerId(f"w{holder}"), WorkerEpoch(epoch)), end.name, end.address, blocks)


def test_a_pulled_chain_serves_requests_like_any_other(pool: Pool) -> None:
    first, second = pool.add(), pool.add()
    prompt = pool.prompt(42)
    pool.run(first, make_request("warm", prompt, 1))
    chain = chain_of(first, prompt)
    order = PullOrder("", chain, (source(pool, 0, len(chain)),), 5 * SECOND_NS)
    result = second.pull(order)
    assert (result.blocks, result.held_before, result.held, result.failures) == (10, 0, 10, ())
    request = make_request("again", prompt, 6, ignore_eos=True)
    served = pool.run(second, request)
    assert served.tokens == pool.kind.plain(request)
    assert served.stats is not None
    assert served.stats.tokens_cached == 40
    again = second.pull(order)
    assert (again.held_before, again.held) == (10, 10)
    assert second.counters()["pulled_blocks"] == 10


def test_a_pull_from_a_dead_incarnation_fails_typed_tries_the_next_and_leaves_nothing_behind(pool: Pool) -> None:
    first, second = pool.add(), pool.add()
    prompt = pool.prompt(20)
    pool.run(first, make_request("warm", prompt, 1))
    chain = chain_of(first, prompt)
    dead = source(pool, 0, len(chain), epoch=7)
    result = second.pull(PullOrder("", chain, (dead,), SECOND_NS))
    assert result.held == 0
    assert result.failures
    assert any(name.startswith("pull_failures.") for name in second.counters())
    result = second.pull(PullOrder("", chain, (dead, source(pool, 0, len(chain))), 5 * SECOND_NS))
    assert result.held == len(chain)


def test_a_pull_leaves_room_for_requests_and_takes_what_fits(pool: Pool) -> None:
    first, second = pool.add(num_blocks=32), pool.add(num_blocks=8)
    prompt = pool.prompt(64)
    pool.run(first, make_request("warm", prompt, 1))
    chain = chain_of(first, prompt)
    result = second.pull(PullOrder("", chain, (source(pool, 0, len(chain)),), 5 * SECOND_NS))
    assert result.blocks == 16
    assert result.held == 7
    request = make_request("big", pool.prompt(31), 1)  # as much as the whole segment
    assert pool.run(second, request).tokens == pool.kind.plain(request)


def test_a_pull_whose_room_a_peer_pins_at_that_moment_takes_nothing_and_leaves_nothing(pool: Pool) -> None:
    first, second = pool.add(), pool.add(num_blocks=8)
    prompt, other = pool.prompt(24), pool.prompt(24)
    pool.run(first, make_request("warm", prompt, 1))
    pool.run(second, make_request("here", prompt[:8], 1))
    pool.run(second, make_request("other", other, 1))
    chain = chain_of(first, prompt)
    reader = WorkerKey(WorkerId("reader"), WorkerEpoch(1))
    leases: list[int] = []
    reserve = second._puller._reserve

    def pinning() -> int:  # between the question for room and the answer
        leases.append(second.segment.pin(reader, chain_of(second, other))[0])
        return reserve()

    second._puller._reserve = pinning
    result = second.pull(PullOrder("", chain, (source(pool, 0, len(chain)),), 5 * SECOND_NS))
    assert (result.held_before, result.held, result.failures) == (2, 2, (CapacityError.code,))
    second.segment.unpin(leases.pop())
    second._puller._reserve = reserve
    assert second.pull(PullOrder("", chain, (source(pool, 0, len(chain)),), 5 * SECOND_NS)).held == 6


def test_a_closed_worker_refuses_to_pull(pool: Pool) -> None:
    core = pool.add()
    core.close()
    with pytest.raises(UnavailableError):
        core.pull(PullOrder("", chain_of(core, pool.prompt(8)), (), SECOND_NS))


def test_pulls_and_evictions_beside_running_requests_change_no_token(pool: Pool) -> None:
    first, second = pool.add(num_blocks=64), pool.add(num_blocks=24)
    prompts = [pool.prompt(length) for length in (9, 18, 27, 36, 45)]
    for number, prompt in enumerate(prompts):
        pool.run(first, make_request(f"warm-{number}", prompt, 1))
    stop = threading.Event()

    def disturb() -> None:
        number = 0
        while not stop.is_set():
            chain = chain_of(first, prompts[number % len(prompts)])
            second.pull(PullOrder("", chain, (source(pool, 0, len(chain)),), SECOND_NS))
            second.evict(Selection(chain=chain[:2]))
            number += 1

    with ThreadPoolExecutor(1) as threads:
        disturbance = threads.submit(disturb)
        try:
            for turn in range(40):
                request = make_request(f"r{turn}", prompts[turn % len(prompts)], 5, ignore_eos=True)
                assert pool.run(second, request).tokens == pool.kind.plain(request)
        finally:
            stop.set()
        disturbance.result(20)
    assert second.counters()["pulled_blocks"] > 0


def test_an_eviction_by_hand_counts_what_stays_and_why(pool: Pool) -> None:
    core = pool.add()
    prompt, other = pool.prompt(20), pool.prompt(12)
    pool.run(core, make_request("a", prompt, 1))
    pool.run(core, make_request("b", [*prompt[:8], *other], 1))
    pool.run(core, make_request("c", other, 1))
    chain = chain_of(core, prompt)
    lease, _ = core.segment.pin(WorkerKey(WorkerId("reader"), WorkerEpoch(1)), chain[3:4])
    purge, _ = core.evict(Selection(chain=chain))
    assert ([v.block_hash for v in purge.victims], purge.in_use, purge.needed) == ([chain[4]], 1, 3)
    core.segment.unpin(lease)
    purge, _ = core.evict(Selection(chain=chain))
    assert ([v.block_hash for v in purge.victims], purge.in_use, purge.needed) == ([chain[3], chain[2]], 0, 2)
    assert core.evict(Selection(tenant="nobody"))[0].victims == ()
    purge, _ = core.evict(Selection(idle_ns=0))
    assert len(purge.victims) == 2 + 3 + 3
    assert core.held_hashes() == []


class DirectoryInProcess:
    """A directory without a wire; the segments' publishers are told to it by hand."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.state = DirectoryState(1, DirectoryLimits(), 0)
        self.now_ns = 0
        for core, transport in zip(pool.cores, pool.transports, strict=True):
            info = member(str(core.key.worker_id), core.key.worker_epoch, data_address=transport.address)
            self.state.join(info, 0)

    def tend(self, key: WorkerKey, hashes: Sequence[BlockHash], pins_digest: int, pins: Sequence[Pin] = ()) -> Tending:
        for core in self.pool.cores:
            self.state.index.begin_snapshot(core.key)
            self.state.index.stored(core.key, Tier.HOST, core.held_hashes())
            self.state.index.end_snapshot(core.key)
        self.now_ns += SECOND_NS
        return self.state.tend(key, hashes, pins_digest, pins, self.now_ns)


def houses(pool: Pool) -> tuple[DirectoryInProcess, list[Housekeeper]]:
    assert isinstance(pool.transports[0], MemoryTransport)
    directory = DirectoryInProcess(pool)
    return directory, [Housekeeper(core.key, directory, core.segment, 16, core.pull) for core in pool.cores]


def test_housekeeping_makes_the_copies_that_a_pin_asks_for_and_protects_them(pool: Pool) -> None:
    cores = [pool.add(num_blocks=32) for _ in range(3)]
    prompt = pool.prompt(21)
    pool.run(cores[0], make_request("warm", prompt, 1))
    chain = chain_of(cores[0], prompt)
    directory, keepers = houses(pool)
    directory.state.merge_pins([Pin.of("", chain, 2, 5)])
    for _ in range(2):
        for keeper in keepers:
            keeper.round()
    (view,) = directory.state.merge_pins([])
    assert len(view.holders) == 2
    assert sum(core.segment.match(chain) != [] for core in cores) == 2
    for number in range(12):  # more than the segments hold
        for core in cores:
            pool.run(core, make_request(f"cold-{number}", pool.prompt(30), 1))
    assert sum(len(core.segment.match(chain)) for core in cores) == 2 * len(chain)
    assert directory.state.merge_pins([Pin(view.pin.pin_id, "", (), 0, 6)]) == ()
    for keeper in keepers:
        keeper.round()
    assert all(core.segment.counts().kept == 0 for core in cores)
    assert keepers[0].status()["pins"] == 0


def test_housekeeping_learns_which_copies_live_elsewhere_and_those_leave_first(pool: Pool) -> None:
    first, second = pool.add(num_blocks=16), pool.add(num_blocks=9)
    shared, own = pool.prompt(25), pool.prompt(25)
    for core in (first, second):
        pool.run(core, make_request("shared", shared, 1))
    pool.run(first, make_request("own", own, 1))
    _, keepers = houses(pool)
    for keeper in keepers:
        keeper.round()
    assert first.segment.counts().spare + second.segment.counts().spare == 6  # each block has one keeper
    spare = first.segment.counts().spare
    before = first.segment.counts().cached
    pool.run(first, make_request("more", pool.prompt(4 * BLOCK_TOKENS * 2), 1))
    assert first.segment.counts().cached >= before
    gone = 6 - len(first.segment.match(chain_of(first, shared)))
    assert gone >= min(1, spare)
    assert len(first.segment.match(chain_of(first, own))) == 6


def following(pool: Pool, blocks: int, deadline_ns: int) -> Plan:
    piece = pool.slice(0, 0, blocks)
    return Plan(PlanKind.LOAD, (piece,), load_deadline_ns=deadline_ns, stall_ns=SECOND_NS, patient=True)


def test_a_prompt_is_followed_while_its_holder_computes_it_and_no_failure_is_reported(pool: Pool) -> None:
    first, second = pool.add(), pool.add()
    prompt = pool.prompt(42)
    request = make_request("prompt", prompt, 1)
    with ThreadPoolExecutor(1) as threads:
        followed = threads.submit(second.follow, request, following(pool, 10, 20 * SECOND_NS), "d1")
        wait_until(lambda: second.counters().get("pulls", 0) > 1, 10.0, "it looks before anything is there")
        pool.run(first, request)
        result = followed.result(20)
    assert (result.held, result.failures) == (10, ())
    assert not [name for name in second.counters() if name.startswith("pull_failures.")]
    samples = [sample for item in pool.publishers[1].reports for sample in item.loads]
    assert not [sample for sample in samples if sample.failure is not None]


def test_following_ends_at_its_deadline_with_the_request_and_with_the_worker(pool: Pool) -> None:
    pool.add()
    second = pool.add()
    request = make_request("never", pool.prompt(42), 1)
    assert second.follow(request, following(pool, 10, SECOND_NS // 10), "late").held == 0
    patient = following(pool, 10, 60 * SECOND_NS)
    with ThreadPoolExecutor(2) as threads:
        first, other = (threads.submit(second.follow, request, patient, name) for name in ("a", "b"))
        wait_until(lambda: second.counters().get("prompts_followed", 0) == 3, 10.0, "both are followed")
        second.unfollow("a")
        assert first.result(10).held == 0
        assert not other.done()
        second.close()
        assert other.result(10).held == 0


def test_a_call_to_end_that_overtakes_the_one_to_begin_counts_too(pool: Pool) -> None:
    pool.add()
    second = pool.add()
    request = make_request("never", pool.prompt(42), 1)
    second.unfollow("d")
    assert second.follow(request, following(pool, 10, 60 * SECOND_NS), "d").held == 0
    assert not second.counters().get("pulls", 0)


def test_a_follower_gives_up_a_holder_that_fails_again_and_again(pool: Pool) -> None:
    pool.add()
    second = pool.add()
    request = make_request("prompt", pool.prompt(42), 1)
    plan = following(pool, 10, 60 * SECOND_NS)
    plan = plan._replace(loads=(plan.loads[0]._replace(transport="another"),))
    result = second.follow(request, plan, "d")
    assert (result.held, result.failures) == (0, (IncompatibleError.code,))
    assert second.counters()["pulls"] == MAX_FAILED_LOOKS


def test_only_so_many_prompts_are_followed(pool: Pool) -> None:
    pool.add()
    second = pool.add()
    request = make_request("never", pool.prompt(42), 1)
    patient = following(pool, 10, 60 * SECOND_NS)
    with ThreadPoolExecutor(MAX_FOLLOWED) as threads:
        running = [threads.submit(second.follow, request, patient, f"d{number}") for number in range(MAX_FOLLOWED)]
        wait_until(lambda: second.counters().get("prompts_followed", 0) == MAX_FOLLOWED, 20.0, "all are followed")
        with pytest.raises(CapacityError):
            second.follow(request, patient, "one more")
        second.close()
        assert [item.result(10).held for item in running] == [0] * MAX_FOLLOWED
