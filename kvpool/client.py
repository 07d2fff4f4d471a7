"""What users import: `KVPoolClient` and `AsyncKVPoolClient`.

    from kvpool.client import KVPoolClient

    with KVPoolClient() as client:                      # an embedded cluster; or KVPoolClient(address="host:port")
        print(client.generate("The capital of France is", max_tokens=8).text)

A request is accepted when `generate` or `stream` has validated it. From then on it ends with its tokens or with a
typed error at its deadline: when its worker dies, the tokens already delivered stay and another worker goes on from
them. The client owns nothing of a running cluster; an embedded one ends with the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from kvpool.config import ClusterConfig
from kvpool.errors import CapacityError, DeadlineError, RequestError, StaleError, UnavailableError
from kvpool.plan import Route
from kvpool.request import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    RequestStats,
    SamplingParams,
    TokenChunk,
    TokenLogprobs,
)
from kvpool.text import TextStream
from kvpool.tokenizer import Tokenizer
from kvpool.types import RequestId, WorkerKey

if TYPE_CHECKING:
    from kvpool.cluster.connection import ClusterConnection, ClusterInfo
    from kvpool.cluster.launcher import Cluster

DEFAULT_TIMEOUT_S = 120.0
MAX_ATTEMPTS = 64
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0
CLOSE_TIMEOUT_S = 60.0
LONG_PROMPT_CHARS = 16 * 1024  # longer texts are tokenized on a thread: a megabyte takes half a second

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages (``{"role": …, "content": …}``)."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A piece of a streamed answer. The last one carries ``result``."""

    request_id: RequestId
    text: str
    tokens: tuple[int, ...]
    result: GenerateResult | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


