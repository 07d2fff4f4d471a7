"""Fetching from another process's memory: what comes, what is refused, and who is mistaken for the holder."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from dataclasses import replace

import numpy as np
import xxhash

from kvpool.errors import PeerGoneError
from kvpool.transport.ucx.direct import CALL_BYTES, DirectMemory, Fragment
from kvpool.transport.verify import Check
from kvpool.transport.wire import Window

BLOCK = 4096
BLOCKS = 600  # more fragments than one call takes


class Two:
    """A holder's and a reader's segment, in one process."""

    def __init__(self) -> None:
        self.theirs = np.random.default_rng(1).integers(0, 256, BLOCKS * BLOCK, dtype=np.uint8)
        self.mine = np.zeros(BLOCKS * BLOCK, dtype=np.uint8)
        self.holder = DirectMemory(self.theirs.data, {})
        self.reader = DirectMemory(self.mine.data, {})

    def window(self, blocks: list[int]) -> Window:
        window = self.holder.window(self.reader.host, [block * BLOCK for block in blocks])
        assert window is not None
        return window

    def fragments(self, window: Window, blocks: list[int]) -> list[Fragment]:
        """Each block into the page of its number."""
        return [
            Fragment(
                address,
                block * BLOCK,
                Check(
                    self.mine.data[block * BLOCK : (block + 1) * BLOCK],
                    BLOCK,
                    (xxhash.xxh3_64_intdigest(self.theirs[block * BLOCK : (block + 1) * BLOCK]),),
                ),
            )
            for address, block in zip(window.addresses, blocks, strict=True)
        ]


def test_scattered_blocks_land_where_they_belong_in_any_number() -> None:
    two = Two()
    blocks = list(range(0, BLOCKS, 2)) + list(range(BLOCKS - 1, 0, -2))
    window = two.window(blocks)
    fetched = two.reader.fetch(window, two.fragments(window, blocks), lambda: True)
    assert fetched.error is None
    assert fetched.verdicts == ((True,),) * BLOCKS
    assert np.array_equal(two.mine, two.theirs)


def test_a_block_that_differs_from_its_checksum_is_told_apart() -> None:
    two = Two()
    window = two.window([3, 4, 5])
    fragments = two.fragments(window, [3, 4, 5])
    two.theirs[4 * BLOCK] ^= 1
    assert two.reader.fetch(window, fragments, lambda: True).verdicts == ((True,), (False,), (True,))


def test_what_is_not_wanted_any_more_is_not_fetched() -> None:
    two = Two()
    blocks = list(range(2 * CALL_BYTES // BLOCK))
    window, answers = two.window(blocks), iter([True, False])
    fetched = two.reader.fetch(window, two.fragments(window, blocks), lambda: next(answers))
    assert fetched.error is None
    assert fetched.verdicts == ((True,),) * (len(blocks) // 2) + ((),) * (len(blocks) // 2)
    assert not two.mine[CALL_BYTES:].any()


def test_a_closed_holder_offers_nothing_and_is_not_believed() -> None:
    two = Two()
    window = two.window([1])
    assert two.reader.reaches(window)
    two.holder.close()
    assert two.holder.window(two.reader.host, [0]) is None
    assert not two.reader.reaches(window)
    fetched = two.reader.fetch(window, two.fragments(window, [1]), lambda: True)
    assert fetched.verdicts == ((),)
    assert isinstance(fetched.error, PeerGoneError)


def test_an_address_that_is_not_there_is_a_typed_error() -> None:
    two = Two()
    window = replace(two.window([1]), addresses=(4096,))
    fetched = two.reader.fetch(window, two.fragments(window, [1]), lambda: True)
    assert isinstance(fetched.error, PeerGoneError)


def test_a_process_that_ended_is_a_typed_error() -> None:
    two = Two()
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(30)
    window = replace(two.window([1]), pid=child.pid)
    fetched = two.reader.fetch(window, two.fragments(window, [1]), lambda: True)
    assert isinstance(fetched.error, PeerGoneError)


def test_another_value_where_the_cookie_was_means_another_holder() -> None:
    two = Two()
    other = ctypes.c_uint64(7)
    window = replace(two.window([1]), cookie_at=ctypes.addressof(other))
    assert not two.reader.reaches(window)


def test_settings_without_shared_memory_and_other_hosts_get_no_window() -> None:
    two = Two()
    assert DirectMemory(two.mine.data, {"TLS": "tcp,self"}).host == 0
    assert DirectMemory(two.mine.data, {"TLS": "^sm"}).host == 0
    assert DirectMemory(two.mine.data, {"TLS": "sm,tcp"}).host == two.reader.host != 0
    assert two.holder.window(0, [0]) is None
    assert two.holder.window(two.holder.host + 2, [0]) is None
