"""Loads of a simulated cluster: from other nodes, over one or several links at once, and from a node's own host tier.

A load starts when its request arrives and holds up nobody else. What arrived is kept; what failed is tried again from
the next copy, then redone. A plan over several holders is one load from each; what counts is the part of the chain
that is whole, so a piece that never comes leaves what lies behind it to be redone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from kvpool.plan import PlanKind
from kvpool.reports import LoadSample
from kvpool.types import Tier, WorkerKey
from router.signals import Footprint
from router.simulation.cache import Change
from router.simulation.events import EventLoop
from router.simulation.network import Network
from router.simulation.parts import Job, Load, Node, Piece, Tail
from router.simulation.presets import Preset
from router.simulation.scenario import Faults

LOOK_RATIO = 1.1  # a load is given up when its rest would take this much longer than redoing it
MIN_LOOK_NS = 20_000_000


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What loads need of their cluster.

    Attributes:
        network: between nodes.
        host_links: from every node's host to its device.
        find: a node by its incarnation, None when there is none.
        store: the job's chain is whole up to a block on its node.
        publish: tell the index what changed in a node's cache.
    """

    loop: EventLoop
    network: Network
    host_links: Network
    faults: Faults
    preset: Preset
    footprint: Footprint
    find: Callable[[WorkerKey], Node | None]
    store: Callable[[Job, int], None]
    publish: Callable[[Node, Change], None]


