"""KV arithmetic by attention kind, against the published configurations of 18 models."""

from __future__ import annotations

import csv
from itertools import product
from pathlib import Path

import pytest

from kvpool.errors import RequestError
from kvpool.layout import (
    AttentionKind,
    ChainHeld,
    KVGroup,
    KVLayout,
    StatesHeld,
    WindowHeld,
    hit_boundary,
    window_blocks,
)
from router.simulation.models import MODEL_GROUPS, model_layout

ROWS = list(csv.DictReader((Path(__file__).parents[1] / "data" / "model_footprints.csv").open()))
FULL = KVGroup(AttentionKind.FULL, 2, 100)
SLIDING = KVGroup(AttentionKind.SLIDING, 1, 10, window=8, sinks=2)
LINEAR = KVGroup(AttentionKind.LINEAR, 4, 0, fixed_bytes=1000)


def test_every_model_of_the_reference_is_described() -> None:
    assert {row["model"] for row in ROWS} == set(MODEL_GROUPS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["model"])
def test_footprints_equal_the_reference(row: dict[str, str]) -> None:
    layout = model_layout(row["model"])
    per_token = layout.growing_block_bytes / layout.block_tokens
    assert per_token == pytest.approx(1000 * float(row["kv_kB_per_token"]), rel=1e-5)
    assert layout.fixed_bytes == pytest.approx(1e6 * float(row["fixed_MB"]), rel=1e-5)
    for name, tokens in (("8k", 8192), ("32k", 32_768), ("128k", 131_072)):
        assert layout.prefix_bytes(tokens) == pytest.approx(1e9 * float(row[f"footprint_GB_{name}"]), rel=1e-5)
        assert layout.start_bytes(tokens) == pytest.approx(1e9 * float(row[f"lazy_start_GB_{name}"]), rel=1e-5)
        assert layout.move_bytes(0, tokens) == layout.prefix_bytes(tokens)


def test_moving_in_two_steps_costs_a_dense_group_nothing_extra() -> None:
    layout = KVLayout("m", "bf16", 16, (FULL,))
    assert layout.move_bytes(0, 64) + layout.move_bytes(64, 160) == layout.move_bytes(0, 160)
    assert layout.move_bytes(160, 160) == 0


def test_a_window_moves_only_what_the_reader_lacks_of_it() -> None:
    assert SLIDING.move_bytes(0, 100) == 10 * (8 + 2)
    assert SLIDING.move_bytes(2, 100) == 10 * 8
    assert SLIDING.move_bytes(97, 100) == 10 * 3
    assert SLIDING.move_bytes(0, 5) == 10 * 5
    assert SLIDING.prefix_bytes(5) == 10 * 5


def test_a_state_moves_whole_wherever_the_reader_stands() -> None:
    assert LINEAR.move_bytes(0, 10) == LINEAR.move_bytes(9, 10) == 1000
    assert LINEAR.prefix_bytes(0) == 0


def test_blocks_must_not_cut_compressed_entries() -> None:
    with pytest.raises(RequestError, match="multiple of 128"):
        KVLayout("m", "bf16", 16, (KVGroup(AttentionKind.LATENT, 1, 100, entry_tokens=128),))


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers": 0},
        {"entry_tokens": 0},
        {"entry_bytes": -1},
        {"kind": AttentionKind.SLIDING},
        {"window": 8},
        {"kind": AttentionKind.SLIDING, "window": 0},
    ],
)
def test_impossible_groups_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(RequestError):
        KVGroup(**{"kind": AttentionKind.FULL, "layers": 1, "entry_bytes": 4, **wrong})  # type: ignore[arg-type]


def test_layouts_that_differ_have_different_fingerprints() -> None:
    one = KVLayout("m", "bf16", 16, (FULL,))
    assert one.fingerprint() == KVLayout("m", "bf16", 16, (FULL,)).fingerprint()
    assert one.fingerprint() != KVLayout("m", "bf16", 32, (FULL,)).fingerprint()
    assert one.fingerprint() != KVLayout("m", "bf16", 16, (FULL, LINEAR)).fingerprint()


@pytest.mark.parametrize(("window", "blocks"), [(1, 0), (2, 1), (17, 1), (18, 2), (128, 8), (129, 8), (130, 9)])
def test_a_window_needs_the_blocks_of_its_last_tokens_but_one(window: int, blocks: int) -> None:
    assert window_blocks(window, 16) == blocks


def test_a_hit_of_a_hybrid_model_ends_where_all_groups_agree() -> None:
    chain = ChainHeld(10)
    states = StatesHeld(frozenset({4, 8, 12}))
    assert hit_boundary([chain, states], 20) == 8
    window = WindowHeld([True] * 5 + [False] * 2 + [True] * 3, window_blocks=2)
    assert hit_boundary([chain, window], 20) == 10
    assert hit_boundary([chain, window, states], 20) == 4  # at 8 the window lacks block 6
    assert hit_boundary([chain, window, StatesHeld(frozenset({6, 7, 8}))], 20) == 0
    assert hit_boundary([], 7) == 7


def test_lost_sinks_leave_only_what_comes_before_them() -> None:
    held = WindowHeld([True, False, True, True], window_blocks=1, sink_blocks=2)
    assert held.longest(4) == 1
    assert WindowHeld([True, True, False, True], window_blocks=1, sink_blocks=2).longest(4) == 4


def test_the_fixed_point_equals_a_search_over_every_boundary() -> None:
    size = 5
    chain = ChainHeld(4)
    for bits in product([False, True], repeat=size):
        for stored in product([False, True], repeat=size):
            window = WindowHeld(bits, window_blocks=2, sink_blocks=1)
            states = StatesHeld(frozenset(i + 1 for i, held in enumerate(stored) if held))
            whole = [
                b for b in range(1, 5) if all(bits[max(0, b - 2) : b]) and bits[0] and b in states.boundaries and b <= 4
            ]
            assert hit_boundary([chain, window, states], size) == max(whole, default=0)
