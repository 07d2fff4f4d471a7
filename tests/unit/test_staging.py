"""Staging buffers are bounded, counted, reused, and never again used once written off."""

from __future__ import annotations

import pytest

from kvpool.errors import InvariantViolation
from kvpool.transport.staging import StagingPool


def test_buffers_are_bounded_and_come_back() -> None:
    pool = StagingPool(1000)
    held = [pool.take(400), pool.take(400)]
    assert not pool.fits(400)
    pool.give_back(held.pop())
    assert pool.fits(400)
    pool.give_back(held.pop())
    assert pool.used_bytes == 0


def test_a_returned_buffer_is_reused_and_shows_only_what_was_asked_for() -> None:
    pool = StagingPool(1000)
    first = pool.take(400)
    pool.give_back(first)
    again = pool.take(350)
    assert again.whole is first.whole
    assert len(again.view) == 350


def test_a_single_buffer_may_be_longer_than_the_limit() -> None:
    pool = StagingPool(1000)
    big = pool.take(5000)
    assert not pool.fits(1)
    pool.give_back(big)
    assert pool.fits(1)


def test_a_buffer_is_returned_once() -> None:
    pool = StagingPool(1000)
    held = pool.take(10)
    pool.give_back(held)
    for end in (pool.give_back, pool.write_off):
        with pytest.raises(InvariantViolation):
            end(held)


def test_what_was_written_off_makes_room_and_is_never_handed_out_again() -> None:
    pool = StagingPool(1000)
    lost = pool.take(1000)
    pool.write_off(lost)
    assert (pool.used_bytes, pool.written_off_bytes) == (0, 1000)
    assert pool.take(1000).whole is not lost.whole
