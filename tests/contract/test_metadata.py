"""The metadata service over real gRPC: what workers and routers rely on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvpool.errors import IncompatibleError, InvariantViolation, RequestError, StaleError, UnavailableError
from kvpool.metadata import service
from kvpool.metadata.client import MetadataClient
from kvpool.metadata.membership import DirectoryLimits
from kvpool.metadata.publisher import MetadataPublisher
from kvpool.metadata.watcher import MetadataWatcher
from kvpool.reports import LoadSample, PrefillSample, RequestOutcome, WorkerLoad, WorkerReport
from kvpool.types import BlockHash, MemberInfo, MemberState, RequestId, Tier, WorkerEpoch, WorkerId, WorkerKey
from tests.contract.metadata_support import WAIT_S, Owner, ThreadedServer, hashes, member, sees

SHORT = DirectoryLimits(lease_ns=400_000_000, probe_backoff_ns=50_000_000)


@pytest.fixture
def server() -> Iterator[ThreadedServer]:
    running = ThreadedServer(SHORT)
    yield running
    running.stop()


class Rig:
    """Publishers and watchers that are closed at the end of a test."""

    def __init__(self) -> None:
        self.closers: list[Any] = []
        self.fenced: list[str] = []

    def publisher(self, addresses: list[str], info: MemberInfo, owner: Owner | None = None) -> MetadataPublisher:
        publisher = MetadataPublisher(addresses, info, (owner or Owner()).snapshot, self.fenced.append)
        self.closers.append(publisher)
        publisher.start()
        return publisher

    def watcher(self, addresses: list[str], **callbacks: Any) -> MetadataWatcher:
        watcher = MetadataWatcher(addresses, **callbacks)
        self.closers.append(watcher)
        watcher.start()
        assert watcher.wait_ready(WAIT_S)
        return watcher

    def client(self, addresses: list[str]) -> MetadataClient:
        client = MetadataClient(addresses)
        self.closers.append(client)
        return client


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    for item in reversed(made.closers):
        item.close()


def test_published_blocks_are_seen_by_lookups_and_watchers(server: ThreadedServer, rig: Rig) -> None:
    chain, info = hashes(40), member()
    owner = Owner(chain[:10])
    publisher = rig.publisher([server.address], info, owner)
    watcher, client = rig.watcher([server.address]), rig.client([server.address])
    publisher.stored(Tier.DEVICE, owner.store(chain[10:30]), linked=True)
    assert sees(watcher, chain, info.key, 30)
    assert client.lookup(chain) == {info.key: {Tier.DEVICE: 30}} == watcher.prefixes(chain)
    publisher.removed(Tier.DEVICE, owner.remove(chain[20:30]))
    assert sees(watcher, chain, info.key, 20)
    publisher.stored(Tier.HOST, chain[20:25])
    assert publisher.flush(WAIT_S)
    assert client.lookup(chain) == {info.key: {Tier.DEVICE: 20, Tier.HOST: 25}}


def test_a_watcher_that_starts_late_gets_everything_in_its_snapshot(server: ThreadedServer, rig: Rig) -> None:
    chain = hashes(20_000)
    first, second = member("w0"), member("w1")
    for info, blocks in ((first, 20_000), (second, 500)):
        assert rig.publisher([server.address], info, Owner(chain[:blocks])).flush(WAIT_S)
    watcher = rig.watcher([server.address])
    assert watcher.prefixes(chain) == {first.key: {Tier.DEVICE: 20_000}, second.key: {Tier.DEVICE: 500}}
    assert watcher.members()[first.key].info == first


def test_reports_reach_watchers_whole_and_the_newest_is_kept(server: ThreadedServer, rig: Rig) -> None:
    info, seen, arrived = member(), list[WorkerReport](), threading.Semaphore(0)

    def on_report(report: WorkerReport) -> None:
        seen.append(report)
        arrived.release()

    publisher = rig.publisher([server.address], info)
    watcher = rig.watcher([server.address], on_report=on_report)
    report = WorkerReport(
        info.key,
        7,
        WorkerLoad(1, 2, 3, 4, 5, 6, 7, 8, served_request_ids=(RequestId("r1"),)),
        prefills=(PrefillSample(100, 20, 5),),
        loads=(
            LoadSample(WorkerKey(WorkerId("w9"), WorkerEpoch(3)), 4096, 2, 77, "stall", Tier.DISK),
            LoadSample(info.key, 1, 1, 1),
        ),
        outcomes=(RequestOutcome(RequestId("r1"), "d1", info.key.worker_id, 1, 2, 3, 4, 5, 6, 7, ("stall",)),),
        counters=(("loads", 3),),
    )
    publisher.report(report)
    assert arrived.acquire(timeout=WAIT_S)
    assert seen == [report]
    late = rig.watcher([server.address])
    assert late.members()[info.key].report == report == watcher.members()[info.key].report


def test_a_suspected_holder_is_hidden_at_once_and_comes_back_after_a_probe(server: ThreadedServer, rig: Rig) -> None:
    chain, holder, reader = hashes(4), member("holder"), member("reader")
    assert rig.publisher([server.address], holder, Owner(chain)).flush(WAIT_S)
    reporter = rig.publisher([server.address], reader)
    states, changed = list[MemberState | None](), threading.Semaphore(0)

    def on_member(info: MemberInfo, state: MemberState | None) -> None:
        if info.key == holder.key:
            states.append(state)
            changed.release()

    watcher, client = rig.watcher([server.address], on_member=on_member), rig.client([server.address])
    assert changed.acquire(timeout=WAIT_S)
    assert client.lookup(chain)
    reporter.suspect(holder.key, "stall")
    assert changed.acquire(timeout=WAIT_S)
    assert states[-1] is MemberState.SUSPECT
    assert watcher.members()[holder.key].state in (MemberState.SUSPECT, MemberState.ALIVE)
    assert changed.acquire(timeout=WAIT_S)
    assert states == [MemberState.ALIVE, MemberState.SUSPECT, MemberState.ALIVE]
    assert client.lookup(chain) == {holder.key: {Tier.DEVICE: 4}}
    assert client.describe()["counters"]["suspects"] == 1


def test_a_suspect_is_gone_from_lookups_when_the_report_returns(server: ThreadedServer, rig: Rig) -> None:
    server.stop()
    server.__init__(DirectoryLimits(probe_backoff_ns=10**12, max_probe_backoff_ns=10**12))  # type: ignore[misc]
    chain, holder = hashes(4), member("holder")
    assert rig.publisher([server.address], holder, Owner(chain)).flush(WAIT_S)
    client = rig.client([server.address])
    assert client.lookup(chain)
    assert client.suspect(holder.key, "peer_gone")
    assert client.lookup(chain) == {}
    assert not client.suspect(holder.key, "peer_gone")


def test_a_dead_worker_disappears_with_its_blocks_when_its_lease_ends(server: ThreadedServer, rig: Rig) -> None:
    chain, info = hashes(4), member()
    publisher = rig.publisher([server.address], info, Owner(chain))
    watcher = rig.watcher([server.address])
    assert sees(watcher, chain, info.key, 4)
    publisher.close(leave=False)
    assert watcher.wait_for(lambda: not watcher.view.members, WAIT_S)
    assert watcher.prefixes(chain) == {}


def test_a_worker_that_leaves_is_gone_when_close_returns(server: ThreadedServer, rig: Rig) -> None:
    chain, info = hashes(4), member()
    publisher = rig.publisher([server.address], info, Owner(chain))
    assert publisher.flush(WAIT_S)
    publisher.close()
    described = rig.client([server.address]).describe()
    assert described["members"] == []
    with pytest.raises(StaleError, match="fenced"):
        MetadataPublisher([server.address], info, Owner().snapshot, rig.fenced.append).start()


def test_a_new_epoch_replaces_the_old_one_and_fences_it(server: ThreadedServer, rig: Rig) -> None:
    chain, fenced = hashes(8), threading.Event()
    old, new = member(epoch=1), member(epoch=2)
    zombie = MetadataPublisher([server.address], old, Owner(chain).snapshot, lambda reason: fenced.set())
    rig.closers.append(zombie)
    zombie.start()
    assert zombie.flush(WAIT_S)
    watcher = rig.watcher([server.address])
    assert rig.publisher([server.address], new, Owner(chain[:3])).flush(WAIT_S)
    assert sees(watcher, chain, new.key, 3)
    assert watcher.prefixes(chain) == {new.key: {Tier.DEVICE: 3}}
    zombie.stored(Tier.DEVICE, chain)
    assert fenced.wait(WAIT_S)
    assert zombie.fenced
    assert rig.client([server.address]).lookup(chain) == {new.key: {Tier.DEVICE: 3}}


def test_two_workers_with_one_address_are_two_workers(server: ThreadedServer, rig: Rig) -> None:
    chain = hashes(8)
    first, second = member("w0", data_address=b"10.0.0.1"), member("w1", data_address=b"10.0.0.1")
    assert rig.publisher([server.address], first, Owner(chain[:5])).flush(WAIT_S)
    assert rig.publisher([server.address], second, Owner(chain[:2])).flush(WAIT_S)
    found = rig.client([server.address]).lookup(chain)
    assert found == {first.key: {Tier.DEVICE: 5}, second.key: {Tier.DEVICE: 2}}


@pytest.mark.parametrize(
    ("field", "value"), [("layout_fingerprint", "layout-b"), ("hash_scheme", "other-v2"), ("block_tokens", 32)]
)
def test_a_mismatch_is_refused_at_start_and_names_both_sides(
    server: ThreadedServer, rig: Rig, field: str, value: Any
) -> None:
    rig.publisher([server.address], member("w0"))
    other = MetadataPublisher([server.address], member("w1", **{field: value}), Owner().snapshot, rig.fenced.append)
    with pytest.raises(IncompatibleError) as caught:
        other.start()
    assert {field, "w1@1", "w0@1", str(value), str(getattr(member(), field))} <= set(
        str(caught.value).replace("=", " ").replace("(", " ").replace(")", " ").replace(";", " ").split()
    )
    assert [item["worker_id"] for item in rig.client([server.address]).describe()["members"]] == ["w0"]


def test_draining_hides_a_worker_and_describe_says_so(server: ThreadedServer, rig: Rig) -> None:
    chain, info = hashes(4), member()
    assert rig.publisher([server.address], info, Owner(chain)).flush(WAIT_S)
    client, watcher = rig.client([server.address]), rig.watcher([server.address])
    assert client.drain(info.key.worker_id) == info.key
    assert client.drain(info.key.worker_id) == info.key
    assert client.lookup(chain) == {}
    assert watcher.wait_for(lambda: watcher.view.members[0].state is MemberState.DRAINING, WAIT_S)
    described = client.describe()
    assert described["members"][0]["state"] == "draining"
    assert described["members"][0]["blocks"] == {"device": 4, "host": 0, "disk": 0}
    with pytest.raises(RequestError, match="members: w0"):
        client.drain(WorkerId("nobody"))


def test_a_restarted_service_is_whole_again_by_itself(server: ThreadedServer, rig: Rig) -> None:
    chain, info = hashes(3000), member()
    owner = Owner(chain[:2000])
    publisher, watcher = rig.publisher([server.address], info, owner), rig.watcher([server.address])
    assert sees(watcher, chain, info.key, 2000)
    server.stop()
    assert watcher.wait_for(lambda: not watcher._connected, WAIT_S)
    assert watcher.prefixes(chain) == {info.key: {Tier.DEVICE: 2000}}, "it goes on with what it knew"
    publisher.stored(Tier.DEVICE, owner.store(chain[2000:]))
    server._start(int(server.address.rpartition(":")[2]))
    assert sees(watcher, chain, info.key, 3000)
    assert watcher.connected
    assert publisher.status()["endpoints"][server.address]["connected"]


def test_publishers_start_while_the_service_is_down_and_join_later(server: ThreadedServer, rig: Rig) -> None:
    chain, info = hashes(5), member()
    server.stop()
    publisher = rig.publisher([server.address], info, Owner(chain))
    assert not publisher.status()["endpoints"][server.address]["connected"]
    assert publisher.status()["endpoints"][server.address]["last_error"]
    server._start(int(server.address.rpartition(":")[2]))
    assert publisher.flush(WAIT_S)
    assert rig.client([server.address]).lookup(chain) == {info.key: {Tier.DEVICE: 5}}


def test_calls_without_a_service_fail_with_a_typed_error(rig: Rig) -> None:
    client = MetadataClient(["127.0.0.1:1"], timeout_s=0.3)
    rig.closers.append(client)
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        client.lookup(hashes(1))
    with pytest.raises(RequestError, match="HOST:PORT"):
        MetadataClient(["nowhere"])


def test_malformed_requests_are_refused_by_name(server: ThreadedServer, rig: Rig) -> None:
    client = rig.client([server.address])
    with pytest.raises(RequestError, match="multiple of 16"):
        client.lookup([b"short"])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="worker_id"):
        rig.publisher([server.address], member(""))
    with pytest.raises(RequestError, match="block_tokens"):
        rig.publisher([server.address], member(block_tokens=0))
    with pytest.raises(StaleError, match="not a member"):
        client.suspect(member("ghost").key, "stall")


def test_a_huge_call_is_split_and_the_publisher_goes_on(server: ThreadedServer, rig: Rig) -> None:
    chain, info = hashes(150_000), member()
    publisher = rig.publisher([server.address], info)
    assert publisher.flush(WAIT_S)
    publisher.stored(Tier.DEVICE, chain[:-1], linked=True)
    publisher.stored(Tier.DEVICE, chain[-1:])
    assert publisher.flush(WAIT_S)
    assert rig.client([server.address]).lookup(chain) == {info.key: {Tier.DEVICE: 150_000}}
    status = publisher.status()["endpoints"][server.address]
    assert (status["snapshots"], status["gaps"], status["overflows"]) == (1, 0, 0)


def test_more_events_than_fit_the_queue_become_one_snapshot(server: ThreadedServer, rig: Rig) -> None:
    info, owner = member(), Owner()
    publisher = rig.publisher([server.address], info, owner)
    assert publisher.flush(WAIT_S)
    chain = hashes(300_000)
    publisher.stored(Tier.DEVICE, owner.store(chain))
    assert publisher.flush(WAIT_S)
    assert publisher.status()["endpoints"][server.address]["overflows"] == 1
    client = rig.client([server.address])
    assert client.describe()["entries"] == 300_000
    with pytest.raises(RequestError, match="at most 262144 blocks"):
        client.lookup(chain)


def test_a_watcher_too_slow_for_the_deltas_starts_over_from_a_snapshot(
    server: ThreadedServer, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_WATCH_EVENTS", 4)
    info = member()
    rig.publisher([server.address], info)
    watcher = rig.watcher([server.address])

    def burst() -> None:
        """More changes in one step of the server's loop than a watcher's queue takes."""
        running = server.server.service
        for sequence in range(1, 11):
            running._relay(running.state.report(WorkerReport(info.key, sequence, WorkerLoad())))

    server.run(burst)

    def caught_up() -> bool:
        report = watcher.view.members[0].report
        return report is not None and report.sequence == 10

    assert watcher.wait_for(caught_up, WAIT_S)
    assert watcher.status()["snapshots"] == 2
    assert rig.client([server.address]).describe()["counters"]["watchers_dropped"] == 1


def test_a_broken_invariant_ends_the_service_instead_of_serving_wrong_answers(
    server: ThreadedServer, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise InvariantViolation("the index lost a slot")

    monkeypatch.setattr(server.server.service.state, "lookup", broken)
    client = MetadataClient([server.address], timeout_s=0.3)
    rig.closers.append(client)
    with pytest.raises(UnavailableError, match="lost a slot"):
        client.lookup(hashes(1))
    with pytest.raises(InvariantViolation, match="lost a slot"):
        server.call(server.server.wait(asyncio.Event()))


def test_a_snapshot_callback_that_fails_once_is_called_again(server: ThreadedServer, rig: Rig) -> None:
    chain, info, calls = hashes(5), member(), list[int]()

    def snapshot() -> list[tuple[Tier, BlockHash]]:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("the store is not ready")
        return [(Tier.DEVICE, item) for item in chain]

    publisher = MetadataPublisher([server.address], info, snapshot, rig.fenced.append)
    rig.closers.append(publisher)
    publisher.start()
    assert publisher.flush(WAIT_S)
    assert rig.client([server.address]).lookup(chain) == {info.key: {Tier.DEVICE: 5}}


def test_a_publisher_thread_that_breaks_tells_its_worker_instead_of_going_silent(
    server: ThreadedServer, rig: Rig
) -> None:
    told = threading.Event()
    publisher = MetadataPublisher(
        [server.address], member(), Owner().snapshot, lambda reason: (rig.fenced.append(reason), told.set())[1]
    )
    rig.closers.append(publisher)
    publisher.start()
    publisher.report("not a report")  # type: ignore[arg-type]
    assert told.wait(WAIT_S)
    assert "publishing broke" in rig.fenced[0]
