"""One fault run from beginning to end: cluster, reference, workload, strikes, rest, audit. Judges nothing.

    reference run ─▶ workload starts ─▶ baseline ─▶ strikes ─▶ tail ─▶ workload stops ─▶ rest ─▶ audit

The run always ends with its history closed and the cluster left as it was found: an embedded one is ended.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

from kvpool.client import AsyncKVPoolClient
from kvpool.cluster.connection import ClusterConnection, ClusterInfo, connect_ray
from kvpool.cluster.launcher import Cluster
from kvpool.cluster.manual import ManualRouter
from kvpool.config import ClusterConfig, EngineConfig, MetadataConfig, RouterConfig, StoreConfig, WorkerConfig
from kvpool.errors import KVPoolError, RequestError, UnavailableError
from kvpool.faults.heartbeat import Heartbeat
from kvpool.faults.history import HistoryWriter, Kind
from kvpool.faults.measures import Bounds
from kvpool.faults.nemesis import NAMESPACES, SHAPING, Arena, Nemesis
from kvpool.faults.network import Network, why_not
from kvpool.faults.probe import Auditor, ForcedLoads, RecordingConnection, watch_states
from kvpool.faults.scenarios import Mechanism, Needs, Scenario
from kvpool.faults.workload import Driver, WorkloadConfig, label, plan_chats, schedule
from kvpool.interrupts import second_interrupt_ends
from kvpool.metadata.client import MetadataClient
from kvpool.metadata.watcher import MetadataWatcher
from kvpool.request import GenerateRequest, SamplingParams
from kvpool.transport import NETNS, SHAPED
from kvpool.types import RequestId

S = 1_000_000_000
REFERENCE_TIMEOUT_S = 300.0
WATCH_TIMEOUT_S = 10.0
SETTLE_LIMIT_S = 20.0
DISK_BYTES = 256 << 20
LOAD_OF_CAPACITY = 0.3
MIN_RATE_RPS, MAX_RATE_RPS = 0.5, 6.0
LINKS_BY = "links by: "
MIN_TTFT_LIMIT_NS = 2 * S
TTFT_LIMIT_FACTOR = 3

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run.

    Attributes:
        seed: of the workload, of the victims and of the order of strikes.
        duration_s: strikes go on for at least this long, and at least once each.
        baseline_s: load without faults before the first strike.
        rate_rps: None sends `LOAD_OF_CAPACITY` of what the reference run shows one worker to do.
        forced_loads: share of the routes that are turned into loads where another worker holds more.
        workload: lengths and shares; its seed, tenants and rate are set by the run.
        bounds: leave room for what they measure.
    """

    seed: int = 0
    duration_s: float = 20.0
    baseline_s: float = 5.0
    rate_rps: float | None = None
    forced_loads: float = 0.5
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    bounds: Bounds = field(default_factory=Bounds)

    @property
    def room_s(self) -> float:
        """Load that is needed after a healing to see whether service is back."""
        return (self.bounds.recovery_ns + self.bounds.window_ns) / S + 1.0


def embedded_config(
    needs: Needs,
    *,
    workers: int,
    routers: int = 1,
    lease_ms: int,
    model: str | None,
    disk_path: str | None = None,
    network: Network | None = None,
) -> ClusterConfig:
    """Settings of a cluster on which a scenario can run; ``disk_path`` is used when it needs a disk tier."""
    engine = EngineConfig() if model is None else EngineConfig(model=model)
    if needs.num_blocks is not None:
        engine = engine.model_copy(update={"num_blocks": needs.num_blocks})
    transport = WorkerConfig().transport
    if network is not None:
        transport = f"{NETNS}{network.hub}:{transport}"
    store = StoreConfig(disk_path=disk_path, disk_bytes=DISK_BYTES) if needs.disk else StoreConfig()
    group = WorkerConfig(
        count=workers, engine=engine, store=store, transport=SHAPED + transport if needs.shaped else transport
    )
    return ClusterConfig(
        workers=(group,),
        router=RouterConfig(count=routers),
        metadata=MetadataConfig(replicas=needs.metadata_replicas, lease_ms=lease_ms),
    )


