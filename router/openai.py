"""OpenAI's HTTP objects ↔ ours: request bodies, answers, stream events, errors. No HTTP and no Ray here.  (pure)

A field is either served, or accepted at the one value that changes nothing, or refused by name: a request that would
be answered differently from what it asks for is never answered at all.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, field_validator, model_validator

from kvpool.client import DEFAULT_TIMEOUT_S, TextChunk
from kvpool.errors import CapacityError, DeadlineError, KVPoolError, ModelError, RequestError
from kvpool.options import MAX_TIMEOUT_S
from kvpool.prompts import Prompt
from kvpool.request import MAX_PRIORITY, MAX_TOP_LOGPROBS, FinishReason, GenerateResult, TokenLogprobs

MAX_STOP_STRINGS = 16
MAX_SHOWN_ERRORS = 5
MAX_SHOWN_CHARS = 200
TIMES = frozenset({"timeout", "ttft_limit", "tpot_limit"})

Json = dict[str, Any]
Decode = Callable[[Sequence[int]], str]
_Zero = Annotated[float, Field(ge=0, le=0)]


class _Object(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        """OpenAI's clients send null for what they leave out."""
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class StreamOptions(_Object):
    """``stream_options``."""

    include_usage: bool = False


class _Body(_Object):
    """What both endpoints take; the range of a value that goes to the model is `SamplingParams`' to check."""

    model: str | None = None
    max_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str = Field(default="", max_length=256)
    timeout: float = Field(default=DEFAULT_TIMEOUT_S, gt=0, le=MAX_TIMEOUT_S)
    ttft_limit: float | None = Field(default=None, gt=0, le=MAX_TIMEOUT_S)
    tpot_limit: float | None = Field(default=None, gt=0, le=MAX_TIMEOUT_S)
    priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    may_degrade: bool = False
    n: Literal[1] = 1
    presence_penalty: _Zero = 0.0
    frequency_penalty: _Zero = 0.0

    @property
    def shown_logprobs(self) -> int | None:
        """How many alternatives per token to show; None for no log-probabilities at all."""
        raise NotImplementedError

    @property
    def content(self) -> Prompt:
        """The prompt as the client takes it."""
        raise NotImplementedError

    def options(self) -> Json:
        """Arguments of `AsyncKVPoolClient.stream`."""
        shown = self.shown_logprobs
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
            "logprobs": 0 if shown is None else max(1, shown),
            "tenant": self.user,
            "timeout_s": self.timeout,
            "ttft_limit_s": self.ttft_limit,
            "tpot_limit_s": self.tpot_limit,
            "priority": self.priority,
            "may_degrade": self.may_degrade,
        }


class CompletionBody(_Body):
    """``POST /v1/completions``."""

    prompt: str | list[int]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: Literal[1] = 1
    echo: Literal[False] = False

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, prompt: Any) -> Any:
        """One message, where the union would say one per element and alternative."""
        if isinstance(prompt, list) and not all(type(token) is int for token in prompt):
            raise ValueError("must be text or one list of token ids; send several prompts as several requests")
        return prompt

    @property
    def shown_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def content(self) -> Prompt:
        return self.prompt


class Message(_Object):
    """One chat message."""

    role: Literal["system", "user", "assistant"]
    content: str


