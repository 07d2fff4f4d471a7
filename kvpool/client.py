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
import concurrent.futures
import contextlib
import os
import queue
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from kvpool.attempts import FIRST_BACKOFF_S, MAX_BACKOFF_S, Attempts, is_final
from kvpool.config import ClusterConfig
from kvpool.errors import DeadlineError, DuplicateError, RequestError, UnavailableError
from kvpool.options import checked_timeout_s, limit_ns, require_fits, require_known
from kvpool.prompts import Prompt, encode_beside, tuple_of
from kvpool.request import GenerateRequest, GenerateResult, Limits, SamplingParams, TokenChunk, TokenLogprobs
from kvpool.text import TextStream
from kvpool.tokenizer import Tokenizer
from kvpool.types import RequestId

if TYPE_CHECKING:
    from kvpool.cluster.administration import Administrator, AsyncAdministrator
    from kvpool.cluster.connection import ClusterConnection, ClusterInfo
    from kvpool.cluster.launcher import Cluster

DEFAULT_TIMEOUT_S = 120.0
CLOSE_TIMEOUT_S = 60.0
END_TASKS_TIMEOUT_S = 5.0

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
        self._joined = False
        if address is None:
            self._cluster = Cluster.start(config or ClusterConfig(), name=f"{cluster}-{uuid.uuid4().hex[:8]}")
            self._connection: ClusterConnection = self._cluster.connection()
        else:
            self._joined = connect_ray(address)
            self._connection = ClusterConnection(cluster)
        self._info: ClusterInfo | None = None
        self._tokenizer: Tokenizer | None = None
        self._running: dict[RequestId, asyncio.Event] = {}

    @classmethod
    def of(cls, connection: ClusterConnection) -> AsyncKVPoolClient:
        """A client over a connection that somebody else owns."""
        client = cls.__new__(cls)
        client._cluster = None
        client._joined = False
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
        require_known(options, self.stream, f"{type(self).__name__}.generate")
        async with contextlib.aclosing(self.stream(prompt, **options)) as chunks:
            async for chunk in chunks:
                if chunk.result is not None:
                    return chunk.result
        raise UnavailableError("the stream ended without a result")

    async def generate_batch(self, prompts: Sequence[Prompt], **options: Any) -> list[GenerateResult]:
        """Generate for all prompts at once; results in order. The first error cancels the rest and is raised."""
        require_known(options, self.stream, f"{type(self).__name__}.generate_batch")
        tasks = [asyncio.ensure_future(self.generate(prompt, **options)) for prompt in prompts]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

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
        ttft_limit_s: float | None = None,
        tpot_limit_s: float | None = None,
        priority: int = 0,
        may_degrade: bool = False,
        request_id: str | None = None,
    ) -> AsyncGenerator[TextChunk]:
        """Generate and yield text as it comes. Closing the generator cancels the request.

        Args:
            prompt: text, token ids, or chat messages.
            max_tokens, temperature, top_p, seed, stop, stop_token_ids, ignore_eos, logprobs: see
                `kvpool.request.SamplingParams`.
            tenant: requests of different tenants never share blocks.
            timeout_s: budget for the whole request, from the call on.
            ttft_limit_s, tpot_limit_s: the first token should come within, and the mean gap after it be at most. A
                request that is expected to miss a limit is refused at once, unless ``may_degrade``.
            priority: of requests that wait, the higher goes first.
            request_id: identity for `cancel` and ``kvpool explain``; made up when None.

        Raises:
            RequestError: the prompt or an option is malformed; nothing was started.
            DeadlineError: the budget is over.
            OverloadError: a limit cannot be met now; ``details["retry_after_s"]`` says when to come again, and
                `explain` of ``details["request_id"]`` why.
            UnavailableError: no worker could serve it within its attempts.
        """
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop=(stop,) if isinstance(stop, str) else tuple_of(stop, "stop"),
            stop_token_ids=tuple_of(stop_token_ids, "stop_token_ids"),
            ignore_eos=ignore_eos,
            logprobs=logprobs,
        )
        limits = Limits(
            ttft_ns=limit_ns(ttft_limit_s, "ttft_limit"),
            tpot_ns=limit_ns(tpot_limit_s, "tpot_limit"),
            priority=priority,
            may_degrade=may_degrade,
        )
        started_s = time.monotonic()
        deadline_s = started_s + checked_timeout_s(timeout_s)
        tokenizer, info = await self._first_contact(deadline_s)
        tokens = await encode_beside(tokenizer, prompt)
        require_fits(tokens, sampling, info.max_context_tokens)
        request = GenerateRequest(
            request_id=RequestId(f"req-{uuid.uuid4().hex[:12]}" if request_id is None else request_id),
            prompt=tokens,
            sampling=sampling,
            tenant=tenant,
            timeout_ns=max(1, int(timeout_s * 1e9)),
            limits=limits,
            elapsed_ns=int((time.monotonic() - started_s) * 1e9),
        )
        if request.request_id in self._running:
            raise DuplicateError(f"request id {request.request_id!r} is already running", field="request_id")
        cancelled = self._running[request.request_id] = asyncio.Event()
        attempts = Attempts(self._connection, request, cancelled, deadline_s)
        try:
            async with contextlib.aclosing(_render(tokenizer, request, attempts.run())) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            del self._running[request.request_id]

    async def _first_contact(self, deadline_s: float) -> tuple[Tokenizer, ClusterInfo]:
        """What every request needs of the cluster. Asked once; a router or worker that just restarts is waited for."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                    return await self.tokenizer(), await self.info()
            except TimeoutError as error:
                raise DeadlineError(
                    "neither a router nor a worker answered within the request's budget; 'kvpool status' shows who does"
                ) from error
            except UnavailableError as error:
                if is_final(error) or time.monotonic() + backoff_s >= deadline_s:
                    raise
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)

    async def cancel(self, request_id: str) -> bool:
        """Cancel a request of this client; it ends with ``FinishReason.CANCELLED``. False when it does not run."""
        event = self._running.get(RequestId(request_id))
        if event is not None:
            event.set()
        return event is not None

    async def explain(self, request_id: str) -> dict[str, Any]:
        """The decision record of a request; see `kvpool.cluster.decisions.explain`.

        Raises:
            RequestError: no record of that id is kept.
            UnavailableError: a router does not answer, and no other one has it.
        """
        from kvpool.cluster.decisions import explain

        return await explain(self._connection, RequestId(request_id))

    async def records(self) -> list[str]:
        """All decision records the routers keep, oldest first, as JSON lines; those of a silent one are missing."""
        from kvpool.cluster.decisions import all_records

        return await all_records(self._connection)

    async def status(self) -> dict[str, Any]:
        """Members, blocks, links, decisions and failures of the cluster."""
        from kvpool.cluster.status import cluster_status

        return await cluster_status(self._connection)

    @property
    def admin(self) -> AsyncAdministrator:
        """Draining, evicting and pinning."""
        from kvpool.cluster.administration import AsyncAdministrator

        async def tokens_of(prompt: Prompt) -> tuple[int, ...]:
            return await encode_beside(await self.tokenizer(), prompt)

        return AsyncAdministrator(self._connection, tokens_of)

    async def close(self) -> None:
        """End the embedded cluster, or this client's part in the connection to the running one. May be repeated."""
        from kvpool.cluster.connection import disconnect_ray

        if self._cluster is not None:
            await asyncio.to_thread(self._cluster.close)
        if self._joined:
            self._joined = False
            await asyncio.to_thread(disconnect_ray)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def _render(
    tokenizer: Tokenizer, request: GenerateRequest, chunks: AsyncGenerator[TokenChunk]
) -> AsyncGenerator[TextChunk]:
    async with contextlib.aclosing(chunks):
        async for chunk in _rendered(tokenizer, request, chunks):
            yield chunk


