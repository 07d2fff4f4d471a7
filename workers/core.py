"""The worker core: what a worker is without Ray. Binds engine, segment, loader and publisher, and takes requests.

`submit`, `cancel`, `load`, `status` may be called from any thread; the work is done by `workers.engine_loop` on one
engine thread. No Ray, no torch, no gRPC here. The core owns arena, segment and engine, and releases them in `close`
only after every load is terminal.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvpool.config import WorkerConfig
from kvpool.errors import RequestError, UnavailableError
from kvpool.hashing import Namespace, block_hashes
from kvpool.plan import Plan
from kvpool.reports import LoadSample, PrefillSample, WorkerLoad
from kvpool.request import GenerateRequest
from kvpool.store.answers import Purge
from kvpool.store.arena import Arena
from kvpool.store.disk import DiskTier
from kvpool.store.segment import Segment, SegmentConfig
from kvpool.store.selection import Selection
from kvpool.transport.base import Transport
from kvpool.types import BlockHash, RequestId, Tier, WorkerKey
from workers.block_table import BlockTable
from workers.bridge import Bridge
from workers.calibrate import pair_ratio
from workers.device_copies import DeviceCopies
from workers.disk_loads import DiskLoader, DiskSpeed, Promoter, with_disk
from workers.engine.base import Engine
from workers.engine_loop import EngineLoop, LoopParts, Sink
from workers.flights import Flights, open_ended
from workers.gate import Gate
from workers.ports import Loader, Publisher
from workers.puller import Puller, PullOrder, PullResult, PullSource
from workers.queue_load import queue_load
from workers.reporter import Reporter
from workers.scheduler import Scheduler
from workers.sequence import Sequence
from workers.stopping import Decode

JOIN_S = 60.0
MAX_SAMPLES = 1024
MAX_TENANTS_SHOWN = 16

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CoreParts:
    """What a core binds together.

    Attributes:
        key: this worker's incarnation.
        engine: computes; the core owns it from now on and shuts it down.
        config: limits and the size of the segment.
        namespace_for: tenant → what its block chains are rooted in.
        publisher: whom to tell about blocks, load and suspects.
        transport: the data plane, not started; None for a worker without one (plans are then redone).
        make_loader: builds the loader over the started transport.
        decode: tokens → text, for stop strings.
        tier: where the segment lies.
        disk: where evicted blocks go, not started; the core owns it. None without one.
        disk_error: why there is none although there should be one, for the status.
        gate: whether to wait for loads in flight; None for one that learns the prefill speed.
        clock_ns: monotonic clock.
        on_failure: called once, from the engine thread, when the engine broke.
    """

    key: WorkerKey
    engine: Engine
    config: WorkerConfig
    namespace_for: Callable[[str], Namespace]
    publisher: Publisher
    transport: Transport | None = None
    make_loader: Callable[[Transport], Loader] | None = None
    decode: Decode | None = None
    tier: Tier = Tier.HOST
    disk: DiskTier | None = None
    disk_error: str = ""
    gate: Gate | None = None
    clock_ns: Callable[[], int] = time.monotonic_ns
    on_failure: Callable[[BaseException], None] | None = None


class WorkerCore:
    """Serves requests; see the module's docstring. Starts its thread at once."""

    def __init__(self, parts: CoreParts) -> None:
        self._parts = parts
        engine, num_blocks, store = parts.engine, parts.config.engine.num_blocks, parts.config.store
        block_bytes = engine.layout.block_bytes
        self._block_tokens = engine.layout.block_tokens
        self._arena = Arena(block_bytes * num_blocks)
        self.segment = Segment(
            SegmentConfig(
                block_bytes,
                num_blocks,
                parts.tier,
                quotas=store.tenant_quotas,
                device_blocks=store.device_blocks,
            ),
            self._arena.memory,
            parts.publisher,
            parts.clock_ns,
        )
        engine.attach_pages(self._arena.memory, num_blocks)
        self._device: DeviceCopies | None = None
        if self.segment.device is not None:
            engine.attach_device_pages(store.device_blocks)
            self._device = DeviceCopies(engine, self.segment.device, parts.clock_ns)
        self._lock = threading.RLock()
        self._draining = self._closed = False
        self._samples: deque[LoadSample] = deque(maxlen=MAX_SAMPLES)  # no lock: a transport's thread must never wait
        self._last_read_ns: dict[WorkerKey, int] = {}
        wake = threading.Event()
        self._gate = parts.gate or Gate(self._block_tokens)
        self._scheduler = Scheduler(parts.config.scheduler, self.segment, self._gate)
        self._reporter = Reporter(parts.key, parts.publisher)
        self._bridge = Bridge(engine, self.segment, self._device, parts.clock_ns)
        loader = self._start_loader()
        self._has_peers = loader is not None
        self._disk_speed = DiskSpeed()
        if parts.disk is not None:
            parts.disk.start(self._arena.memory)
            self.segment.on_evict(parts.disk.offer)
            loader = DiskLoader(parts.key, parts.disk, loader, self._disk_speed, self.observe_load)
        self._flights = Flights(self._scheduler, self._reporter, loader, block_bytes, wake.set)
        self._puller = Puller(
            self.segment,
            loader,
            self._lock,
            root_of=lambda tenant: parts.namespace_for(tenant).root(),
            work_of=self._bridge.work_of,
            reserve=lambda: len(self._scheduler.running) + 1,
            on_end=wake.set,
        )
        self._promoter: Promoter | None = None
        if parts.disk is not None:
            self._promoter = Promoter(parts.key, parts.disk, self._puller.pull)
            self.segment.on_miss(self._promoter.missed)
        self._loop = EngineLoop(
            LoopParts(
                worker_id=parts.key.worker_id,
                engine=engine,
                scheduler=self._scheduler,
                gate=self._gate,
                bridge=self._bridge,
                flights=self._flights,
                reporter=self._reporter,
                lock=self._lock,
                wake=wake,
                clock_ns=parts.clock_ns,
                decode=parts.decode,
                load=self.load,
                counters=self.counters,
                samples=self._samples,
                pulling=lambda: self._puller.busy,
            )
        )
        self.segment.on_room(wake.set)
        self._thread = threading.Thread(
            target=self._loop.run, args=(parts.on_failure,), name=f"kvpool-engine-{parts.key.worker_id}", daemon=True
        )
        self._thread.start()

    def _start_loader(self) -> Loader | None:
        parts = self._parts
        if parts.transport is None:
            return None
        parts.transport.start(parts.key, self._arena.memory, parts.engine.layout.block_bytes, self.segment)
        return None if parts.make_loader is None else parts.make_loader(parts.transport)

    # -- requests, from any thread

    def submit(self, request: GenerateRequest, plan: Plan, decision_id: str, sink: Sink) -> None:
        """Accept a request; its loads start before this returns.

        Args:
            request: what to generate.
            plan: how to make the prefix whole; loads that cannot be done are redone.
            decision_id: the router's decision, for the outcome report.
            sink: gets chunks in order, the last with ``finish``, or one error. Called from the engine thread; must not
                block. Nothing is delivered after `FinishReason` or an error.

        Raises:
            RequestError: the request can never be served here.
            DuplicateError: one with its id is running.
            CapacityError: too many requests wait.
            UnavailableError: the worker drains, is closed or its engine broke.
        """
        if self._draining:
            raise UnavailableError(f"worker {self._parts.key} drains and takes no new requests; use another worker")
        self._require_servable(request)
        self._puller.unfollow(decision_id)
        table = BlockTable(self._parts.namespace_for(request.tenant).root(), self._block_tokens)
        plan = open_ended(plan) if self._has_peers else plan._replace(loads=())
        now_ns = self._parts.clock_ns()
        sequence = Sequence(request, plan, decision_id, table, now_ns, now_ns + request.timeout_ns)
        sequence.plan = self._with_disk(plan, table.chain)
        self._loop.admit(sequence, sink)

    def _with_disk(self, plan: Plan, chain: list[BlockHash]) -> Plan:
        """The plan, with what lies on the own disk behind what lies in memory, unless peers bring that sooner."""
        disk = self._parts.disk
        if disk is None or (plan.loads and not plan.own_disk):
            return plan
        start = len(self.segment.match(chain))
        blocks = disk.run(chain, start)
        if not blocks:
            return plan
        expected_ns = self._disk_speed.expect_ns(blocks * self.segment.config.block_bytes)
        return with_disk(plan, start, start + blocks, self._parts.key, expected_ns)

    def cancel(self, request_id: RequestId, decision_id: str | None = None) -> None:
        """End a request; its sink gets a chunk with `FinishReason.CANCELLED`. Unknown ids are fine.

        ``decision_id`` names one attempt: whoever gives up an attempt must not end another one, be it a later one of
        the same request or that of a stranger who chose the same id.
        """
        self._loop.cancel(request_id, decision_id)

    def observe_load(self, sample: LoadSample) -> None:
        """A read from one holder ended; for the loader, from any thread. Never waits, drops the oldest when full.

        Reads from one holder take turns, so a read that queued behind another is timed from the end of that one.
        """
        now_ns = self._parts.clock_ns()
        before_ns = self._last_read_ns.get(sample.holder, 0)
        if len(self._last_read_ns) >= MAX_SAMPLES:
            self._last_read_ns.clear()  # holders of long ago
        self._last_read_ns[sample.holder] = now_ns
        self._samples.append(replace(sample, elapsed_ns=max(1, min(sample.elapsed_ns, now_ns - before_ns))))

    def observe_prefills(self, samples: Collection[PrefillSample]) -> None:
        """Prefill passes measured before the first request; the gate learns from them, and what a block is worth.
        Routers have them from join."""
        self._bridge.pair_ratio = pair_ratio(tuple(samples))
        with self._lock:
            for sample in samples:
                self._gate.observe(sample.new_tokens, sample.elapsed_ns)

    # -- administration, from any thread

    def pull(self, order: PullOrder) -> PullResult:
        """Load a chain that no request waits for; see `workers.puller.Puller.pull`."""
        return self._puller.pull(order)

    def follow(self, request: GenerateRequest, plan: Plan, decision_id: str) -> PullResult:
        """Load a prompt while the worker that the plan names computes it, because the request goes on here; see
        `workers.puller.Puller.follow`."""
        chain = block_hashes(request.prompt + request.generated, self._parts.namespace_for(request.tenant))
        sources = tuple(
            PullSource(part.holder, part.transport, part.data_address, min(part.stop, len(chain)))
            for part in plan.loads
        )
        order = PullOrder(request.tenant, chain, sources, plan.load_deadline_ns, patient=True)
        return self._puller.follow(order, decision_id)

    def unfollow(self, decision_id: str) -> None:
        """The followed request is here now, or over."""
        self._puller.unfollow(decision_id)

    def evict(self, selection: Selection) -> tuple[Purge, int]:
        """Evict what is selected and not needed now; returns what became of blocks in memory, and how many were
        removed from disk."""
        disk = self._parts.disk
        with self._lock:
            purge, selected = self.segment.evict(selection, () if disk is None else disk.blocks())
        return purge, 0 if disk is None else disk.remove(selected)

    @property
    def keep_blocks(self) -> int:
        """Most blocks that pins may protect."""
        return int(self.segment.total_blocks * self._parts.config.store.keep_share)

    def drain(self) -> None:
        """Take no new requests; running ones finish. `wait_idle` tells when."""
        self._draining = True

    def wait_idle(self, timeout_ns: int) -> bool:
        """Wait until no request is active and no load in flight; False when the time ran out."""
        return self._loop.wait_idle(timeout_ns)

    def close(self) -> None:
        """End every request with `UnavailableError`, give up loads, wait for them, release everything. May be
        repeated."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._puller.close()
        if self._promoter is not None:
            self._promoter.close()
        self._loop.stop()
        self._thread.join(JOIN_S)
        if self._parts.transport is not None:
            self._parts.transport.close()
        with self._lock:
            self._flights.follow()
        ended = self._parts.disk is None or self._parts.disk.close()
        if self._thread.is_alive() or self._flights.count or not ended:
            log.error("worker %s: the engine or a load did not end; its memory is kept mapped", self._parts.key)
            return
        self._parts.engine.shutdown()
        self._arena.close()

    # -- state, from any thread

    @property
    def key(self) -> WorkerKey:
        """This incarnation."""
        return self._parts.key

    @property
    def failure(self) -> BaseException | None:
        """Why the engine broke, None while it is healthy."""
        return self._loop.failure

    def held_hashes(self) -> list[BlockHash]:
        """Every block peers can read now, for a full snapshot to the directory."""
        return self.segment.held_hashes()

    def device_hashes(self) -> list[BlockHash]:
        """Those of them that lie in device memory too, for the same."""
        return [] if self.segment.device is None else list(self.segment.device.held())

    def disk_hashes(self) -> list[BlockHash]:
        """Every block on disk, for the same."""
        return [] if self._parts.disk is None else self._parts.disk.held_hashes()

    def load(self) -> WorkerLoad:
        """The queue as it is now."""
        with self._lock:
            counts = self.segment.counts()
            until_ns = self._loop.step_until_ns
            rest_ns = 0 if until_ns is None else max(0, until_ns - self._parts.clock_ns())
            return replace(
                queue_load(self._scheduler.running, self._scheduler.waiting),
                step_remaining_ns=rest_ns,
                free_blocks=self.segment.available_blocks,
                total_blocks=counts.total,
                empty_blocks=counts.free,
                idle_ns=self.segment.idle_ns(),
                in_flight_bytes=self._flights.in_flight_bytes,
                fill_mib_ns=self._fill_mib_ns(),
            )

    def counters(self) -> dict[str, int]:
        """Running totals by name; see `kvpool.reports.WorkerReport`."""
        with self._lock:
            totals = dict(self._reporter.counters)
            totals["preemptions"] = self._scheduler.preemptions
        totals.update(self._puller.counters)
        totals.update({} if self._promoter is None else self._promoter.counters)
        totals.update({} if self._parts.disk is None else self._parts.disk.counters())
        totals.update(self.segment.totals())
        totals.update({} if self.segment.device is None else self.segment.device.totals())
        totals.update({} if self._device is None else self._device.counters)
        if self._parts.transport is not None:
            stats = self._parts.transport.stats()
            totals["bytes_served"] = stats.bytes_served
            totals["bytes_saved"] = stats.bytes_saved
            totals["bad_frames"] = stats.bad_frames
            totals["codec_ns"] = stats.encode_ns + stats.decode_ns
        return totals

    def status(self) -> dict[str, Any]:
        """Everything worth showing, JSON-serialisable."""
        counts = self.segment.counts()
        counters = self.counters()
        load = self.load()
        failure = self._loop.failure
        return {
            "healthy": failure is None,
            "failure": None if failure is None else str(failure),
            "draining": self._draining,
            "running": load.running_requests,
            "waiting": load.waiting_requests,
            "loads_in_flight": self._flights.count,
            "tier": self._parts.tier.name.lower(),
            "block_bytes": self.segment.config.block_bytes,
            "blocks": {
                "free": counts.free,
                "cached": counts.cached,
                "referenced": counts.referenced,
                "in_flight": counts.in_flight,
                "pinned": counts.pinned,
                "kept": counts.kept,
                "spare": counts.spare,
                "total": counts.total,
            },
            "tenants": {
                tenant or "(shared)": blocks
                for tenant, blocks in Counter(self.segment.tenants()).most_common(MAX_TENANTS_SHOWN)
            },
            "read_leases": self.segment.leases,
            "device": self._device_status(),
            "disk": self._disk_status(),
            "counters": counters,
            "failures": _failures(counters),
        }

    def _disk_status(self) -> dict[str, Any] | None:
        if self._parts.disk is not None:
            return self._parts.disk.status()
        return {"error": self._parts.disk_error} if self._parts.disk_error else None

    def _device_status(self) -> dict[str, int] | None:
        if self._device is None or self.segment.device is None:
            return None
        return {**self.segment.device.status(), "fill_mib_ns": self._fill_mib_ns()}

    def _fill_mib_ns(self) -> int:
        return 0 if self._device is None else self._device.speed.mib_ns

    def check(self) -> None:
        """Invariants of pool and scheduler.

        Raises:
            InvariantViolation: one does not hold.
        """
        with self._lock:
            self.segment.check()
            self._scheduler.check()

    # -- validation

    def _require_servable(self, request: GenerateRequest) -> None:
        engine, total = self._parts.engine, self.segment.total_blocks
        longest = len(request.prompt) + request.sampling.max_tokens
        if longest > engine.max_context_tokens:
            raise RequestError(
                f"the prompt has {len(request.prompt)} tokens and max_tokens is {request.sampling.max_tokens}, but the "
                f"model takes {engine.max_context_tokens} in all; shorten the prompt or lower max_tokens",
                prompt_tokens=len(request.prompt),
                max_context_tokens=engine.max_context_tokens,
            )
        needed = longest // self._block_tokens
        if needed > total:
            raise RequestError(
                f"prompt and output of {longest} tokens need {needed} blocks and the worker's segment has {total}; "
                "shorten the prompt, lower max_tokens or raise engine.num_blocks",
                needed_blocks=needed,
                available_blocks=total,
            )
        vocab = engine.vocab_size
        for token in (*request.prompt, *request.generated):
            if not 0 <= token < vocab:
                raise RequestError(f"token id {token} is outside [0, {vocab}), the model's vocabulary", token=token)


def _failures(counters: Mapping[str, int]) -> dict[str, int]:
    """Failures by kind, loads and requests together."""
    by_kind: Counter[str] = Counter()
    for name, count in counters.items():
        family, _, code = name.partition(".")
        if family in ("load_failures", "pull_failures", "request_failures"):
            by_kind[code] += count
    return dict(by_kind)
