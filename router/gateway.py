"""The OpenAI-compatible HTTP ingress: an ASGI app over the client, served by Ray Serve.

``POST /v1/completions``, ``POST /v1/chat/completions``, ``GET /v1/models``, ``GET /healthz``; `router.openai` has the
objects. Nothing is decided here. A request ends with its answer or with an error in OpenAI's shape; when its client
goes away, it is cancelled on the worker. A request's id is its ``x-request-id`` header, which Ray Serve's proxy makes
up when there is none and sends back.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from ray import serve
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvpool.client import AsyncKVPoolClient, TextChunk
from kvpool.cluster.connection import ClusterConnection
from kvpool.errors import CapacityError, KVPoolError, RequestError
from router.openai import Answer, Body, ChatBody, CompletionBody, error_body, parse_body, status_of

MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_REQUEST_ID_CHARS = 128
HEALTH_TIMEOUT_S = 2.0
RETRY_AFTER_S = 1
SPARE_REQUESTS = 64  # beyond the limit on generations: health checks, and refusals
REQUEST_ID_HEADER = "x-request-id"

log = logging.getLogger(__name__)


def application(cluster: str, max_requests: int) -> Any:
    """The Serve application that serves ``cluster``.

    The app is built in the replica: Serve would otherwise copy it by value at import, half-made module and all.
    """

    def build() -> ASGIApp:
        return build_app(ClusterConnection(cluster), max_requests)

    deployment = serve.deployment(
        serve.ingress(build)(),
        name="gateway",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=max_requests + SPARE_REQUESTS,
        max_queued_requests=max_requests,
        graceful_shutdown_timeout_s=0,
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )
    return deployment.bind()


def build_app(connection: ClusterConnection, max_requests: int) -> ASGIApp:
    """The ASGI app over one cluster; at most ``max_requests`` generations at once."""
    gateway = _Gateway(connection)
    app = Starlette(
        routes=[
            Route("/v1/completions", gateway.completions, methods=["POST"]),
            Route("/v1/chat/completions", gateway.chat_completions, methods=["POST"]),
            Route("/v1/models", gateway.models),
            Route("/healthz", gateway.healthz),
        ],
        exception_handlers={
            KVPoolError: _on_kvpool_error,
            HTTPException: _on_http_error,
            Exception: _on_bug,
        },
    )
    return _Limit(app, max_requests)


class _Limit:
    """Refuses generations beyond a limit instead of queueing them out of sight.

    It bounds memory, so it counts before a body is read, when nobody knows a priority yet: those that wait at the
    router count like those that run.
    """

    def __init__(self, app: ASGIApp, max_requests: int) -> None:
        self._app = app
        self._max_requests = max_requests
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._running >= self._max_requests:
            message = (
                f"{self._max_requests} requests, of whatever priority, run or wait here already "
                "(gateway.max_requests); come again"
            )
            await _error_response(CapacityError(message))(scope, receive, send)
            return
        self._running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= 1


class _Gateway:
    """The endpoints."""

    def __init__(self, connection: ClusterConnection) -> None:
        self._connection = connection
        self._client = AsyncKVPoolClient.of(connection)

    async def completions(self, request: Request) -> Response:
        """Generate from a prompt."""
        return await self._serve(request, CompletionBody)

    async def chat_completions(self, request: Request) -> Response:
        """Generate the assistant's answer in a chat."""
        return await self._serve(request, ChatBody)

    async def models(self, _: Request) -> Response:
        """The one model that is served."""
        info = await self._client.info()
        entry = {
            "id": info.model,
            "object": "model",
            "created": 0,
            "owned_by": "kvpool",
            "max_model_len": info.max_context_tokens,
        }
        return JSONResponse({"object": "list", "data": [entry]})

    async def healthz(self, _: Request) -> Response:
        """200 while a router answers and knows a worker, else 503."""
        try:
            await self._connection.ask_router("ready", 1, timeout_s=HEALTH_TIMEOUT_S)
        except KVPoolError as error:
            return _error_response(error, status=503)
        return JSONResponse({"status": "ok"})

    async def _serve(self, request: Request, kind: type[Body]) -> Response:
        request_id = _request_id(request)
        try:
            body = parse_body(kind, await _read(request))
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        info = await self._client.info()
        if body.model not in (None, info.model):
            raise RequestError(f"model {body.model!r} is not served here; {info.model!r} is", field="model")
        tokenizer = await self._client.tokenizer()
        answer = Answer(body, info.model, int(time.time()), tokenizer.decode)
        chunks = self._client.stream(body.content, **body.options(), request_id=request_id)
        assert isinstance(chunks, AsyncGenerator)
        if not body.stream:
            return await _whole(answer, chunks)
        first = await anext(chunks)  # an error before the first token still has its own status
        return _EventStream(_events(answer, first, chunks))


async def _whole(answer: Answer, chunks: AsyncGenerator[TextChunk]) -> Response:
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            if chunk.result is not None:
                return JSONResponse(answer.whole(chunk.result))
    raise AssertionError("the client's stream ended without a result")


async def _events(answer: Answer, first: TextChunk, chunks: AsyncGenerator[TextChunk]) -> AsyncGenerator[bytes]:
    """Server-sent events. An error after the first token is the last event: no ``[DONE]`` follows a cut answer."""
    async with contextlib.aclosing(chunks):
        try:
            async for chunk in _prepend(first, chunks):
                for event in answer.events(chunk):
                    yield _event(event)
        except KVPoolError as error:
            yield _event(_body_of(error, status_of(error)))
            return
        yield b"data: [DONE]\n\n"


async def _prepend(first: TextChunk, rest: AsyncIterator[TextChunk]) -> AsyncIterator[TextChunk]:
    yield first
    async for chunk in rest:
        yield chunk


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


class _EventStream(StreamingResponse):
    """Ends its source at once when the client goes away; a generator left to the collector would run on meanwhile."""

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            await super().__call__(scope, receive, send)


def _request_id(request: Request) -> str | None:
    value = request.headers.get(REQUEST_ID_HEADER)
    if value is not None and (not value.isprintable() or not 1 <= len(value) <= MAX_REQUEST_ID_CHARS):
        raise RequestError(
            f"{REQUEST_ID_HEADER} must have 1 to {MAX_REQUEST_ID_CHARS} printable characters", field=REQUEST_ID_HEADER
        )
    return value


async def _read(request: Request) -> bytes:
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes; send a shorter prompt")
    return bytes(raw)


def _body_of(error: KVPoolError, status: int) -> dict[str, Any]:
    return error_body(error.message, status=status, code=error.code, field=error.details.get("field"))


def _error_response(error: KVPoolError, *, status: int | None = None) -> Response:
    status = status or status_of(error)
    headers = {"retry-after": str(_retry_after_s(error))} if status in (429, 503) else {}
    return JSONResponse(_body_of(error, status), status_code=status, headers=headers)


def _retry_after_s(error: KVPoolError) -> int:
    """Whole seconds, as the header wants them."""
    return max(RETRY_AFTER_S, math.ceil(float(error.details.get("retry_after_s", 0.0))))


async def _on_kvpool_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, KVPoolError)
    return _error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """No such path, wrong method, body too large."""
    assert isinstance(error, HTTPException)
    message = error.detail if error.status_code == 413 else f"{error.detail}: {request.method} {request.url.path}"
    body = error_body(message, status=error.status_code, code="invalid_request", field=None)
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _on_bug(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    body = error_body("internal error; the gateway's log has it", status=500, code="internal")
    return JSONResponse(body, status_code=500)