class Loads:
    """Runs the loads of all nodes.

    Args:
        around: the cluster.
        rng: draws faults.
    """

    def __init__(self, around: Surroundings, rng: Random) -> None:
        self._around = around
        self._rng = rng
        self._faults = around.faults
        self._block_tokens = around.footprint.block_tokens

    @property
    def loop(self) -> EventLoop:
        """Simulated time."""
        return self._around.loop

    def token_ns(self, position: int) -> float:
        """True time to compute one token at a position."""
        curve = self._around.preset.curve
        return curve.token_ns + curve.pair_ns * position

    # ---- beginning

    def begin(self, job: Job) -> None:
        """Start what the job's plan and its cached blocks ask for."""
        if job.device_blocks < job.cached_blocks:
            self._promote(job)
        split = job.route.plan.kind is PlanKind.SPLIT
        per_holder: dict[WorkerKey, tuple[Tier, list[Piece]]] = {}
        for place, piece in enumerate(job.route.plan.loads):
            start = max(job.cached_blocks, piece.start if split or place else 0)
            if piece.stop <= start:
                continue
            if split and not per_holder:
                start = job.cached_blocks  # the tail loads towards the front until they meet
            part = Piece(start, piece.stop, piece.alternates)
            per_holder.setdefault(piece.holder, (piece.tier, []))[1].append(part)
            job.sequence.expected = piece.stop * self._block_tokens
        fixed_bytes = self._around.footprint.fixed_bytes  # once per plan
        for holder, (tier, pieces) in per_holder.items():
            self._load_from(job, holder, tier, pieces, fixed_bytes)
            fixed_bytes = 0

    def _promote(self, job: Job) -> None:
        """Bring what the node's host tier holds of the chain to its device."""
        footprint = self._around.footprint
        blocks = job.cached_blocks - job.device_blocks
        job.sequence.ready = False
        job.promotion = self._around.host_links.start(
            job.node.number,
            job.node.number,
            float(footprint.fixed_bytes + blocks * footprint.block_bytes),
            lambda _: self._promoted(job),
        )

    def _promoted(self, job: Job) -> None:
        job.promotion = None
        change = job.node.cache.insert(job.chain[: job.cached_blocks], job.device_blocks)
        self._around.publish(job.node, change)
        self._keep(job)
        self._go(job)

    def _load_from(self, job: Job, key: WorkerKey, tier: Tier, pieces: list[Piece], fixed_bytes: int) -> None:
        holder = self._around.find(key)
        missing = holder is None or not holder.alive or self._rng.random() < self._faults.stale
        prefix = 0 if missing or holder is None else holder.cache.prefix(job.chain)
        there = [piece._replace(stop=min(piece.stop, prefix)) for piece in pieces if prefix > piece.start]
        if there and holder is not None:
            self._start(job, holder, tier, there, fixed_bytes)
        lost = [piece for piece in pieces if prefix <= piece.start]
        if lost:
            job.failures.append("stale")
            job.node.loads.append(LoadSample(key, 0, 0, 1, "stale", tier))
            self._elsewhere(job, lost, fixed_bytes)

    def _start(self, job: Job, holder: Node, tier: Tier, pieces: list[Piece], fixed_bytes: int) -> None:
        around = self._around
        dies = self._rng.random() < self._faults.load_death
        slow = self._rng.random() < self._faults.straggler
        blocks = [block for piece in pieces for block in job.chain[piece.start : piece.stop]]
        holder.cache.pin(blocks)
        load = Load(
            job=job,
            holder=holder,
            tier=tier,
            pieces=tuple(pieces),
            flow=None,  # type: ignore[arg-type]
            held=blocks,
            started_ns=self.loop.now_ns,
            tail_first=job.route.plan.kind is PlanKind.SPLIT,
            dies=dies,
            fixed_bytes=fixed_bytes,
            block_bytes=around.footprint.block_bytes,
        )
        total = float(load.num_bytes)
        load.flow = around.network.start(
            holder.number,
            job.node.number,
            total * self._rng.random() if dies else total,
            lambda _: self._flow_done(load),
            self._faults.straggler_factor if slow else 1.0,
        )
        job.loads.append(load)
        job.node.in_flight_bytes += total
        if load.tail_first:
            job.sequence.tail = Tail(job, self, self._block_tokens)
            return
        job.sequence.ready = False
        self.loop.after(max(1, job.route.plan.load_deadline_ns), self._deadline, load)
        predicted = load.blocks * load.block_bytes / around.network.rate_bytes_per_ns
        self.loop.after(max(MIN_LOOK_NS, int(1.2 * predicted)), self._look, load)

    # ---- ending

    def _flow_done(self, load: Load) -> None:
        if load.over:
            return
        if load.dies:
            self.loop.after(self._faults.notice_ns, self._died, load)
            return
        self._close(load)
        job, elapsed_ns = load.job, self._note_time(load)
        job.node.loads.append(LoadSample(load.holder.key, load.num_bytes, load.blocks, elapsed_ns, None, load.tier))
        if load.tail_first:
            return  # the engine takes the tail over at its next look
        self._keep(job)
        self._go(job)

    def _died(self, load: Load) -> None:
        if load.over:
            return
        job = load.job
        self._close(load)
        if not load.tail_first:
            self._keep(job)
        self._note_failure(load, "peer_gone")
        if not load.tail_first:
            self._elsewhere(job, load.missing(self.loop.now_ns), load.fixed_bytes)

    def lost_holder(self, load: Load) -> None:
        """The holder of a running load died; it is noticed later."""
        self._around.network.cancel(load.flow)
        load.dies = True
        self.loop.after(self._faults.notice_ns, self._died, load)

    def drop(self, job: Job) -> None:
        """The job's node died."""
        for load in job.running():
            self._around.network.cancel(load.flow)
            self._close(load)
        if job.promotion is not None:
            self._around.host_links.cancel(job.promotion)

    def _elsewhere(self, job: Job, pieces: list[Piece], fixed_bytes: int) -> None:
        """Go on with the next copy of what is missing, or with redo."""
        for start, stop, alternates in pieces:
            for n, ref in enumerate(alternates):
                if ref.stop > start:
                    rest = Piece(start, min(stop, ref.stop), alternates[n + 1 :])
                    self._load_from(job, ref.holder, ref.tier, [rest], fixed_bytes)
                    break
        self._go(job)

    def _deadline(self, load: Load) -> None:
        if not load.over:
            self._give_up(load)

    def _look(self, load: Load) -> None:
        """Late loads are given up when their rest takes longer than redoing it; else looked at again later."""
        if load.over:
            return
        job, now_ns = load.job, self.loop.now_ns
        elapsed_ns = max(1, now_ns - load.started_ns)
        running = job.running()
        first = job.whole_to(now_ns) * self._block_tokens
        stop = max(item.pieces[-1].stop for item in running) * self._block_tokens
        redo_ns = self._around.preset.curve.time_ns(stop - first, first)
        rest_ns = max(_rest_ns(item, now_ns) for item in running)
        if job.node.engine.idle and rest_ns > LOOK_RATIO * redo_ns:
            for item in running:
                self._give_up(item)
        else:
            self.loop.after(max(MIN_LOOK_NS, elapsed_ns // 4), self._look, load)

    def _give_up(self, load: Load) -> None:
        self._around.network.cancel(load.flow)
        self._close(load)
        self._keep(load.job)
        self._note_failure(load, "stall")
        self._go(load.job)

    def end_tail(self, job: Job) -> int:
        """The computed front met the loaded tail: stop loading, keep the tail; returns the boundary in tokens."""
        now_ns = self.loop.now_ns
        first, stop = job.whole_from(now_ns)
        for load in job.running():
            self._around.network.cancel(load.flow)
            self._close(load)
            elapsed_ns = self._note_time(load)
            arrived = load.arrived_blocks(now_ns)
            if arrived:
                sample = LoadSample(load.holder.key, round(load.flow.moved), arrived, elapsed_ns, None, load.tier)
                job.node.loads.append(sample)
        if first == stop:
            return 0
        boundary = stop * self._block_tokens
        job.loaded_tokens += max(0, boundary - job.sequence.position)
        self._around.store(job, stop)
        return boundary

    def _close(self, load: Load) -> None:
        load.over = True
        load.job.node.in_flight_bytes -= load.num_bytes
        if load.holder.alive:
            self._around.publish(load.holder, load.holder.cache.unpin(load.held))

    def _note_time(self, load: Load) -> int:
        """How long the load took; several at once count once for their job."""
        job, elapsed_ns = load.job, self.loop.now_ns - load.started_ns
        if len(job.route.plan.loads) > 1:
            job.load_ns = self.loop.now_ns - job.loads[0].started_ns
        else:
            job.load_ns += elapsed_ns
        return elapsed_ns

    def _note_failure(self, load: Load, code: str) -> None:
        now_ns = self.loop.now_ns
        arrived, elapsed_ns = load.arrived_blocks(now_ns), now_ns - load.started_ns
        load.job.failures.append(code)
        load.job.node.loads.append(LoadSample(load.holder.key, 0, arrived, elapsed_ns, code, load.tier))

    def _keep(self, job: Job) -> None:
        """Use what is whole from the front; while a promotion runs, nothing is."""
        if job.promotion is not None:
            return
        edge = job.whole_to(self.loop.now_ns)
        position = edge * self._block_tokens
        if position > job.sequence.position:
            job.loaded_tokens += position - job.sequence.position
            job.sequence.position = position
            self._around.store(job, edge)

    def _go(self, job: Job) -> None:
        """Prefill may begin when nothing is awaited any more; the loads of a split plan are not."""
        if job.promotion is not None or (job.sequence.tail is None and job.running()):
            return
        job.sequence.ready = True
        if job.sequence in job.node.engine.waiting:
            job.node.engine.wake()


def _rest_ns(load: Load, now_ns: int) -> float:
    """How long the rest of a load takes at the speed it has had so far."""
    moved = load.flow.arrived(now_ns)
    elapsed_ns = max(1, now_ns - load.started_ns)
    return (load.flow.total - moved) * elapsed_ns / moved if moved > 0 else float("inf")
