"""A simulated cluster around the real router core: nodes with caches and engines, links, reports that lag, faults.

The router is `router.core.RouterCore` itself; it sees what a router sees: members, reports after a delay, and an
index that lags behind the nodes' caches. Nodes do what workers do: start loads at arrival, let other requests pass
while a load runs, keep what arrived, fall back to the next copy and then to redo, publish what they computed.
"""

from __future__ import annotations

from random import Random

from kvpool.plan import HolderRef, LoadSlice, PlanKind, Route
from kvpool.reports import LoadSample, PrefillSample, RequestOutcome
from kvpool.types import (
    MemberInfo,
    MemberState,
    RequestId,
    Role,
    WorkerEpoch,
    WorkerId,
    WorkerKey,
)
from router.core import RequestMeta, RouterCore
from router.policies import Policy
from router.signals import Features, Footprint
from router.simulation.cache import NodeCache
from router.simulation.engine import Engine, Sequence
from router.simulation.events import EventLoop
from router.simulation.lagging_index import LaggingIndex
from router.simulation.network import Network
from router.simulation.oracle import AT_ONCE, Oracle
from router.simulation.parts import Job, Load, Node, departed
from router.simulation.presets import Preset
from router.simulation.scenario import Faults, Served, Timing
from router.simulation.trace import Trace, TraceRequest

RETRY_LIMIT = 8
LOOK_RATIO = 1.1  # a load is given up when its rest would take this much longer than redoing it
MIN_LOOK_NS = 20_000_000


