"""The OpenAI-compatible HTTP ingress, on Ray Serve: a thin translation between HTTP bodies and the client.

``POST /v1/completions``, ``POST /v1/chat/completions`` (both with ``stream``), ``GET /v1/models``, ``GET /healthz``.
An answer carries a ``kvpool`` object with worker, plan, and tokens cached, loaded and redone. Errors have OpenAI's
shape and the status of what the caller can do: 400 fix the request, 429 and 503 come again, 504 out of time.
"""

# No postponed annotations here: Ray Serve rebuilds the class in another process, where FastAPI could not resolve them.
import json
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from ray import serve

from kvpool.client import DEFAULT_TIMEOUT_S, AsyncKVPoolClient, Prompt, TextChunk
from kvpool.cluster.connection import ClusterConnection
from kvpool.errors import CapacityError, DeadlineError, KVPoolError, RequestError
from kvpool.request import FinishReason, GenerateResult

MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_ONGOING_REQUESTS = 1000
RETRY_AFTER_S = 1
REQUEST_ID_HEADER = "x-request-id"

_app = FastAPI(title="kvpool")


class _Body(BaseModel):
    """What both endpoints take. Fields of OpenAI's that change the output and are not served are refused."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    max_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    stop: str | list[str] = []
    stream: bool = False
    logprobs: int | bool | None = None
    top_logprobs: int | None = None
    n: Literal[1] = 1
    user: str = Field(default="", description="tenant: requests of different tenants never share blocks")
    ignore_eos: bool = False
    timeout: float = DEFAULT_TIMEOUT_S
    stream_options: dict[str, bool] | None = None

    def options(self, request_id: str | None) -> dict[str, Any]:
        """Arguments of the client."""
        logprobs = self.top_logprobs if self.top_logprobs is not None else int(self.logprobs or 0)
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "stop": self.stop,
            "logprobs": logprobs,
            "tenant": self.user,
            "ignore_eos": self.ignore_eos,
            "timeout_s": self.timeout,
            "request_id": request_id,
        }


class CompletionBody(_Body):
    """``POST /v1/completions``."""

    prompt: str | list[int]


class Message(BaseModel):
    """One chat message."""

    model_config = ConfigDict(extra="forbid")

    role: str
    content: str


class ChatBody(_Body):
    """``POST /v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: int | None = None


@serve.deployment(name="gateway", max_ongoing_requests=MAX_ONGOING_REQUESTS, ray_actor_options={"num_cpus": 0})
@serve.ingress(_app)
class Gateway:
    """One replica of the ingress."""

    def __init__(self, cluster: str) -> None:
        self._client = AsyncKVPoolClient.of(ClusterConnection(cluster))

    @_app.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        """Generate from a prompt."""
        return await self._serve(request, CompletionBody)

    @_app.post("/v1/chat/completions")
    async def chat_completions(self, request: Request) -> Response:
        """Generate the assistant's answer in a chat."""
        return await self._serve(request, ChatBody)

    @_app.get("/v1/models")
    async def models(self) -> Response:
        """The one model that is served."""
        try:
            info = await self._client.info()
        except KVPoolError as error:
            return _error_response(error)
        entry = {"id": info.model, "object": "model", "owned_by": "kvpool", "max_model_len": info.max_context_tokens}
        return JSONResponse({"object": "list", "data": [entry]})

    @_app.get("/healthz")
    async def healthz(self) -> Response:
        """200 while the router answers."""
        try:
            await self._client.info()
        except KVPoolError as error:
            return _error_response(error)
        return JSONResponse({"status": "ok"})

    async def _serve(self, request: Request, kind: type[CompletionBody] | type[ChatBody]) -> Response:
        try:
            body = await _parse(request, kind)
            info = await self._client.info()
            if body.model not in (None, info.model):
                raise RequestError(
                    f"model {body.model!r} is not served; this cluster serves {info.model!r}", field="model"
                )
            shape = _Shape(chat=isinstance(body, ChatBody), model=info.model)
            chunks = self._client.stream(_prompt(body), **body.options(request.headers.get(REQUEST_ID_HEADER)))
            first = await anext(chunks)  # errors before the first token still get their status
        except KVPoolError as error:
            return _error_response(error)
        if body.stream:
            return StreamingResponse(_events(shape, first, chunks), media_type="text/event-stream")
        try:
            result = first.result
            async for chunk in chunks:
                result = chunk.result or result
        except KVPoolError as error:
            return _error_response(error)
        assert result is not None
        return JSONResponse(shape.whole(result), headers={REQUEST_ID_HEADER: result.request_id})