class ChatBody(_Body):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _one_meaning(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @property
    def shown_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def content(self) -> Prompt:
        return [{"role": message.role, "content": message.content} for message in self.messages]

    def options(self) -> Json:
        """As above; the newer name of the limit wins."""
        options = super().options()
        return options if self.max_completion_tokens is None else {**options, "max_tokens": self.max_completion_tokens}


Body = CompletionBody | ChatBody


def parse_body(kind: type[Body], raw: bytes) -> Body:
    """Read a body.

    Raises:
        RequestError: it is not JSON, or a field is unknown, missing or of the wrong type; the message names each.
    """
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
        shown = "; ".join(f"{_place(item)}: {item['msg']}{_way_out(item, kind)}" for item in found[:MAX_SHOWN_ERRORS])
        field = found[0]["loc"][0] if found[0]["loc"] else "body"
        raise RequestError(f"malformed body: {shown}", field=str(field)[:MAX_SHOWN_CHARS]) from error


def _way_out(item: Mapping[str, Any], kind: type[Body]) -> str:
    """The unit of a time, which its name does not say, or the field that an unknown one may have meant."""
    name = str(item["loc"][-1])[:MAX_SHOWN_CHARS] if item["loc"] else ""
    if name in TIMES:
        return " (it is in seconds)"
    near = difflib.get_close_matches(name, kind.model_fields, n=1) if item["type"] == "extra_forbidden" else []
    return f"; did you mean {near[0]!r}?" if near else ""


def _place(item: Mapping[str, Any]) -> str:
    place = ".".join(str(part) for part in item["loc"]) or "body"
    return place if len(place) <= MAX_SHOWN_CHARS else f"{place[:MAX_SHOWN_CHARS]}…"


@dataclass(slots=True)
class Answer:
    """Builds the objects of one answer, in the order of its chunks.

    Attributes:
        body: what was asked.
        model: name of the served model.
        created_s: Unix time of the request.
        decode: token ids → text, to show the tokens of log-probabilities.
    """

    body: Body
    model: str
    created_s: int
    decode: Decode
    _offset_chars: int = 0
    _events: int = 0

    @property
    def _is_chat(self) -> bool:
        return isinstance(self.body, ChatBody)

    def whole(self, result: GenerateResult) -> Json:
        """The answer of a request that does not stream."""
        content: Json = {"text": result.text}
        if self._is_chat:
            content = {"message": {"role": "assistant", "content": result.text}}
        choice = self._choice(content, result.logprobs, result.finish)
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._envelope(result.request_id, kind, [choice]), "usage": usage(result), **_kvpool(result)}

    def events(self, chunk: TextChunk) -> list[Json]:
        """The events of one chunk. The one with the finish reason carries ``kvpool``; usage follows when asked for."""
        result = chunk.result
        content: Json = {"text": chunk.text}
        if self._is_chat:
            role = {} if self._events else {"role": "assistant"}
            content = {"delta": {**role, "content": chunk.text}}
        self._events += 1
        choice = self._choice(content, chunk.logprobs, None if result is None else result.finish)
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        event = self._envelope(chunk.request_id, kind, [choice])
        if result is None:
            return [event]
        event |= _kvpool(result)
        if not self.body.stream_options.include_usage:
            return [event]
        return [event, {**self._envelope(chunk.request_id, kind, []), "usage": usage(result)}]

    def _envelope(self, request_id: str, kind: str, choices: list[Json]) -> Json:
        return {"id": request_id, "object": kind, "created": self.created_s, "model": self.model, "choices": choices}

    def _choice(self, content: Json, logprobs: Sequence[TokenLogprobs], finish: FinishReason | None) -> Json:
        shown = self.body.shown_logprobs
        built = None
        if shown is not None:
            built = self._chat_logprobs(logprobs, shown) if self._is_chat else self._logprobs(logprobs, shown)
        return {"index": 0, **content, "logprobs": built, "finish_reason": _finish(finish)}

    def _logprobs(self, items: Sequence[TokenLogprobs], shown: int) -> Json:
        texts = [self.decode((item.token,)) for item in items]
        offsets = []
        for text in texts:
            offsets.append(self._offset_chars)
            self._offset_chars += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [item.logprob for item in items],
            "top_logprobs": [{self.decode((token,)): value for token, value in item.top[:shown]} for item in items],
            "text_offset": offsets,
        }

    def _chat_logprobs(self, items: Sequence[TokenLogprobs], shown: int) -> Json:
        content = []
        for item in items:
            top = [self._token(token, value) for token, value in item.top[:shown]]
            content.append({**self._token(item.token, item.logprob), "top_logprobs": top})
        return {"content": content}

    def _token(self, token: int, logprob: float) -> Json:
        text = self.decode((token,))
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _finish(reason: FinishReason | None) -> str | None:
    if reason is None:
        return None
    return FinishReason.STOP.value if reason is FinishReason.CANCELLED else reason.value


def usage(result: GenerateResult) -> Json:
    """OpenAI's ``usage``; cached tokens are those whose prefill was saved, by this worker's blocks or a peer's."""
    stats = result.stats
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": len(result.tokens),
        "total_tokens": stats.prompt_tokens + len(result.tokens),
        "prompt_tokens_details": {"cached_tokens": stats.tokens_cached + stats.tokens_loaded},
    }


def _kvpool(result: GenerateResult) -> Json:
    return {"kvpool": asdict(result.stats)}


def status_of(error: KVPoolError) -> int:
    """HTTP status, by what the caller does next: 400 fix it, 429 and 503 come again, 504 give it more time."""
    if isinstance(error, ModelError):
        return 500
    if isinstance(error, RequestError):
        return 400
    if isinstance(error, CapacityError) or isinstance(error.__cause__, CapacityError):
        return 429  # the client waits for room as long as the budget lasts; that it was full is the reason
    return 504 if isinstance(error, DeadlineError) else 503


def error_body(message: str, *, status: int, code: str, field: str | None = None) -> Json:
    """OpenAI's error object."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}
