"""How clients reach a running cluster: typed calls on its actors, every wait bounded, every Ray error mapped once.

A router answers `route`; tokens then stream from the worker itself, so neither the router nor this module's caller
is on the way of a running request. Which router is asked, and who else when it is silent, is said in
`kvpool.cluster.routers`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

import ray
import ray.exceptions
from ray.actor import ActorHandle

from kvpool.cluster.lookups import Found, Lookups, answer, wait_for
from kvpool.cluster.ray_auth import MODE_VARIABLE, TOKEN_VARIABLE, find_token
from kvpool.cluster.routers import (
    PATIENCE_S,
    ROUTER_NAME,
    SILENCE_S,
    Answer,
    Routers,
    ask_in_turn,
    who_answers,
)
from kvpool.errors import DeadlineError, KVPoolError, RequestError, UnavailableError
from kvpool.hashing import Namespace
from kvpool.plan import HandOver, Route
from kvpool.request import GenerateRequest, TokenChunk
from kvpool.tokenizer import TokenizerFiles
from kvpool.types import RequestId, WorkerId, WorkerKey

LIVENESS_PERIOD_S = 1.0
CALL_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0
INFO_PATIENCE_S = 0.25
"""Before anything else a client asks what the cluster serves, which every router knows: no reason to wait for one."""
ENDED_OR_OTHER_NAME = (
    "the cluster was ended or has another name: give that as cluster= in Python, to a command as --name"
)
RAY_PATIENCE_VARIABLE = "RAY_gcs_server_port_wait_time_s"


def namespace_of(cluster: str) -> str:
    """Ray namespace of a cluster's actors."""
    return f"kvpool-{cluster}"


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """What a client must know of a cluster.

    Attributes:
        model: name of the served model.
        max_context_tokens: longest prompt plus output.
        namespace: what block hashes are rooted in, without a tenant.
        metadata: addresses of the metadata servers.
        workers: names of the worker actors the launcher started.
        routers: names of the router actors.
        metadata_metrics: of every metadata server, where its metrics are; empty when none are served.
    """

    model: str
    max_context_tokens: int
    namespace: Namespace
    metadata: tuple[str, ...]
    workers: tuple[WorkerId, ...]
    routers: tuple[str, ...] = (ROUTER_NAME,)
    metadata_metrics: tuple[str, ...] = ()


def map_ray_error(error: Exception, what: str) -> KVPoolError:
    """The one place where Ray's exceptions become ours. ``what`` names the call for the message."""
    cause = getattr(error, "cause", None)
    for candidate in (error, cause):
        if isinstance(candidate, KVPoolError) and not isinstance(candidate, ray.exceptions.RayError):
            return candidate
    if isinstance(cause, KVPoolError):
        return cause
    if isinstance(error, (TimeoutError, ray.exceptions.GetTimeoutError)):
        return DeadlineError(f"{what} did not answer in time")
    if isinstance(error, ray.exceptions.RayTaskError):
        return UnavailableError(f"{what} failed: {error.cause!r}")
    if getattr(error, "actor_init_failed", False):
        return UnavailableError(f"{what} did not start: {str(error).strip().splitlines()[-1]}")
    if isinstance(error, ray.exceptions.RayError):
        return UnavailableError(f"{what} is not reachable: {type(error).__name__}")
    if isinstance(error, ValueError):  # ray.get_actor on an unknown name
        return UnavailableError(f"{what} is not running")
    raise error