async def _parse(request: Request, kind: type[CompletionBody] | type[ChatBody]) -> CompletionBody | ChatBody:
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > MAX_BODY_BYTES:
            raise RequestError(f"the body is larger than {MAX_BODY_BYTES} bytes", field="body")
    try:
        body = kind.model_validate_json(bytes(raw))
    except ValueError as error:
        raise RequestError(f"malformed body: {_first_line(error)}", field="body") from error
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        body = body.model_copy(update={"max_tokens": body.max_completion_tokens})
    return body


def _first_line(error: ValueError) -> str:
    errors = getattr(error, "errors", None)
    if errors is None:
        return str(error)
    return "; ".join(f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']}" for item in errors()[:5])


def _prompt(body: CompletionBody | ChatBody) -> Prompt:
    if isinstance(body, ChatBody):
        return [{"role": message.role, "content": message.content} for message in body.messages]
    return body.prompt


class _Shape:
    """Builds OpenAI's objects for one request."""

    def __init__(self, *, chat: bool, model: str) -> None:
        self._chat = chat
        self._base = {"created": int(time.time()), "model": model}

    def whole(self, result: GenerateResult) -> dict[str, Any]:
        """A whole answer."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": _finish(result.finish), "logprobs": _logprobs(result)}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": result.text}
        else:
            choice["text"] = result.text
        kind = "chat.completion" if self._chat else "text_completion"
        return self._envelope(result.request_id, kind, choice) | _usage(result)

    def piece(self, chunk: TextChunk) -> dict[str, Any]:
        """One event of a stream; the last one carries usage and the ``kvpool`` object."""
        finish = None if chunk.result is None else _finish(chunk.result.finish)
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        if self._chat:
            choice["delta"] = {"content": chunk.text}
        else:
            choice["text"] = chunk.text
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        event = self._envelope(chunk.request_id, kind, choice)
        return event if chunk.result is None else event | _usage(chunk.result)

    def _envelope(self, request_id: str, kind: str, choice: dict[str, Any]) -> dict[str, Any]:
        return {"id": request_id, "object": kind, **self._base, "choices": [choice]}


def _finish(reason: FinishReason) -> str:
    return "stop" if reason is FinishReason.CANCELLED else reason.value


def _logprobs(result: GenerateResult) -> dict[str, Any] | None:
    if not result.logprobs:
        return None
    return {
        "token_ids": [item.token for item in result.logprobs],
        "token_logprobs": [item.logprob for item in result.logprobs],
        "top_logprobs": [dict(item.top) for item in result.logprobs],
    }


def _usage(result: GenerateResult) -> dict[str, Any]:
    stats = result.stats
    generated = len(result.tokens)
    return {
        "usage": {
            "prompt_tokens": stats.prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": stats.prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": stats.tokens_cached + stats.tokens_loaded},
        },
        "kvpool": asdict(stats),
    }


async def _events(shape: _Shape, first: TextChunk, chunks: AsyncIterator[TextChunk]) -> AsyncIterator[str]:
    """Server-sent events; an error after the first token becomes the last event."""
    try:
        yield f"data: {json.dumps(shape.piece(first))}\n\n"
        async for chunk in chunks:
            yield f"data: {json.dumps(shape.piece(chunk))}\n\n"
    except KVPoolError as error:
        yield f"data: {json.dumps(_error_body(error))}\n\n"
    yield "data: [DONE]\n\n"


def _error_body(error: KVPoolError) -> dict[str, Any]:
    return {
        "error": {"message": error.message, "type": error.code, "param": error.details.get("field"), "code": error.code}
    }


def _error_response(error: KVPoolError) -> Response:
    if isinstance(error, RequestError):
        status = 400
    elif isinstance(error, CapacityError):
        status = 429
    elif isinstance(error, DeadlineError):
        status = 504
    else:
        status = 503
    headers = {"retry-after": str(RETRY_AFTER_S)} if status in (429, 503) else {}
    return JSONResponse(_error_body(error), status_code=status, headers=headers)