class AsyncKVPoolClient:
    """The client for asyncio programs; use from one event loop. See the module for what a request may expect.

    Args:
        address: Ray address of a running cluster; None starts an embedded one (blocking, some seconds).
        cluster: the cluster's name at that address.
        config: settings of the embedded cluster.
    """

    def __init__(
        self, address: str | None = None, *, cluster: str = "default", config: ClusterConfig | None = None
    ) -> None:
        # Ray stays out of programs that only import kvpool: it takes a second to import.
        from kvpool.cluster.connection import ClusterConnection, connect_ray
        from kvpool.cluster.launcher import Cluster

        if address is not None and config is not None:
            raise RequestError("config applies to an embedded cluster only; leave it out with an address")
        self._cluster: Cluster | None = None
        if address is None:
            self._cluster = Cluster.start(config or ClusterConfig(), name=f"{cluster}-{uuid.uuid4().hex[:8]}")
            self._connection: ClusterConnection = self._cluster.connection()
        else:
            connect_ray(address)
            self._connection = ClusterConnection(cluster)
        self._info: ClusterInfo | None = None
        self._tokenizer: Tokenizer | None = None
        self._running: dict[RequestId, asyncio.Event] = {}

    @classmethod
    def of(cls, connection: ClusterConnection) -> AsyncKVPoolClient:
        """A client over a connection that somebody else owns."""
        client = cls.__new__(cls)
        client._cluster = None
        client._connection = connection
        client._info = None
        client._tokenizer = None
        client._running = {}
        return client

    async def info(self) -> ClusterInfo:
        """Model and limits of the cluster."""
        if self._info is None:
            self._info = await self._connection.info()
        return self._info

    async def tokenizer(self) -> Tokenizer:
        """The served model's tokenizer."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(await self._connection.tokenizer())
        return self._tokenizer

    async def generate(self, prompt: Prompt, **options: Any) -> GenerateResult:
        """Generate and return the whole answer. Options are those of `stream`."""
        async for chunk in self.stream(prompt, **options):
            if chunk.result is not None:
                return chunk.result
        raise UnavailableError("the stream ended without a result")

    async def generate_batch(self, prompts: Sequence[Prompt], **options: Any) -> list[GenerateResult]:
        """Generate for all prompts at once; results in order. The first error cancels the rest and is raised."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.generate(prompt, **options)) for prompt in prompts]
        return [task.result() for task in tasks]

    async def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] | str = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        logprobs: int = 0,
        tenant: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        request_id: str | None = None,
    ) -> AsyncIterator[TextChunk]:
        """Generate and yield text as it comes.

        Args:
            prompt: text, token ids, or chat messages.
            max_tokens, temperature, top_p, seed, stop, stop_token_ids, ignore_eos, logprobs: see
                `kvpool.request.SamplingParams`.
            tenant: requests of different tenants never share blocks.
            timeout_s: budget for the whole request.
            request_id: identity for `cancel` and ``kvpool explain``; made up when None.

        Raises:
            RequestError: the prompt or an option is malformed; nothing was started.
            DeadlineError: the budget is over.
            UnavailableError: no worker could serve it within its attempts.
        """
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(stop_token_ids),
            ignore_eos=ignore_eos,
            logprobs=logprobs,
        )
        tokenizer = await self.tokenizer()
        tokens = await _encode_beside(tokenizer, prompt)
        _require_fits(tokens, sampling, (await self.info()).max_context_tokens)
        request = GenerateRequest(
            request_id=RequestId(request_id or f"req-{uuid.uuid4().hex[:12]}"),
            prompt=tokens,
            sampling=sampling,
            tenant=tenant,
            timeout_ns=int(timeout_s * 1e9),
        )
        if request.request_id in self._running:
            raise RequestError(f"request id {request.request_id!r} is already running", field="request_id")
        cancelled = self._running[request.request_id] = asyncio.Event()
        try:
            async for chunk in _render(tokenizer, request, _Attempts(self._connection, request, cancelled).run()):
                yield chunk
        finally:
            del self._running[request.request_id]

    async def cancel(self, request_id: str) -> bool:
        """Cancel a request of this client; it ends with ``FinishReason.CANCELLED``. False when it does not run."""
        event = self._running.get(RequestId(request_id))
        if event is not None:
            event.set()
        return event is not None

    async def explain(self, request_id: str) -> dict[str, Any]:
        """The router's decision record of a request.

        Raises:
            RequestError: no record of that id is kept.
        """
        record: dict[str, Any] = await self._connection.call("router", "explain", RequestId(request_id))
        return record

    async def records(self) -> list[str]:
        """All decision records the router keeps, oldest first, as JSON lines."""
        lines: list[str] = await self._connection.call("router", "records")
        return lines

    async def status(self) -> dict[str, Any]:
        """Members, blocks, links, decisions and failures of the cluster."""
        from kvpool.cluster.status import cluster_status

        status: dict[str, Any] = await cluster_status(self._connection)
        return status

    async def close(self) -> None:
        """End the embedded cluster, if there is one. May be repeated."""
        if self._cluster is not None:
            await asyncio.to_thread(self._cluster.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def _encode_beside(tokenizer: Tokenizer, prompt: Prompt) -> tuple[int, ...]:
    """`_encode`, without holding up the loop's other requests when the prompt may be long."""
    if isinstance(prompt, str) and len(prompt) <= LONG_PROMPT_CHARS:
        return _encode(tokenizer, prompt)
    return await asyncio.to_thread(_encode, tokenizer, prompt)


def _require_fits(tokens: tuple[int, ...], sampling: SamplingParams, max_context_tokens: int) -> None:
    """Refuse here what no worker can take, before a prompt of any size travels to the router."""
    if len(tokens) + sampling.max_tokens > max_context_tokens:
        raise RequestError(
            f"the prompt has {len(tokens)} tokens and max_tokens is {sampling.max_tokens}, but the model takes "
            f"{max_context_tokens} in all; shorten the prompt or lower max_tokens",
            field="prompt" if len(tokens) >= max_context_tokens else "max_tokens",
        )


def _encode(tokenizer: Tokenizer, prompt: Prompt) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    items = list(prompt)
    if items and all(isinstance(item, Mapping) for item in items):
        return tokenizer.encode_chat(items)  # type: ignore[arg-type]
    if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return tuple(items)  # type: ignore[arg-type]
    raise RequestError("the prompt must be text, a list of token ids, or a list of chat messages", field="prompt")


async def _render(
    tokenizer: Tokenizer, request: GenerateRequest, chunks: AsyncIterator[TokenChunk]
) -> AsyncIterator[TextChunk]:
    text = TextStream(tokenizer.decode, request.sampling.stop)
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    async for chunk in chunks:
        tokens.extend(chunk.tokens)
        logprobs.extend(chunk.logprobs)
        piece = text.push(chunk.tokens, last=chunk.finish is not None)
        result = None
        if chunk.finish is not None:
            assert chunk.stats is not None
            result = GenerateResult(
                request_id=request.request_id,
                tokens=tuple(tokens),
                text=text.text,
                finish=chunk.finish,
                stats=chunk.stats,
                logprobs=tuple(logprobs),
            )
        if piece or chunk.tokens or result is not None:
            yield TextChunk(request.request_id, piece, chunk.tokens, result, chunk.logprobs)


class _Attempts:
    """One request over as many workers as it takes, inside its deadline."""

    def __init__(self, connection: ClusterConnection, request: GenerateRequest, cancelled: asyncio.Event) -> None:
        self._connection = connection
        self._request = request
        self._cancelled = cancelled
        self._deadline_s = time.monotonic() + request.timeout_ns / 1e9
        self._delivered: list[int] = []
        self._excluded: set[WorkerKey] = set()
        self._attempts = 0

    async def run(self) -> AsyncIterator[TokenChunk]:
        backoff_s = FIRST_BACKOFF_S
        last_error: Exception | None = None
        while self._attempts < MAX_ATTEMPTS:
            self._attempts += 1
            delivered_before = len(self._delivered)
            route: Route | None = None
            try:
                route = await self._connection.route(self._current(), frozenset(self._excluded), self._remaining_s())
                async for chunk in self._stream(route):
                    yield chunk
                return
            except (UnavailableError, StaleError) as error:
                last_error = error
                if route is not None:
                    self._excluded.add(route.worker)
            except CapacityError as error:
                last_error = error  # full, not broken: wait and ask again, anyone may be free by then
            if len(self._delivered) > delivered_before:
                backoff_s = FIRST_BACKOFF_S
            if time.monotonic() + backoff_s >= self._deadline_s:
                break
            await self._pause(backoff_s)
            backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)
        raise DeadlineError(
            f"request {self._request.request_id} did not finish within its budget; last error: {last_error}",
            attempts=self._attempts,
            timeout_s=self._request.timeout_ns / 1e9,
        ) from last_error

    async def _stream(self, route: Route) -> AsyncIterator[TokenChunk]:
        """Chunks of one attempt; ends with a cancelled chunk when the user cancels."""
        chunks = self._connection.stream(route, self._current(), self._remaining_s())
        waiter = asyncio.ensure_future(self._cancelled.wait())
        step: asyncio.Future[TokenChunk | None] | None = None
        try:
            while True:
                step = asyncio.ensure_future(anext(chunks, None))
                await asyncio.wait({step, waiter}, return_when=asyncio.FIRST_COMPLETED)
                if not step.done():
                    yield _cancelled_chunk(self._request, route, self._attempts)
                    return
                chunk = step.result()
                if chunk is None:
                    return
                self._delivered.extend(chunk.tokens)
                if chunk.stats is not None:
                    chunk = replace(chunk, stats=replace(chunk.stats, attempts=self._attempts))
                yield chunk
        finally:
            waiter.cancel()
            if step is not None and not step.done():
                step.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await step
            await chunks.aclose()  # type: ignore[attr-defined]

    def _current(self) -> GenerateRequest:
        """The request as it stands: what was delivered is context now, and the budget has shrunk."""
        return replace(
            self._request, generated=tuple(self._delivered), timeout_ns=max(1, int(self._remaining_s() * 1e9))
        )

    def _remaining_s(self) -> float:
        return max(0.001, self._deadline_s - time.monotonic())

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._cancelled.wait(), seconds)


