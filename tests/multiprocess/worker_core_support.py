"""Worker cores that can load from each other, over any transport and engine, beside the plain run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from kvpool.config import EngineConfig, SchedulerConfig, StoreConfig, WorkerConfig
from kvpool.hashing import Namespace
from kvpool.plan import REDO, HolderRef, LoadSlice, Plan, PlanKind
from kvpool.request import GenerateRequest
from kvpool.store.disk import DiskTier
from kvpool.transfer.loader import Loader
from kvpool.transport.base import Transport
from kvpool.transport.memory import MemoryHub, MemoryTransport
from kvpool.transport.ucx import UcxTransport
from kvpool.types import Tier, WorkerEpoch, WorkerId, WorkerKey
from tests.worker_support import (
    Collector,
    FakeEngine,
    PatientGate,
    RecordingPublisher,
    WatchedDevice,
    reference,
)
from workers.core import CoreParts, WorkerCore
from workers.engine.base import Engine
from workers.engine.reference import PlainModel
from workers.engine.torch_engine import TorchEngine

BLOCK_TOKENS = 4
SECOND_NS = 1_000_000_000
Plain = Callable[[GenerateRequest], list[int]]


@dataclass
class Kind:
    """One engine under test and its reference."""

    make: Callable[[], Engine]
    plain: Plain
    vocab: int
    transport: Callable[[MemoryHub], Transport] = MemoryTransport


FAKE = Kind(lambda: FakeEngine(block_tokens=BLOCK_TOKENS, max_context_tokens=512), reference, 97)


def make_kind(name: str, model_path: Path) -> Kind:
    """An engine over a transport, by name; ``model_path`` for the torch engine."""
    if name == "fake over memory":
        return FAKE
    if name == "fake over ucx":
        return replace(FAKE, transport=lambda hub: UcxTransport())
    model = PlainModel(model_path)
    known: dict[GenerateRequest, list[int]] = {}

    def plain(wanted: GenerateRequest) -> list[int]:
        if wanted not in known:
            known[wanted] = [item.token for item in model.greedy(wanted.prompt, wanted.sampling.max_tokens)]
        return known[wanted]

    return Kind(lambda: TorchEngine(model_path, block_tokens=BLOCK_TOKENS), plain, 211, lambda hub: UcxTransport())


class Pool:
    """Worker cores that can load from each other."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.hub = MemoryHub()
        self.rng = Random(5)
        self.cores: list[WorkerCore] = []
        self.transports: list[Transport] = []
        self.publishers: list[RecordingPublisher] = []
        self.failures: list[BaseException] = []

    def add(
        self,
        engine: Engine | None = None,
        *,
        num_blocks: int = 64,
        patient: bool = True,
        disk: DiskTier | None = None,
        device_blocks: int = 0,
        **limits: int,
    ) -> WorkerCore:
        key = WorkerKey(WorkerId(f"w{len(self.cores)}"), WorkerEpoch(1))
        engine = engine or self.kind.make()
        transport, publisher = self.kind.transport(self.hub), RecordingPublisher()
        layout = engine.layout
        space = Namespace("tiny", layout.dtype, layout.fingerprint(), layout.block_tokens)
        held: list[WorkerCore] = []
        core = WorkerCore(
            CoreParts(
                key=key,
                engine=engine,
                config=WorkerConfig(
                    engine=EngineConfig(num_blocks=num_blocks, block_tokens=layout.block_tokens),
                    scheduler=SchedulerConfig(**limits),
                    store=StoreConfig(device_blocks=device_blocks),
                ),
                namespace_for=lambda tenant: Namespace(
                    space.model, space.dtype, space.layout, space.block_tokens, tenant=tenant
                ),
                publisher=publisher,
                transport=transport,
                make_loader=lambda started: Loader(
                    started,
                    on_suspect=lambda holder, code: None,
                    on_sample=lambda sample: held[0].observe_load(sample),  # noqa: PLW0108 - bound late
                ),
                decode=lambda tokens: "".join(f"<{token}>" for token in tokens),
                gate=PatientGate(layout.block_tokens) if patient else None,
                disk=disk,
                on_failure=self.failures.append,
            )
        )
        held.append(core)
        if isinstance(engine, WatchedDevice):
            engine.core = core
        self.cores.append(core)
        self.transports.append(transport)
        self.publishers.append(publisher)
        return core

    def prompt(self, tokens: int) -> list[int]:
        return [self.rng.randrange(4, self.kind.vocab) for _ in range(tokens)]

    def run(self, core: WorkerCore, request: GenerateRequest, plan: Plan = REDO) -> Collector:
        sink = Collector()
        core.submit(request, plan, "d", sink)
        sink.result()
        return sink

    def slice(self, holder: int, start: int, stop: int, *alternates: int, epoch: int = 1) -> LoadSlice:
        key = WorkerKey(WorkerId(f"w{holder}"), WorkerEpoch(epoch))
        refs = tuple(
            HolderRef(WorkerKey(WorkerId(f"w{other}"), WorkerEpoch(1)), self.transports[other].address, Tier.HOST, stop)
            for other in alternates
        )
        end = self.transports[holder]
        return LoadSlice(start, stop, key, end.name, end.address, Tier.HOST, refs)

    def close(self) -> None:
        for core, publisher in zip(self.cores, self.publishers, strict=True):
            if core.failure is None:
                assert core.wait_idle(20 * SECOND_NS), "a request or a load hangs"
                core.check()
                counts = core.segment.counts()
                assert (counts.referenced, counts.in_flight) == (0, 0)
                assert publisher.held == set(core.held_hashes())
                assert publisher.in_device == set(core.device_hashes())
        for core in self.cores:
            core.close()
            core.close()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvpool-engine")]


def load_plan(*slices: LoadSlice, kind: PlanKind = PlanKind.LOAD) -> Plan:
    return Plan(kind, slices, load_deadline_ns=10 * SECOND_NS, stall_ns=2 * SECOND_NS)
