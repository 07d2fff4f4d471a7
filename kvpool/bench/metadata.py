"""The metadata service: the index in this process, and the service over gRPC as a process of its own.

Rows with ``requirement`` as the reference compare against the project's stated bars, which are absolute; the others
compare against something measured in the same run. The peers' figures come from `kvpool.bench.metadata_peers`.

The chains of the index rows: 100 blocks each; 1 M (block, worker) entries in all. *whole*: a chain is published in one
linked event, as after a prefill. *pieces*: in events of 16 blocks, then looked up once, as a router does. *loose*: with
nothing known about the order, as after a resync, then looked up once.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kvpool.bench.metadata_peers import PeerScript
from kvpool.bench.report import Row, interleave, skipped, spread
from kvpool.errors import UnavailableError
from kvpool.hashing import HASH_SCHEME
from kvpool.metadata.client import MetadataClient
from kvpool.metadata.index import PrefixIndex
from kvpool.metadata.publisher import MetadataPublisher
from kvpool.metadata.watcher import MetadataWatcher
from kvpool.types import BLOCK_HASH_BYTES, BlockHash, MemberInfo, Role, Tier, WorkerEpoch, WorkerId, WorkerKey

CHAIN_BLOCKS = 100
ENTRIES = 1_000_000
QUICK_ENTRIES = 200_000
HOLDERS = 4
"""Workers that hold one chain, each a part of it, in the index rows."""

RUNS = 5
SERVICE_RUNS = 9
LOOKUPS_PER_RUN = 500
LOOKUP_CHAIN_BLOCKS = 1_000
PUBLISHED_BLOCKS = 20_000
WAIT_S = 60.0
REQUIREMENT = "requirement"
_INDEX_LIMIT_US = {16: 10.0, 1000: 15.0}

Chain = list[BlockHash]


def run(*, quick: bool, peers: bool) -> list[Row]:
    """Measure; about a minute, with ``quick`` about 20 s. Without ``peers`` only their rows are missing."""
    rows: list[Row] = []
    for workers in _INDEX_LIMIT_US:
        rows += index_rows(workers, QUICK_ENTRIES if quick else ENTRIES, peers=peers)
    rows += service_rows(peers=peers)
    rows += visibility_rows(seconds=2.0 if quick else 5.0)
    rows += restart_rows(runs=3 if quick else RUNS)
    return rows


# -- the index ------------------------------------------------------------------------------------------------------


def index_rows(workers: int, entries: int, *, peers: bool) -> list[Row]:
    """Lookups, inserts and memory of the index with this many workers."""
    rng = random.Random(workers)
    keys = [WorkerKey(WorkerId(f"w{number}"), WorkerEpoch(1)) for number in range(workers)]
    label = f"{entries // 1000}k entries, {workers} workers"
    chains = _chains(rng, entries // CHAIN_BLOCKS // HOLDERS * 2)
    plan = [(key, chain[:stop]) for chain in chains for key, stop in _holders(rng, keys)]
    rows = [_insert_row(keys, plan, label), _memory_row(workers, entries, label)]
    whole, plain = _filled(keys, plan, CHAIN_BLOCKS, linked=True), _PlainDict(keys, plan)
    pieces, loose = _filled(keys, plan, 16, linked=True), _filled(keys, plan, CHAIN_BLOCKS, linked=False)
    for chain in chains:
        pieces.prefixes(chain, learn=True)
        loose.prefixes(chain, learn=True)
    lookups: list[Callable[[Chain], object]] = [whole.prefixes, pieces.prefixes, loose.prefixes, plain.prefixes]
    name, tree = f"lookup p50, whole, {label}", None
    with ExitStack() as stack:
        if peers:
            try:
                tree = stack.enter_context(PeerScript("dynamo", workers, entries))
            except UnavailableError as error:
                rows.append(skipped(name, "Dynamo's tree from Python", error.message))
        whole_us, pieces_us, loose_us, plain_us, tree_us = _lookup_us(lookups, chains, rng, tree)
    limit = _INDEX_LIMIT_US[workers]
    for kind, taken in (("whole", whole_us), ("pieces", pieces_us), ("loose", loose_us)):
        rows.append(_cost(f"lookup p50, {kind}, {label}", taken, limit, REQUIREMENT, "µs", bar=1.0))
    rows.append(_cost(name, whole_us, statistics.median(plain_us), "plain dict, blind to holes", "µs"))
    if tree_us:
        rows.append(_cost(name, whole_us, statistics.median(tree_us), "Dynamo's tree from Python", "µs"))
    return rows


def _chains(rng: random.Random, count: int, blocks: int = CHAIN_BLOCKS) -> list[Chain]:
    size = BLOCK_HASH_BYTES
    return [
        [BlockHash(raw[at : at + size]) for at in range(0, len(raw), size)]
        for raw in (rng.randbytes(size * blocks) for _ in range(count))
    ]


def _holders(rng: random.Random, keys: Sequence[WorkerKey]) -> list[tuple[WorkerKey, int]]:
    """Who holds a chain and how far: one worker all of it, the others a part."""
    return [
        (key, rng.randrange(1, CHAIN_BLOCKS) if number else CHAIN_BLOCKS)
        for number, key in enumerate(rng.sample(list(keys), HOLDERS))
    ]


def _filled(keys: Sequence[WorkerKey], plan: list[tuple[WorkerKey, Chain]], step: int, *, linked: bool) -> PrefixIndex:
    index = PrefixIndex()
    for key in keys:
        index.add_worker(key)
    for key, blocks in plan:
        for start in range(0, len(blocks), step):
            index.stored(key, Tier.HOST, blocks[start : start + step], linked=linked)
    return index


class _PlainDict:
    """Hash → mask with a binary search: the least work there is, and wrong as soon as a chain has a hole."""

    def __init__(self, keys: Sequence[WorkerKey], plan: list[tuple[WorkerKey, Chain]]) -> None:
        self._keys = keys
        self._masks: dict[BlockHash, int] = {}
        bits = {key: 1 << number for number, key in enumerate(keys)}
        for key, blocks in plan:
            for item in blocks:
                self._masks[item] = self._masks.get(item, 0) | bits[key]

    def prefixes(self, chain: Chain) -> dict[WorkerKey, int]:
        """Longest prefix per worker."""
        masks, found, low = self._masks, dict[WorkerKey, int](), 0
        mask = masks.get(chain[0], 0)
        while mask:  # every round finds where the next workers drop out
            start, stop = low, len(chain)
            while start < stop:
                middle = (start + stop) // 2
                if masks.get(chain[middle], 0) & mask == mask:
                    start = middle + 1
                else:
                    stop = middle
            rest = masks.get(chain[start], 0) & mask if start < len(chain) else 0
            gone = mask ^ rest
            while gone:
                bit = gone & -gone
                found[self._keys[bit.bit_length() - 1]] = start
                gone ^= bit
            mask, low = rest, start
        return found


def _lookup_us(
    lookups: list[Callable[[Chain], object]], chains: list[Chain], rng: random.Random, peer: PeerScript | None
) -> list[list[float]]:
    """Median microseconds of a lookup, per run, of each and of the peer; chains are fresh, as from a tokenizer."""
    medians: list[list[float]] = [[] for _ in range(len(lookups) + 1)]
    for _ in range(RUNS):
        for taken, lookup in zip(medians, lookups, strict=False):
            asked = [[BlockHash(bytes(bytearray(item))) for item in rng.choice(chains)] for _ in range(LOOKUPS_PER_RUN)]
            gc.collect()
            times = []
            for chain in asked:
                start = time.perf_counter_ns()
                lookup(chain)
                times.append(time.perf_counter_ns() - start)
            taken.append(statistics.median(times) / 1e3)
        if peer is not None:
            medians[-1].append(peer.ask("lookup"))
    return medians


def _insert_row(keys: Sequence[WorkerKey], plan: list[tuple[WorkerKey, Chain]], label: str) -> Row:
    part = plan[: 200_000 * 2 // CHAIN_BLOCKS]
    blocks = sum(len(chain) for _, chain in part)
    (seconds,) = interleave([lambda: _filled(keys, part, 16, linked=True)], runs=RUNS)
    speed = [blocks / taken / 1e6 for taken in seconds]
    return Row(
        f"inserts in events of 16, {label}", statistics.median(speed), 0.5, "M blocks/s", REQUIREMENT,
        bar=1.0, runs=RUNS, spread=spread(speed),
    )  # fmt: skip


def _memory_row(workers: int, entries: int, label: str) -> Row:
    """Growth of a fresh process per entry when every block has one holder, which is the dearest case."""
    command = [sys.executable, "-m", "kvpool.bench.metadata", str(workers), str(entries)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    return _cost(
        f"memory per entry, one holder a block, {label}", [float(done.stdout)], 120.0, REQUIREMENT, "B", bar=1.0
    )


def _print_memory(workers: int, entries: int) -> None:
    keys = [WorkerKey(WorkerId(f"w{number}"), WorkerEpoch(1)) for number in range(workers)]
    index = PrefixIndex()
    for key in keys:
        index.add_worker(key)
    rng, raw = random.Random(1), BLOCK_HASH_BYTES
    before = _resident_bytes()
    for _ in range(entries // CHAIN_BLOCKS):
        chain = rng.randbytes(raw * CHAIN_BLOCKS)
        key = rng.choice(keys)
        for start in range(0, CHAIN_BLOCKS, 16):
            piece = [BlockHash(chain[raw * at : raw * (at + 1)]) for at in range(start, min(start + 16, CHAIN_BLOCKS))]
            index.stored(key, Tier.HOST, piece, linked=True)
    gc.collect()
    print((_resident_bytes() - before) / index.entries)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


# -- the service ----------------------------------------------------------------------------------------------------


class _Owner:
    """A worker's blocks, for snapshots."""

    def __init__(self, blocks: Sequence[BlockHash] = ()) -> None:
        self.blocks = list(blocks)

    def snapshot(self) -> list[tuple[Tier, BlockHash]]:
        """Everything held."""
        return [(Tier.HOST, item) for item in list(self.blocks)]