class ClusterConnection:
    """Calls on the actors of one cluster. Ray must be initialised; safe to use from one event loop."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._namespace = namespace_of(cluster)
        self._routers = Routers()
        self._actors: dict[str, ActorHandle] = {}
        self._searches = Lookups()

    @property
    def namespace(self) -> str:
        """Where Ray keeps the names of the cluster's actors."""
        return self._namespace

    async def info(self, timeout_s: float = CALL_TIMEOUT_S) -> ClusterInfo:
        """What the cluster serves."""
        info: ClusterInfo = (await self._ask("info", key="", timeout_s=timeout_s, patience_s=INFO_PATIENCE_S)).value
        self._routers.learn(info.routers)
        return info

    async def routers(self) -> tuple[str, ...]:
        """Names of the routers."""
        return self._routers.names or (await self.info()).routers

    async def actors(self) -> tuple[str, ...]:
        """Names of all actors of the cluster as Ray knows them, for when no router says which there are."""

        def look() -> list[str]:
            if not ray.is_initialized():  # else Ray would start a cluster to ask
                raise UnavailableError("the connection to the Ray cluster is closed", gone=True)
            named = ray.util.list_named_actors(all_namespaces=True)
            return sorted(item["name"] for item in named if item["namespace"] == self._namespace)

        names: list[str] = await self.ask_ray("actors", look, CALL_TIMEOUT_S)
        return tuple(names)

    async def ask_ray(self, what: str, look: Callable[[], Any], timeout_s: float) -> Any:
        """What Ray says to a blocking call; callers of the same ``what`` share one that is under way.

        Raises:
            UnavailableError: Ray does not say, or not in time.
        """
        try:
            return await wait_for(self._searches.begin(f"ray.{what}", look), timeout_s)  # no actor has such a name
        except Exception as error:
            raise map_ray_error(error, "Ray") from error

    async def tokenizer(self) -> TokenizerFiles:
        """The served model's tokenizer, from the first worker that answers.

        Raises:
            UnavailableError: none answers.
        """
        errors = []
        for worker in (await self.info()).workers:
            try:
                files: TokenizerFiles = await self.call(worker, "tokenizer")
            except UnavailableError as error:
                errors.append(str(error))
                continue
            return files
        raise UnavailableError(f"no worker could send its tokenizer: {'; '.join(errors)}")

    async def route(self, request: GenerateRequest, exclude: frozenset[WorkerKey], timeout_s: float) -> Route:
        """Ask the request's router, or another one, for a worker and a plan.

        Raises:
            UnavailableError: no router or no eligible worker; may be retried.
        """
        asked: set[str] = set()
        try:
            answer = await self._ask(
                "route", request, exclude, key=request.request_id, timeout_s=timeout_s, asked=asked
            )
            asked.discard(answer.by)
        finally:
            for router in asked:
                self._tell(router, "release", request.request_id)  # what it still decides, nobody follows
        route: Route = answer.value
        return route

    def give_back(self, route: Route, *, followed: bool = False) -> None:
        """Nobody follows a route, or goes on ``followed`` one: its router drops what it promised for it."""
        for router in self._routers.names:
            self._tell(router, "release", route.request_id, followed)

    def leave(self, request_id: RequestId) -> None:
        """The request asks no more, and waits at no router."""
        for router in self._routers.names:
            self._tell(router, "release", request_id, True)

    async def ask_router(self, method: str, *args: Any, key: str = "", timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Call a method of one router, of another one where that is unavailable or silent.

        Args:
            method, args: the call; it may be made of several routers.
            key: chooses whom to ask first.
            timeout_s: bound on all of it.

        Raises:
            KVPoolError: what a router raised; UnavailableError when all of them are unavailable.
        """
        return (await self._ask(method, *args, key=key, timeout_s=timeout_s)).value

    async def ask_routers(
        self, method: str, *args: Any, timeout_s: float = CALL_TIMEOUT_S
    ) -> dict[str, Any | KVPoolError]:
        """Call a method of every router at once; what each answered, or the error instead. A router that is silent is
        not waited for (`who_answers`); one that says that it lives may take ``timeout_s``."""

        async def ask(name: str) -> Any:
            return await self.call(name, "pid", timeout_s=timeout_s)

        async def tell(name: str) -> Any | KVPoolError:
            if isinstance(lives[name], KVPoolError):
                return lives[name]
            try:
                return await self.call(name, method, *args, timeout_s=timeout_s)
            except KVPoolError as error:
                return error

        names = await self.routers()
        lives = await who_answers(names, ask, min(SILENCE_S, timeout_s))
        return dict(zip(names, await asyncio.gather(*(tell(name) for name in names)), strict=True))

    async def _ask(
        self,
        method: str,
        *args: Any,
        key: str,
        timeout_s: float,
        asked: set[str] | None = None,
        patience_s: float | None = None,
    ) -> Answer:
        """See `ask_router`. ``asked`` names, whatever comes of it, who has been asked and has not refused."""
        asked = set() if asked is None else asked
        clock_s = asyncio.get_running_loop().time
        deadline_s = clock_s() + timeout_s

        async def ask(name: str) -> Any:
            asked.add(name)
            try:
                value = await self.call(name, method, *args, timeout_s=max(0.001, deadline_s - clock_s()))
            except KVPoolError as error:
                if not isinstance(error, DeadlineError):
                    asked.discard(name)
                if isinstance(error, UnavailableError):
                    self._routers.failed(name, clock_s())
                elif not isinstance(error, DeadlineError):
                    self._routers.answered(name)
                raise
            self._routers.answered(name)
            return value

        order = self._routers.order(key, clock_s())
        try:
            answer = await ask_in_turn(order, ask, min(patience_s or PATIENCE_S, timeout_s / 2))
        except KVPoolError:
            for name in asked:  # and silent, while another one refused or had nobody
                self._routers.failed(name, clock_s())
            raise
        for name in answer.late:
            self._routers.failed(name, clock_s())
        return answer

    async def stream(self, route: Route, request: GenerateRequest, timeout_s: float) -> AsyncGenerator[TokenChunk]:
        """Tokens of one attempt, until the last chunk.

        Raises:
            UnavailableError: the worker died or was fenced; another attempt is right.
            DuplicateError: a request of the same id is being served there, an earlier attempt of this one perhaps.
            DeadlineError: ``timeout_s`` passed.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        what = f"worker {route.worker}"
        generator = None
        finished = False
        try:
            actor = await self._reach(route.control_address, min(CALL_TIMEOUT_S, timeout_s))
            generator = actor.generate.options(num_returns="streaming").remote(request, route)
            while True:
                reference = await self._next(generator, route.worker, deadline_s)
                if reference is None:
                    break
                left_s = deadline_s - asyncio.get_running_loop().time()
                patience_s = min(CALL_TIMEOUT_S, max(LIVENESS_PERIOD_S, left_s))
                chunk: TokenChunk = await asyncio.wait_for(reference, patience_s)
                finished = chunk.finish is not None
                yield chunk
                if finished:
                    return  # nothing may follow, so a worker that dies now owes nothing and must not be waited for
            raise UnavailableError(f"{what} ended the stream early")
        except Exception as error:
            # An actor's error arrives as Ray's and ours in one class, whose text is a remote traceback.
            mapped = map_ray_error(error, what)
            if mapped is error:
                raise
            raise mapped from error
        finally:
            if generator is not None and not finished:
                self._tell(route.control_address, "cancel", route.request_id, route.decision_id)

    async def follow(self, request: GenerateRequest, part: HandOver, timeout_s: float) -> bool:
        """Have the decode worker load a prompt while it is computed. It only shortens what comes: whatever goes wrong,
        the worker redoes or loads the rest when the request comes.

        Returns:
            Whether the worker did what it could.
        """
        try:
            await self.call(part.control_address, "follow", request, part, timeout_s=timeout_s)
        except KVPoolError:
            return False
        return True

    def unfollow(self, part: HandOver) -> None:
        """The request does not come there; the worker stops to follow by itself at the plan's deadline anyway."""
        self._tell(part.control_address, "unfollow", part.decision_id)

    async def _next(self, generator: Any, key: WorkerKey, deadline_s: float) -> Any:
        """Next reference, None at the end. A silent worker is checked against the membership once a second."""
        loop = asyncio.get_running_loop()
        step = asyncio.ensure_future(anext(generator, None))
        try:
            while True:
                remaining_s = deadline_s - loop.time()
                if remaining_s <= 0:
                    raise DeadlineError(f"worker {key} did not finish before the request's deadline")
                done, _ = await asyncio.wait({step}, timeout=min(LIVENESS_PERIOD_S, remaining_s))
                if done:
                    return step.result()
                if not await self._is_member(key, max(0.001, min(LIVENESS_PERIOD_S, deadline_s - loop.time()))):
                    raise UnavailableError(f"worker {key} is no longer a member of the pool")
        finally:
            step.cancel()

    async def _is_member(self, key: WorkerKey, timeout_s: float) -> bool:
        """False only when a router positively knows the worker is gone; an unknown is no reason to drop it."""
        try:
            return bool(await self.ask_router("is_member", key, key=str(key), timeout_s=timeout_s))
        except UnavailableError:
            return True

    async def call(self, actor: str, method: str, *args: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Call a method of a named actor and wait at most ``timeout_s``.

        Raises:
            KVPoolError: what the actor raised, or UnavailableError / DeadlineError for Ray's own failures. ``gone`` in
                the details says that no such actor exists, which waiting does not change; one that restarts exists.
        """
        what = f"{actor}.{method}"
        try:
            async with asyncio.timeout(timeout_s):
                return await getattr(await self._reach(actor, timeout_s), method).remote(*args)
        except Exception as error:
            if not isinstance(error, KVPoolError):
                self._actors.pop(actor, None)
            mapped = map_ray_error(error, what)
            if mapped is error:
                raise
            raise mapped from error

    def end(self, actor: str) -> None:
        """End a named actor for good; fine when there is none."""
        try:
            ray.kill(self._actor(actor), no_restart=True)
        except (UnavailableError, ray.exceptions.RayError):
            return
        finally:
            self._actors.pop(actor, None)

    def _tell(self, actor: str, method: str, *args: Any) -> None:
        """Call a method whose answer nobody needs. When the actor is gone, so is what it was to do."""

        def send(found: Found) -> None:
            with contextlib.suppress(KVPoolError, ray.exceptions.RayError):
                getattr(found.result(), method).remote(*args)

        self._search(actor).add_done_callback(send)

    async def _reach(self, name: str, timeout_s: float) -> ActorHandle:
        """The actor's handle; TimeoutError when Ray does not say in time."""
        if name in self._actors:
            return self._actor(name)
        handle: ActorHandle = await wait_for(self._search(name), timeout_s)
        return handle

    def _search(self, name: str) -> Found:
        """Ask Ray for an actor, on a thread unless its handle is known."""
        if name not in self._actors:
            return self._searches.begin(name, lambda: self._actor(name))
        known: Found = Found()
        answer(known, lambda: self._actor(name))
        return known

    def _actor(self, name: str) -> ActorHandle:
        """The handle, blocking until Ray says."""
        if not ray.is_initialized():
            raise UnavailableError("the connection to the Ray cluster is closed", gone=True)
        handle = self._actors.get(name)
        if handle is None:
            try:
                handle = ray.get_actor(name, namespace=self._namespace)
            except ValueError as error:
                raise UnavailableError(
                    f"no actor {name!r} of cluster {self._cluster!r} runs there; {ENDED_OR_OTHER_NAME}",
                    gone=True,
                ) from error
            self._actors[name] = handle
        return handle


class _Shares:
    """Clients that hold the connection which `connect_ray` made; Ray has one connection per process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0


_shares = _Shares()


def connect_ray(address: str) -> bool:
    """Join a running Ray cluster as a driver.

    Returns:
        Whether the caller holds a share in the connection now, to be given back with `disconnect_ray`; False when the
        program had made the connection itself.

    Raises:
        UnavailableError: nothing answers at the address.
        RequestError: the address is malformed, or this process is already connected to another cluster.
    """
    with _shares.lock:
        if not ray.is_initialized():
            _shares.count = 0  # whoever held the last connection has lost it
            _init_ray(address)
        elif ray.get_runtime_context().gcs_address != address:
            raise RequestError(f"this process is already connected to another Ray cluster, not to {address}")
        elif not _shares.count:
            return False
        _shares.count += 1
        return True


def disconnect_ray() -> None:
    """Give a share back; the last one closes the connection, so that the process may join another cluster."""
    with _shares.lock:
        _shares.count = max(0, _shares.count - 1)
        if not _shares.count and ray.is_initialized():
            ray.shutdown()


def be_quiet() -> None:
    """Keep Ray from printing the error of a stream that a client gave up as one that nobody handled."""
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")


def _init_ray(address: str) -> None:
    """Ray itself tries for a quarter of an hour when nobody answers, so look first, and let it try once."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise RequestError(f"a Ray address is host:port, got {address!r}", field="address")
    be_quiet()
    find_token(address)
    before = os.environ.get(RAY_PATIENCE_VARIABLE)
    os.environ.setdefault(RAY_PATIENCE_VARIABLE, "1")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError, OverflowError, ray.exceptions.RayError) as error:
        raise UnavailableError(
            f"no Ray cluster answers at {address}: {error}. If it asks for a token, set {MODE_VARIABLE}=token and "
            f"{TOKEN_VARIABLE}"
        ) from error
    finally:
        if before is None:
            os.environ.pop(RAY_PATIENCE_VARIABLE, None)