def open_network(needs: Needs, progress: Progress) -> Network | None:
    """What the data planes of an embedded cluster hang on, where its links are cut and the machine allows that."""
    if not needs.links:
        return None
    reason = why_not()
    if reason is not None:
        progress(f"{LINKS_BY}{SHAPING}; {NAMESPACES} are not to be had: {reason}")
        return None
    progress(LINKS_BY + NAMESPACES)
    return Network()


class ClusterUnderTest:
    """An embedded cluster, or a running one that is somebody else's. `close` on every path."""

    def __init__(self, name: str, cluster: Cluster | None, network: Network | None = None) -> None:
        self.name = name
        self.cluster = cluster
        self.network = network
        self.connection = ClusterConnection(name)

    @classmethod
    def start(
        cls,
        config: ClusterConfig,
        name: str,
        progress: Progress,
        ray_nodes: int = 1,
        network: Network | None = None,
    ) -> ClusterUnderTest:
        """Start an embedded cluster, on a network of whoever calls this."""
        return cls(name, Cluster.start(config, name=name, ray_nodes=ray_nodes, progress=progress), network)

    @classmethod
    def join(cls, address: str, name: str) -> ClusterUnderTest:
        """Use a running cluster."""
        connect_ray(address)
        return cls(name, None)

    def close(self) -> None:
        """End the cluster if it is ours."""
        if self.cluster is not None:
            self.cluster.close()


@dataclass(frozen=True, slots=True)
class Reference:
    """What the answers must be, and how long an undisturbed worker takes."""

    prompts: dict[str, tuple[int, ...]]
    answers: dict[str, tuple[int, ...]]
    ttfts_ns: tuple[int, ...]
    took_s: float

    @property
    def ttft_limit_ns(self) -> int:
        """A request whose first token takes longer is not good; see `kvpool.faults.measures`."""
        return max(MIN_TTFT_LIMIT_NS, TTFT_LIMIT_FACTOR * max(self.ttfts_ns))

    @property
    def rate_rps(self) -> float:
        """A rate well below what one worker did one by one."""
        return min(MAX_RATE_RPS, max(MIN_RATE_RPS, LOAD_OF_CAPACITY * len(self.answers) / self.took_s))


async def run_scenarios(
    under_test: ClusterUnderTest,
    scenarios: Sequence[Scenario],
    options: RunOptions,
    history: HistoryWriter,
    progress: Progress,
) -> None:
    """Run one scenario, or a mix of several, under one workload, and write everything down.

    A first Ctrl-C waits for the last answers and closes the history; a second one ends the process.

    Raises:
        KVPoolError: the cluster does not work before anything was broken. Later failures are in the history.
    """
    heartbeat = Heartbeat(progress, time.monotonic)
    with second_interrupt_ends():
        async with heartbeat.beating():
            await _run_scenarios(under_test, scenarios, options, history, heartbeat)


async def _run_scenarios(
    under_test: ClusterUnderTest,
    scenarios: Sequence[Scenario],
    options: RunOptions,
    history: HistoryWriter,
    progress: Heartbeat,
) -> None:
    info = await under_test.connection.info()
    watcher = MetadataWatcher(info.metadata, name="fault-run")
    watcher.start()
    auditor = Auditor(under_test.connection, info.metadata)
    try:
        if not await asyncio.to_thread(watcher.wait_ready, WATCH_TIMEOUT_S):
            raise UnavailableError("no metadata server answers", timeout_s=WATCH_TIMEOUT_S)
        progress("reference run: every prompt through one worker, without loads")
        workload = replace(options.workload, seed=options.seed, tenants=f"run-{time.time_ns():x}")
        reference = await _reference(under_test.connection, watcher, info, workload, progress)
        workload = replace(workload, rate_rps=options.rate_rps or reference.rate_rps)
        run = _Run(
            under_test, tuple(scenarios), options, workload, history, progress, info, watcher, auditor, reference
        )
        await run.run()
    finally:
        auditor.close()
        watcher.close()


