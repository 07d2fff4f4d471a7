"""Dense working views of sequences, and copies between views and block pages.

A view is one tensor ``[layer, K/V, kv_head, capacity, dim]``; attention reads its front without gathering pages. On
the CPU a view is virtual memory until its tokens are written: opening one for 8,000 tokens costs nothing, so it
never has to grow. On an accelerator it is allocated in full. Closed views are kept for reuse up to a byte limit,
because fresh memory costs a page fault per 4 KiB and used memory none.

Pages are ``[block, layer, K/V, kv_head, token, dim]``: one block is one contiguous run of bytes. Copies go run by run
over consecutive block ids, one strided copy each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvpool.errors import CapacityError, InvariantViolation
from kvpool.types import BlockId

MIN_CAPACITY_TOKENS = 256
"""Capacities are rounded up to this times a power of two, so that closed views fit new sequences."""

GATHER_BYTES = 256 << 20

_INTEGERS = {2: torch.int16, 4: torch.int32}
"""Integer dtype of the same width as an element."""


@dataclass(frozen=True, slots=True)
class ViewShape:
    """What one token of one sequence occupies."""

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int

    def view(self, capacity_tokens: int) -> tuple[int, ...]:
        """Shape of a view."""
        return (self.layers, 2, self.kv_heads, capacity_tokens, self.head_dim)

    def pages(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of the pages."""
        return (num_blocks, self.layers, 2, self.kv_heads, self.block_tokens, self.head_dim)


