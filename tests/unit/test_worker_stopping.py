"""Why generations end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvpool.request import FinishReason, SamplingParams
from workers.stopping import finish_reason

EOS = frozenset({2})


def decode(tokens: Sequence[int]) -> str:
    """Token 10 is 'a', 11 is 'b', and so on; 9 is half a character."""
    return "".join("\ufffd" if token == 9 else chr(87 + token) for token in tokens)


@pytest.mark.parametrize(
    ("sampling", "output", "reason"),
    [
        (SamplingParams(max_tokens=3), [5, 6], None),
        (SamplingParams(max_tokens=3), [5, 6, 7], FinishReason.LENGTH),
        (SamplingParams(max_tokens=3), [5, 2], FinishReason.STOP),
        (SamplingParams(max_tokens=3, ignore_eos=True), [5, 2], None),
        (SamplingParams(max_tokens=3, stop_token_ids=(6,)), [5, 6], FinishReason.STOP),
        (SamplingParams(max_tokens=1, stop_token_ids=(6,)), [6], FinishReason.STOP),
        (SamplingParams(max_tokens=99, stop=("abc",)), [10, 11], None),
        (SamplingParams(max_tokens=99, stop=("abc",)), [10, 11, 12], FinishReason.STOP),
        (SamplingParams(max_tokens=99, stop=("zz", "b")), [9, 9, 11], FinishReason.STOP),
        (SamplingParams(max_tokens=99, stop=("abc",)), [12] * 60 + [10, 11, 12], FinishReason.STOP),
    ],
)
def test_a_generation_ends_for_the_reason_that_comes_first(
    sampling: SamplingParams, output: list[int], reason: FinishReason | None
) -> None:
    assert finish_reason(sampling, EOS, output, decode) is reason


def test_only_the_tail_is_decoded() -> None:
    seen: list[int] = []

    def spy(tokens: Sequence[int]) -> str:
        seen.append(len(tokens))
        return decode(tokens)

    finish_reason(SamplingParams(max_tokens=10_000, stop=("abc",)), EOS, [10] * 5000, spy)
    assert seen == [20]


def test_without_a_decoder_stop_strings_are_not_seen() -> None:
    assert finish_reason(SamplingParams(max_tokens=9, stop=("a",)), EOS, [10], None) is None
