"""The whole pool on one heap: metadata service, routers, workers that serve, transfers between them, clients.

Everything that decides is the real thing: directory, outboxes and views; router core with ledger and policy; engine
loop, scheduler, gate, segment and block pool; loader and load machine; block hashes and checksums. Modelled are the
network, processes and their clocks, the engine's arithmetic, and what gRPC, Ray and UCX promise.

A seed also draws its *swarm*: which kinds of faults happen at all, and how often, because a run with everything at
once hides what only a few of them bring about together.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kvpool.errors import KVPoolError
from kvpool.hashing import block_hashes
from kvpool.plan import HolderRef, LoadSlice, Plan, PlanKind, Route
from kvpool.request import GenerateRequest, SamplingParams
from kvpool.types import BlockHash, MemberInfo, MemberState, RequestId, Tier, WorkerId, WorkerKey
from router.core import RouterCore
from router.door import RequestMeta
from router.planning import Params
from router.policies import KVPoolPolicy
from router.signals import Features
from tests.simulation.metadata_processes import LEASE_NS, NO_FAULTS, Faults, Process, Router
from tests.simulation.metadata_world import World
from tests.simulation.pool_client import Ask, check_ask
from tests.simulation.pool_worker import BLOCK_TOKENS, PoolWorker
from tests.worker_support import VOCAB, namespace, reference

MS = 1_000_000
FAULT_TIME_NS = 1_500 * MS
HEAL_TIME_NS = 1_200 * MS
QUIET_TIME_NS = 2_500 * MS
CHECK_NS = 100 * MS
DEADLINE_NS = 900 * MS
GRACE_NS = 1 * MS
LINK_NS, BLOCK_NS = 300_000, 100_000
KINDS = (
    "drop", "duplicate", "reorder", "crash", "pause", "jump", "corrupt", "storm", "slow_link", "router_crash", "cancel",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Swarm:
    """What one seed may do.

    Attributes:
        kinds: fault kinds that happen.
        num_blocks: size of a segment; small ones evict all the time.
        device_blocks: size of the device tier over it, 0 for none.
        limits: of the scheduler.
        read_lease_ns: of the segment; short ones run out under a read.
        landing_ns: bound on how long a piece takes to land.
        rate_ns: mean time between requests.
    """

    kinds: frozenset[str]
    num_blocks: int
    limits: dict[str, int]
    read_lease_ns: int
    landing_ns: int
    rate_ns: int
    device_blocks: int = 0
    faults: Faults = field(default_factory=Faults)

    @classmethod
    def draw(cls, seed: int) -> Swarm:
        """Each kind with an even chance."""
        rng = random.Random(f"swarm {seed}")
        kinds = frozenset(kind for kind in KINDS if rng.random() < 0.5)
        network = rng.choice([0.02, 0.1, 0.25])
        return cls(
            kinds=kinds,
            num_blocks=rng.choice([24, 40, 120]),
            limits={
                "max_step_tokens": rng.choice([8, 32, 64]),
                "mixed_prefill_tokens": rng.choice([4, 16]),
                "max_running": rng.choice([1, 3, 6]),
                "max_waiting": rng.choice([2, 32]),
            },
            read_lease_ns=rng.choice([20, 200, 30_000]) * MS,
            landing_ns=rng.choice([1, 2 * MS, 40 * MS]),
            rate_ns=rng.choice([15, 30, 60]) * MS,
            device_blocks=random.Random(f"device {seed}").choice([0, 7, 24]),
            faults=Faults(
                drop=network if "drop" in kinds else 0.0,
                duplicate=network if "duplicate" in kinds else 0.0,
                slow=network if "reorder" in kinds else 0.0,
                crash_ns=rng.choice([300, 700]) * MS if "crash" in kinds else 0,
                pause_ns=rng.choice([300, 700]) * MS if "pause" in kinds else 0,
                jump_ns=700 * MS if "jump" in kinds else 0,
            ),
        )


class PoolRouter(Router):
    """A watcher with a router's brain, fed after `kvpool.metadata.watcher`."""

    world: PoolWorld

    def __init__(self, world: PoolWorld) -> None:
        super().__init__(world)
        self.number_of_router = next(world.router_numbers)
        self.known: dict[WorkerKey, tuple[MemberInfo, MemberState]] = {}
        self.lives = 0
        self.core = self._new_core()

    def _new_core(self) -> RouterCore:
        self.lives += 1
        params = Params(min_deadline_ns=200.0 * MS, min_stall_ns=60.0 * MS)
        return RouterCore(
            self,
            lambda: self.now_ns,
            policy=KVPoolPolicy(params),
            features=Features(split=True),
            max_records=200,
            router_id=f"r{self.number_of_router}.{self.lives}",
        )

    def suspect(self) -> None:
        """Only failed loads make suspects here."""

    def prefixes(self, chain: Any) -> Any:
        """As `kvpool.metadata.watcher.MetadataWatcher.prefixes`."""
        return self.view.prefixes(chain)

    def changed(self) -> None:
        members = {item.info.key: item for item in self.view.members}
        for key in [key for key in self.known if key not in members]:
            info, _ = self.known.pop(key)
            self.core.on_member_change(info, None)
        for key, item in members.items():
            if self.known.get(key) != (item.info, item.state):
                self.known[key] = (item.info, item.state)
                self.core.on_member_change(item.info, item.state)
            if item.report is not None:
                self.core.on_report(item.report)

    def route_request(
        self, request: GenerateRequest, excluded: frozenset[WorkerKey], reply: Callable[[Route | KVPoolError], None]
    ) -> None:
        """As `router.actor`."""
        context = request.prompt + request.generated
        chain = block_hashes(context, namespace(request.tenant, BLOCK_TOKENS))
        left = request.sampling.max_tokens - len(request.generated)
        answer: Route | KVPoolError
        try:
            answer = self.core.route(RequestMeta(request.request_id, len(context), chain, left, excluded))
            answer = self._forced(answer, chain)
        except KVPoolError as error:
            answer = error
        self.world.reply(self, lambda: reply(answer))

    def _forced(self, route: Route, chain: tuple[BlockHash, ...]) -> Route:
        """Half of the routes for which somebody else holds more become loads: computing is too fast here to wait."""
        rng, held = self.world.rng, {key: max(tiers.values()) for key, tiers in self.prefixes(chain).items() if tiers}
        own = held.pop(route.worker, 0)
        others = sorted((key for key in held if held[key] > own + 1), key=lambda key: (-held[key], str(key)))
        if not others or rng.random() < 0.4:
            return route
        first, *rest = [
            HolderRef(key, self.known[key][0].data_address, Tier.HOST, held[key]) for key in others if key in self.known
        ]
        start = own if rng.random() < 0.5 else rng.randrange(own, first.stop)
        piece = LoadSlice(start, first.stop, first.holder, "sim", first.data_address, Tier.HOST, tuple(rest))
        kind = PlanKind.LOAD if start == own else PlanKind.SPLIT
        times = {"load_deadline_ns": rng.choice([30, 300]) * MS, "stall_ns": 60 * MS, "predicted_load_ns": 5 * MS}
        return route._replace(plan=Plan(kind, (piece,), **times))

    def restart(self) -> None:
        """Killed and started again: nothing is remembered."""
        self.incarnation += 1
        self.known = {}
        self.core = self._new_core()
        self.view = type(self.view)(max_entries=10_000, max_workers=64)
        self.every(60 * MS, self.watch_over)
        self.connect()

    def check_at_rest(self) -> None:
        """Every promise is given back or over."""
        ledger = self.core._ledger
        ledger.expire(self.now_ns + 60_000 * MS)
        assert len(ledger) == 0, f"{len(ledger)} promises are left"
        for key in self.known:
            totals = ledger.totals(key)
            assert (totals.requests, totals.tokens) == (0, 0), f"promises of {key} are left: {totals}"


