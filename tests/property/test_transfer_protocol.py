"""Reader and holder of the UCX transport over a hostile network (`tests.property.transfer_world`).

Checked after every step: bytes land only in pages of reads that are not terminal; what counts as arrived is right.
Checked at the end: every read is terminal, every read lease released, counts at zero.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.errors import StallError
from kvpool.transport.base import BlockWant, Peer, ReadRequest, ReadState
from kvpool.transport.handle import ReadTask
from kvpool.transport.ucx.settings import UcxOptions
from tests.property.transfer_world import BLOCK, BLOCKS, HOLDER, LEASE_NS, MS, Faults, World, crawl, name_of, slow_world


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.booleans(), st.booleans())
def test_no_wrong_or_late_byte_and_no_lease_or_read_is_left(seed: int, one_host: bool, framed: bool) -> None:
    world = World(seed, one_host=one_host, framed=framed)
    for _ in range(300):
        roll = world.rng.random()
        if roll < 0.10:
            world.start_read()
        elif roll < 0.13 and world.tasks:
            world.rng.choice(world.tasks).cancel()
        elif roll < 0.14:
            world.reader.forget(HOLDER, world.now_ns)
        elif roll < 0.16:
            world.net.stopped = not world.net.stopped
        world.step()
    world.net.healed, world.net.stopped = True, False
    steps = 0
    while world.tasks or world.store.leases or world.server.leases:
        world.step()
        steps += 1
        assert steps < 20_000, f"left: {[task.state for task in world.tasks]}, leases {world.store.leases}"
    assert world.reader.in_flight_bytes == 0
    assert world.reader.quarantined_reads == 0
    assert world.reader.frames.staging_bytes == world.server.frames.staging_bytes == 0, "staging is lost"
    world.start_read()
    while world.tasks:
        world.step()
        steps += 1
        assert steps < 40_000, "a read after the faults does not end"


def test_a_receive_that_outlives_its_connection_keeps_its_pages_quarantined() -> None:
    world = World(1)
    world.faults.drop = world.faults.double = world.faults.cut = world.faults.flip = world.faults.die = 0
    world.faults.stuck = 1
    world.start_read()
    task = world.tasks[0]
    while not world.net.landing:
        world.step()
    world.net.stopped = True
    while task.state is not ReadState.CANCELLING:
        world.step()
    for _ in range(2000):
        world.step()
    assert not task.done(), "a read ended although a receive was open"
    assert world.reader.quarantined_reads == 1
    assert isinstance(task.error, StallError)
    world.net.healed, world.net.stopped = True, False
    while not task.done():
        world.step()
    world.step()
    assert task.state is ReadState.FAILED
    for _ in range(100):
        world.step()
    assert world.reader.quarantined_reads == 0


@pytest.mark.parametrize("steps_before_silence", [0, 3, 6, 12])
def test_silence_ends_a_read_at_its_stall_bound_whatever_its_deadline(steps_before_silence: int) -> None:
    world = World(2)
    world.faults = world.net.faults = Faults(random.Random(0))
    for name in ("drop", "double", "cut", "flip", "die", "stuck"):
        setattr(world.faults, name, 0)
    world.start_read()
    task = world.tasks[0]
    for _ in range(steps_before_silence):
        world.step()
    assert not task.done()
    world.net.stopped = True
    since_ns = world.now_ns
    while not task.done():
        world.step()
    assert isinstance(task.error, StallError)
    assert world.now_ns - since_ns <= task.request.stall_ns + 30 * MS


@pytest.mark.parametrize("one_host", [False, True])
@pytest.mark.parametrize("seed", [0, 7, 2**31])
def test_without_faults_every_read_is_done(seed: int, one_host: bool) -> None:
    world = World(seed, one_host=one_host)
    for name in ("drop", "double", "cut", "flip", "die", "stuck"):
        setattr(world.faults, name, 0)
    for _ in range(20):
        numbers = sorted(world.rng.sample(range(BLOCKS), 20))
        wants = tuple(BlockWant(name_of(n), n * BLOCK) for n in numbers)
        request = ReadRequest(Peer(HOLDER, b"server"), wants, 60_000 * MS, 60_000 * MS)
        task = ReadTask(request, BLOCK, lambda: world.now_ns, lambda _: None)
        world.lane_of[id(task)] = 0
        world.tasks.append(task)
        world.reader.submit(task, world.now_ns)
        while not task.done():
            world.step()
        assert task.state is ReadState.DONE


def test_what_a_fence_holds_does_not_starve_other_peers() -> None:
    world = World(1)
    for name in ("drop", "double", "cut", "flip", "die"):
        setattr(world.faults, name, 0)
    world.faults.stuck = 1
    world.reader._options = UcxOptions(process_window_bytes=BLOCK)
    world.start_read()
    stuck = world.tasks[0]
    while not world.net.landing:
        world.step()
    world.net.stopped = True
    while not world.reader._fencing:
        world.step()
    world.net.stopped = False
    wants = (BlockWant(name_of(1), 3 * BLOCKS * BLOCK - BLOCK),)
    task = ReadTask(
        ReadRequest(Peer(HOLDER, b"server"), wants, 2000 * MS, 500 * MS), BLOCK, lambda: world.now_ns, lambda _: None
    )
    world.lane_of[id(task)] = 2
    world.tasks.append(task)
    world.free_lanes.remove(2)
    world.reader.submit(task, world.now_ns)
    while not task.done():
        world.step()
    assert task.state is ReadState.DONE, task.error
    assert not stuck.done()


@pytest.mark.parametrize("one_host", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_giving_one_read_up_costs_the_others_on_its_link_nothing(seed: int, one_host: bool) -> None:
    world = World(seed, one_host=one_host)
    for name in ("drop", "double", "cut", "flip", "die", "stuck"):
        setattr(world.faults, name, 0)
    tasks = []
    for lane in range(3):
        wants = tuple(BlockWant(name_of(n), (lane * BLOCKS + n) * BLOCK) for n in range(BLOCKS))
        request = ReadRequest(Peer(HOLDER, b"server"), wants, 60_000 * MS, 60 * MS)
        task = ReadTask(request, BLOCK, lambda: world.now_ns, lambda task: world.reader.cancel(task, world.now_ns))
        world.lane_of[id(task)] = lane
        world.tasks.append(task)
        world.reader.submit(task, world.now_ns)
        tasks.append(task)
    goal_bytes = world.rng.randrange(BLOCKS // 2) * BLOCK
    while tasks[0].progress().bytes_arrived < goal_bytes:
        world.step()
    tasks[0].cancel()
    while world.tasks:
        world.step()
    assert [task.state for task in tasks] == [ReadState.CANCELLED, ReadState.DONE, ReadState.DONE]


@pytest.mark.parametrize("one_host", [False, True])
def test_a_slow_read_outlives_many_leases_and_loses_none(one_host: bool) -> None:
    world = slow_world(one_host=one_host)
    while world.tasks:
        crawl(world, helpers=True)
    assert world.now_ns > 3 * LEASE_NS, "not slow enough to prove anything"
    assert world.store.ran_out == 0
    assert world.reader.reads_failed == world.reader.corrupt_blocks == 0
    while world.server.leases:
        crawl(world, helpers=True)


@pytest.mark.parametrize("one_host", [False, True])
def test_a_reader_that_fell_silent_costs_one_lease_and_no_more_than_its_deadline(one_host: bool) -> None:
    world = slow_world(one_host=one_host, deadline_ns=20 * LEASE_NS)
    while not world.store.leases:
        crawl(world)
    started_ns = world.now_ns
    while world.store.leases:
        crawl(world, reader=False)
        assert world.now_ns <= started_ns + 2 * LEASE_NS
    assert world.store.ran_out == 2, "one for each open pull"
    while world.server.leases:
        crawl(world, reader=False)
        assert world.now_ns <= started_ns + 21 * LEASE_NS