def _cancelled_chunk(request: GenerateRequest, route: Route, attempts: int) -> TokenChunk:
    stats = RequestStats(
        worker_id=route.worker_id,
        plan=route.plan.kind.value,
        prompt_tokens=len(request.prompt),
        tokens_cached=0,
        tokens_loaded=0,
        tokens_redone=0,
        attempts=attempts,
    )
    return TokenChunk(request.request_id, (), finish=FinishReason.CANCELLED, stats=stats)


class KVPoolClient:
    """The client for ordinary programs: the same calls, blocking; safe to use from several threads.

    Arguments and errors are those of `AsyncKVPoolClient`.
    """

    def __init__(
        self, address: str | None = None, *, cluster: str = "default", config: ClusterConfig | None = None
    ) -> None:
        self._async = AsyncKVPoolClient(address, cluster=cluster, config=config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvpool-client", daemon=True)
        self._thread.start()

    def info(self) -> ClusterInfo:
        """Model and limits of the cluster."""
        return self._run(self._async.info())

    def generate(self, prompt: Prompt, **options: Any) -> GenerateResult:
        """Generate and return the whole answer. Options are those of `AsyncKVPoolClient.stream`."""
        return self._run(self._async.generate(prompt, **options))

    def generate_batch(self, prompts: Sequence[Prompt], **options: Any) -> list[GenerateResult]:
        """Generate for all prompts at once; results in order."""
        return self._run(self._async.generate_batch(prompts, **options))

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[TextChunk]:
        """Generate and yield text as it comes. Closing the iterator cancels the request."""
        chunks: queue.Queue[TextChunk | BaseException | None] = queue.Queue()

        async def pump() -> None:
            try:
                async for chunk in self._async.stream(prompt, **options):
                    chunks.put(chunk)
                chunks.put(None)
            except BaseException as error:
                chunks.put(error)
                raise

        task = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while (item := chunks.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            task.cancel()

    def cancel(self, request_id: str) -> bool:
        """Cancel a running request of this client."""
        return self._run(self._async.cancel(request_id))

    def explain(self, request_id: str) -> dict[str, Any]:
        """The router's decision record of a request."""
        return self._run(self._async.explain(request_id))

    def records(self) -> list[str]:
        """All decision records the router keeps, oldest first, as JSON lines."""
        return self._run(self._async.records())

    def status(self) -> dict[str, Any]:
        """Members, blocks, links, decisions and failures of the cluster."""
        return self._run(self._async.status())

    def close(self) -> None:
        """End the embedded cluster, if there is one, and this client. May be repeated."""
        if self._loop.is_closed():
            return
        self._run(self._async.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        if self._loop.is_closed():
            coroutine.close()
            raise RequestError("the client is closed")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
