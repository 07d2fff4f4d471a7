"""What a user asks for and what comes back: requests, token chunks, results. Pure values, validated on creation."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvpool.errors import RequestError
from kvpool.types import RequestId, WorkerId

MAX_TOP_LOGPROBS = 20
MAX_NAME_CHARS = 256
MAX_PRIORITY = 100


def _require_int(value: object, field_name: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{field_name} must be an integer, got {value!r}", field=field_name)


def _require_number(value: object, field_name: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise RequestError(f"{field_name} must be a number, got {value!r}", field=field_name)


def require_name(value: object, field_name: str) -> None:
    """Names travel to router, workers and reports: text of bounded length that UTF-8 can carry."""
    if not isinstance(value, str) or len(value) > MAX_NAME_CHARS or any(0xD800 <= ord(char) < 0xE000 for char in value):
        raise RequestError(
            f"{field_name} must be Unicode text of at most {MAX_NAME_CHARS} characters, got {value!r:.80}",
            field=field_name,
        )


class FinishReason(Enum):
    """Why a generation ended."""

    STOP = "stop"  # a stop token, stop string or end-of-sequence
    LENGTH = "length"  # max_tokens reached
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen.

    Attributes:
        max_tokens: tokens to generate at most, at least 1.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: nucleus mass in (0, 1].
        seed: makes sampling reproducible. The draw at a position depends only on (seed, position), so a resumed or
            retried request continues with the same tokens. Ignored when greedy.
        stop_token_ids: token ids that end the generation; they are not part of the output.
        stop: strings that end the generation; the output text ends before the first of them.
        ignore_eos: go on past the model's end-of-sequence token.
        logprobs: how many top log-probabilities to return per token, 0 for none.

    Raises:
        RequestError: a value is out of range; the message names it.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int = 0

    def __post_init__(self) -> None:
        # Types first: a value of another type would pass here and fail in an engine, beside other people's requests.
        for name in ("max_tokens", "seed", "logprobs"):
            _require_int(getattr(self, name), name)
        for name in ("temperature", "top_p"):
            _require_number(getattr(self, name), name)
        for token in self.stop_token_ids:
            _require_int(token, "stop_token_ids")
        if not all(isinstance(text, str) for text in self.stop):
            raise RequestError(f"stop must be text or a sequence of texts, got {self.stop!r}", field="stop")
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, got {self.max_tokens}", field="max_tokens")
        if not 0.0 <= self.temperature <= 100.0:
            raise RequestError(f"temperature must be in [0, 100], got {self.temperature}", field="temperature")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p must be in (0, 1], got {self.top_p}", field="top_p")
        if not 0 <= self.seed < 2**63:
            raise RequestError(f"seed must be in [0, 2**63), got {self.seed}", field="seed")
        if not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise RequestError(f"logprobs must be in [0, {MAX_TOP_LOGPROBS}], got {self.logprobs}", field="logprobs")
        if any(not text for text in self.stop):
            raise RequestError("stop strings must not be empty", field="stop")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request asks of the service. Without limits it is never refused for being late.

    Attributes:
        ttft_ns: time to the first token, from the user's call on.
        tpot_ns: mean gap between tokens after it.
        priority: of requests that wait, the higher goes first; 0 is everybody's.
        may_degrade: the limits are goals: rather late than not at all.
    """

    ttft_ns: int | None = None
    tpot_ns: int | None = None
    priority: int = 0
    may_degrade: bool = False

    def __post_init__(self) -> None:
        for name in ("ttft_ns", "tpot_ns"):
            value = getattr(self, name)
            if value is None:
                continue
            field_name = name.replace("_ns", "_limit")
            _require_int(value, field_name)
            if not 0 < value < 2**63:
                raise RequestError(f"{field_name} must be above 0 s, got {value / 1e9:g} s", field=field_name)
        _require_int(self.priority, "priority")
        if not -MAX_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise RequestError(
                f"priority must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}], got {self.priority}", field="priority"
            )
        if not isinstance(self.may_degrade, bool):
            raise RequestError(f"may_degrade must be true or false, got {self.may_degrade!r}", field="may_degrade")


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request as it travels from client to router to worker.

    Attributes:
        request_id: identity; retries keep it.
        prompt: token ids, at least one.
        sampling: how tokens are chosen.
        tenant: salt of the block namespace; empty shares with every other request without a tenant.
        generated: tokens that an earlier attempt already delivered. They follow the prompt in the context, count
            towards ``max_tokens``, and are not delivered again.
        timeout_ns: the client's budget for the whole request. It is a duration, not a moment, because clocks differ.
        limits: what it asks of the service.
        elapsed_ns: how long ago the user's call was when this attempt was sent.
        ttft_ns: how long after that call the first token came, when an earlier attempt delivered it.
        hands_over: this attempt is for the first token only; another worker finishes the request, unless it ends here.
    """

    request_id: RequestId
    prompt: tuple[int, ...]
    sampling: SamplingParams
    tenant: str = ""
    generated: tuple[int, ...] = ()
    timeout_ns: int = 120_000_000_000
    limits: Limits = NO_LIMITS
    elapsed_ns: int = 0
    ttft_ns: int | None = None
    hands_over: bool = False

    def __post_init__(self) -> None:
        if not self.prompt:
            raise RequestError("the prompt is empty; give at least one token", field="prompt")
        for name in ("request_id", "tenant"):
            require_name(getattr(self, name), name)
        if not self.request_id:
            raise RequestError("request_id must not be empty", field="request_id")
        _require_int(self.timeout_ns, "timeout")
        if len(self.generated) >= self.sampling.max_tokens:
            raise RequestError("nothing is left to generate", field="generated")
        _require_int(self.elapsed_ns, "elapsed")
        if self.ttft_ns is not None:
            _require_int(self.ttft_ns, "ttft_ns")
        if self.timeout_ns <= 0:
            raise RequestError(f"timeout must be positive, got {self.timeout_ns} ns", field="timeout")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of the chosen token and of the most likely ones, natural log, after softmax at temperature 1."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestStats:
    """How a request was served. All times in nanoseconds, on the worker's monotonic clock.

    Attributes:
        worker_id: who served it.
        plan: name of the plan that was carried out (`kvpool.plan.PlanKind` value).
        prompt_tokens: length of the prompt.
        tokens_cached: prompt tokens whose KV the worker already held.
        tokens_loaded: prompt tokens whose KV came from peers.
        tokens_redone: prompt tokens prefilled here.
        bytes_loaded: bytes that came over the data plane.
        queue_ns: arrival → first prefill step.
        load_ns: start of the first load → last load terminal; 0 without loads.
        ttft_ns: arrival at the worker → first token.
        preemptions: how often it was preempted.
        load_failures: names (`KVPoolError.code`) of loads that failed and were redone.
        attempts: how many workers were tried, and routers in vain, filled in by the client.
        waited_ns: the user's call → the router's first decision, on the client's clock and filled in by it; in overload
            requests wait at the router. What the user waited for the first token is this and ``ttft_ns``.
        decoded_by: who went on after the first token, when another worker did.
    """

    worker_id: WorkerId
    plan: str
    prompt_tokens: int
    tokens_cached: int
    tokens_loaded: int
    tokens_redone: int
    bytes_loaded: int = 0
    queue_ns: int = 0
    load_ns: int = 0
    ttft_ns: int = 0
    preemptions: int = 0
    load_failures: tuple[str, ...] = ()
    attempts: int = 1
    waited_ns: int = 0
    decoded_by: WorkerId | None = None


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Newly generated tokens of one request, in order. The last chunk carries ``finish`` and ``stats``."""

    request_id: RequestId
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    stats: RequestStats | None = None


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """A finished generation as the client returns it."""

    request_id: RequestId
    tokens: tuple[int, ...]
    text: str
    finish: FinishReason
    stats: RequestStats
    logprobs: tuple[TokenLogprobs, ...] = field(default=())
