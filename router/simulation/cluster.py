"""A simulated cluster around the real router core: nodes with caches and engines, links, reports that lag, faults.

The router is `router.core.RouterCore` itself; it sees what a router sees: members, reports after a delay, and an
index that lags behind the nodes' caches. Nodes do what workers do: start loads at arrival, let other requests pass
while a load runs, keep what arrived, fall back to the next copy and then to redo, publish what they computed.
"""

from __future__ import annotations

from random import Random

from kvpool.errors import CapacityError
from kvpool.plan import Route
from kvpool.reports import PrefillSample, RequestOutcome
from kvpool.types import (
    MemberInfo,
    MemberState,
    RequestId,
    Role,
    WorkerEpoch,
    WorkerId,
    WorkerKey,
)
from router.core import RouterCore
from router.door import RequestMeta
from router.policies import Policy
from router.signals import Features, Footprint
from router.simulation.cache import Change, NodeCache
from router.simulation.engine import Engine, Sequence
from router.simulation.events import EventLoop
from router.simulation.lagging_index import LaggingIndex
from router.simulation.loads import Loads, Surroundings
from router.simulation.network import Network
from router.simulation.oracle import AT_ONCE, Oracle
from router.simulation.parts import Job, Node, departed
from router.simulation.presets import Preset
from router.simulation.routers import SeveralRouters
from router.simulation.scenario import Faults, Served, Timing
from router.simulation.trace import Trace, TraceRequest

RETRY_LIMIT = 8
MAX_STRIPES = 4
"""Holders that one load may come from at once, as in `router.actor`."""


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
        calibration: prefills that every node measured before it joined, as real workers do.
        routers: how many; each hears everything, and has promises and a waiting room of its own.
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
        calibration: tuple[PrefillSample, ...] = (),
        routers: int = 1,
    ) -> None:
        self.loop = EventLoop()
        self._trace = trace
        self._calibration = calibration
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
        host_links = Network(self.loop, nodes, preset.host_bytes_per_s, preset.host_alpha_ns)
        self._loads = Loads(
            Surroundings(
                loop=self.loop,
                network=self._network,
                host_links=host_links,
                faults=self._faults,
                preset=preset,
                footprint=self._footprint,
                find=self._by_key.get,
                store=self._store,
                publish=self._publish,
            ),
            self._rng,
        )
        cores = [
            RouterCore(
                self._index,
                lambda: self.loop.now_ns,
                policy=Oracle(policy, self.nodes, self._network, preset) if oracle else policy,
                features=features or Features(split=True, stripes=MAX_STRIPES),
                max_records=max_records,
                router_id=f"sim{number or ''}",
                rng=Random(seed + 1 + number),
                footprint=self._footprint,
                routers=routers,
            )
            for number in range(routers)
        ]
        self.core: RouterCore | SeveralRouters = cores[0] if routers == 1 else SeveralRouters(cores)
        self.served = [Served(item.arrival_ns, item.prompt_tokens, item.output_tokens) for item in trace.requests]

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
            elapsed_ns=self.loop.now_ns - request.arrival_ns,
        )
        try:
            route = self.core.route(meta)
        except CapacityError as error:  # it waits at the router
            served.attempts -= 1
            again_ns = round(float(error.details["retry_after_s"]) * 1e9)
            self.loop.after(again_ns, self._arrive, index, request, exclude)
            return
        node = self._by_key[route.worker]
        served.plan = route.plan.kind.value
        served.decided_ns = self.loop.now_ns
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
        job.device_blocks = min(node.cache.device_prefix(chain), usable) if node.cache.in_host else job.cached_blocks
        job.pinned = list(chain[: job.cached_blocks])
        node.cache.pin(job.pinned)
        sequence.position = job.cached_blocks * self._trace.block_tokens
        node.accepted.append(route.request_id)
        self._loads.begin(job)
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
        served.tokens_promoted = (job.cached_blocks - job.device_blocks) * self._trace.block_tokens
        served.tokens_loaded = job.loaded_tokens
        served.tokens_redone = sequence.computed
        served.load_failures = len(job.failures)
        self._store(job, len(job.chain))
        if sequence.computed:
            sample = PrefillSample(sequence.computed, sequence.context_at_start, max(1, round(sequence.busy_ns)))
            node.prefills.append(sample)
        node.outcomes.append(
            RequestOutcome(
                request_id=job.route.request_id,
                decision_id=job.route.decision_id,
                worker_id=node.key.worker_id,
                ttft_ns=sequence.first_token_ns - job.accepted_ns,
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
        self._publish(node, node.cache.unpin(job.pinned))
        self._report(node)

    # ---- caches, index, reports

    def _store(self, job: Job, stop: int) -> None:
        """The job's chain is whole up to ``stop`` in its node's device: cache, pin and publish it."""
        have = len(job.pinned)
        if stop <= have:
            return
        change = job.node.cache.insert(job.chain[:stop], have, pin=True)
        job.pinned.extend(job.chain[have:stop])
        self._publish(job.node, change)

    def _publish(self, node: Node, change: Change) -> None:
        """Tell the index, which hears it later."""
        if change.new:
            self.loop.after(self._timing.index_ns, self._index.add, node.number, change.new)
        if change.demoted:
            self.loop.after(self._timing.index_ns, self._index.demote, node.number, change.demoted)
        if change.gone:
            self.loop.after(self._timing.index_ns, self._drop, node, change.gone)

    def _drop(self, node: Node, blocks: list[int]) -> None:
        gone = [block for block in blocks if block not in node.cache]
        self._index.drop(node.number, gone)

    def _report(self, node: Node) -> None:
        self.loop.after(self._timing.report_ns, self.core.on_report, node.report(self._preset.capacity_blocks))

    # ---- members

    def _make_node(self, number: int, key: WorkerKey) -> Node:
        cache = NodeCache(self._preset.capacity_blocks, lambda: self.loop.now_ns, self._preset.host_blocks)
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
            capacity_blocks=(self._preset.capacity_blocks, self._preset.host_blocks, 0),
            control_address=node.key.worker_id,
            calibration=self._calibration,
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
            self._loads.drop(job)
            if self.served[job.index].ttft_ns is None:
                self._retry(job.index, self._trace.requests[job.index], job.route)
        for other in self.nodes:
            for job in other.jobs.values():
                for load in job.running():
                    if load.holder is node:
                        self._loads.lost_holder(load)
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
