"""The arena: zeroed, aligned, writable, and given back."""

import ctypes

import pytest

from kvpool.errors import CapacityError, RequestError
from kvpool.store.arena import HUGE_PAGE_BYTES, Arena


@pytest.mark.parametrize("size", [1, 4096, HUGE_PAGE_BYTES + 12345])
@pytest.mark.parametrize("touch", [True, False])
def test_memory_has_the_size_asked_for_starts_on_a_huge_page_and_is_zero(size: int, touch: bool) -> None:
    with Arena(size, touch=touch) as arena:
        memory = arena.memory
        assert len(memory) == size
        assert not memory.readonly
        assert bytes(memory) == bytes(size)
        anchor = ctypes.c_char.from_buffer(memory)
        assert ctypes.addressof(anchor) % HUGE_PAGE_BYTES == 0
        del anchor


def test_what_is_written_is_read_until_the_arena_closes() -> None:
    arena = Arena(100)
    arena.memory[10:14] = b"kv!!"
    assert bytes(arena.memory[9:15]) == b"\0kv!!\0"
    arena.close()
    arena.close()
    with pytest.raises(RequestError, match="closed"):
        _ = arena.memory


def test_a_forgotten_slice_does_not_keep_the_arena_from_closing() -> None:
    arena = Arena(100)
    arena.memory[0] = 7
    kept = arena.memory[:4]
    arena.close()
    assert bytes(kept) == bytes(4), "the memory itself is gone"


def test_impossible_sizes_are_refused_with_a_way_out() -> None:
    with pytest.raises(RequestError, match="at least 1 byte"):
        Arena(0)
    with pytest.raises(CapacityError, match=r"engine\.num_blocks"):
        Arena(1 << 60)
