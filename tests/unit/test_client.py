"""What users see of the client when the cluster behind it fails, is slow, or is asked for nonsense.

The cluster is a scripted connection: each attempt is one answer of the script. Everything above it is real.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from kvpool import attempts
from kvpool.client import AsyncKVPoolClient, KVPoolClient
from kvpool.errors import (
    CapacityError,
    DeadlineError,
    DuplicateError,
    KVPoolError,
    OverloadError,
    RequestError,
    UnavailableError,
)
from kvpool.plan import REDO, HandOver, Route
from kvpool.request import FinishReason, GenerateRequest, GenerateResult, RequestStats, SamplingParams, TokenChunk
from kvpool.tokenizer import TokenizerFiles
from kvpool.types import RequestId, WorkerEpoch, WorkerId, WorkerKey

STATS = RequestStats(WorkerId("w-0"), "redo", 1, 0, 0, 1)
FOREVER = object()
"""In a script: nothing comes any more."""


class Cluster:
    """Stands in for `ClusterConnection`. ``script`` has one entry per attempt: tokens, errors, `FOREVER`."""

    def __init__(self, *script: Sequence[Any], workers: int = 2) -> None:
        self.script = list(script)
        self.keys = [WorkerKey(WorkerId(f"w-{index}"), WorkerEpoch(1)) for index in range(workers)]
        self.contact: list[Any] = []  # what `info` does first, one entry per call
        self.refusals: list[Any] = []  # what `route` does first, one entry per call
        self.routed: list[WorkerKey] = []
        self.given_back: list[Route] = []
        self.left: list[RequestId] = []
        self.handing_over = False  # the first worker gives one token, the second goes on
        self.requests: list[GenerateRequest] = []
        self.streams = 0
        self.first_token = threading.Event()
        self.ended = threading.Event()

    async def info(self) -> Any:
        await _act(self.contact)
        return SimpleNamespace(max_context_tokens=128)

    async def tokenizer(self) -> TokenizerFiles:
        backend = Backend(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
        backend.pre_tokenizer = Whitespace()
        return TokenizerFiles("m", backend.to_str(), None, ())

    async def route(self, request: GenerateRequest, exclude: frozenset[WorkerKey], timeout_s: float) -> Route:
        await _act(self.refusals)
        key = next((key for key in self.keys if key not in exclude), None)
        if key is None:
            raise UnavailableError("no worker can take the request")
        self.routed.append(key)
        part = None
        if self.handing_over and key == self.keys[0]:
            part = HandOver(self.keys[1], self.keys[1].worker_id, f"d-{len(self.routed)}+", REDO)
        return Route(request.request_id, f"d-{len(self.routed)}", key.worker_id, key, key.worker_id, REDO, part)

    async def follow(self, request: GenerateRequest, part: HandOver, timeout_s: float) -> bool:
        return True

    def unfollow(self, part: HandOver) -> None:
        pass

    def give_back(self, route: Route, *, followed: bool = False) -> None:
        self.given_back.append(route)

    def leave(self, request_id: RequestId) -> None:
        self.left.append(request_id)

    async def stream(self, route: Route, request: GenerateRequest, timeout_s: float) -> AsyncGenerator[TokenChunk]:
        self.requests.append(request)
        self.streams += 1
        left = request.sampling.max_tokens - len(request.generated)
        try:
            for item in self.script.pop(0) if self.script else [0] * left:
                if item is FOREVER:
                    self.first_token.set()
                    await asyncio.Event().wait()
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, FinishReason):
                    yield TokenChunk(request.request_id, (), finish=item, stats=STATS)
                    return
                left -= 1
                end = None if left else FinishReason.LENGTH
                yield TokenChunk(request.request_id, (item,), finish=end, stats=STATS if end else None)
        finally:
            self.streams -= 1
            self.ended.set()


async def _act(script: list[Any]) -> None:
    item = script.pop(0) if script else None
    if item is FOREVER:
        await asyncio.Event().wait()
    if isinstance(item, Exception):
        raise item


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(attempts, "MAX_BACKOFF_S", 0.001)


def _ask(cluster: Cluster, **options: Any) -> Any:
    client = AsyncKVPoolClient.of(cluster)  # type: ignore[arg-type]
    return asyncio.run(client.generate([1], **{"max_tokens": 3, **options}))


def test_an_attempt_goes_on_behind_the_tokens_of_the_one_before() -> None:
    cluster = Cluster([1, UnavailableError("died")])
    result = _ask(cluster)
    assert result.tokens == (1, 0, 0)
    assert [request.generated for request in cluster.requests] == [(), (1,)]
    assert [key.worker_id for key in cluster.routed] == ["w-0", "w-1"]


def test_workers_that_failed_once_are_tried_again_when_nobody_else_is_left() -> None:
    cluster = Cluster([UnavailableError("late")], [UnavailableError("late")])
    assert len(_ask(cluster).tokens) == 3
    assert [key.worker_id for key in cluster.routed] == ["w-0", "w-1", "w-0"]


def test_an_earlier_attempt_that_still_ends_is_waited_for() -> None:
    cluster = Cluster([UnavailableError("late")], [DuplicateError("runs here")], workers=1)
    assert len(_ask(cluster).tokens) == 3
    assert len(cluster.routed) == 3


def test_an_id_that_another_client_uses_is_refused_at_once() -> None:
    cluster = Cluster([DuplicateError("runs here")])
    with pytest.raises(DuplicateError):
        _ask(cluster)
    assert len(cluster.routed) == 1


def test_the_worker_that_handed_the_request_over_and_has_not_put_it_away_yet_is_waited_for() -> None:
    cluster = Cluster([1], [CapacityError("full")], [DuplicateError("runs here")])
    cluster.handing_over = True
    assert _ask(cluster).tokens == (1, 0, 0)


@pytest.mark.parametrize(
    ("first", "given_back"),
    [([5], 0), ([FinishReason.STOP], 1), ([UnavailableError("died")], 1)],
    ids=["goes on", "is over", "fails"],
)
def test_a_hand_over_that_does_not_come_about_is_given_back(first: list[Any], given_back: int) -> None:
    cluster = Cluster(first)
    cluster.handing_over = True
    assert _ask(cluster).finish is not None
    assert [route.worker for route in cluster.given_back] == [cluster.keys[0]] * given_back


def test_a_queued_request_asks_again_until_the_last_moment_of_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "FIRST_BACKOFF_S", 60.0)
    cluster = Cluster()
    cluster.refusals = [CapacityError("requests of higher priority wait", retry_after_s=0.001)] * 5
    assert len(_ask(cluster, timeout_s=30.0).tokens) == 3


def test_waiting_at_the_router_is_no_attempt() -> None:
    cluster = Cluster([UnavailableError("died")])
    cluster.refusals = [CapacityError("busy", retry_after_s=0.02)] * 5
    stats = _ask(cluster).stats
    assert stats.attempts == 2
    assert stats.waited_ns >= 5 * 20_000_000  # the stats say how long it waited
    assert not cluster.left  # it was decided


def test_a_request_is_asked_about_again_before_its_budget_ends_however_late_the_router_wants_it() -> None:
    cluster = Cluster()
    cluster.refusals = [CapacityError("the workers are busy", retry_after_s=5.0)]
    assert len(_ask(cluster, timeout_s=1.0).tokens) == 3
    cluster.refusals = [CapacityError("the workers are busy", retry_after_s=5.0)] * 100
    with pytest.raises(DeadlineError, match="the workers are busy"):
        _ask(cluster, timeout_s=0.1)
    assert 0 < len(cluster.refusals) < 99
    assert len(cluster.left) == 1


@pytest.mark.parametrize("how", ["by name", "its task"])
def test_who_is_cancelled_while_it_waits_ends_at_once_and_leaves_its_place(how: str) -> None:
    async def run() -> Cluster:
        cluster = Cluster()
        cluster.refusals = [CapacityError("the workers are busy", retry_after_s=5.0), RequestError("asked again")]
        client = AsyncKVPoolClient.of(cluster)  # type: ignore[arg-type]
        running = asyncio.ensure_future(client.generate([1], request_id="r"))
        while len(cluster.refusals) > 1:
            await asyncio.sleep(0)
        if how == "by name":
            assert await client.cancel("r")
            assert (await asyncio.wait_for(running, 4.0)).finish is FinishReason.CANCELLED
        else:
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        return cluster

    cluster = asyncio.run(run())
    assert cluster.left == [RequestId("r")]
    assert len(cluster.refusals) == 1


@pytest.mark.parametrize("told_before", [0, 1, 3])
def test_who_is_cancelled_while_the_router_is_asked_tried_nobody_and_leaves_its_place(told_before: int) -> None:
    async def run() -> tuple[GenerateResult, Cluster]:
        cluster = Cluster()
        cluster.refusals = [CapacityError("the workers are busy", retry_after_s=0.001)] * told_before + [FOREVER]
        client = AsyncKVPoolClient.of(cluster)  # type: ignore[arg-type]
        running = asyncio.ensure_future(client.generate([1], request_id="r"))
        while cluster.refusals:
            await asyncio.sleep(0)
        assert await client.cancel("r")
        return await asyncio.wait_for(running, 4.0), cluster

    result, cluster = asyncio.run(run())
    assert (result.finish, result.stats.attempts) == (FinishReason.CANCELLED, 0)
    assert cluster.left == [RequestId("r")]


def test_a_full_cluster_is_waited_for_as_long_as_the_budget_lasts() -> None:
    cluster = Cluster(*[[CapacityError("full")]] * (attempts.MAX_FAILED_ATTEMPTS + 9))
    assert len(_ask(cluster).tokens) == 3


def test_a_refused_request_can_be_asked_about_by_the_id_in_its_error() -> None:
    cluster = Cluster()
    cluster.refusals = [OverloadError("too late", retry_after_s=2.0)]
    with pytest.raises(OverloadError) as caught:
        _ask(cluster, request_id="mine")
    assert caught.value.details == {"retry_after_s": 2.0, "request_id": "mine"}


def test_a_request_that_every_worker_fails_is_given_up() -> None:
    cluster = Cluster(*[[UnavailableError("died")]] * (attempts.MAX_FAILED_ATTEMPTS + 9))
    with pytest.raises(UnavailableError, match="died") as caught:
        _ask(cluster)
    assert not isinstance(caught.value, DeadlineError)
    assert len(cluster.routed) == attempts.MAX_FAILED_ATTEMPTS


def test_a_cancellation_nobody_asked_for_is_an_attempt_that_failed() -> None:
    result = _ask(Cluster([1, FinishReason.CANCELLED]))
    assert result.tokens == (1, 0, 0)
    assert result.finish is FinishReason.LENGTH


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), 0, -1, None, "5"])
def test_a_budget_that_is_none_is_refused_by_name(timeout_s: Any) -> None:
    with pytest.raises(RequestError, match="timeout_s"):
        _ask(Cluster(), timeout_s=timeout_s)


@pytest.mark.parametrize("options", [{"stop": 5}, {"stop": [5]}, {"stop_token_ids": 5}, {"request_id": 5}])
def test_options_of_another_type_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(options))):
        _ask(Cluster(), **options)


@pytest.mark.parametrize("prompt", [None, 5, [True], ["a", 1], [1.5], {}])
def test_what_is_no_prompt_is_refused_by_name(prompt: Any) -> None:
    client = AsyncKVPoolClient.of(Cluster())  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="prompt"):
        asyncio.run(client.generate(prompt))


def test_token_ids_may_be_an_array() -> None:
    cluster = Cluster()
    client = AsyncKVPoolClient.of(cluster)  # type: ignore[arg-type]
    asyncio.run(client.generate(np.array([1, 0]), max_tokens=1))  # type: ignore[arg-type]
    assert cluster.requests[0].prompt == (1, 0)
    assert all(type(token) is int for token in cluster.requests[0].prompt)


def test_first_contact_ends_with_the_budget() -> None:
    cluster = Cluster()
    cluster.contact = [FOREVER]
    with pytest.raises(DeadlineError):
        _ask(cluster, timeout_s=0.05)


def test_a_router_that_restarts_at_first_contact_is_waited_for() -> None:
    cluster = Cluster()
    cluster.contact = [UnavailableError("restarts")] * 3
    assert len(_ask(cluster).tokens) == 3


@pytest.mark.parametrize("place", ["contact", "refusals"])
def test_a_cluster_that_is_gone_is_not_waited_for(place: str) -> None:
    cluster = Cluster()
    setattr(cluster, place, [UnavailableError("no actor", gone=True)])
    with pytest.raises(UnavailableError, match="no actor"):
        _ask(cluster)


def test_an_id_may_be_used_again_as_soon_as_its_result_is_there() -> None:
    async def twice() -> None:
        client = AsyncKVPoolClient.of(Cluster())  # type: ignore[arg-type]
        for _ in range(2):
            await client.generate([1], max_tokens=2, request_id="same")

    asyncio.run(twice())


@pytest.mark.parametrize("place", ["route", "stream"])
def test_a_cancelled_request_ends_so_wherever_it_is(place: str) -> None:
    async def cancel() -> FinishReason:
        cluster = Cluster([1, FOREVER])
        if place == "route":
            cluster.refusals = [FOREVER]
        client = AsyncKVPoolClient.of(cluster)  # type: ignore[arg-type]
        running = asyncio.ensure_future(client.generate([1], max_tokens=3, request_id="r"))
        while not await client.cancel("r"):
            await asyncio.sleep(0)
        result = await asyncio.wait_for(running, 10)
        assert cluster.streams == 0
        return result.finish

    assert asyncio.run(cancel()) is FinishReason.CANCELLED


def test_a_route_that_comes_as_its_request_is_cancelled_is_given_back() -> None:
    async def run() -> tuple[list[FinishReason | None], Cluster]:
        cancelled = asyncio.Event()

        class Late(Cluster):
            async def route(self, request: GenerateRequest, exclude: frozenset[WorkerKey], timeout_s: float) -> Route:
                cancelled.set()
                return await super().route(request, exclude, timeout_s)

        cluster = Late()
        request = GenerateRequest(RequestId("r"), (1,), SamplingParams(max_tokens=3))
        tries = attempts.Attempts(cluster, request, cancelled, time.monotonic() + 30.0)  # type: ignore[arg-type]
        return [chunk.finish async for chunk in tries.run()], cluster

    finishes, cluster = asyncio.run(run())
    assert finishes == [FinishReason.CANCELLED]
    assert len(cluster.given_back) == len(cluster.routed) == 1


def test_a_batch_raises_its_first_error_itself_and_cancels_the_rest() -> None:
    cluster = Cluster([FOREVER], [RequestError("malformed")])
    client = AsyncKVPoolClient.of(cluster)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="malformed"):
        asyncio.run(client.generate_batch([[1], [1]]))
    assert cluster.streams == 0


# ── the blocking client


def _in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    got: list[Any] = []

    def run() -> None:
        try:
            got.append(call())
        except BaseException as error:  # noqa: BLE001 (the test looks at it)
            got.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, got


@pytest.mark.parametrize("streaming", [False, True])
def test_closing_the_client_ends_what_another_thread_waits_for(streaming: bool) -> None:
    cluster = Cluster([1, FOREVER])
    client = KVPoolClient.of(cluster)  # type: ignore[arg-type]
    thread, got = _in_thread(lambda: list(client.stream([1])) if streaming else client.generate([1]))
    assert cluster.first_token.wait(10)
    client.close()
    thread.join(10)
    assert [type(item) for item in got] == [UnavailableError]
    assert cluster.streams == 0


@pytest.mark.parametrize("use", ["generate", "stream", "status"])
def test_a_closed_client_says_so(use: str) -> None:
    client = KVPoolClient.of(Cluster())  # type: ignore[arg-type]
    client.close()
    client.close()
    with pytest.raises(RequestError, match="closed"):
        client.status() if use == "status" else list(getattr(client, use)([1]))


def test_closing_a_stream_early_ends_the_request() -> None:
    cluster = Cluster([1, 0, FOREVER])
    client = KVPoolClient.of(cluster)  # type: ignore[arg-type]
    stream = client.stream([1])
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert cluster.ended.wait(10)
    client.close()


def test_a_forked_child_is_told_to_make_its_own_client_and_cannot_close_ours() -> None:
    client = KVPoolClient.of(Cluster())  # type: ignore[arg-type]
    pid = os.fork()
    if not pid:
        try:
            client.close()
            client.generate([1])
        except KVPoolError as error:
            os._exit(0 if "process" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert client.generate([1], max_tokens=1).finish is FinishReason.LENGTH
    client.close()


def test_the_blocking_client_works_beside_a_running_loop() -> None:
    async def notebook_cell() -> int:
        with KVPoolClient.of(Cluster()) as client:  # type: ignore[arg-type]
            return len(client.generate([1], max_tokens=2).tokens)

    assert asyncio.run(notebook_cell()) == 2


@pytest.mark.parametrize("call", ["generate", "generate_batch", "stream"])
def test_an_unknown_option_is_refused_by_the_name_of_what_was_called_and_the_nearest_is_named(call: str) -> None:
    client = KVPoolClient.of(Cluster())  # type: ignore[arg-type]
    prompt: Any = ["x"] if call == "generate_batch" else "x"
    try:
        with pytest.raises(
            TypeError, match=rf"^KVPoolClient\.{call}\(\) got .* 'max_token'; did you mean 'max_tokens'"
        ):
            list(getattr(client, call)(prompt, max_token=3))
        with pytest.raises(TypeError, match="it takes max_tokens, temperature"):
            list(getattr(client, call)(prompt, bogus=3))
    finally:
        client.close()
    with pytest.raises(TypeError, match=r"^AsyncKVPoolClient\.generate\(\)"):
        asyncio.run(AsyncKVPoolClient.of(Cluster()).generate("x", max_token=3))  # type: ignore[arg-type]
