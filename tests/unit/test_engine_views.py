"""Pages and views: the byte layout that moves between workers, runs of blocks, reuse of memory."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kvpool.errors import CapacityError, InvariantViolation
from tests.engine_parity import block_ids
from workers.engine import views
from workers.engine.views import (
    ViewPool,
    ViewShape,
    allocate_pages,
    gather_pages,
    load_pages,
    map_pages,
    round_capacity,
    scatter_pages,
    store_pages,
)

SHAPE = ViewShape(layers=3, kv_heads=2, head_dim=4, block_tokens=5)
BLOCK_BYTES = 3 * 2 * 2 * 5 * 4 * 4


def pool_of(spare_bytes: int) -> ViewPool:
    return ViewPool(SHAPE, dtype=torch.float32, device=torch.device("cpu"), spare_bytes=spare_bytes)


def random_view(capacity: int) -> torch.Tensor:
    return torch.randn(SHAPE.view(capacity), generator=torch.Generator().manual_seed(capacity))


def test_a_block_is_one_contiguous_run_ordered_layer_kind_head_token_dim() -> None:
    memory = bytearray(7 * BLOCK_BYTES)
    view = random_view(40)
    store_pages(view, map_pages(memoryview(memory), SHAPE, 7, torch.float32), 2, block_ids(5))
    raw = np.frombuffer(memory, dtype=np.float32)
    block = raw[5 * BLOCK_BYTES // 4 : 6 * BLOCK_BYTES // 4].reshape(3, 2, 2, 5, 4)
    assert np.array_equal(block, view[:, :, :, 10:15].numpy())
    assert not raw[: 5 * BLOCK_BYTES // 4].any()
    assert not raw[6 * BLOCK_BYTES // 4 :].any()


@pytest.mark.parametrize("seed", range(20))
def test_storing_and_loading_any_blocks_gives_the_same_tokens_back(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 8)
    ids = block_ids(*rng.sample(range(12), count))
    if seed % 2:
        ids = sorted(ids)
    pages = map_pages(memoryview(bytearray(12 * BLOCK_BYTES)), SHAPE, 12, torch.float32)
    source, target = random_view(60), torch.zeros(SHAPE.view(45 + 5))
    first_from, first_to = rng.randint(0, 12 - count), rng.randint(0, 10 - count)
    store_pages(source, pages, first_from, ids)
    load_pages(target, pages, first_to, ids)
    expected = torch.zeros_like(target)
    expected[:, :, :, first_to * 5 : (first_to + count) * 5] = source[
        :, :, :, first_from * 5 : (first_from + count) * 5
    ]
    assert torch.equal(target, expected)


@pytest.mark.parametrize("gather_blocks", [1, 3, 100])
@pytest.mark.parametrize("ids", [(), (3,), (4, 5, 6), (7, 2, 3, 0)])
def test_one_gather_copies_what_run_by_run_copies(
    ids: tuple[int, ...], gather_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "GATHER_BYTES", gather_blocks * BLOCK_BYTES)
    cpu = torch.device("cpu")
    runs, gathered = (allocate_pages(SHAPE, 8, dtype=torch.float32, device=cpu).zero_() for _ in range(2))
    source = random_view(40)
    store_pages(source, runs, 1, block_ids(*ids))
    scatter_pages(source, gathered, 1, block_ids(*ids))
    assert torch.equal(runs, gathered)
    one, other = torch.zeros(SHAPE.view(40)), torch.zeros(SHAPE.view(40))
    load_pages(one, runs, 2, block_ids(*ids))
    gather_pages(other, runs, 2, block_ids(*ids))
    assert torch.equal(one, other)
    assert torch.equal(one[:, :, :, 10 : 10 + 5 * len(ids)], source[:, :, :, 5 : 5 + 5 * len(ids)])


def test_device_pages_that_find_no_memory_say_which_setting_to_lower() -> None:
    with pytest.raises(CapacityError, match=r"store\.device_blocks"):
        allocate_pages(SHAPE, 1 << 50, dtype=torch.float32, device=torch.device("cpu"))


def test_half_precision_travels_bit_by_bit() -> None:
    pages = map_pages(memoryview(bytearray(BLOCK_BYTES // 2 * 3)), SHAPE, 3, torch.bfloat16)
    source, target = random_view(15).bfloat16(), torch.zeros(SHAPE.view(15), dtype=torch.bfloat16)
    source[0, 0, 0, 0, 0] = torch.nan
    store_pages(source, pages, 0, block_ids(2, 0, 1))
    load_pages(target, pages, 0, block_ids(2, 0, 1))
    assert torch.equal(target.view(torch.int16), source.view(torch.int16))


def test_copying_beyond_a_view_is_refused() -> None:
    pages = map_pages(memoryview(bytearray(2 * BLOCK_BYTES)), SHAPE, 2, torch.float32)
    with pytest.raises(InvariantViolation, match="capacity of 8"):
        load_pages(random_view(8), pages, 0, block_ids(0, 1))


def test_memory_of_the_wrong_size_or_read_only_is_refused() -> None:
    with pytest.raises(InvariantViolation, match=str(BLOCK_BYTES)):
        map_pages(memoryview(bytearray(BLOCK_BYTES - 1)), SHAPE, 1, torch.float32)
    with pytest.raises(InvariantViolation, match="readonly=True"):
        map_pages(memoryview(bytes(BLOCK_BYTES)), SHAPE, 1, torch.float32)


def test_capacities_are_rounded_to_few_sizes() -> None:
    assert [round_capacity(tokens) for tokens in (1, 256, 257, 1000, 4096)] == [256, 256, 512, 1024, 4096]


def test_a_closed_view_serves_the_next_sequence_of_its_size() -> None:
    pool = pool_of(spare_bytes=1 << 20)
    first = pool.take(300)
    pool.give_back(first)
    assert pool.take(10).data_ptr() != first.data_ptr()
    assert pool.take(400).data_ptr() == first.data_ptr()


def test_spare_views_are_bounded_by_bytes() -> None:
    pool = pool_of(spare_bytes=2 * random_view(256).nbytes)
    views = [pool.take(256) for _ in range(4)]
    for view in views:
        pool.give_back(view)
    kept = {view.data_ptr() for view in views[:2]}
    again = [pool.take(256) for _ in range(2)]
    assert {view.data_ptr() for view in again} == kept
    pool.give_back(again[0])
    pool.clear()


def test_a_refused_allocation_is_a_capacity_error() -> None:
    with pytest.raises(CapacityError, match="no memory for the working view"):
        pool_of(spare_bytes=0).take(1 << 50)
