"""The client's side of a stream, with an actor handle whose streams misbehave as real ones did in fault runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from kvpool.cluster.connection import ClusterConnection
from kvpool.plan import REDO, Route
from kvpool.request import FinishReason, GenerateRequest, SamplingParams, TokenChunk
from kvpool.types import RequestId, WorkerEpoch, WorkerId, WorkerKey

KEY = WorkerKey(WorkerId("worker-0"), WorkerEpoch(1))
REQUEST = GenerateRequest(RequestId("r"), (1, 2, 3), SamplingParams(max_tokens=2))
ROUTE = Route(REQUEST.request_id, "d", KEY.worker_id, KEY, "worker-0", REDO)


class _Handle:
    """Streams two chunks, then stands still as a stopped process does: no next item, no end, no error."""

    def __init__(self) -> None:
        self.generate = self
        self.cancelled = False

    def options(self, **_: Any) -> _Handle:
        return self

    def remote(self, *_: Any) -> AsyncIterator[asyncio.Future[TokenChunk]]:
        async def stream() -> AsyncIterator[asyncio.Future[TokenChunk]]:
            for chunk in (
                TokenChunk(REQUEST.request_id, (7,)),
                TokenChunk(REQUEST.request_id, (8,), finish=FinishReason.LENGTH),
            ):
                ready: asyncio.Future[TokenChunk] = asyncio.get_running_loop().create_future()
                ready.set_result(chunk)
                yield ready
            await asyncio.Event().wait()

        return stream()


class _Connection(ClusterConnection):
    def _actor(self, name: str) -> Any:
        assert name == "worker-0"
        return _Handle()


def test_a_worker_that_falls_silent_behind_the_last_chunk_is_not_waited_for() -> None:
    async def follow() -> list[TokenChunk]:
        return [chunk async for chunk in _Connection("c").stream(ROUTE, REQUEST, 20.0)]

    chunks = asyncio.run(asyncio.wait_for(follow(), 10.0))
    assert [chunk.tokens for chunk in chunks] == [(7,), (8,)]