class PoolWorld(World):
    """Everything. ``swarm`` may be given, for tests that need one."""

    workers: list[PoolWorker]  # type: ignore[assignment]
    routers: list[PoolRouter]  # type: ignore[assignment]

    def __init__(self, seed: int, swarm: Swarm | None = None, *, verbose: bool = False) -> None:
        self.seed = seed
        self.verbose = verbose
        self.router_numbers = count()
        self.swarm = swarm or Swarm.draw(seed)
        self.asks: list[Ask] = []
        self.links: dict[tuple[WorkerId, WorkerId], float] = {}
        self.healed = False
        self._calls: dict[Process, int] = {}
        self._answers: dict[Process, int] = {}
        super().__init__(seed, self.swarm.faults)
        documents = random.Random(seed)
        self.documents = [[documents.randrange(VOCAB) for _ in range(64)] for _ in range(5)]

    def new_worker(self, worker_id: str, epoch: int) -> PoolWorker:
        return PoolWorker(self, worker_id, epoch)

    def new_router(self) -> PoolRouter:
        return PoolRouter(self)

    # -- what processes reach each other by

    def at_address(self, address: bytes) -> PoolWorker:
        """Who listens there now, whatever incarnation was meant."""
        return self.named(address.decode())

    def named(self, name: str) -> PoolWorker:
        """The newest incarnation of a worker."""
        return next(worker for worker in self.workers if worker.info.key.worker_id == name)

    def call(self, target: Process, handler: Callable[[], None]) -> None:
        """A call of an actor: in order, lost with the process."""
        time_ns = max(self.now_ns + self.rng.randrange(1, 2 * MS), self._calls.get(target, 0))
        self._calls[target] = time_ns
        incarnation = target.incarnation
        self.at(time_ns, lambda: target.deliver(handler) if target.incarnation == incarnation else None)

    def reply(self, source: Process, handler: Callable[[], None]) -> None:
        """What an actor says to a client, which lives; in order, after what it computes is computed."""
        ready_ns = max(self.now_ns, getattr(source, "ahead_ns", 0))
        time_ns = max(ready_ns + self.rng.randrange(1, 2 * MS), self._answers.get(source, 0))
        self._answers[source] = time_ns
        incarnation = source.incarnation
        self.at(time_ns, lambda: handler() if source.up and source.incarnation == incarnation else None)

    def piece_ns(self, holder: PoolWorker, reader: PoolWorker, blocks: int) -> int:
        """How long a piece takes on a link."""
        factor = self.links.get((holder.info.key.worker_id, reader.info.key.worker_id), 1.0)
        return int((LINK_NS + blocks * BLOCK_NS) * factor)

    def strikes(self, kind: str) -> bool:
        """Whether a fault of a kind that is drawn by chance happens now."""
        return not self.healed and kind in self.swarm.kinds and self.rng.random() < 0.1

    # -- load

    def ask(self, deadline_ns: int = DEADLINE_NS, *, unique: bool = False) -> Ask:
        """A client with a request: a shared document and a question of its own."""
        rng = self.rng
        document = [rng.randrange(VOCAB) for _ in range(64)] if unique else rng.choice(self.documents)
        prompt = document[: rng.randrange(8, 60)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 6))]
        name = RequestId(f"q{len(self.asks)}")
        sampling = SamplingParams(max_tokens=rng.randrange(1, 8), temperature=rng.choice([0.0, 1.0]), seed=3)
        request = GenerateRequest(name, tuple(prompt), sampling, timeout_ns=deadline_ns)
        made = Ask(self, request, self.now_ns + deadline_ns, rng.choice(self.routers))
        self.asks.append(made)
        made.start()
        if "cancel" in self.swarm.kinds and not self.healed and rng.random() < 0.15:
            self.after(rng.randrange(1, 200 * MS), made.cancel)
        return made

    def keep_asking(self, until_ns: int) -> None:
        """Requests at random times."""
        if self.now_ns < until_ns:
            self.ask()
            self.after(int(self.rng.expovariate(1 / self.swarm.rate_ns)) + 1, lambda: self.keep_asking(until_ns))

    # -- faults

    def plan_faults(self) -> None:
        super().plan_faults()
        for kind, mean_ns, strike in (
            ("storm", 500 * MS, self.storm),
            ("slow_link", 200 * MS, self.slow_link),
            ("router_crash", 600 * MS, self.crash_router),
        ):
            time_ns = 0
            while (
                kind in self.swarm.kinds
                and (time_ns := time_ns + int(self.rng.expovariate(1 / mean_ns))) < FAULT_TIME_NS
            ):
                self.at(time_ns, strike)

    def crash_router(self) -> None:
        """A router forgets everything and begins again."""
        number = self.rng.randrange(len(self.routers))
        self.note(f"router {number} crashes")
        self.routers[number].restart()

    def storm(self) -> None:
        """Many prompts that nobody shares, or a segment that is emptied."""
        if self.rng.random() < 0.5:
            self.note("six unique prompts at once")
            for _ in range(6):
                self.ask(unique=True)
        else:
            worker = self.rng.choice(self.workers)
            self.note(f"{worker.info.key} drops what nobody needs")
            worker.deliver(worker.empty)

    def slow_link(self) -> None:
        """One direction becomes up to a thousand times slower, or as fast as it was."""
        pair = tuple(self.rng.choice(self.workers).info.key.worker_id for _ in range(2))
        self.links[pair] = self.rng.choice([1.0, 10.0, 100.0, 1000.0])  # type: ignore[index]
        self.note(f"the link {pair[0]} → {pair[1]} takes {self.links[pair]:.0f} times as long")  # type: ignore[index]

    def note(self, text: str) -> None:
        if self.verbose:
            print(f"{self.now_ns / MS:9.3f} ms  {text}")

    def heal(self) -> None:
        """No more faults; what was lost stays lost."""
        self.note("healed")
        self.healed = True
        self.faults = NO_FAULTS
        self.links.clear()

    # -- a run

    def run(self) -> None:
        """Faults under load, healing under load, quiet. Raises when something is wrong."""
        self.run_until(LEASE_NS // 2)  # everybody knows everybody
        self.plan_faults()
        self.keep_asking(FAULT_TIME_NS)
        self._run_checked(FAULT_TIME_NS)
        self.heal()
        self._run_checked(FAULT_TIME_NS + HEAL_TIME_NS)
        late = [self.ask(3 * DEADLINE_NS) for _ in range(6)]
        self.quiet = True
        self._run_checked(FAULT_TIME_NS + HEAL_TIME_NS + QUIET_TIME_NS)
        self.check_asks()
        for ask in late:
            assert ask.ended == "length", f"{ask.request.request_id} failed after healing: {ask.ended}"
        self.check_rest()

    def _run_checked(self, end_ns: int) -> None:
        while self.now_ns < end_ns:
            self.run_until(min(end_ns, self.now_ns + CHECK_NS))
            self.check_safety()

    def check_safety(self) -> None:
        super().check_safety()
        for worker in self.incarnations.values():
            assert isinstance(worker, PoolWorker)
            if worker.up:
                worker.check()

    def check_asks(self) -> None:
        """Nobody got a wrong token, was lost, or hung."""
        for ask in self.asks:
            check_ask(ask, reference(ask.request), GRACE_NS)

    def check_rest(self) -> None:
        """Nothing is left over, and everybody believes the truth."""
        for worker in self.workers:
            worker.check_at_rest()
        for router in self.routers:
            router.check_at_rest()
        self.check_agreement()

    def totals(self) -> dict[str, int]:
        """What happened, to see that a run was worth it."""
        workers = [worker for worker in self.incarnations.values() if isinstance(worker, PoolWorker)]
        counts = {"asks": len(self.asks), "loaded": sum(ask.loaded for ask in self.asks)}
        counts["retried"] = sum(bool(ask.failed) for ask in self.asks)
        counts["evictions"] = sum(worker.segment.totals()["evictions"] for worker in workers)
        tiers = [worker.device.counters for worker in workers if worker.device is not None]
        counts["device_fills"] = sum(counters["device_fills"] for counters in tiers)
        counts["preemptions"] = sum(worker.scheduler.preemptions for worker in workers)
        for worker in workers:
            for name, times in worker.reporter.counters.items():
                if name.startswith("load"):
                    counts[name] = counts.get(name, 0) + times
        return counts
