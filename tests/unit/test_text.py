"""Streaming text: pieces add up to the whole, nothing is taken back, stop strings never leak."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.text import TextStream


def _decode(tokens: Sequence[int]) -> str:
    """Tokens are bytes; a cut character decodes to U+FFFD, as tokenizers do."""
    return bytes(tokens).decode("utf-8", errors="replace")


@given(st.text(alphabet="abå€🙂", max_size=30), st.lists(st.integers(1, 5), max_size=60))
def test_pieces_add_up_to_the_whole_text_whatever_the_chunking(text: str, sizes: list[int]) -> None:
    stream = TextStream(_decode)
    raw = list(text.encode())
    pieces = []
    for size in sizes:
        pieces.append(stream.push(raw[:size]))
        raw = raw[size:]
    pieces.append(stream.push(raw, last=True))
    assert "".join(pieces) == text == stream.text


@given(st.text(alphabet="abc", max_size=20), st.sampled_from(["c", "ab", "abca"]), st.integers(1, 4))
def test_text_ends_before_the_stop_string_and_none_of_it_leaks(text: str, stop: str, size: int) -> None:
    stream = TextStream(_decode, (stop,))
    raw = list(text.encode())
    pieces = [stream.push(raw[start : start + size]) for start in range(0, len(raw), size)]
    pieces.append(stream.push([], last=True))
    assert "".join(pieces) == text.partition(stop)[0]
    assert stream.stopped == (stop in text)


def test_half_a_character_is_held_back() -> None:
    stream = TextStream(_decode)
    first, *rest = "🙂".encode()
    assert stream.push([first]) == ""
    assert stream.push(rest) == "🙂"


def test_nothing_comes_after_a_stop() -> None:
    stream = TextStream(_decode, ("b",))
    assert stream.push(list(b"ab")) == "a"
    assert stream.push(list(b"cd"), last=True) == ""


@pytest.mark.parametrize("stops", [("xy", "x"), ("x", "xy")])
def test_the_earliest_of_several_stop_strings_counts(stops: tuple[str, ...]) -> None:
    stream = TextStream(_decode, stops)
    assert stream.push(list(b"axyz")) == "a"
