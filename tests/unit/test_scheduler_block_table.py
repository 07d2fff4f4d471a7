"""The block table: page states, the sealed run, what may be read and sealed."""

from __future__ import annotations

import pytest

from kvpool.errors import InvariantViolation
from kvpool.hashing import block_hashes
from kvpool.types import BlockId
from tests.worker_support import namespace
from workers.block_table import READABLE, BlockTable, PageState

SPACE = namespace(block_tokens=4)


def table(tokens: int, *pages: int) -> BlockTable:
    made = BlockTable(SPACE.root(), 4)
    made.extend_chain(range(tokens))
    made.assign(list(range(len(pages))), [BlockId(page) for page in pages])
    return made


def test_the_chain_grows_as_whole_hashing_would_make_it() -> None:
    made = BlockTable(SPACE.root(), 4)
    for length in (0, 3, 4, 5, 11, 12, 30):
        made.extend_chain(range(length))
        assert made.chain == list(block_hashes(range(length), SPACE))
    assert made.parent_of(0) == SPACE.root()
    assert made.parent_of(2) == made.chain[1]


def test_only_a_leading_run_of_complete_blocks_can_be_sealed() -> None:
    made = table(16, 7, 8, 9, 10)
    assert made.sealable(0) == []
    assert made.sealable(2) == [0, 1]
    made.move(1, PageState.FLYING)
    assert made.sealable(4) == [0], "a page that a load may still write is not offered, nor is what follows"
    made.move(1, PageState.ARRIVED)
    assert made.sealable(4) == [0]
    made.move(1, PageState.FILLED)
    assert made.sealable(1) == [0, 1]
    assert made.sealable(4) == [0, 1, 2, 3]
    made.seal(0, BlockId(70))
    assert (made.page(0), made.sealed_blocks) == (70, 1)
    made.adopt(2, BlockId(90))
    assert made.sealed_blocks == 1
    made.seal(1, BlockId(8))
    assert made.sealed_blocks == 3


def test_readable_runs_and_gaps() -> None:
    made = table(20, 1, 2, 3, 4)
    made.adopt(0, BlockId(50))
    made.move(1, PageState.FLYING)
    made.adopt(3, BlockId(51))
    assert made.readable_run(0, 5) == 1
    assert made.readable_run(1, 5) == 0
    assert made.next_in(1, 5, READABLE) == 3
    assert made.next_in(0, 5, (PageState.FLYING,)) == 1
    assert made.next_in(4, 5, READABLE) == 5
    assert made.missing(5) == [4]
    assert made.flying() == [1]


def test_an_adopted_page_replaces_the_one_before() -> None:
    made = table(8, 1)
    assert made.adopt(0, BlockId(9)) == 1
    assert made.adopt(1, BlockId(10)) is None
    assert made.clear() == [9, 10]
    assert (made.pages(), made.sealed_blocks) == ([], 0)


def test_only_pages_that_a_load_may_write_are_detached() -> None:
    made = table(12, 7, 8, 9)
    made.move(0, PageState.FLYING)
    made.move(1, PageState.FLYING)
    made.move(1, PageState.ARRIVED)
    assert made.detach([1, 0]) == [7, 8]
    assert (made.missing(3), made.flying(), made.arrived()) == ([0, 1], [], [])
    with pytest.raises(InvariantViolation, match="no load"):
        made.detach([2])


def test_what_a_view_holds_whole_is_late_while_a_load_may_write_its_page() -> None:
    made = table(12, 7, 8, 9)
    for index in (0, 1, 2):
        made.move(index, PageState.FLYING)
    made.move(1, PageState.ARRIVED)
    assert (made.late(3), made.late(8), made.late(11), made.late(12)) == ([], [0, 1], [0, 1], [0, 1, 2])
    assert made.lacks(0, made.chain[0])
    assert not made.lacks(1, made.chain[1]), "it can be read"
    assert not made.lacks(0, made.chain[1])
    assert not made.lacks(3, made.chain[0])


def test_impossible_moves_are_our_bug() -> None:
    made = table(8, 1, 2)
    with pytest.raises(InvariantViolation, match="cannot go from blank to filled"):
        made.move(0, PageState.FILLED)
    with pytest.raises(InvariantViolation, match="second page"):
        made.assign([0], [BlockId(5)])
    made.move(0, PageState.FLYING)
    with pytest.raises(InvariantViolation, match="cannot be sealed"):
        made.seal(0, BlockId(1))
