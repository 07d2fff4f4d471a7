"""Membership, epochs, suspicion and event streams of the directory, on a clock of numbers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from kvpool.errors import CapacityError, IncompatibleError, RequestError, StaleError
from kvpool.metadata.events import (
    BlockAction,
    BlockEvent,
    BlocksChanged,
    EventBatch,
    Heartbeat,
    LeaveReason,
    MemberChanged,
    MemberGone,
)
from kvpool.metadata.membership import DirectoryLimits
from kvpool.metadata.metrics import metrics_of
from kvpool.metadata.state import DirectoryState
from kvpool.reports import WorkerLoad, WorkerReport
from kvpool.types import BlockHash, MemberInfo, MemberState, Tier, WorkerId, WorkerKey
from tests.contract.metadata_support import hashes, member

LIMITS = DirectoryLimits(
    lease_ns=1000, probe_backoff_ns=100, max_probe_backoff_ns=450, suspicion_memory_ns=5000, max_workers=8
)
EPOCH = 77


def _directory(limits: DirectoryLimits = LIMITS) -> DirectoryState:
    return DirectoryState(EPOCH, limits, 0)


def _batch(key: WorkerKey, sequence: int, blocks: list[BlockHash] | None = None, **flags: Any) -> EventBatch:
    events = () if blocks is None else (BlockEvent(BlockAction.STORED, Tier.DEVICE, tuple(blocks)),)
    return EventBatch(key, flags.pop("directory_epoch", EPOCH), sequence, events, **flags)


def _joined(state: DirectoryState, info: MemberInfo, blocks: list[BlockHash] | None = None) -> WorkerKey:
    state.join(info, 0)
    state.publish(_batch(info.key, 1, blocks, snapshot_begin=True, snapshot_end=True))
    state.check()
    return info.key


def _reason(error: StaleError) -> object:
    return error.details["reason"]


def test_a_join_is_announced_once_and_its_repetition_keeps_the_blocks() -> None:
    state, chain = _directory(), hashes(3)
    welcome, deltas = state.join(member(), 0)
    assert (welcome.directory_epoch, welcome.lease_ns, welcome.applied_sequence) == (EPOCH, 1000, None)
    assert [delta.change for delta in deltas] == [MemberChanged(member(), MemberState.ALIVE)]
    state.publish(_batch(member().key, 1, chain, snapshot_begin=True, snapshot_end=True))
    welcome, deltas = state.join(member(), 10)
    assert (welcome.applied_sequence, deltas) == (1, ())
    assert state.lookup(chain) == {member().key: {Tier.DEVICE: 3}}


def test_a_member_expires_exactly_at_the_end_of_its_lease() -> None:
    state, chain = _directory(), hashes(3)
    key = _joined(state, member(), chain)
    for now_ns in range(0, 2000, 250):
        state.tick(now_ns)
        if now_ns == 750:
            state.heartbeat(Heartbeat(key, EPOCH, None), now_ns)
        assert bool(state.members()) == (now_ns < 1750)
    assert state.lookup(chain) == {}
    with pytest.raises(StaleError) as caught:
        state.heartbeat(Heartbeat(key, EPOCH, None), 1800)
    assert _reason(caught.value) == "not_a_member"
    welcome, _ = state.join(member(), 1800)
    assert welcome.applied_sequence is None


def test_lookups_pin_and_renew_nothing() -> None:
    state, chain = _directory(), hashes(3)
    _joined(state, member(), chain)
    for now_ns in range(0, 1100, 50):
        state.lookup(chain)
        state.tick(now_ns)
    assert state.members() == ()


def test_a_paused_directory_does_not_punish_its_members() -> None:
    state = _directory()
    key = _joined(state, member())
    state.tick(100)
    assert state.tick(50_000) == ()
    state.heartbeat(Heartbeat(key, EPOCH, None), 50_010)
    assert len(state.members()) == 1
    gone = [delta for now_ns in range(50_100, 52_000, 100) for delta in state.tick(now_ns)]
    assert [delta.change for delta in gone] == [MemberGone(key, LeaveReason.EXPIRED)]


def test_a_new_epoch_replaces_the_old_in_one_step_and_every_old_call_is_refused() -> None:
    state, chain = _directory(), hashes(3)
    old = _joined(state, member(epoch=5), chain)
    _, deltas = state.join(member(epoch=6), 0)
    assert [type(delta.change) for delta in deltas] == [MemberGone, MemberChanged]
    assert state.lookup(chain) == {}
    reader = _joined(state, member("reader"))
    calls = [
        lambda: state.join(member(epoch=5), 0),
        lambda: state.heartbeat(Heartbeat(old, EPOCH, None), 0),
        lambda: state.publish(_batch(old, 2, chain)),
        lambda: state.report(WorkerReport(old, 1, WorkerLoad())),
        lambda: state.suspect(reader, old, "stall", token=1, now_ns=0),
        lambda: state.suspect(old, reader, "stall", token=1, now_ns=0),
        lambda: state.leave(old),
    ]
    for call in calls:
        with pytest.raises(StaleError) as caught:
            call()
        assert _reason(caught.value) == "fenced"
    assert state.counters.fenced == len(calls)
    state.check()


def test_an_epoch_that_left_cannot_come_back_but_the_next_can() -> None:
    state = _directory()
    key = _joined(state, member(epoch=5))
    assert [delta.change for delta in state.leave(key)] == [MemberGone(key, LeaveReason.LEFT)]
    with pytest.raises(StaleError):
        state.join(member(epoch=5), 0)
    state.join(member(epoch=6), 0)
    with pytest.raises(StaleError):
        state.leave(key)


def test_fences_are_bounded() -> None:
    state = _directory(DirectoryLimits(max_fences=3, max_workers=10))
    for number in range(5):
        state.join(member(f"w{number}", epoch=9), 0)
    state.join(member("w0", epoch=1), 0)  # forgotten: the price of the bound
    with pytest.raises(StaleError):
        state.join(member("w4", epoch=1), 0)


def test_a_call_for_another_incarnation_of_the_directory_is_refused() -> None:
    state = _directory()
    key = _joined(state, member())
    for call in (
        lambda: state.heartbeat(Heartbeat(key, EPOCH - 1, None), 0),
        lambda: state.publish(_batch(key, 2, directory_epoch=EPOCH - 1)),
    ):
        with pytest.raises(StaleError) as caught:
            call()
        assert _reason(caught.value) == "directory_restarted"


@pytest.mark.parametrize("field", ["layout_fingerprint", "hash_scheme"])
def test_an_incompatible_worker_is_refused_until_the_pool_is_empty(field: str) -> None:
    state = _directory()
    key = _joined(state, member("w0"))
    with pytest.raises(IncompatibleError, match=r"w1@1.*w0@1"):
        state.join(member("w1", **{field: "other"}), 0)
    assert state.counters.incompatible == 1
    state.leave(key)
    state.join(member("w1", **{field: "other"}), 0)


def test_the_only_member_may_come_back_with_another_layout() -> None:
    state = _directory()
    _joined(state, member(epoch=1))
    state.join(member(epoch=2, layout_fingerprint="other"), 0)


def test_too_many_members_are_refused() -> None:
    state = _directory()
    for number in range(LIMITS.max_workers):
        state.join(member(f"w{number}"), 0)
    with pytest.raises(CapacityError):
        state.join(member("more"), 0)
    state.check()


def test_malformed_joins_are_refused_by_field() -> None:
    for changes in (
        {"block_tokens": 0},
        {"transport": ""},
        {"data_address": b"x" * 100_000},
        {"capacity_blocks": (-1,)},
    ):
        with pytest.raises(RequestError, match=next(iter(changes)).split("[")[0]):
            _directory().join(member(**changes), 0)


# -- suspicion ------------------------------------------------------------------------------------------------------


def _suspect(state: DirectoryState, key: WorkerKey, now_ns: int, token: int = 42) -> bool:
    started, _ = state.suspect(key, None, "stall", token=token, now_ns=now_ns)
    state.check()
    return started


def test_a_suspect_is_hidden_at_once_and_returns_after_probe_and_backoff() -> None:
    state, chain = _directory(), hashes(3)
    key = _joined(state, member(), chain)
    assert _suspect(state, key, 10)
    assert state.lookup(chain) == {}
    pulse, _ = state.heartbeat(Heartbeat(key, EPOCH, None), 20)
    assert (pulse.state, pulse.probe) == (MemberState.SUSPECT, 42)
    pulse, deltas = state.heartbeat(Heartbeat(key, EPOCH, 42), 30)
    assert (pulse.state, deltas) == (MemberState.SUSPECT, ()), "the answer alone is not enough"
    pulse, deltas = state.heartbeat(Heartbeat(key, EPOCH, None), 110)
    assert (pulse.state, pulse.probe) == (MemberState.ALIVE, None)
    assert [delta.change for delta in deltas] == [MemberChanged(member(), MemberState.ALIVE)]
    assert state.lookup(chain) == {key: {Tier.DEVICE: 3}}


def test_without_the_right_answer_a_suspect_stays_hidden() -> None:
    state = _directory()
    key = _joined(state, member())
    _suspect(state, key, 0)
    for now_ns in range(100, 3000, 100):
        state.tick(now_ns)
        pulse, _ = state.heartbeat(Heartbeat(key, EPOCH, 41), now_ns)
        assert pulse.state is MemberState.SUSPECT


def _hidden_for(state: DirectoryState, key: WorkerKey, start_ns: int) -> int:
    """Suspect a worker that answers its probe at once; how long until it is back."""
    _suspect(state, key, start_ns)
    now_ns = start_ns
    while state.heartbeat(Heartbeat(key, EPOCH, 42), now_ns)[0].state is not MemberState.ALIVE:
        now_ns += 1
    return now_ns - start_ns


def test_the_backoff_doubles_up_to_its_bound_and_is_forgotten_after_a_clean_time() -> None:
    state = _directory()
    key = _joined(state, member())
    assert [_hidden_for(state, key, start_ns) for start_ns in (0, 1000, 2000, 3000)] == [100, 200, 400, 450]
    assert _hidden_for(state, key, 3450 + LIMITS.suspicion_memory_ns) == 450
    assert _hidden_for(state, key, 20_000) == 100


def test_reports_of_one_incident_do_not_prolong_it() -> None:
    state = _directory()
    key = _joined(state, member())
    assert _suspect(state, key, 0)
    assert not _suspect(state, key, 50, token=43)
    assert state.heartbeat(Heartbeat(key, EPOCH, 42), 60)[0].state is MemberState.SUSPECT
    assert state.heartbeat(Heartbeat(key, EPOCH, None), 100)[0].state is MemberState.ALIVE
    assert (state.counters.suspects, state.counters.suspects_ignored) == (1, 1)


def test_a_suspect_whose_lease_ends_is_removed() -> None:
    state = _directory()
    key = _joined(state, member())
    _suspect(state, key, 0)
    gone = [delta.change for now_ns in range(0, 1200, 100) for delta in state.tick(now_ns)]
    assert gone == [MemberGone(key, LeaveReason.EXPIRED)]


def test_a_draining_worker_that_was_suspected_goes_on_draining() -> None:
    state, chain = _directory(), hashes(2)
    key = _joined(state, member(), chain)
    state.drain(WorkerId("w0"))
    _suspect(state, key, 0)
    assert state.members()[0].state is MemberState.SUSPECT
    assert state.heartbeat(Heartbeat(key, EPOCH, 42), 200)[0].state is MemberState.DRAINING
    assert state.lookup(chain) == {}
    state.check()


def test_a_drained_worker_stays_drained_when_the_directory_restarts() -> None:
    state, chain = _directory(), hashes(2)
    state.join(member(), 0, draining=True)
    state.publish(_batch(member().key, 1, chain, snapshot_begin=True, snapshot_end=True))
    assert state.members()[0].state is MemberState.DRAINING
    assert state.lookup(chain) == {}
    state.check()


def test_a_replica_that_missed_a_drain_learns_of_it_with_a_heartbeat() -> None:
    state = _directory()
    key = _joined(state, member())
    pulse, deltas = state.heartbeat(Heartbeat(key, EPOCH, draining=True), 1)
    assert pulse.state is MemberState.DRAINING
    assert [delta.change for delta in deltas] == [MemberChanged(member(), MemberState.DRAINING)]
    assert state.heartbeat(Heartbeat(key, EPOCH, None), 2)[0].state is MemberState.DRAINING
    state.check()


def test_suspicions_are_described_with_their_reason() -> None:
    state = _directory()
    key = _joined(state, member())
    _suspect(state, key, 0)
    assert state.suspicions() == {key: "stall"}


# -- streams --------------------------------------------------------------------------------------------------------


def test_events_before_the_first_snapshot_ask_for_one() -> None:
    state = _directory()
    state.join(member(), 0)
    ack, deltas = state.publish(_batch(member().key, 1, hashes(1)))
    assert (ack.resync, deltas) == (True, ())


def test_a_repeated_batch_changes_nothing() -> None:
    state, chain = _directory(), hashes(2)
    key = _joined(state, member(), chain[:1])
    batch = _batch(key, 2, chain[1:])
    first, deltas = state.publish(batch)
    again, nothing = state.publish(batch)
    assert first == again
    assert [delta.change for delta in deltas] == [BlocksChanged(batch)]
    assert nothing == ()
    assert state.counters.duplicate_batches == 1


def test_a_gap_asks_for_a_snapshot_until_one_comes() -> None:
    state, chain = _directory(), hashes(4)
    key = _joined(state, member(), chain[:1])
    for sequence in (3, 4):
        ack, deltas = state.publish(_batch(key, sequence, chain))
        assert (ack.received, ack.applied, ack.resync, deltas) == (sequence, 1, True, ())
    assert state.join(member(), 0)[0].applied_sequence is None
    assert state.lookup(chain) == {key: {Tier.DEVICE: 1}}
    ack, _ = state.publish(_batch(key, 5, chain[:2], snapshot_begin=True))
    assert (ack.applied, ack.resync) == (5, False)
    state.publish(_batch(key, 6, chain[2:3], snapshot_end=True))
    assert state.lookup(chain) == {key: {Tier.DEVICE: 3}}
    assert (state.counters.gaps, state.counters.snapshots) == (1, 2)


def test_a_late_snapshot_of_an_abandoned_stream_is_not_applied() -> None:
    state, chain = _directory(), hashes(4)
    key = _joined(state, member(), chain)
    state.publish(_batch(key, 2, chain[:2], snapshot_begin=True, snapshot_end=True))
    ack, deltas = state.publish(_batch(key, 1, chain, snapshot_begin=True, snapshot_end=True))
    assert (ack.applied, deltas) == (2, ())
    assert state.lookup(chain) == {key: {Tier.DEVICE: 2}}


def test_refused_blocks_are_acknowledged_as_such() -> None:
    state = _directory(DirectoryLimits(max_entries=5))
    state.join(member(), 0)
    ack, _ = state.publish(_batch(member().key, 1, hashes(8), snapshot_begin=True, snapshot_end=True))
    assert (ack.refused_blocks, state.counters.refused_blocks) == (3, 3)


def test_only_the_newest_report_is_kept_and_older_ones_are_dropped() -> None:
    state = _directory()
    key = _joined(state, member())
    assert len(state.report(WorkerReport(key, 2, WorkerLoad(running_requests=1)))) == 1
    assert state.report(WorkerReport(key, 1, WorkerLoad())) == ()
    kept = state.members()[0].report
    assert kept is not None
    assert kept.load.running_requests == 1


def test_deltas_are_numbered_without_a_gap() -> None:
    state, numbers = _directory(), list[int]()
    for number in range(5):
        info = member(f"w{number}")
        for deltas in (
            state.join(info, 0)[1],
            state.publish(_batch(info.key, 1, hashes(1), snapshot_begin=True, snapshot_end=True))[1],
            state.suspect(info.key, None, "stall", token=1, now_ns=0)[1],
            state.leave(info.key),
        ):
            numbers.extend(delta.sequence for delta in deltas)
    assert numbers == list(range(1, 21)) == list(range(1, state.sequence + 1))


def test_event_lag_is_what_the_slowest_worker_said_last() -> None:
    state = _directory()
    for number, lag_ns in enumerate((5, 3_000_000_000, 7)):
        state.heartbeat(Heartbeat(_joined(state, member(f"w{number}")), EPOCH, event_lag_ns=lag_ns), 1)
    metrics = {metric.name: metric for metric in metrics_of(state)}
    assert metrics["kvpool_metadata_event_lag_seconds"].samples[0].value == 3.0


def test_every_counter_is_a_metric_and_labels_do_not_grow_with_the_cluster() -> None:
    state = _directory()
    for number in range(5):
        _joined(state, member(f"w{number}"), hashes(2))
    metrics = {metric.name: metric for metric in metrics_of(state)}
    assert {f"kvpool_metadata_{name}" for name in asdict(state.counters)} <= set(metrics)
    assert all(len(metric.samples) <= 3 for metric in metrics.values())
    held = {sample.labels["tier"]: sample.value for sample in metrics["kvpool_metadata_held_blocks"].samples}
    assert held == {"device": 10, "host": 0, "disk": 0}


def test_what_workers_count_is_summed_once_whatever_is_repeated_lost_or_made_up() -> None:
    state = _directory()
    keys = [_joined(state, member(f"w{number}")) for number in range(2)]

    def report(key: WorkerKey, sequence: int, **counters: int) -> None:
        named = tuple((name.replace("__", "."), value) for name, value in counters.items())
        state.report(WorkerReport(key, sequence, WorkerLoad(), counters=named))

    report(keys[0], 1, tokens_cached=5, load_failures__stall=1, made_up=9, load_failures__nonsense=2)
    report(keys[0], 2, tokens_cached=7, load_failures__stall=1)
    report(keys[0], 2, tokens_cached=100)
    report(keys[1], 1, tokens_cached=10, load_failures__nonsense=1)
    state.tick(5000)  # both expire and come back
    for key in keys:
        state.join(member(str(key.worker_id)), 5000)
    report(keys[0], 3, tokens_cached=8)
    assert state.worker_totals.totals["tokens_cached"] == 18
    assert state.worker_totals.failures == {("load_failures", "stall"): 1, ("load_failures", "other"): 3}
    metrics = {metric.name: metric for metric in metrics_of(state)}
    assert metrics["kvpool_worker_tokens_cached"].samples[0].value == 18
    assert {tuple(sample.labels.values()) for sample in metrics["kvpool_worker_failures"].samples} == {
        ("load", "stall"),
        ("load", "other"),
    }
