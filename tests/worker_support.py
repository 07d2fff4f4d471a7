"""What the worker tests share: a tiny deterministic engine, its reference, and small stand-ins for the pool around it.

The engine is real in the sense that matters: the KV of a token depends on the token and its position, the next token
on every byte of the context's KV, and views start as garbage. Any wrong, missing or corrupt block changes the output.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool.errors import CapacityError, InvariantViolation, KVPoolError
from kvpool.hashing import Namespace
from kvpool.layout import AttentionKind, KVGroup, KVLayout
from kvpool.reports import WorkerReport
from kvpool.request import FinishReason, GenerateRequest, RequestStats, SamplingParams, TokenChunk, TokenLogprobs
from kvpool.types import BlockHash, BlockId, RequestId, Tier
from workers.engine.base import SequenceSlice
from workers.gate import Gate, LoadView, Rest, Ruling, Verdict

if TYPE_CHECKING:
    from workers.core import WorkerCore

VOCAB = 97
WIDTH = 4  # uint64 words of KV per token


def namespace(tenant: str = "", block_tokens: int = 4) -> Namespace:
    """Block namespace of the fake model."""
    return Namespace("fake", "uint64", "layout", block_tokens, tenant=tenant)


def kv_of(tokens: Sequence[int], start: int) -> np.ndarray:
    """KV rows of ``tokens`` at positions ``start`` on."""
    token = np.array(tokens, dtype=np.uint64)[:, None]
    position = np.arange(start, start + len(tokens), dtype=np.uint64)[:, None]
    lane = np.arange(1, WIDTH + 1, dtype=np.uint64)[None, :]
    return (token + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ (position + np.uint64(7)) * lane * np.uint64(
        0xBF58476D1CE4E5B9
    )


def next_token(context_kv: np.ndarray, sampling: SamplingParams) -> TokenLogprobs:
    """What follows a context; sampled requests also depend on (seed, position)."""
    seed = b"" if sampling.temperature == 0 else f"{sampling.seed}/{len(context_kv)}".encode()
    digest = blake2b(np.ascontiguousarray(context_kv).tobytes() + seed, digest_size=8).digest()
    value = int.from_bytes(digest, "little")
    return TokenLogprobs(value % VOCAB, -(value % 1000) / 1000)


def reference_choices(request: GenerateRequest, eos: frozenset[int] = frozenset()) -> list[TokenLogprobs]:
    """What the fake engine generates for ``request`` without any pool."""
    context = [*request.prompt, *request.generated]
    output: list[TokenLogprobs] = []
    while len(request.generated) + len(output) < request.sampling.max_tokens:
        choice = next_token(kv_of(context, 0), request.sampling)
        if choice.token in eos or choice.token in request.sampling.stop_token_ids:
            break
        output.append(choice)
        context.append(choice.token)
    return output


def reference(request: GenerateRequest, eos: frozenset[int] = frozenset()) -> list[int]:
    """Tokens of `reference_choices`."""
    return [choice.token for choice in reference_choices(request, eos)]


class FakeEngine:
    """Implements `workers.engine.base.Engine` in numpy. ``running.clear()`` holds it before its next step; ``token_s``
    is what a token takes to compute, so that plans can be compared on a busy machine."""

    def __init__(
        self,
        *,
        block_tokens: int = 4,
        max_context_tokens: int = 512,
        max_views: int = 64,
        eos: frozenset[int] = frozenset(),
        token_s: float = 0.0,
    ) -> None:
        group = KVGroup(AttentionKind.FULL, layers=1, entry_bytes=8 * WIDTH)
        self.layout = KVLayout("fake", "uint64", block_tokens, (group,))
        self.max_context_tokens = max_context_tokens
        self.eos_token_ids = eos
        self.vocab_size = VOCAB
        self.computed_tokens = 0
        self._token_s = token_s
        self.steps = 0
        self.running = threading.Event()
        self.running.set()
        self._max_views = max_views
        self._views: dict[int, np.ndarray] = {}
        self._lengths: dict[int, int] = {}
        self._next_slot = 0
        self._pages: np.ndarray | None = None
        self._device_pages: np.ndarray | None = None

    def attach_device_pages(self, num_blocks: int) -> None:
        self._device_pages = np.full((num_blocks, self.layout.block_tokens, WIDTH), 0xDEAD, dtype=np.uint64)

    def attach_pages(self, memory: memoryview, num_blocks: int) -> None:
        self._pages = np.frombuffer(memory, dtype=np.uint64).reshape(num_blocks, self.layout.block_tokens, WIDTH)

    def open(self, capacity_tokens: int) -> int:
        if len(self._views) >= self._max_views:
            raise CapacityError("no memory for another view")
        self._next_slot += 1
        self._views[self._next_slot] = np.full((capacity_tokens, WIDTH), 0xDEAD, dtype=np.uint64)
        self._lengths[self._next_slot] = 0
        return self._next_slot

    def close(self, slot: int) -> None:
        del self._views[slot], self._lengths[slot]

    @property
    def open_views(self) -> int:
        return len(self._views)

    def load_blocks(self, slot: int, first_block: int, block_ids: Sequence[BlockId]) -> None:
        self._load(self._pages, slot, first_block, block_ids)

    def load_device_blocks(self, slot: int, first_block: int, block_ids: Sequence[BlockId]) -> None:
        self._load(self._device_pages, slot, first_block, block_ids)

    def _load(self, pages: np.ndarray | None, slot: int, first_block: int, block_ids: Sequence[BlockId]) -> None:
        assert pages is not None
        size = self.layout.block_tokens
        for index, block_id in enumerate(block_ids, first_block):
            self._views[slot][index * size : (index + 1) * size] = pages[block_id]
        if self._lengths[slot] != first_block * size:
            raise InvariantViolation("pages are filled in out of order")
        self._lengths[slot] = (first_block + len(block_ids)) * size

    def store_blocks(self, slot: int, first_block: int, block_ids: Sequence[BlockId]) -> None:
        self._store(self._pages, slot, first_block, block_ids)

    def store_device_blocks(self, slot: int, first_block: int, block_ids: Sequence[BlockId]) -> None:
        self._store(self._device_pages, slot, first_block, block_ids)

    def _store(self, pages: np.ndarray | None, slot: int, first_block: int, block_ids: Sequence[BlockId]) -> None:
        assert pages is not None
        size = self.layout.block_tokens
        if (first_block + len(block_ids)) * size > self._lengths[slot]:
            raise InvariantViolation("a block that is not computed is stored")
        for index, block_id in enumerate(block_ids, first_block):
            pages[block_id] = self._views[slot][index * size : (index + 1) * size]

    def step(self, batch: Sequence[SequenceSlice]) -> list[TokenLogprobs | None]:
        assert self.running.wait(30), "nobody let the engine go on"
        self.steps += 1
        time.sleep(self._token_s * sum(len(part.tokens) for part in batch))
        return [self._run(part) for part in batch]

    def _run(self, part: SequenceSlice) -> TokenLogprobs | None:
        stop = part.start + len(part.tokens)
        if part.start > self._lengths[part.slot] or not part.tokens:
            raise InvariantViolation("a slice leaves a gap")
        self._views[part.slot][part.start : stop] = kv_of(part.tokens, part.start)
        self._lengths[part.slot] = stop
        self.computed_tokens += len(part.tokens)
        return None if part.sampling is None else next_token(self._views[part.slot][:stop], part.sampling)

    def shutdown(self) -> None:
        self._pages = None
        self._views.clear()


class WatchedDevice:
    """Before an engine that it is mixed into: whenever blocks are read from device memory, every place that holds none
    is poisoned first, and each that is read must be, byte for byte, the page it is a copy of. ``core`` is set by the
    test. The engine thread does it, so nothing races."""

    core: WorkerCore
    poison: float = 0xDEAD
    places_read = 0
    _pages: Any
    _device_pages: Any

    def load_device_blocks(self, slot: int, first_block: int, block_ids: Sequence[BlockId]) -> None:
        segment = self.core.segment
        assert segment.device is not None
        held = {place: block_hash for block_hash, place in segment.device.held().items()}
        free = [place for place in range(len(self._device_pages)) if place not in held]
        if free:
            self._device_pages[free] = self.poison
        for place in block_ids:
            page = segment.lookup(held[place])
            assert page is not None, "a copy outlived its page"
            copy = self._device_pages[place]
            copy = copy.cpu() if hasattr(copy, "cpu") else copy
            assert bool((copy == self._pages[page]).all()), "a copy differs from its page"
        self.places_read += len(block_ids)
        super().load_device_blocks(slot, first_block, block_ids)  # type: ignore[misc]


class WatchedFake(WatchedDevice, FakeEngine):
    """The fake engine, watched."""


class PatientGate(Gate):
    """Waits for every load until its deadline, so that a test can say how many blocks are loaded."""

    def rule(self, view: LoadView, rest: Rest, now_ns: int, *, idle: bool) -> Ruling:
        return Ruling(Verdict.GIVE_UP if now_ns >= view.deadline_ns else Verdict.WAIT)


class RecordingPublisher:
    """Keeps what it is told; replays stored and removed into the sets a directory would show: what peers can read, and
    what of it lies in device memory too."""

    def __init__(self) -> None:
        self.held: set[BlockHash] = set()
        self.in_device: set[BlockHash] = set()
        self.linked: list[bool] = []
        self.reports: list[WorkerReport] = []
        self._lock = threading.Condition()

    def stored(self, tier: Tier, hashes: Sequence[BlockHash], *, linked: bool = False) -> None:
        with self._lock:
            held = self._tier(tier)
            assert not held & set(hashes), "a block is announced twice"
            assert tier is not Tier.DEVICE or self.held >= set(hashes), "a copy is announced before its block"
            self.linked.append(linked)
            held |= set(hashes)

    def removed(self, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        with self._lock:
            held = self._tier(tier)
            assert held >= set(hashes), "a block is withdrawn that was not announced"
            assert tier is Tier.DEVICE or not self.in_device & set(hashes), "a block is withdrawn before its copy"
            held -= set(hashes)

    def _tier(self, tier: Tier) -> set[BlockHash]:
        return self.in_device if tier is Tier.DEVICE else self.held

    def report(self, report: WorkerReport) -> None:
        with self._lock:
            self.reports.append(report)
            self._lock.notify_all()

    def wait_for(self, holds: Callable[[list[WorkerReport]], bool], timeout_s: float = 10.0) -> bool:
        """Wait until the reports so far satisfy ``holds``."""
        with self._lock:
            return self._lock.wait_for(lambda: holds(self.reports), timeout_s)


class Collector:
    """A sink that a test can wait on."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish: FinishReason | None = None
        self.stats: RequestStats | None = None
        self.error: KVPoolError | None = None
        self.first = threading.Event()
        self.done = threading.Event()

    def __call__(self, item: TokenChunk | KVPoolError) -> None:
        assert not self.done.is_set(), "something is delivered after the end"
        if isinstance(item, KVPoolError):
            self.error = item
            self.done.set()
            return
        self.tokens += item.tokens
        self.logprobs += item.logprobs
        self.first.set()
        if item.finish is not None:
            self.finish, self.stats = item.finish, item.stats
            self.done.set()

    def result(self, timeout_s: float = 60.0) -> list[int]:
        """Wait for the end; raises the request's error."""
        assert self.done.wait(timeout_s), "the request hangs"
        if self.error is not None:
            raise self.error
        return self.tokens


def make_request(request_id: str, prompt: Sequence[int], max_tokens: int = 8, **sampling: object) -> GenerateRequest:
    """A request with defaults for tests."""
    return GenerateRequest(
        RequestId(request_id),
        tuple(prompt),
        SamplingParams(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
    )