class Cluster:
    """One simulated run.

    Args:
        trace: what arrives.
        preset: node and model.
        nodes: number of nodes.
        bandwidth_bytes_per_s: of every node's link, each way.
        policy: routing policy.
        features: plans the workers can execute.
        faults, timing: what goes wrong, and how late everything is known.
        seed: of faults, and of policies that draw.
        oracle: show the policy the truth (`router.simulation.oracle`).
    """

    def __init__(
        self,
        trace: Trace,
        preset: Preset,
        *,
        nodes: int,
        bandwidth_bytes_per_s: float,
        policy: Policy,
        features: Features | None = None,
        faults: Faults | None = None,
        timing: Timing | None = None,
        seed: int = 0,
        max_records: int = 1000,
        oracle: bool = False,
    ) -> None:
        self.loop = EventLoop()
        self._trace = trace
        self._preset = preset
        self._faults = faults or Faults()
        self._timing = timing or (AT_ONCE if oracle else Timing())
        self._rng = Random(seed)
        layout = preset.layout
        self._footprint = Footprint(trace.block_tokens, preset.block_bytes(trace.block_tokens), layout.fixed_bytes)
        self._network = Network(self.loop, nodes, bandwidth_bytes_per_s, preset.alpha_ns)
        keys = [WorkerKey(WorkerId(f"node-{i:04d}"), WorkerEpoch(1)) for i in range(nodes)]
        self._index = LaggingIndex(keys)
        self.nodes = [self._make_node(i, key) for i, key in enumerate(keys)]
        self._by_key = {node.key: node for node in self.nodes}
        self.core = RouterCore(
            self._index,
            lambda: self.loop.now_ns,
            policy=Oracle(policy, self.nodes, self._network, preset) if oracle else policy,
            features=features or Features(split=True),
            max_records=max_records,
            router_id="sim",
            rng=Random(seed + 1),
            footprint=self._footprint,
        )
        self.served = [Served(item.arrival_ns, item.prompt_tokens, item.output_tokens) for item in trace.requests]

    def token_ns(self, position: int) -> float:
        """True time to compute one token at a position."""
        curve = self._preset.curve
        return curve.token_ns + curve.pair_ns * position

    @property
    def bytes_moved(self) -> float:
        """Bytes that all loads moved, those of failed loads included."""
        return self._network.bytes_moved

    def run(self) -> list[Served]:
        """Play the whole trace; returns what became of every request, in the order of the trace."""
        for node in self.nodes:
            self._join(node)
        for index, request in enumerate(self._trace.requests):
            self.loop.at(request.arrival_ns, self._arrive, index, request, frozenset())
        for start_ns, length_ns, number in self._faults.outages:
            self.loop.at(start_ns, self._die, self.nodes[number], length_ns)
        self.loop.run()
        return self.served

    # ---- requests

    def _arrive(self, index: int, request: TraceRequest, exclude: frozenset[WorkerKey]) -> None:
        served = self.served[index]
        served.attempts += 1
        chain = request.blocks[: request.prompt_tokens // self._trace.block_tokens]
        meta = RequestMeta(
            RequestId(f"q{index}"),
            request.prompt_tokens,
            chain,  # type: ignore[arg-type]
            request.output_tokens,
            exclude,
        )
        route = self.core.route(meta)
        node = self._by_key[route.worker]
        served.plan = route.plan.kind.value
        served.predicted_ns = route.plan.predicted_ttft_ns
        served.node = node.number
        self.loop.after(self._timing.dispatch_ns, self._accept, index, request, chain, route, node)

    def _accept(self, index: int, request: TraceRequest, chain: tuple[int, ...], route: Route, node: Node) -> None:
        if not node.alive or node.key != route.worker:
            self._retry(index, request, route)
            return
        sequence = Sequence(f"q{index}", request.arrival_ns, request.prompt_tokens, request.output_tokens)
        job = Job(index, route, chain, sequence, node, self.loop.now_ns)
        node.jobs[index] = job
        usable = min(len(chain), (request.prompt_tokens - 1) // self._trace.block_tokens)
        job.cached_blocks = min(node.cache.prefix(chain), usable)
        job.pinned = list(chain[: job.cached_blocks])
        node.cache.pin(job.pinned)
        sequence.position = job.cached_blocks * self._trace.block_tokens
        node.accepted.append(route.request_id)
        for piece in route.plan.loads:
            self._begin_load(job, piece)
        node.engine.submit(sequence)
        self._report(node)

    def _retry(self, index: int, request: TraceRequest, route: Route) -> None:
        served = self.served[index]
        self.core.release(route.request_id)
        if served.attempts < RETRY_LIMIT:
            again = frozenset({route.worker})
            self.loop.after(self._timing.dispatch_ns, self._arrive, index, request, again)

    def _prefilled(self, node: Node, sequence: Sequence) -> None:
        job = node.jobs[int(sequence.name[1:])]
        served = self.served[job.index]
        assert sequence.first_token_ns is not None
        served.ttft_ns = sequence.first_token_ns - served.arrival_ns
        served.tokens_cached = job.cached_blocks * self._trace.block_tokens
        served.tokens_loaded = job.loaded_tokens
        served.tokens_redone = sequence.computed
        served.load_failures = len(job.failures)
        self._store(node, job, len(job.chain))
        if sequence.computed:
            sample = PrefillSample(sequence.computed, sequence.context_at_start, max(1, round(sequence.busy_ns)))
            node.prefills.append(sample)
        node.outcomes.append(
            RequestOutcome(
                request_id=job.route.request_id,
                decision_id=job.route.decision_id,
                worker_id=node.key.worker_id,
                ttft_ns=served.ttft_ns,
                tokens_cached=served.tokens_cached,
                tokens_loaded=served.tokens_loaded,
                tokens_redone=served.tokens_redone,
                bytes_loaded=job.loaded_tokens // self._trace.block_tokens * self._footprint.block_bytes,
                load_ns=job.load_ns,
                queue_ns=(sequence.started_ns or self.loop.now_ns) - job.accepted_ns,
                load_failures=tuple(job.failures),
            )
        )
        self._report(node)

    def _finished(self, node: Node, sequence: Sequence) -> None:
        job = node.jobs.pop(int(sequence.name[1:]))
        self.served[job.index].finished_ns = self.loop.now_ns
        self._unpublish(node, node.cache.unpin(job.pinned))
        self._report(node)

    # ---- loads

    def _begin_load(self, job: Job, piece: LoadSlice) -> None:
        start = max(job.cached_blocks, piece.start if job.route.plan.kind is PlanKind.SPLIT else 0)
        if piece.stop <= start:
            return
        if job.route.plan.kind is PlanKind.SPLIT:
            start = job.cached_blocks  # the tail loads towards the front until they meet
        job.sequence.expected = piece.stop * self._trace.block_tokens
        self._load_from(job, piece.holder, start, piece.stop, piece.alternates)

    def _load_from(
        self, job: Job, holder_key: WorkerKey, start: int, stop: int, alternates: tuple[HolderRef, ...]
    ) -> None:
        holder = self._by_key.get(holder_key)
        missing = holder is None or not holder.alive or self._rng.random() < self._faults.stale
        held = 0 if missing or holder is None else min(stop, holder.cache.prefix(job.chain))
        if held <= start or holder is None:
            self._load_failed(job, holder_key, 0, 1, "stale", start, stop, alternates)
            return
        dies = self._rng.random() < self._faults.load_death
        slow = self._rng.random() < self._faults.straggler
        total = float(self._footprint.fixed_bytes + (held - start) * self._footprint.block_bytes)
        blocks = list(job.chain[start:held])
        holder.cache.pin(blocks)
        load = Load(
            job=job,
            holder=holder,
            start=start,
            stop=held,
            flow=None,  # type: ignore[arg-type]
            held=blocks,
            started_ns=self.loop.now_ns,
            tail_first=job.route.plan.kind is PlanKind.SPLIT,
            dies=dies,
            alternates=alternates,
            fixed_bytes=self._footprint.fixed_bytes,
            block_bytes=self._footprint.block_bytes,
            block_tokens=self._trace.block_tokens,
            cluster=self,
        )
        moved = total * self._rng.random() if dies else total
        load.flow = self._network.start(
            holder.number,
            job.node.number,
            moved,
            lambda _: self._flow_done(load),
            self._faults.straggler_factor if slow else 1.0,
        )
        job.load = load
        job.node.in_flight_bytes += total
        if load.tail_first:
            job.sequence.tail = load
            return
        job.sequence.ready = False
        plan = job.route.plan
        self.loop.after(max(1, plan.load_deadline_ns), self._deadline, load)
        predicted = (held - start) * self._footprint.block_bytes / self._network.rate_bytes_per_ns
        self.loop.after(max(MIN_LOOK_NS, int(1.2 * predicted)), self._look, load)

    def _flow_done(self, load: Load) -> None:
        if load.over:
            return
        if load.dies:
            self.loop.after(self._faults.notice_ns, self._died, load)
            return
        self._close(load)
        job = load.job
        num_bytes = load.fixed_bytes + (load.stop - load.start) * load.block_bytes
        elapsed = self.loop.now_ns - load.started_ns
        job.load_ns += elapsed
        job.node.loads.append(LoadSample(load.holder.key, num_bytes, load.stop - load.start, elapsed))
        if load.tail_first:
            return  # the engine takes the tail over at its next look
        self._keep(load, load.stop)
        self._go(job)

    def _died(self, load: Load) -> None:
        if load.over:
            return
        arrived = max(0, load.arrived_blocks(self.loop.now_ns))
        self._close(load)
        elapsed = self.loop.now_ns - load.started_ns
        if load.tail_first:
            load.job.failures.append("peer_gone")
            load.job.node.loads.append(LoadSample(load.holder.key, 0, arrived, elapsed, "peer_gone"))
            return
        self._keep(load, load.start + arrived)
        self._load_failed(
            load.job, load.holder.key, arrived, elapsed, "peer_gone", load.start + arrived, load.stop, load.alternates
        )

    def _load_failed(
        self,
        job: Job,
        holder: WorkerKey,
        blocks: int,
        elapsed_ns: int,
        code: str,
        start: int,
        stop: int,
        alternates: tuple[HolderRef, ...],
    ) -> None:
        """Report a failed load and go on with the next copy, or with redo."""
        job.failures.append(code)
        job.node.loads.append(LoadSample(holder, 0, blocks, elapsed_ns, code))
        for n, ref in enumerate(alternates):
            if ref.stop > start:
                self._load_from(job, ref.holder, start, min(stop, ref.stop), alternates[n + 1 :])
                return
        self._go(job)

    def _deadline(self, load: Load) -> None:
        if not load.over:
            self._give_up(load, "stall")

    def _look(self, load: Load) -> None:
        """A late load is given up when its rest takes longer than redoing it; else looked at again later."""
        if load.over:
            return
        now_ns = self.loop.now_ns
        moved = load.flow.arrived(now_ns)
        elapsed = max(1, now_ns - load.started_ns)
        rest_bytes = load.flow.total - moved
        rest_ns = rest_bytes * elapsed / moved if moved > 0 else float("inf")
        first = (load.start + max(0, load.arrived_blocks(now_ns))) * self._trace.block_tokens
        redo_ns = self._preset.curve.time_ns(load.stop * self._trace.block_tokens - first, first)
        idle = load.job.node.engine.idle
        if idle and rest_ns > LOOK_RATIO * redo_ns:
            self._give_up(load, "stall")
        else:
            self.loop.after(max(MIN_LOOK_NS, elapsed // 4), self._look, load)

    def _give_up(self, load: Load, code: str) -> None:
        arrived = max(0, load.arrived_blocks(self.loop.now_ns))
        self._network.cancel(load.flow)
        self._close(load)
        self._keep(load, load.start + arrived)
        elapsed = self.loop.now_ns - load.started_ns
        load.job.failures.append(code)
        load.job.node.loads.append(LoadSample(load.holder.key, 0, arrived, elapsed, code))
        self._go(load.job)

    def end_tail(self, load: Load) -> int:
        """The computed front met the loaded tail: stop loading, keep the tail; returns the boundary in tokens."""
        now_ns = self.loop.now_ns
        arrived = max(0, load.arrived_blocks(now_ns))
        job = load.job
        if not load.over:
            self._network.cancel(load.flow)
            self._close(load)
            elapsed = now_ns - load.started_ns
            job.load_ns += elapsed
            if arrived:
                num_bytes = round(load.flow.moved)
                job.node.loads.append(LoadSample(load.holder.key, num_bytes, arrived, elapsed))
        job.load = None
        boundary = load.stop * self._trace.block_tokens if arrived else 0
        job.loaded_tokens += max(0, boundary - job.sequence.position)
        if arrived:
            self._store(job.node, job, load.stop)
        return boundary

    def _close(self, load: Load) -> None:
        load.over = True
        load.job.node.in_flight_bytes -= load.fixed_bytes + (load.stop - load.start) * load.block_bytes
        if load.holder.alive:
            self._unpublish(load.holder, load.holder.cache.unpin(load.held))

    def _keep(self, load: Load, stop: int) -> None:
        """Use what arrived front-first up to ``stop``."""
        job = load.job
        if stop > load.start:
            job.loaded_tokens += (stop - load.start) * self._trace.block_tokens
            job.sequence.position = max(job.sequence.position, stop * self._trace.block_tokens)
            self._store(job.node, job, stop)

    def _go(self, job: Job) -> None:
        job.load = None
        job.sequence.ready = True
        if job.sequence in job.node.engine.waiting:
            job.node.engine.wake()

    # ---- caches, index, reports

    def _store(self, node: Node, job: Job, stop: int) -> None:
        """The job's chain is whole up to ``stop`` here: cache, pin and publish it."""
        have = len(job.pinned)
        if stop <= have:
            return
        new, evicted = node.cache.insert(job.chain[:stop], have, pin=True)
        job.pinned.extend(job.chain[have:stop])
        if new:
            self.loop.after(self._timing.index_ns, self._index.add, node.number, new)
        self._unpublish(node, evicted)

    def _unpublish(self, node: Node, blocks: list[int]) -> None:
        if blocks:
            self.loop.after(self._timing.index_ns, self._drop, node, blocks)

    def _drop(self, node: Node, blocks: list[int]) -> None:
        gone = [block for block in blocks if block not in node.cache]
        self._index.drop(node.number, gone)

    def _report(self, node: Node) -> None:
        self.loop.after(self._timing.report_ns, self.core.on_report, node.report(self._preset.capacity_blocks))

    # ---- members

    def _make_node(self, number: int, key: WorkerKey) -> Node:
        cache = NodeCache(self._preset.capacity_blocks, lambda: self.loop.now_ns)
        node = Node(number, key, cache, None)  # type: ignore[arg-type]
        node.engine = Engine(
            self.loop,
            self._preset,
            lambda sequence: self._prefilled(node, sequence),
            lambda sequence: self._finished(node, sequence),
        )
        return node

    def _join(self, node: Node) -> None:
        info = MemberInfo(
            key=node.key,
            role=Role.MIXED,
            transport="simulated",
            data_address=str(node.number).encode(),
            layout_fingerprint="simulated",
            hash_scheme="simulated",
            block_tokens=self._trace.block_tokens,
            block_bytes=self._footprint.block_bytes,
            capacity_blocks=(self._preset.capacity_blocks, 0, 0),
            control_address=node.key.worker_id,
        )
        self.core.on_member_change(info, MemberState.ALIVE)
        self._report(node)

    def _die(self, node: Node, length_ns: int) -> None:
        """The node dies with its cache; its requests are retried elsewhere; loads from it end."""
        node.alive = False
        old = node.key
        lost_blocks = node.cache.clear()
        jobs = list(node.jobs.values())
        node.jobs.clear()
        node.engine.drop_all()
        for job in jobs:
            if job.load is not None and not job.load.over:
                self._network.cancel(job.load.flow)
                self._close(job.load)
            if self.served[job.index].ttft_ns is None:
                self._retry(job.index, self._trace.requests[job.index], job.route)
        for other in self.nodes:
            for job in other.jobs.values():
                load = job.load
                if load is not None and load.holder is node and not load.over:
                    self._network.cancel(load.flow)
                    load.dies = True
                    self.loop.after(self._faults.notice_ns, self._died, load)
        self.loop.after(self._timing.lease_ns, self._expire_member, node, old)
        self.loop.after(self._timing.index_ns, self._index.drop, node.number, lost_blocks)
        self.loop.after(length_ns, self._revive, node)

    def _expire_member(self, node: Node, old: WorkerKey) -> None:
        self.core.on_member_change(departed(old), None)

    def _revive(self, node: Node) -> None:
        key = WorkerKey(node.key.worker_id, WorkerEpoch(node.key.worker_epoch + 1))
        del self._by_key[node.key]
        if node.key in self.core.members():
            self.core.on_member_change(departed(node.key), None)
        node.key = key
        node.alive = True
        node.in_flight_bytes = 0.0
        node.sequence_number = 0
        self._by_key[key] = node
        self._index.keys[node.number] = key
        self._join(node)


__all__ = ["Cluster", "Faults", "Served", "Timing"]
