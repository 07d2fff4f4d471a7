"""The Ray shell around one worker: places, names and restarts it, and streams its tokens. No decision lives here.

A restarted actor is a new incarnation: it takes a new epoch, starts with empty pages and joins the pool again, which
removes what the old incarnation had registered.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import logging
import os
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import ray

from kvpool.errors import CapacityError, InvariantViolation, KVPoolError, RequestError, StaleError, UnavailableError
from kvpool.hashing import set_digest
from kvpool.metadata.disturbance import Disturbance
from kvpool.plan import HandOver, Route
from kvpool.request import GenerateRequest, TokenChunk
from kvpool.store.selection import Selection
from kvpool.tokenizer import TokenizerFiles
from kvpool.transport.shaping import LinkShape, ShapingTransport
from kvpool.types import RequestId, WorkerEpoch, WorkerId, WorkerKey
from kvpool.wallclock import unix_ns
from workers.assemble import AssembledWorker, Evicted, Leaving, WorkerReady, WorkerSpec, assemble_worker
from workers.epochs import epoch_after
from workers.puller import MAX_FOLLOWED, PullOrder, PullResult

MAX_CONCURRENT_CALLS = 1000
BOOT_RETRY_S = 5.0
EXIT_BOOT_FAILED = 71

log = logging.getLogger(__name__)


@ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=MAX_CONCURRENT_CALLS)
class WorkerActor:
    """One worker. `ready` tells when, or why not, it serves."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._key = WorkerKey(spec.worker_id, WorkerEpoch(unix_ns()))
        self._restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        self._followers = concurrent.futures.ThreadPoolExecutor(MAX_FOLLOWED, thread_name_prefix="kvpool-follow")
        self._following = 0
        self._booted: concurrent.futures.Future[AssembledWorker] = concurrent.futures.Future()
        threading.Thread(target=self._boot, name="kvpool-boot", daemon=True).start()

    def _boot(self) -> None:
        try:
            self._booted.set_result(self._assemble())
        except BaseException as error:
            log.exception("worker %s did not start", self._key)
            self._booted.set_exception(error)
            if self._restarted:
                # At the first start somebody waits for `ready` and hears why. After a restart nobody asks: what kept
                # this incarnation from starting may pass, so let Ray start another one.
                time.sleep(BOOT_RETRY_S)
                os._exit(EXIT_BOOT_FAILED)

    def _assemble(self) -> AssembledWorker:
        """Assemble; once more when the wall clock was set back since the predecessor took its number."""
        try:
            return assemble_worker(self._key, self._spec)
        except StaleError as error:
            epoch = epoch_after(error, unix_ns())
            if epoch is None:
                raise
            log.warning("%s: the predecessor's clock was ahead of this one; going on with number %d", self._key, epoch)
        self._key = WorkerKey(self._spec.worker_id, epoch)
        return assemble_worker(self._key, self._spec)

    async def ready(self) -> WorkerReady:
        """Wait until the worker serves.

        Raises:
            KVPoolError: why it did not start.
        """
        worker = await asyncio.wrap_future(self._booted)
        return worker.ready

    async def tokenizer(self) -> TokenizerFiles:
        """The served model's tokenizer, as data."""
        return self._worker().tokenizer

    async def generate(self, request: GenerateRequest, route: Route) -> AsyncIterator[TokenChunk]:
        """Serve one request by the route's plan and stream its tokens.

        Raises:
            UnavailableError: the route names another incarnation, or this one is still starting.
            KVPoolError: the request was refused or failed.
        """
        worker = self._worker()
        if route.worker != self._key:
            raise UnavailableError(f"the route names {route.worker}, but this is {self._key}; ask the router again")
        loop = asyncio.get_running_loop()
        # Room for the whole answer and an error: a full queue could only lose a token.
        chunks: asyncio.Queue[TokenChunk | KVPoolError] = asyncio.Queue(request.sampling.max_tokens + 1)

        def sink(item: TokenChunk | KVPoolError) -> None:
            loop.call_soon_threadsafe(chunks.put_nowait, item)

        worker.core.submit(request, route.plan, route.decision_id, sink)
        finished = False
        try:
            while not finished:
                item = await chunks.get()  # bounded: the core ends every request by its deadline
                if isinstance(item, KVPoolError):
                    finished = True
                    raise item
                finished = item.finish is not None
                yield item
        finally:
            if not finished:
                worker.core.cancel(request.request_id, route.decision_id)

    async def follow(self, request: GenerateRequest, part: HandOver) -> int:
        """Load the prompt of a request that will go on here while another worker computes it.

        Returns:
            Leading blocks of the prompt that are here now.

        Raises:
            UnavailableError: the hand-over names another incarnation, or this one cannot load.
            CapacityError: too many prompts are followed.
        """
        worker = self._worker()
        if part.worker != self._key:
            raise UnavailableError(f"the hand-over names {part.worker}, but this is {self._key}; ask the router again")
        if self._following >= MAX_FOLLOWED:  # in the executor's queue it would begin when nobody needs it any more
            raise CapacityError(f"{MAX_FOLLOWED} prompts are followed already; the load comes later")
        call = functools.partial(worker.core.follow, request, part.plan, part.decision_id)
        self._following += 1
        try:
            return (await asyncio.get_running_loop().run_in_executor(self._followers, call)).held
        finally:
            self._following -= 1

    async def unfollow(self, decision_id: str) -> None:
        """The request of a hand-over does not come any more."""
        if self._booted.done():
            self._worker().core.unfollow(decision_id)

    async def cancel(self, request_id: RequestId, decision_id: str) -> None:
        """Cancel the attempt of a request that ``decision_id`` stands for; unknown ones are fine."""
        if self._booted.done():  # whoever still starts has none: it was an earlier incarnation's
            self._worker().core.cancel(request_id, decision_id)

    async def status(self) -> dict[str, Any]:
        """Counters and gauges of this worker."""
        worker = self._worker()
        return {"key": str(self._key), **await asyncio.to_thread(worker.status)}

    async def pid(self) -> int:
        """Process id, for operators and fault injection."""
        return os.getpid()

    async def audit(self) -> dict[str, Any]:
        """What this worker really holds and whether its books balance, for operators and fault injection.

        Returns:
            ``digest`` (`kvpool.hashing.set_digest` of what peers can read), ``broken`` (the invariant that does not
            hold, or None), and of the status what must be zero at rest.
        """
        return await asyncio.to_thread(self._audit)

    def _audit(self) -> dict[str, Any]:
        core = self._worker().core
        broken = None
        try:
            core.check()
        except InvariantViolation as error:
            broken = str(error)
        status = core.status()
        return {
            "key": str(self._key),
            "digest": set_digest({*core.held_hashes(), *core.disk_hashes()}),
            "broken": broken,
            "active": status["running"] + status["waiting"] + status["loads_in_flight"],
            "failures": status["failures"],
        }

    async def shape_link(self, peer: WorkerId, shape: LinkShape) -> None:
        """Make the links to and from a peer behave like ``shape`` from now on; for fault injection.

        Raises:
            RequestError: this worker's transport was not chosen with the prefix ``shaped:``.
        """
        self._shaping().shape(peer, shape)

    async def disturb_events(self, disturbance: Disturbance) -> None:
        """Lose, repeat or hold back what this worker publishes from now on; for fault injection.

        Raises:
            RequestError: as `shape_link`: the prefix says that this worker may be broken.
        """
        self._shaping()
        self._worker().publisher.disturb(disturbance)

    def _shaping(self) -> ShapingTransport:
        transport = self._worker().transport
        if not isinstance(transport, ShapingTransport):
            raise RequestError(
                f"worker {self._key} runs the plain transport {transport.name!r}; start it with "
                f"transport = 'shaped:{transport.name}' to break what it sends",
                field="transport",
            )
        return transport

    async def drain(self) -> None:
        """Take no new requests; running ones finish."""
        self._worker().core.drain()

    async def leaving(self) -> Leaving:
        """What only this worker holds of what others ask for, and how to read it.

        Raises:
            KVPoolError: the directory does not say what lives elsewhere.
        """
        worker = self._worker()
        return await asyncio.to_thread(worker.leaving)

    async def pull(self, order: PullOrder) -> PullResult:
        """Load a chain that no request waits for; see `workers.puller.Puller.pull`."""
        return await asyncio.to_thread(self._worker().core.pull, order)

    async def evict(self, selection: Selection) -> Evicted:
        """Evict what is selected and not needed now."""
        return await asyncio.to_thread(self._worker().evict, selection)

    async def stop(self) -> None:
        """Leave the pool and release everything. May be repeated."""
        if self._booted.done() and self._booted.exception() is None:
            await asyncio.to_thread(self._booted.result().close)
        self._followers.shutdown(wait=False, cancel_futures=True)

    def _worker(self) -> AssembledWorker:
        if not self._booted.done():
            raise UnavailableError(f"worker {self._key} is still starting")
        error = self._booted.exception()
        if error is not None:
            if isinstance(error, KVPoolError):
                raise error
            raise UnavailableError(f"worker {self._key} did not start: {error!r}") from error
        return self._booted.result()