async def _reference(
    connection: ClusterConnection,
    watcher: MetadataWatcher,
    info: ClusterInfo,
    config: WorkloadConfig,
    progress: Heartbeat,
) -> Reference:
    """All chats, turn by turn: an answer is part of the next prompt. The tenant keeps its blocks out of the run."""
    router = ManualRouter(watcher, info.namespace)
    worker = sorted(key.worker_id for key in watcher.members())[0]
    prompts: dict[str, tuple[int, ...]] = {}
    answers: dict[str, tuple[int, ...]] = {}
    ttfts_ns = []
    started_s = time.monotonic()
    chats = plan_chats(config)
    total = sum(len(chat.questions) for chat in chats)
    for chat in chats:
        context = chat.system
        for turn, question in enumerate(chat.questions):
            name = label(chat.name, turn)
            prompts[name] = context = context + question
            sampling = SamplingParams(max_tokens=config.answer_tokens, ignore_eos=True)
            request_id = RequestId(f"reference-{name}-{time.monotonic_ns()}")
            request = GenerateRequest(request_id, context, sampling, tenant=config.tenants)
            tokens: tuple[int, ...] = ()
            sent_ns, first_ns = time.monotonic_ns(), None
            async for chunk in connection.stream(router.redo(request_id, worker), request, REFERENCE_TIMEOUT_S):
                tokens += chunk.tokens
                first_ns = first_ns or time.monotonic_ns()
            answers[name] = tokens
            context = context + tokens
            ttfts_ns.append((first_ns or time.monotonic_ns()) - sent_ns)
            progress.detail = f"{len(answers)} of {total} prompts"
    return Reference(prompts, answers, tuple(ttfts_ns), time.monotonic() - started_s)


