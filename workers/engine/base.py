"""The engine contract: run a batch of sequence slices through the model, over dense working views and block pages.

An engine owns model weights and one dense working view per open sequence. It never decides what runs, never
allocates blocks and never knows the network: `workers.scheduler` chooses, `workers.core` binds. One thread calls an
engine; no method may be called concurrently.

Pages are block-major, ``[block, layer, K/V, kv_head, token, dim]``, over memory the worker's arena owns, so that
one block is one contiguous run of ``layout.block_bytes`` bytes. Device pages look the same, in memory of the engine's
own; only the engine's thread touches them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpool.layout import KVLayout
from kvpool.request import SamplingParams, TokenLogprobs
from kvpool.types import BlockId


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """Tokens of one sequence to run in one step.

    Attributes:
        slot: engine handle of the open sequence.
        tokens: token ids to compute, at least one.
        start: position of the first of them = tokens whose KV is in the view already.
        sampling: set when the token after the slice is wanted (a decode step, or the last prefill chunk).
    """

    slot: int
    tokens: tuple[int, ...]
    start: int
    sampling: SamplingParams | None


class Engine(Protocol):
    """What a worker needs of an inference engine."""

    @property
    def layout(self) -> KVLayout:
        """Layout of the KV this engine computes."""

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt plus output the model allows."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a generation."""

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, vocab_size)."""

    def attach_pages(self, memory: memoryview, num_blocks: int) -> None:
        """Use ``memory`` (writable, ``num_blocks * layout.block_bytes`` bytes) as pages. The caller keeps owning it."""

    def attach_device_pages(self, num_blocks: int) -> None:
        """Allocate ``num_blocks`` pages in the memory the engine computes in, once, for a device tier.

        Raises:
            CapacityError: no memory for them.
        """

    def open(self, capacity_tokens: int) -> int:
        """Open a sequence with an empty view that can grow to ``capacity_tokens``; returns its slot.

        Raises:
            CapacityError: no memory for the view.
        """

    def close(self, slot: int) -> None:
        """Drop a sequence's view. The slot may be reused afterwards."""

    def load_blocks(self, slot: int, first_block: int, block_ids: Sequence[BlockId]) -> None:
        """Copy pages into the view: page ``block_ids[i]`` becomes block ``first_block + i`` of the sequence."""

    def store_blocks(self, slot: int, first_block: int, block_ids: Sequence[BlockId]) -> None:
        """Copy full blocks of the view into pages, the inverse of `load_blocks`."""

    def load_device_blocks(self, slot: int, first_block: int, block_ids: Sequence[BlockId]) -> None:
        """`load_blocks` from device pages."""

    def store_device_blocks(self, slot: int, first_block: int, block_ids: Sequence[BlockId]) -> None:
        """`store_blocks` into device pages."""

    def step(self, batch: Sequence[SequenceSlice]) -> list[TokenLogprobs | None]:
        """Compute every slice, appending its KV to its view; one entry a slice, None where ``sampling`` is None.

        The draw at a position depends only on (seed, position). Greedy takes the first maximum. A step may be
        repeated: the same slices write the same KV again.

        Raises:
            NumericsError: logits of some slices are not finite; ``details["slots"]`` names them, comma-separated.
                The caller ends those requests and steps again with the others.
        """

    def shutdown(self) -> None:
        """Free weights and views. May be repeated."""