def _member(name: str) -> MemberInfo:
    return MemberInfo(
        key=WorkerKey(WorkerId(name), WorkerEpoch(1)),
        role=Role.MIXED,
        transport="memory",
        data_address=b"",
        layout_fingerprint="bench",
        hash_scheme=HASH_SCHEME,
        block_tokens=16,
        block_bytes=1,
        capacity_blocks=(0, 0, 0),
        control_address=name,
    )


class _Server:
    """The service as a process on a port of its own."""

    def __init__(self, port: int = 0) -> None:
        command = [sys.executable, "-m", "kvpool.metadata.server", "--port", str(port), "--exit-with-parent"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        self.address = str(json.loads(self._process.stdout.readline())["address"])
        self.port = int(self.address.rpartition(":")[2])

    def kill(self) -> None:
        """SIGKILL, and reap. May be repeated."""
        self._process.kill()
        self._process.wait(WAIT_S)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


@contextmanager
def _published(address: str, name: str, owner: _Owner) -> Iterator[MetadataPublisher]:
    publisher = MetadataPublisher([address], _member(name), owner.snapshot, lambda reason: None)
    publisher.start()
    try:
        yield publisher
    finally:
        publisher.close()


@contextmanager
def _watching(address: str) -> Iterator[MetadataWatcher]:
    watcher = MetadataWatcher([address])
    watcher.start()
    try:
        yield watcher
    finally:
        watcher.close()


def service_rows(*, peers: bool) -> list[Row]:
    """Lookups and publishing over gRPC, beside Mooncake's master where it is installed."""
    rng = random.Random(5)
    chains = _chains(rng, 50, LOOKUP_CHAIN_BLOCKS)
    keys = len(chains) * LOOKUP_CHAIN_BLOCKS
    fresh = iter(_chains(rng, 2 * SERVICE_RUNS, PUBLISHED_BLOCKS))
    server = _Server()
    try:
        with _published(server.address, "w0", _Owner()) as publisher, MetadataClient([server.address]) as client:
            publisher.flush(WAIT_S)
            for chain in chains:
                publisher.stored(Tier.HOST, chain, linked=True)
            publisher.flush(WAIT_S)

            def look_up() -> None:
                for chain in chains:
                    assert client.lookup(chain)

            def publish() -> None:
                blocks = next(fresh)
                for start in range(0, len(blocks), 16):
                    publisher.stored(Tier.HOST, blocks[start : start + 16], linked=True)
                publisher.flush(WAIT_S)

            with ExitStack() as stack:
                why, mooncake = "not asked for", None
                if peers:
                    try:
                        mooncake = stack.enter_context(PeerScript("mooncake", keys, PUBLISHED_BLOCKS))
                    except UnavailableError as error:
                        why = error.message
                looked, published, their_lookups, their_puts = [], [], [], []
                for _ in range(SERVICE_RUNS):
                    looked += interleave([look_up], runs=1)[0]
                    their_lookups += [mooncake.ask("lookup")] if mooncake else []
                    published += interleave([publish], runs=1)[0]
                    their_puts += [mooncake.ask("publish")] if mooncake else []
    finally:
        server.kill()
    names = (f"lookups over gRPC, {LOOKUP_CHAIN_BLOCKS}-block chains", "publish over gRPC, events of 16 blocks")
    rows = [
        _speed(names[0], looked, keys, their_lookups, "Mooncake batch_is_exist of 1,000 keys", bar=1.0),
        _speed(names[1], published, PUBLISHED_BLOCKS, their_puts, "Mooncake put_batch, 64 B, remote", bar=5.0),
    ]
    if peers and not their_puts:
        rows += [skipped(name, "Mooncake", why) for name in names]
    return rows


def _speed(
    name: str, seconds: list[float], count: int, reference_seconds: list[float], reference_name: str, *, bar: float
) -> Row:
    speed = [count / taken for taken in seconds]
    reference = count / statistics.median(reference_seconds) if reference_seconds else None
    return Row(
        name, statistics.median(speed), reference, "blocks/s", reference_name,
        bar=bar if reference_seconds else None, runs=len(speed), spread=spread(speed),
    )  # fmt: skip


def visibility_rows(*, seconds: float) -> list[Row]:
    """Publish → visible in a router's copy at 10,000 blocks/s, and lookups there meanwhile, against idle ones."""
    rng, event_blocks, rate = random.Random(6), 16, 10_000
    events = int(seconds * rate / event_blocks)
    chains = _chains(rng, events, event_blocks)
    steady = _chains(rng, 20)
    server = _Server()
    owner = _Owner([item for chain in steady for item in chain])
    try:
        with _published(server.address, "w0", owner) as publisher, _watching(server.address) as watcher:
            publisher.flush(WAIT_S)
            watcher.wait_for(lambda: watcher.view.index.blocks == len(owner.blocks), WAIT_S)
            idle = _p99(_timed_lookups(watcher, steady, seconds=1.0))
            sent, seen = dict[int, float](), dict[int, float]()
            base = len(owner.blocks)
            threads = [
                threading.Thread(target=_observe, args=(watcher, base, event_blocks, events, seen)),
                threading.Thread(target=_publish_at, args=(publisher, chains, rate / event_blocks, sent)),
            ]
            for thread in threads:
                thread.start()
            busy = _p99(_timed_lookups(watcher, steady, seconds=seconds))
            for thread in threads:
                thread.join(WAIT_S)
            churn = _p99(_churn(publisher, watcher, owner, steady, seconds=seconds))
    finally:
        server.kill()
    lag_ms = sorted((seen[number] - sent[number]) * 1e3 for number in sent if number in seen)
    rows = [
        _cost("publish → visible p99 at 10,000 blocks/s", [_p99(lag_ms)], 50.0, REQUIREMENT, "ms", bar=1.0),
        _cost("lookup p99 in a router while it follows 10,000 blocks/s", [busy], idle, "idle", "µs", bar=0.1),
        _cost("lookup p99 in a router while evicting and resyncing", [churn], idle, "idle", "µs", bar=0.1),
    ]
    if len(lag_ms) < events:
        raise RuntimeError(f"only {len(lag_ms)} of {events} events became visible")
    return rows


def _publish_at(publisher: MetadataPublisher, chains: list[Chain], per_second: float, sent: dict[int, float]) -> None:
    start = time.perf_counter()
    for number, chain in enumerate(chains):
        time.sleep(max(0.0, start + number / per_second - time.perf_counter()))
        sent[number] = time.perf_counter()
        publisher.stored(Tier.HOST, chain, linked=True)


def _observe(watcher: MetadataWatcher, base: int, event_blocks: int, events: int, seen: dict[int, float]) -> None:
    """Note when each event is in the copy: events come in order, so the number of blocks tells."""

    def news() -> bool:
        return watcher.view.index.blocks > base + len(seen) * event_blocks

    while len(seen) < events and watcher.wait_for(news, WAIT_S):
        now = time.perf_counter()
        reached = (watcher.view.index.blocks - base) // event_blocks
        seen.update((number, now) for number in range(len(seen), reached))


def _timed_lookups(watcher: MetadataWatcher, chains: list[Chain], *, seconds: float) -> list[float]:
    """Microseconds of lookups at a modest pace."""
    taken, end = list[float](), time.perf_counter() + seconds
    while time.perf_counter() < end:
        for chain in chains:
            start = time.perf_counter()
            watcher.prefixes(chain)
            taken.append((time.perf_counter() - start) * 1e6)
        time.sleep(0.002)
    return taken


def _churn(
    publisher: MetadataPublisher, watcher: MetadataWatcher, owner: _Owner, chains: list[Chain], *, seconds: float
) -> list[float]:
    """Lookups while another 50,000 blocks are evicted, stored again, and sent as snapshots."""
    extra = [item for chain in _chains(random.Random(8), 500) for item in chain]
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            owner.blocks += extra
            for start in range(0, len(extra), CHAIN_BLOCKS):
                publisher.stored(Tier.HOST, extra[start : start + CHAIN_BLOCKS], linked=True)
            publisher.resync()
            publisher.flush(WAIT_S)
            del owner.blocks[-len(extra) :]
            for start in range(0, len(extra), CHAIN_BLOCKS):
                publisher.removed(Tier.HOST, extra[start : start + CHAIN_BLOCKS])
            publisher.flush(WAIT_S)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        return _timed_lookups(watcher, chains, seconds=seconds)
    finally:
        stop.set()
        thread.join(WAIT_S)


def restart_rows(*, runs: int) -> list[Row]:
    """SIGKILL and restart with 100,000 blocks on 3 workers: from the new process's first answer to a whole copy."""
    rng = random.Random(7)
    owners = [_Owner([item for chain in _chains(rng, 334) for item in chain]) for _ in range(3)]
    total = sum(len(owner.blocks) for owner in owners)
    server = _Server()
    taken = []
    with (
        _published(server.address, "w0", owners[0]),
        _published(server.address, "w1", owners[1]),
        _published(server.address, "w2", owners[2]),
        _watching(server.address) as watcher,
    ):
        try:
            for _ in range(runs):
                _wait_whole(watcher, total, 0)
                before = watcher.view.directory_epoch
                server.kill()
                server = _Server(server.port)
                start = time.perf_counter()
                _wait_whole(watcher, total, before)
                taken.append(time.perf_counter() - start)
        finally:
            server.kill()
    return [_cost(f"restart until whole, {total} blocks on 3 workers", taken, 2.0, REQUIREMENT, "s", bar=1.0)]


def _wait_whole(watcher: MetadataWatcher, entries: int, epoch_before: int) -> None:
    """Wait until the copy of a later directory holds all entries."""

    def whole() -> bool:
        return watcher.view.directory_epoch > epoch_before and watcher.view.index.entries == entries

    if not watcher.wait_for(whole, WAIT_S):
        raise RuntimeError(f"the index has {watcher.view.index.entries} of {entries} entries")


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def _cost(
    name: str, ours: Sequence[float], reference: float, reference_name: str, unit: str, *, bar: float | None = None
) -> Row:
    return Row(
        name, statistics.median(ours), reference, unit, reference_name,
        bar=bar, higher_is_better=False, runs=len(ours), spread=spread(ours),
    )  # fmt: skip


if __name__ == "__main__":
    _print_memory(int(sys.argv[1]), int(sys.argv[2]))