@dataclass(frozen=True, slots=True)
class _Run:
    under_test: ClusterUnderTest
    scenarios: tuple[Scenario, ...]
    options: RunOptions
    workload: WorkloadConfig
    history: HistoryWriter
    progress: Progress
    info: ClusterInfo
    watcher: MetadataWatcher
    auditor: Auditor
    reference: Reference

    async def run(self) -> None:
        lease_ns = await asyncio.to_thread(self._lease_ns)
        self._introduce(lease_ns)
        rng = random.Random(f"forced-{self.options.seed}")
        forced = ForcedLoads(self.options.forced_loads, self.info, self.watcher, rng)
        block_tokens = self.info.namespace.block_tokens
        connection = RecordingConnection(self.under_test.name, self.history, block_tokens, forced)
        client = AsyncKVPoolClient.of(connection)
        driver = Driver(client, self.history, self.reference.prompts, self.workload.answer_tokens)
        await self._break_under_load(driver, self._nemesis(connection, driver, lease_ns))

    def _nemesis(self, connection: RecordingConnection, driver: Driver, lease_ns: int) -> Nemesis:
        victims = random.Random(f"victims-{self.options.seed}")
        arena = Arena(
            connection=connection,
            history=self.history,
            watcher=self.watcher,
            metadata=self.info.metadata,
            lease_ns=lease_ns,
            rng=victims,
            flood=lambda requests, tokens: driver.flood(requests, tokens, victims),
            cluster=self.under_test.cluster,
            network=self.under_test.network,
        )
        return Nemesis(arena)

    async def _break_under_load(self, driver: Driver, nemesis: Nemesis) -> None:
        """Baseline, strikes and tail under load, then rest and audit; the history's end is written on every path."""
        stop_load, stop_states = asyncio.Event(), asyncio.Event()
        states = asyncio.create_task(watch_states(self.under_test.connection, self.history, stop_states))
        self.history.add(Kind.START)
        self.progress(f"load: {self.workload.rate_rps:.2f} requests/s; {self.options.baseline_s:.0f} s without faults")
        load = asyncio.create_task(driver.drive(schedule(self.workload), stop_load))
        errors = ["the run was cut short"]
        try:
            await asyncio.sleep(self.options.baseline_s)
            errors = await self._strikes(nemesis)
            await asyncio.sleep(self.options.room_s)
        finally:
            stop_load.set()
            await load
            self.history.add(Kind.REST)
            await self._audit()
            stop_states.set()
            await states
            self.history.add(Kind.END, errors=errors)

    def _introduce(self, lease_ns: int) -> None:
        self.history.add(
            Kind.RUN,
            scenario="+".join(scenario.name for scenario in self.scenarios),
            mechanisms=sorted({self._made_with(scenario) for scenario in self.scenarios}),
            seed=self.options.seed,
            model=self.info.model,
            lease_ns=lease_ns,
            rate_rps=self.workload.rate_rps,
            ttft_limit_ns=self.reference.ttft_limit_ns,
            reference_ttft_p50_ns=int(statistics.median(self.reference.ttfts_ns)),
            forced_loads=self.options.forced_loads,
            workload=asdict(self.workload),
        )
        for name, tokens in self.reference.answers.items():
            self.history.add(Kind.REFERENCE, prompt=name, tokens=tokens)

    def _made_with(self, scenario: Scenario) -> str:
        text: str = scenario.mechanism.value
        if scenario.mechanism is Mechanism.LINK:
            text = LINKS_BY + (SHAPING if self.under_test.network is None else NAMESPACES)
        return text

    def _lease_ns(self) -> int:
        with MetadataClient(self.info.metadata) as client:
            return int(client.describe()["lease_ns"])

    async def _strikes(self, nemesis: Nemesis) -> list[str]:
        """Every scenario at least once, in an order of the seed; in a mix some strike together. Returns errors."""
        rng = random.Random(f"strikes-{self.options.seed}")
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self.options.duration_s
        errors: list[str] = []
        first = True
        while not errors and (first or loop.time() + self.options.room_s < until_s):
            order = list(self.scenarios)
            rng.shuffle(order)
            while order:
                if not first:
                    await asyncio.sleep(self.options.room_s)
                first = False
                together, order = _split(order, rng.randint(1, 2))
                self.progress("strike: " + " and ".join(scenario.name for scenario in together))
                errors += await _strike(nemesis, together)
                self.progress(f"struck; {self.options.room_s:.0f} s of load to see service come back")
        return errors

    async def _audit(self) -> None:
        members = {str(member.info.control_address) for member in self.watcher.members().values()}
        workers = tuple(sorted(members | set(self.info.workers)))
        self.progress("at rest: auditing what workers hold against what router and directories believe")
        await self.auditor.audit_until_equal(workers, self.history, SETTLE_LIMIT_S)


def _split(order: list[Scenario], count: int) -> tuple[list[Scenario], list[Scenario]]:
    return order[:count], order[count:]


async def _strike(nemesis: Nemesis, together: Sequence[Scenario]) -> list[str]:
    """Strike at once; whatever cannot be healed is returned as text, one line each."""
    ended = await asyncio.gather(
        *(scenario.strike(nemesis, scenario.name) for scenario in together), return_exceptions=True
    )
    errors = []
    for scenario, error in zip(together, ended, strict=True):
        if isinstance(error, KVPoolError):
            errors.append(f"{scenario.name}: {error}")
        elif isinstance(error, BaseException):
            raise error
    return errors


def require_possible(scenarios: Sequence[Scenario], *, embedded: bool, replicas: int | None = None) -> Needs:
    """What the scenarios need together.

    Raises:
        RequestError: a running cluster cannot give it.
    """
    needs = Needs()
    for scenario in scenarios:
        needs = needs | scenario.needs
        if scenario.needs.embedded and not embedded:
            raise RequestError(f"{scenario.name} needs an embedded cluster; leave --address and --name out")
        if replicas is not None and scenario.needs.metadata_replicas > replicas:
            raise RequestError(f"{scenario.name} needs {scenario.needs.metadata_replicas} metadata servers")
    return needs