async def _rendered(
    tokenizer: Tokenizer, request: GenerateRequest, chunks: AsyncGenerator[TokenChunk]
) -> AsyncGenerator[TextChunk]:
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


class KVPoolClient:
    """The client for ordinary programs: the same calls, blocking; safe to use from several threads, and beside a
    running event loop, as in a notebook.

    Arguments and errors are those of `AsyncKVPoolClient`. Calls that are under way when another thread closes the
    client end with `UnavailableError`; later ones, and all in a forked child, with `RequestError`.
    """

    def __init__(
        self, address: str | None = None, *, cluster: str = "default", config: ClusterConfig | None = None
    ) -> None:
        self._begin(AsyncKVPoolClient(address, cluster=cluster, config=config))

    @classmethod
    def of(cls, connection: ClusterConnection) -> KVPoolClient:
        """A client over a connection that somebody else owns."""
        client = cls.__new__(cls)
        client._begin(AsyncKVPoolClient.of(connection))
        return client

    def _begin(self, client: AsyncKVPoolClient) -> None:
        self._async = client
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvpool-client", daemon=True)
        self._thread.start()

    def info(self) -> ClusterInfo:
        """Model and limits of the cluster."""
        return self._run(self._async.info())

    def generate(self, prompt: Prompt, **options: Any) -> GenerateResult:
        """Generate and return the whole answer. Options are those of `AsyncKVPoolClient.stream`."""
        self._require_known(options, "generate")
        return self._run(self._async.generate(prompt, **options))

    def generate_batch(self, prompts: Sequence[Prompt], **options: Any) -> list[GenerateResult]:
        """Generate for all prompts at once; results in order."""
        self._require_known(options, "generate_batch")
        return self._run(self._async.generate_batch(prompts, **options))

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[TextChunk]:
        """Generate and yield text as it comes. Closing the iterator cancels the request."""
        self._require_known(options, "stream")
        chunks: queue.Queue[TextChunk | BaseException | None] = queue.Queue()  # max_tokens and a last one bound it

        async def pump() -> None:
            try:
                async with contextlib.aclosing(self._async.stream(prompt, **options)) as source:
                    async for chunk in source:
                        chunks.put(chunk)
                chunks.put(None)
            except BaseException as error:
                chunks.put(error)
                raise

        task = self._submit(pump())
        try:
            while (item := chunks.get()) is not None:  # the pump ends by the request's deadline, or with the client
                if isinstance(item, asyncio.CancelledError):
                    raise _closed_meanwhile() from item
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            task.cancel()

    def cancel(self, request_id: str) -> bool:
        """Cancel a running request of this client."""
        return self._run(self._async.cancel(request_id))

    def explain(self, request_id: str) -> dict[str, Any]:
        """The decision record of a request."""
        return self._run(self._async.explain(request_id))

    def records(self) -> list[str]:
        """All decision records the routers keep, oldest first, as JSON lines."""
        return self._run(self._async.records())

    def status(self) -> dict[str, Any]:
        """Members, blocks, links, decisions and failures of the cluster."""
        return self._run(self._async.status())

    @property
    def admin(self) -> Administrator:
        """Draining, evicting and pinning."""
        from kvpool.cluster.administration import Administrator

        return Administrator(self._async.admin, self._run)

    def close(self) -> None:
        """End this client: its running requests, and the embedded cluster if there is one. May be repeated."""
        if os.getpid() != self._pid:
            return  # a forked child owns nothing of it
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self._wait(self._schedule(_end_tasks()))
            self._wait(self._schedule(self._async.close()))
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_TIMEOUT_S)
            if not self._thread.is_alive():
                self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_known(self, options: dict[str, Any], call: str) -> None:
        require_known(options, self._async.stream, f"{type(self).__name__}.{call}")

    def _run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return self._wait(self._submit(coroutine))

    def _submit(self, coroutine: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        with self._lock:
            if not self._closed and os.getpid() == self._pid:
                return self._schedule(coroutine)
        coroutine.close()
        if self._closed:
            raise RequestError("the client is closed")
        raise RequestError(f"this client belongs to process {self._pid}; make another one in this process")

    def _schedule(self, coroutine: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _wait(self, future: concurrent.futures.Future[_T]) -> _T:
        """The result; who stops waiting for it (Ctrl-C) cancels the call."""
        try:
            return future.result()
        except concurrent.futures.CancelledError as error:
            raise _closed_meanwhile() from error
        finally:
            future.cancel()


async def _end_tasks() -> None:
    """Cancel everything else that runs on this loop, and wait for it."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=END_TASKS_TIMEOUT_S)
    await asyncio.get_running_loop().shutdown_asyncgens()


def _closed_meanwhile() -> UnavailableError:
    return UnavailableError("the client was closed while the call was under way")
