"""A real metadata server in a thread, and small builders, for tests that need gRPC."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvpool.metadata.membership import DirectoryLimits
from kvpool.metadata.server import MetadataServer, ServerOptions
from kvpool.metadata.watcher import MetadataWatcher
from kvpool.types import BlockHash, MemberInfo, Role, Tier, WorkerEpoch, WorkerId, WorkerKey

WAIT_S = 20.0


class ThreadedServer:
    """`MetadataServer` on a loop of its own; `stop` and `restart` keep the port."""

    def __init__(self, limits: DirectoryLimits | None = None, port: int = 0) -> None:
        self._limits = limits or DirectoryLimits()
        self.address = ""
        self._start(port)

    def _start(self, port: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.server = self.call(self._build(port))
        self.address = self.server.address

    async def _build(self, port: int) -> MetadataServer:
        server = MetadataServer(ServerOptions("127.0.0.1", port, self._limits))
        await server.start()
        return server

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(WAIT_S)

    def run(self, function: Callable[[], Any]) -> Any:
        """Run a function on the server's loop, which owns the state."""

        async def inner() -> Any:
            return function()

        return self.call(inner())

    def stop(self) -> None:
        self.call(self.server.stop())
        self.call(_settle())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()

    def restart(self) -> None:
        port = int(self.address.rpartition(":")[2])
        self.stop()
        self._start(port)


async def _settle() -> None:
    """Let what gRPC still runs on this loop end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=WAIT_S)


def member(worker_id: str = "w0", epoch: int = 1, **changes: Any) -> MemberInfo:
    info = MemberInfo(
        key=WorkerKey(WorkerId(worker_id), WorkerEpoch(epoch)),
        role=Role.MIXED,
        transport="memory",
        data_address=b"address-" + worker_id.encode(),
        layout_fingerprint="layout-a",
        hash_scheme="kvpool-blake2b-v1",
        block_tokens=16,
        block_bytes=1024,
        capacity_blocks=(1000, 0, 0),
        control_address=worker_id,
    )
    return replace(info, **changes)


def hashes(count: int) -> list[BlockHash]:
    raw = os.urandom(16 * count)
    return [BlockHash(raw[start : start + 16]) for start in range(0, len(raw), 16)]


class Owner:
    """A worker's block store in the smallest form: the truth that a publisher's snapshot shows."""

    def __init__(self, blocks: Sequence[BlockHash] = ()) -> None:
        self.held: dict[BlockHash, Tier] = dict.fromkeys(blocks, Tier.DEVICE)
        self.lock = threading.Lock()
        self.snapshots = 0

    def snapshot(self) -> list[tuple[Tier, BlockHash]]:
        with self.lock:
            self.snapshots += 1
            return [(tier, item) for item, tier in self.held.items()]

    def store(self, blocks: Sequence[BlockHash]) -> Sequence[BlockHash]:
        with self.lock:
            self.held.update(dict.fromkeys(blocks, Tier.DEVICE))
        return blocks

    def remove(self, blocks: Sequence[BlockHash]) -> Sequence[BlockHash]:
        with self.lock:
            for item in blocks:
                self.held.pop(item, None)
        return blocks


def sees(watcher: MetadataWatcher, chain: Sequence[BlockHash], key: WorkerKey, blocks: int) -> bool:
    """Wait until the watcher's copy says that ``key`` holds exactly ``blocks`` leading blocks of ``chain``."""

    def holds() -> bool:
        return max(watcher.view.prefixes(chain, learn=False).get(key, {}).values(), default=0) == blocks

    return watcher.wait_for(holds, WAIT_S)