def allocate_pages(shape: ViewShape, num_blocks: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Pages in the memory of ``device``; their content is arbitrary.

    Raises:
        CapacityError: the allocator refused.
    """
    try:
        return torch.empty(shape.pages(num_blocks), dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        raise CapacityError(
            f"no memory for {num_blocks} blocks on {device}: {error}; lower store.device_blocks",
            device_blocks=num_blocks,
        ) from error


class ViewPool:
    """Allocates views and keeps closed ones. Not thread-safe.

    Args:
        shape: of a token.
        dtype, device: of every view.
        spare_bytes: closed views kept for reuse, by their capacity, at most this many bytes.
    """

    def __init__(self, shape: ViewShape, *, dtype: torch.dtype, device: torch.device, spare_bytes: int) -> None:
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._spare_limit_bytes = spare_bytes
        self._spare_bytes = 0
        self._spare: dict[int, list[torch.Tensor]] = {}

    def take(self, capacity_tokens: int) -> torch.Tensor:
        """A view for at least ``capacity_tokens``; its content is arbitrary.

        Raises:
            CapacityError: the allocator refused.
        """
        rounded = round_capacity(capacity_tokens)
        if spare := self._spare.get(rounded):
            view = spare.pop()
            self._spare_bytes -= view.nbytes
            return view
        try:
            return torch.empty(self._shape.view(rounded), dtype=self._dtype, device=self._device)
        except (RuntimeError, MemoryError) as error:  # torch reports a refused allocation as a RuntimeError
            raise CapacityError(
                f"no memory for the working view of a sequence of {rounded} tokens; "
                "run fewer sequences at once or shorter ones",
                capacity_tokens=rounded,
            ) from error

    def give_back(self, view: torch.Tensor) -> None:
        """Take a view that nobody uses any more."""
        if self._spare_bytes + view.nbytes <= self._spare_limit_bytes:
            self._spare.setdefault(view.shape[3], []).append(view)
            self._spare_bytes += view.nbytes

    def clear(self) -> None:
        """Drop every spare view."""
        self._spare.clear()
        self._spare_bytes = 0


def round_capacity(tokens: int) -> int:
    """The smallest `MIN_CAPACITY_TOKENS` x power of two that holds ``tokens``."""
    rounded = MIN_CAPACITY_TOKENS
    while rounded < tokens:
        rounded *= 2
    return rounded


def map_pages(memory: memoryview, shape: ViewShape, num_blocks: int, dtype: torch.dtype) -> torch.Tensor:
    """See ``memory`` as pages, without a copy. The tensor keeps the buffer exported until it is dropped.

    Raises:
        InvariantViolation: the memory is read-only or of another size.
    """
    pages_shape = shape.pages(num_blocks)
    expected = torch.Size(pages_shape).numel() * dtype.itemsize
    if memory.readonly or memory.nbytes != expected:
        raise InvariantViolation(
            f"page memory must be writable and {expected} bytes, got {memory.nbytes} (readonly={memory.readonly})"
        )
    return torch.frombuffer(memory, dtype=dtype).view(pages_shape)


def load_pages(view: torch.Tensor, pages: torch.Tensor, first_block: int, block_ids: Sequence[BlockId]) -> None:
    """Copy pages into blocks ``first_block ...`` of a view."""
    for offset, page_start, page_stop in _runs(block_ids):
        source = pages[page_start:page_stop].permute(1, 2, 3, 0, 4, 5)
        _copy(_as_blocks(view, first_block + offset, page_stop - page_start, pages.shape[4]), source)


def store_pages(view: torch.Tensor, pages: torch.Tensor, first_block: int, block_ids: Sequence[BlockId]) -> None:
    """Copy blocks ``first_block ...`` of a view into pages, the inverse of `load_pages`."""
    for offset, page_start, page_stop in _runs(block_ids):
        blocks = _as_blocks(view, first_block + offset, page_stop - page_start, pages.shape[4])
        _copy(pages[page_start:page_stop], blocks.permute(3, 0, 1, 2, 4, 5))


def gather_pages(view: torch.Tensor, pages: torch.Tensor, first_block: int, block_ids: Sequence[BlockId]) -> None:
    """`load_pages` in one gather and one copy, wherever the pages lie in their tensor; for an accelerator, where every
    copy is a launch; a gather takes at most `GATHER_BYTES` of memory for the moment. Pages and view are on one
    device."""
    for start, ids in _pieces(block_ids, pages):
        target = _as_blocks(view, first_block + start, len(ids), pages.shape[4])
        target.copy_(pages[_index(ids, pages.device)].permute(1, 2, 3, 0, 4, 5))


def scatter_pages(view: torch.Tensor, pages: torch.Tensor, first_block: int, block_ids: Sequence[BlockId]) -> None:
    """`store_pages` in one copy, the inverse of `gather_pages`, bounded alike."""
    for start, ids in _pieces(block_ids, pages):
        source = _as_blocks(view, first_block + start, len(ids), pages.shape[4])
        pages[_index(ids, pages.device)] = source.permute(3, 0, 1, 2, 4, 5)


def _pieces(block_ids: Sequence[BlockId], pages: torch.Tensor) -> Iterator[tuple[int, Sequence[BlockId]]]:
    """The ids in pieces of at most `GATHER_BYTES`, each with the index of its first."""
    size = max(1, GATHER_BYTES // (pages.stride(0) * pages.itemsize))
    for start in range(0, len(block_ids), size):
        yield start, block_ids[start : start + size]


def _index(block_ids: Sequence[BlockId], device: torch.device) -> slice | torch.Tensor:
    """What selects these pages: a slice of one run, which needs no memory on the device, else their ids."""
    if list(block_ids) == list(range(block_ids[0], block_ids[0] + len(block_ids))):
        return slice(block_ids[0], block_ids[0] + len(block_ids))
    return torch.tensor(block_ids, dtype=torch.long, device=device)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between tensors of equal shape and dtype.

    On the CPU by one thread, through numpy. Torch would split each run over its threads and wait for the slowest:
    a little faster on idle cores, but tens of times slower when workers share them, because every run then waits for
    a thread to be scheduled.
    """
    if target.device.type == "cpu" and source.device.type == "cpu":
        integers = _INTEGERS[target.dtype.itemsize]  # numpy knows no bfloat16; the bits are what is copied
        np.copyto(target.view(integers).numpy(), source.view(integers).numpy())
    elif source.device.type == "cpu":
        # One contiguous run travels to the device, where the permutation is cheap.
        target.copy_(source.permute(3, 0, 1, 2, 4, 5).to(target.device).permute(1, 2, 3, 0, 4, 5))
    else:
        target.copy_(source.contiguous().to(target.device))


def _as_blocks(view: torch.Tensor, first_block: int, count: int, block_tokens: int) -> torch.Tensor:
    """Blocks of a view as ``[layer, K/V, kv_head, block, token, dim]``, aliasing it."""
    start, stop = first_block * block_tokens, (first_block + count) * block_tokens
    if stop > view.shape[3]:
        raise InvariantViolation(f"blocks end at token {stop}, beyond the view's capacity of {view.shape[3]}")
    layers, kinds, kv_heads, _, head_dim = view.shape
    return view[:, :, :, start:stop].view(layers, kinds, kv_heads, count, block_tokens, head_dim)


def _runs(block_ids: Sequence[BlockId]) -> Iterator[tuple[int, int, int]]:
    """Runs of consecutive ids as (index of the first, id of the first, id after the last)."""
    begin = 0
    for index in range(1, len(block_ids) + 1):
        if index == len(block_ids) or block_ids[index] != block_ids[index - 1] + 1:
            yield begin, block_ids[begin], block_ids[begin] + index - begin
            begin = index
