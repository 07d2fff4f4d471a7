"""The engine against the plain Hugging Face model: prefill, decode, and copies between pages and working views.

Both run in this process, in turn, on the same weights and the same number of threads. The plain model decodes with
its own cache. The bars are those of the project's requirements: a prefill takes at most 1.15 x the plain forward, a
decode step at most 1.1 x.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kvpool.bench.report import Row, interleave, spread
from kvpool.config import DEFAULT_MODEL
from kvpool.request import SamplingParams
from kvpool.types import BlockId

if TYPE_CHECKING:
    from workers.engine.reference import PlainModel
    from workers.engine.torch_engine import TorchEngine

PREFILL_BAR = 1 / 1.15
DECODE_BAR = 1 / 1.1
COPY_BAR = 0.4
"""Least share of the speed of one plain copy of the same bytes. A view takes a block as a few KiB per layer and head,
too short for the streaming stores of a long copy, so on one thread about half is what there is to get."""

BLOCK_TOKENS = 16
CONTEXT_TOKENS = 2000
QUICK_CONTEXT_TOKENS = 512
BATCH = 8
_GREEDY = SamplingParams()


def run(*, quick: bool, peers: bool) -> list[Row]:
    """Measure; about 70 s on two idle cores, with ``quick`` about 20 s at a shorter context. No peers to install."""
    del peers
    from workers.engine.models import resolve_model
    from workers.engine.reference import PlainModel
    from workers.engine.torch_engine import TorchEngine

    path = resolve_model(DEFAULT_MODEL).path
    engine, plain = TorchEngine(path, block_tokens=BLOCK_TOKENS), PlainModel(path)
    context = QUICK_CONTEXT_TOKENS if quick else CONTEXT_TOKENS
    tokens = tuple(int(token) for token in np.random.default_rng(0).integers(3, engine.vocab_size, context))
    rows = [
        _prefill(engine, plain, tokens, runs=5),
        *_decode(engine, plain, tokens, runs=15),
        *_copies(engine, tokens, runs=11),
    ]
    engine.shutdown()
    return rows


def _prefill(engine: TorchEngine, plain: PlainModel, tokens: tuple[int, ...], *, runs: int) -> Row:
    from workers.engine.base import SequenceSlice

    def ours() -> None:
        slot = engine.open(len(tokens))
        engine.step([SequenceSlice(slot, tokens, 0, _GREEDY)])
        engine.close(slot)

    return _cost_row(
        f"prefill {len(tokens)} tokens",
        interleave([ours, lambda: plain.prefill(tokens, keep_cache=False)], runs=runs),
        reference_name="plain forward",
        bar=PREFILL_BAR,
    )


def _decode(engine: TorchEngine, plain: PlainModel, tokens: tuple[int, ...], *, runs: int) -> list[Row]:
    """One sequence against the plain step, then a full batch against as many plain steps in a row."""
    slots = _prefilled(engine, tokens, extra=2 * runs + 4)
    plain.prefill(tokens)
    single = _Decoding(engine, slots[:1], len(tokens))
    alone = interleave([single.step, lambda: plain.decode(7)], runs=runs)
    batch = _Decoding(engine, slots, len(tokens) + runs + 1)
    together = interleave([batch.step], runs=runs)[0]
    for slot in slots:
        engine.close(slot)
    return [
        _cost_row(
            f"decode step at context {len(tokens)}", alone, reference_name="plain step, own cache", bar=DECODE_BAR
        ),
        _cost_row(
            f"decode step of {BATCH} sequences at context {len(tokens)}",
            [together, [BATCH * seconds for seconds in alone[1]]],
            reference_name=f"{BATCH} plain steps",
        ),
    ]


class _Decoding:
    """Sequences that take one step after another."""

    def __init__(self, engine: TorchEngine, slots: list[int], position: int) -> None:
        self._engine, self._slots, self._position = engine, slots, position

    def step(self) -> None:
        """Decode one token of every sequence."""
        from workers.engine.base import SequenceSlice

        self._engine.step([SequenceSlice(slot, (7,), self._position, _GREEDY) for slot in self._slots])
        self._position += 1


def _prefilled(engine: TorchEngine, tokens: tuple[int, ...], *, extra: int) -> list[int]:
    """A batch of open sequences with the same context: one computed, the others copied through pages."""
    from workers.engine.base import SequenceSlice

    slots = [engine.open(len(tokens) + extra) for _ in range(BATCH)]
    engine.step([SequenceSlice(slots[0], tokens, 0, None)])
    blocks = [BlockId(number) for number in range(len(tokens) // BLOCK_TOKENS)]
    pages = np.zeros(len(blocks) * engine.layout.block_bytes, dtype=np.uint8)
    engine.attach_pages(pages.data, len(blocks))
    engine.store_blocks(slots[0], 0, blocks)
    for slot in slots[1:]:
        engine.load_blocks(slot, 0, blocks)
    return slots


def _copies(engine: TorchEngine, tokens: tuple[int, ...], *, runs: int) -> list[Row]:
    """Pages ↔ view of a whole context, blocks in one run and scattered, against a plain copy of the same bytes."""
    count = len(tokens) // BLOCK_TOKENS
    pages = np.zeros(2 * count * engine.layout.block_bytes, dtype=np.uint8)
    engine.attach_pages(pages.data, 2 * count)
    in_a_run = [BlockId(number) for number in range(count)]
    scattered = [BlockId(int(number)) for number in np.random.default_rng(1).permutation(2 * count)[:count]]
    slot = engine.open(len(tokens))
    target = np.zeros(count * engine.layout.block_bytes, dtype=np.uint8)
    subjects: dict[str, Callable[[], object]] = {
        "load pages, one run": lambda: engine.load_blocks(slot, 0, in_a_run),
        "load pages, scattered": lambda: engine.load_blocks(slot, 0, scattered),
        "store pages, one run": lambda: engine.store_blocks(slot, 0, in_a_run),
        "store pages, scattered": lambda: engine.store_blocks(slot, 0, scattered),
    }
    *ours, plain = interleave([*subjects.values(), lambda: np.copyto(target, pages[: target.nbytes])], runs=runs)
    engine.close(slot)
    return [_speed_row(name, seconds, plain, target.nbytes) for name, seconds in zip(subjects, ours, strict=True)]


def _cost_row(name: str, seconds: list[list[float]], *, reference_name: str, bar: float | None = None) -> Row:
    ours, reference = seconds
    return Row(
        name=name,
        ours=statistics.median(ours) * 1e3,
        reference=statistics.median(reference) * 1e3,
        unit="ms",
        reference_name=reference_name,
        bar=bar,
        higher_is_better=False,
        runs=len(ours),
        spread=spread(ours),
    )


def _speed_row(name: str, ours: list[float], reference: list[float], size_bytes: int) -> Row:
    return Row(
        name=name,
        ours=size_bytes / statistics.median(ours) / 1e9,
        reference=size_bytes / statistics.median(reference) / 1e9,
        unit="GB/s",
        reference_name="memcpy",
        bar=COPY_BAR,
        runs=len(ours),
        spread=spread(ours),
    )
