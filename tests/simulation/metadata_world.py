"""A whole metadata deployment on one heap of integer-time events, reproducible from one seed.

The pure cores are the real ones: `DirectoryState` in every replica, an `Outbox` per (worker, replica), a
`DirectoryView` in every router. What is modelled is the rest: the network (drop, delay, duplicate, reorder), processes
(crash, pause past a lease, restart, a zombie beside its successor), clocks that jump. The processes are in
`tests.simulation.metadata_processes`.

`World.run` has three phases: faults while the workers' blocks change; healing; quiet until everything must agree.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

from kvpool.errors import StaleError
from kvpool.metadata.state import DirectoryState
from kvpool.types import BlockHash, MemberState, Tier, WorkerKey
from tests.simulation.metadata_processes import (
    CHAIN_BLOCKS,
    LEASE_NS,
    MS,
    NO_FAULTS,
    Faults,
    Process,
    Replica,
    Router,
    Worker,
    placements,
)

FAULT_TIME_NS = 1_200 * MS
QUIET_TIME_NS = 2_000 * MS
CHECK_NS = 100 * MS
CHAINS = 4


class World:
    """Everything, and the heap. ``make_state`` may be replaced by a broken one, for the canary."""

    def __init__(self, seed: int, faults: Faults, make_state: Callable[..., DirectoryState] = DirectoryState) -> None:
        self.rng = random.Random(seed)
        self.faults = faults
        self.make_state = make_state
        self.now_ns = 0
        self.quiet = False
        self.epochs = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._ties = 0
        self._arrivals: dict[tuple[Process, Process], int] = {}
        raw = random.Random(1)  # the chains are the same in every world
        self.chains = [[BlockHash(raw.randbytes(16)) for _ in range(CHAIN_BLOCKS)] for _ in range(CHAINS)]
        self.replicas = [Replica(self) for _ in range(self.rng.choice([1, 2]))]
        self.incarnations: dict[WorkerKey, Worker] = {}
        self.workers = [self.spawn(f"w{number}") for number in range(3)]
        self.routers = [self.new_router() for _ in range(2)]

    # -- time and messages --------------------------------------------------------------------------------------

    def at(self, time_ns: int, action: Callable[[], None]) -> None:
        self._ties += 1
        heapq.heappush(self._heap, (time_ns, self._ties, action))

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        self.at(self.now_ns + delay_ns, action)

    def send(self, source: Process, target: Process, handler: Callable[[], None]) -> None:
        """Deliver a message: in order, or perhaps late, twice or never; to this incarnation of the target only."""
        if self.rng.random() < self.faults.drop:
            return
        incarnation = target.incarnation
        for _ in range(2 if self.rng.random() < self.faults.duplicate else 1):
            time_ns = self.now_ns + self.rng.randrange(1, 3 * MS)
            if self.rng.random() < self.faults.slow:
                time_ns += self.rng.randrange(300 * MS)  # overtaken by others
            else:
                time_ns = self._arrivals[source, target] = max(time_ns, self._arrivals.get((source, target), 0))
            self.at(time_ns, lambda: target.deliver(handler) if target.incarnation == incarnation else None)

    def run_until(self, end_ns: int) -> None:
        while self._heap and self._heap[0][0] <= end_ns:
            self.now_ns, _, action = heapq.heappop(self._heap)
            action()
        self.now_ns = end_ns

    # -- faults -------------------------------------------------------------------------------------------------

    def new_worker(self, worker_id: str, epoch: int) -> Worker:
        return Worker(self, worker_id, epoch)

    def new_router(self) -> Router:
        return Router(self)

    def spawn(self, worker_id: str) -> Worker:
        worker = self.new_worker(worker_id, 1 + sum(key.worker_id == worker_id for key in self.incarnations))
        self.incarnations[worker.info.key] = worker
        return worker

    def suspect_at(self, replica: Replica, key: WorkerKey) -> None:
        try:
            _, deltas = replica.state.suspect(key, None, "stall", token=self.rng.getrandbits(32), now_ns=replica.now_ns)
        except StaleError:
            return  # gone already
        replica.relay(deltas)

    def plan_faults(self) -> None:
        """Schedule process faults over the fault phase."""
        for mean_ns, fault in (
            (self.faults.crash_ns, self.crash),
            (self.faults.pause_ns, self.pause),
            (self.faults.jump_ns, self.jump),
        ):
            time_ns = 0
            while mean_ns and (time_ns := time_ns + int(self.rng.expovariate(1 / mean_ns))) < FAULT_TIME_NS:
                self.at(time_ns, fault)

    def note(self, text: str) -> None:
        """Something worth a line when a run is replayed."""

    def crash(self) -> None:
        """Kill a replica, or a worker whose successor starts at once, or leave the old one running as a zombie."""
        if self.rng.random() < 0.4:
            replica = self.rng.choice(self.replicas)
            if replica.up:
                self.note(f"replica {self.replicas.index(replica)} crashes")
                replica.crash()
                self.after(self.rng.randrange(1, 400 * MS), lambda: None if replica.up else replica.start())
            return
        number = self.rng.randrange(len(self.workers))
        old = self.workers[number]
        if self.rng.random() < 0.5:
            old.die()
        elif self.rng.random() < 0.5:
            old.paused_until_ns = self.now_ns + self.rng.randrange(600 * MS)
        state = "dies" if not old.up else "becomes a zombie" + (", asleep" if old.paused_until_ns > self.now_ns else "")
        self.note(f"{old.info.key} {state}")
        self.workers[number] = self.spawn(str(old.info.key.worker_id))

    def pause(self) -> None:
        """Freeze a process, often past its lease."""
        process = self.rng.choice([*self.replicas, *self.workers, *self.routers])
        process.paused_until_ns = self.now_ns + self.rng.randrange(2 * LEASE_NS)
        self.note(f"{self.name_of(process)} sleeps for {(process.paused_until_ns - self.now_ns) / MS:.0f} ms")

    def jump(self) -> None:
        """A monotonic clock leaps forward, as after a virtual machine was suspended."""
        process = self.rng.choice([*self.replicas, *self.workers])
        process.clock_offset_ns += self.rng.randrange(2 * LEASE_NS)
        self.note(f"the clock of {self.name_of(process)} is now {process.clock_offset_ns / MS:.0f} ms ahead")

    def name_of(self, process: Process) -> str:
        """For people."""
        return str(process.info.key) if isinstance(process, Worker) else type(process).__name__.lower()

    # -- a run --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Faults, healing, quiet; raises `AssertionError` or `InvariantViolation` when something is wrong."""
        self.plan_faults()
        for end_ns in range(CHECK_NS, FAULT_TIME_NS + 1, CHECK_NS):
            self.run_until(end_ns)
            self.check_safety()
        self.faults = NO_FAULTS
        self.quiet = True
        self.run_until(FAULT_TIME_NS + QUIET_TIME_NS)
        self.check_safety()
        self.check_agreement()

    def check_safety(self) -> None:
        """What must hold at every moment, whatever was lost."""
        for replica in self.replicas:
            if replica.up:
                replica.state.check()
                self.check_index(replica.state)
        for router in self.routers:
            router.view.index.check()

    def check_index(self, state: DirectoryState) -> None:
        """No block is ascribed to an incarnation that never held it."""
        for item in placements(state.index):
            for key, _, _ in item.holders:
                assert self.incarnations[key].ever.issuperset(item.hashes), f"phantom blocks at {key}"

    def check_agreement(self) -> None:
        """After healing: replicas and routers know exactly the truth, and nobody waits for anything."""
        alive = {worker.info.key: worker for worker in self.workers}
        truth = {(key, tier, item) for key, worker in alive.items() for tier, item in worker.snapshot()}
        for worker in self.incarnations.values():
            if worker.info.key not in alive:
                assert not worker.up or not worker.links, f"zombie {worker.info.key} was not fenced"
        for worker in alive.values():
            assert worker.up, f"{worker.info.key} was fenced although it is the newest"
            assert all(link.outbox.idle for link in worker.links), f"{worker.info.key} still has something to say"
        for replica in self.replicas:
            assert self.content(replica.state.index) == truth, "a replica's index differs from the truth"
            assert {view.info.key: view.state for view in replica.state.members()} == dict.fromkeys(
                alive, MemberState.ALIVE
            )
        for router in self.routers:
            assert self.content(router.view.index) == truth, "a router's index differs from the truth"
            assert {item.info.key for item in router.view.members} == set(alive)
            for chain in self.chains:
                assert router.view.prefixes(chain) == self.replicas[0].state.lookup(chain)

    @staticmethod
    def content(index: Any) -> set[tuple[WorkerKey, Tier, BlockHash]]:
        return {
            (key, tier, item)
            for placement in placements(index)
            for key, tier, incoming in placement.holders
            for item in placement.hashes
        }
