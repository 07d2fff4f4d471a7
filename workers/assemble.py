"""Builds one worker out of its parts, in the order they need each other, and takes it apart in the reverse order."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpool.config import WorkerConfig
from kvpool.errors import UnavailableError
from kvpool.hashing import HASH_SCHEME, Namespace
from kvpool.layout import KVLayout
from kvpool.metadata.client import MetadataClient
from kvpool.metadata.publisher import MetadataPublisher
from kvpool.reports import LoadSample
from kvpool.store.disk import DiskConfig, DiskTier
from kvpool.store.selection import HotChain, Selection
from kvpool.tokenizer import Tokenizer, TokenizerFiles, read_tokenizer_files
from kvpool.transfer.loader import Loader
from kvpool.transport import create_transport
from kvpool.transport.base import Transport
from kvpool.types import BlockHash, MemberInfo, Tier, WorkerId, WorkerKey
from workers.calibrate import calibrate
from workers.core import CoreParts, WorkerCore
from workers.engine.models import resolve_model
from workers.housekeeping import Housekeeper

EXIT_DELAY_S = 0.5
EXIT_CODE = 70
MAX_ASKED = 4096
"""Blocks that one question to the directory is about."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker needs to start, again and again.

    Attributes:
        worker_id: its name, also the actor's.
        config: its group's settings.
        metadata: addresses of the metadata servers.
        threads: intra-op threads of the engine.
    """

    worker_id: WorkerId
    config: WorkerConfig
    metadata: tuple[str, ...]
    threads: int


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """What a serving worker says of itself: longest context in tokens, and what its block hashes are rooted in."""

    max_context_tokens: int
    namespace: Namespace


@dataclass(frozen=True, slots=True)
class Leaving:
    """Chains that others ask for and that live only on one worker, the most valuable first, and how to read them."""

    key: WorkerKey
    transport: str
    data_address: bytes
    chains: tuple[HotChain, ...]


@dataclass(frozen=True, slots=True)
class Evicted:
    """What an eviction by hand did on one worker; see `kvpool.store.answers.Purge`."""

    evicted: int = 0
    evicted_bytes: int = 0
    in_use: int = 0
    kept: int = 0
    needed: int = 0
    removed_from_disk: int = 0


@dataclass(frozen=True, slots=True)
class AssembledWorker:
    """A worker that serves. `close` may be repeated."""

    core: WorkerCore
    publisher: MetadataPublisher
    transport: Transport
    tokenizer: TokenizerFiles
    ready: WorkerReady
    housekeeper: Housekeeper
    directory: MetadataClient

    def status(self) -> dict[str, Any]:
        """Counters and gauges of the core, the data plane and the publisher."""
        return {
            **self.core.status(),
            "transport": {"name": self.transport.name, **_plain(self.transport.stats())},
            "publisher": self.publisher.status(),
            "housekeeping": self.housekeeper.status(),
        }

    def close(self) -> None:
        """Leave the pool, end requests, fence transfers, release memory."""
        self.publisher.close()
        self.core.close()
        self.housekeeper.close()  # after the core, which gives its pull up
        self.directory.close()

    def leaving(self) -> Leaving:
        """What should be moved before this worker leaves.

        Raises:
            KVPoolError: the directory does not say what lives elsewhere.
        """
        chains = self.core.segment.hot_chains(self._others_of)
        return Leaving(self.core.key, self.transport.name, self.transport.address, tuple(chains))

    def evict(self, selection: Selection) -> Evicted:
        """Evict what is selected and not needed now."""
        purge, from_disk = self.core.evict(selection)
        evicted, size = len(purge.victims), self.core.segment.config.block_bytes
        return Evicted(evicted, evicted * size, purge.in_use, purge.kept, purge.needed, from_disk)

    def _others_of(self, hashes: Sequence[BlockHash]) -> list[int]:
        key, book = self.core.key, 0
        parts = [hashes[start : start + MAX_ASKED] for start in range(0, len(hashes), MAX_ASKED)]
        return [count for part in parts for count in self.directory.tend(key, part, book).others]


def _plain(stats: Any) -> dict[str, Any]:
    return {name: getattr(stats, name) for name in stats.__dataclass_fields__}


def assemble_worker(key: WorkerKey, spec: WorkerSpec) -> AssembledWorker:
    """Load the model, open the data plane, join the pool. Takes seconds.

    Raises:
        ModelError: the model is unknown or not supported.
        CapacityError: no memory for the segment.
        IncompatibleError: the pool has another layout or hash scheme.

    Metadata servers that are down are joined when they come back.
    """
    # Here and not above: launcher and clients import this module too, and torch takes seconds.
    from workers.engine.torch_engine import TorchEngine

    settings, store = spec.config.engine, spec.config.store
    model = resolve_model(settings.model)
    engine = TorchEngine(
        model.path,
        model_id=f"{model.name}@{model.revision}",
        dtype=settings.dtype,
        device=settings.device,
        block_tokens=settings.block_tokens,
        torch_threads=spec.threads,
    )
    passes = calibrate(engine, spec.config.scheduler.max_step_tokens, time.monotonic_ns)
    layout = engine.layout
    namespace = Namespace(layout.model, layout.dtype, layout.fingerprint(), layout.block_tokens)
    transport = create_transport(
        spec.config.transport, on_failure=lambda error: _end_process(f"the data plane broke: {error!r}")
    )
    member = MemberInfo(
        key=key,
        role=spec.config.role,
        transport=transport.name,
        data_address=transport.address,
        layout_fingerprint=layout.fingerprint(),
        hash_scheme=HASH_SCHEME,
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
        capacity_blocks=(
            store.device_blocks,
            settings.num_blocks,
            store.disk_bytes // layout.block_bytes if store.disk_path else 0,
        ),
        control_address=str(spec.worker_id),
        calibration=passes,
    )
    held: list[WorkerCore] = []  # the publisher needs the core for snapshots, the core the publisher for events

    def snapshot() -> list[tuple[Tier, BlockHash]]:
        in_memory = [(Tier.HOST, block_hash) for core in held for block_hash in core.held_hashes()]
        in_memory += [(Tier.DEVICE, block_hash) for core in held for block_hash in core.device_hashes()]
        return in_memory + [(Tier.DISK, block_hash) for core in held for block_hash in core.disk_hashes()]

    def observe_load(sample: LoadSample) -> None:
        for core in held:
            core.observe_load(sample)

    publisher = MetadataPublisher(spec.metadata, member, snapshot=snapshot, on_fenced=_end_process)
    tokenizer = read_tokenizer_files(model.path, model.name)
    disk, disk_error = _open_disk(spec, layout, publisher)
    core = WorkerCore(
        CoreParts(
            key=key,
            engine=engine,
            config=spec.config,
            namespace_for=namespace.for_tenant,
            publisher=publisher,
            transport=transport,
            make_loader=lambda started: Loader(
                started,
                on_suspect=publisher.suspect,
                on_sample=observe_load,
            ),
            decode=Tokenizer(tokenizer).decode,
            tier=Tier.HOST,
            disk=disk,
            disk_error=disk_error,
            on_failure=lambda error: _end_process(f"the engine broke: {error!r}"),
        )
    )
    held.append(core)
    core.observe_prefills(passes)
    directory = MetadataClient(spec.metadata)
    worker = AssembledWorker(
        core,
        publisher,
        transport,
        tokenizer,
        WorkerReady(engine.max_context_tokens, namespace),
        Housekeeper(key, directory, core.segment, core.keep_blocks, core.pull),
        directory,
    )
    try:
        publisher.start()
        worker.housekeeper.start()
    except BaseException:
        worker.close()
        raise
    return worker


def _open_disk(spec: WorkerSpec, layout: KVLayout, publisher: MetadataPublisher) -> tuple[DiskTier | None, str]:
    """The worker's disk tier, or why there is none: a worker whose disk cannot be used goes on without it."""
    store = spec.config.store
    if store.disk_path is None:
        return None, ""
    config = DiskConfig(
        Path(store.disk_path) / str(spec.worker_id), store.disk_bytes, layout.block_bytes, layout.fingerprint()
    )
    try:
        tier = DiskTier(
            config,
            on_stored=lambda hashes: publisher.stored(Tier.DISK, hashes),
            on_removed=lambda hashes: publisher.removed(Tier.DISK, hashes),
        )
    except UnavailableError as error:
        log.error("%s serves without its disk tier: %s", spec.worker_id, error)
        return None, str(error)
    return tier, ""


def _end_process(reason: str) -> None:
    """This incarnation must not go on: end the process shortly, so that Ray starts a new one with a new epoch.

    The delay lets the errors of running requests reach their clients.
    """
    log.critical("this worker ends: %s", reason)
    timer = threading.Timer(EXIT_DELAY_S, os._exit, args=(EXIT_CODE,))
    timer.daemon = True
    timer.start()
