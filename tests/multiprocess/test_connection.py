"""The client's side of a stream, with an actor handle whose streams misbehave as real ones did in fault runs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from kvpool.cluster.connection import LIVENESS_PERIOD_S, ClusterConnection, connect_ray
from kvpool.errors import CapacityError, DeadlineError, DuplicateError, KVPoolError, RequestError, UnavailableError
from kvpool.plan import REDO, Route
from kvpool.request import FinishReason, GenerateRequest, SamplingParams, TokenChunk
from kvpool.types import RequestId, WorkerEpoch, WorkerId, WorkerKey
from workers.actor import WorkerActor

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


class _Refusing(_Handle):
    """A worker that answers a request with an error, in the class that Ray makes of it."""

    def __init__(self, error: KVPoolError) -> None:
        super().__init__()
        self.error = error
        self.cancelled_with: list[tuple[Any, ...]] = []
        self.cancel = SimpleNamespace(remote=lambda *args: self.cancelled_with.append(args))

    def remote(self, *_: Any) -> AsyncIterator[asyncio.Future[TokenChunk]]:
        async def stream() -> AsyncIterator[asyncio.Future[TokenChunk]]:
            failed: asyncio.Future[TokenChunk] = asyncio.get_running_loop().create_future()
            failed.set_exception(RayTaskError("generate", "remote traceback", self.error).as_instanceof_cause())
            yield failed

        return stream()


def _refused(error: KVPoolError) -> tuple[KVPoolError, _Refusing]:
    handle = _Refusing(error)
    connection = ClusterConnection("c")
    connection._actor = lambda _: handle  # type: ignore[assignment,method-assign]

    async def follow() -> None:
        async for _ in connection.stream(ROUTE, REQUEST, 20.0):
            pass

    with pytest.raises(KVPoolError) as caught:
        asyncio.run(follow())
    return caught.value, handle


def test_a_workers_error_arrives_as_it_was_raised_without_rays_class_and_traceback() -> None:
    error, _ = _refused(RequestError("token 5 is outside", token=5))
    assert type(error) is RequestError
    assert str(error) == "token 5 is outside [token=5]"


def test_giving_up_an_attempt_names_the_attempt_so_that_no_other_of_the_same_id_ends() -> None:
    _, handle = _refused(DuplicateError("runs here already"))
    assert handle.cancelled_with == [(ROUTE.request_id, ROUTE.decision_id)]


def test_an_address_nobody_listens_at_is_refused_at_once() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(UnavailableError, match="no Ray cluster answers"):
            connect_ray(f"127.0.0.1:{probe.getsockname()[1]}")


@pytest.mark.parametrize("address", ["", "nonsense", "auto", "host:", ":6379", "host:port"])
def test_a_malformed_address_is_refused_by_name(address: str) -> None:
    with pytest.raises(RequestError, match="host:port"):
        connect_ray(address)


def test_a_worker_that_still_starts_has_nothing_to_cancel() -> None:
    """A cancellation meant for its dead predecessor must not end in an error that nobody waits for."""
    kind = WorkerActor.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    starting = kind.__new__(kind)
    starting._booted = concurrent.futures.Future()
    asyncio.run(starting.cancel(REQUEST.request_id, ROUTE.decision_id))
    assert not starting._booted.done()


class _Silent(_Handle):
    """A worker that stands still from the beginning."""

    def remote(self, *_: Any) -> AsyncIterator[asyncio.Future[TokenChunk]]:
        async def stream() -> AsyncIterator[asyncio.Future[TokenChunk]]:
            await asyncio.Event().wait()
            yield asyncio.get_running_loop().create_future()

        return stream()


def test_looking_after_a_silent_worker_takes_no_time_beyond_the_deadline() -> None:
    budget_s = LIVENESS_PERIOD_S + 0.2
    asked: list[float] = []

    class Connection(ClusterConnection):
        def _actor(self, name: str) -> Any:
            return _Silent()

        def _cancel_quietly(self, route: Route) -> None:
            return

        async def call(self, actor: str, method: str, *args: Any, timeout_s: float = 0.0) -> Any:
            asked.append(timeout_s)
            return True

    async def follow() -> None:
        async for _ in Connection("c").stream(ROUTE, REQUEST, budget_s):
            pass

    with pytest.raises(DeadlineError):
        asyncio.run(follow())
    assert asked
    assert max(asked) <= budget_s - LIVENESS_PERIOD_S


class _Lost(ClusterConnection):
    """Ray without its head: looking an actor up blocks."""

    def __init__(self) -> None:
        super().__init__("c")
        self.over, self.searches = threading.Event(), 0

    def _actor(self, name: str) -> Any:
        self.searches += 1
        self.over.wait(20)
        raise UnavailableError("there is no Ray any more")


def test_a_search_for_an_actor_that_blocks_keeps_deadlines_and_the_event_loop() -> None:
    connection = _Lost()

    async def use() -> int:
        beats, calls = 0, [asyncio.ensure_future(connection.call("router", "info", timeout_s=0.3)) for _ in range(4)]
        connection._tell("router", "cancel", "r", "d")
        while not all(call.done() for call in calls):
            await asyncio.sleep(0.01)
            beats += 1
        assert all(isinstance(call.exception(), DeadlineError) for call in calls)
        with pytest.raises(DeadlineError):
            async for _ in connection.stream(ROUTE, REQUEST, 0.2):
                pass
        return beats

    try:
        assert asyncio.run(asyncio.wait_for(use(), 10.0)) > 5
        assert connection.searches == 2, "each actor is searched for once at a time"
    finally:
        connection.over.set()


def test_what_ray_does_not_say_costs_one_thread_however_often_it_is_asked_and_none_of_the_loop_s_own() -> None:
    connection, over, asked = ClusterConnection("c"), threading.Event(), []

    def look() -> None:
        asked.append(threading.current_thread().name)
        over.wait(20)

    async def use() -> int:
        for _ in range(2 * (os.cpu_count() or 1) + 40):  # more than the loop has threads
            with pytest.raises(DeadlineError):
                await connection.ask_ray("restarts", look, 0.001)
        return await asyncio.to_thread(lambda: 7)  # as whoever describes a metadata server or encodes a long prompt

    try:
        assert asyncio.run(asyncio.wait_for(use(), 20.0)) == 7
        assert asked == ["kvpool-find-ray.restarts"]
    finally:
        over.set()


def test_a_search_that_nobody_waits_for_any_more_fails_without_a_traceback() -> None:
    connection = _Lost()

    async def use() -> list[Any]:
        told: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        with pytest.raises(DeadlineError):
            await connection.call("router", "info", timeout_s=0.05)
        search = connection._searches.running["router"]
        connection.over.set()
        with pytest.raises(UnavailableError):
            await asyncio.to_thread(search.result, 10)
        await asyncio.sleep(0.01)  # what the thread has scheduled runs
        connection._searches.running.clear()
        del search
        gc.collect()
        return told

    assert asyncio.run(asyncio.wait_for(use(), 20.0)) == []


def test_a_search_whose_thread_could_not_be_started_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = _Lost()
    connection.over.set()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            connection._search("router")
    with pytest.raises(UnavailableError):
        connection._search("router").result(10)


class _TwoRouters(ClusterConnection):
    """Two routers of which the one named in ``silent`` never answers; notes what each is asked and told."""

    def __init__(self, silent: str) -> None:
        super().__init__("c")
        self.silent = silent
        self.says: Exception | None = None
        self.asked: list[tuple[str, str]] = []
        self.told: list[tuple[Any, ...]] = []

    async def call(self, actor: str, method: str, *args: Any, timeout_s: float = 0.0) -> Any:
        self.asked.append((actor, method))
        if actor == self.silent:
            try:
                await asyncio.wait_for(asyncio.Event().wait(), timeout_s)
            except TimeoutError as error:
                raise DeadlineError(f"{actor} did not answer in time") from error
        if method == "info":
            return SimpleNamespace(routers=("router", "router-1"))
        if isinstance(self.says, Exception):
            raise self.says
        return ROUTE if method == "route" else False

    def _tell(self, actor: str, method: str, *args: Any) -> None:
        self.told.append((actor, method, *args))


@pytest.mark.parametrize("silent", ["router", "router-1"])
def test_a_silent_routers_requests_go_to_the_other_one_and_what_it_decides_late_is_given_back(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.cluster.connection.PATIENCE_S", 0.01)
    connection = _TwoRouters(silent)
    requests = [replace(REQUEST, request_id=RequestId(f"r-{number}")) for number in range(8)]

    async def use() -> list[Route]:
        await connection.info()
        return [await connection.route(request, frozenset(), 30.0) for request in requests]

    assert asyncio.run(asyncio.wait_for(use(), 20.0)) == [ROUTE] * len(requests)
    assert {told[:2] for told in connection.told} <= {(silent, "release")}
    asked = [actor for actor, method in connection.asked if method == "route" and actor == silent]
    assert len(asked) == len(connection.told) <= 1, "it is left alone for a while then"


@pytest.mark.parametrize("says", [CapacityError("ask again"), RequestError("no such token"), UnavailableError("died")])
def test_what_a_silent_router_still_decides_is_given_back_though_the_other_one_refused(
    says: KVPoolError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.cluster.connection.PATIENCE_S", 0.01)
    connection = _TwoRouters("router")
    connection.says = says
    request = replace(REQUEST, request_id=RequestId("r-0"))

    async def use() -> None:
        connection._routers.learn(("router", "router-1"))
        connection._routers.failed("router-1", asyncio.get_running_loop().time())  # so the silent one is asked first
        with pytest.raises(KVPoolError):
            await connection.route(request, frozenset(), 0.2)
        if not isinstance(says, UnavailableError):  # one that waits at the other router is not held up at every ask
            assert connection._routers.order("r-0", asyncio.get_running_loop().time())[0] == "router-1"

    asyncio.run(asyncio.wait_for(use(), 20.0))
    assert connection.told == [("router", "release", request.request_id)]


def test_what_is_decided_for_a_client_that_has_stopped_asking_is_given_back() -> None:
    connection = _TwoRouters("router")

    async def use() -> None:
        connection._routers.learn(("router",))
        asking = asyncio.ensure_future(connection.route(REQUEST, frozenset(), 30.0))
        while not connection.asked:
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})

    asyncio.run(asyncio.wait_for(use(), 20.0))
    assert connection.told == [("router", "release", REQUEST.request_id)]


def test_whether_a_worker_lives_is_asked_of_a_router_that_answers() -> None:
    connection = _TwoRouters(silent="router")

    async def use() -> bool:
        connection._routers.learn(("router", "router-1"))
        return await connection._is_member(KEY, 0.2)

    assert asyncio.run(asyncio.wait_for(use(), 20.0)) is False
