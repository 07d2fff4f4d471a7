"""Which limits a finished request has met, as its worker counts it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpool.plan import REDO
from kvpool.request import FinishReason, GenerateRequest, Limits
from tests.worker_support import make_request, namespace
from workers.block_table import BlockTable
from workers.limits import goodput_counter
from workers.sequence import Sequence

MS = 1_000_000


def finished(request: GenerateRequest, first_ms: int, tokens: int) -> Sequence:
    """A request that arrived at 100 ms, had its first token ``first_ms`` later and has ``tokens`` now."""
    sequence = Sequence(request, REDO, "d", BlockTable(namespace(block_tokens=4).root(), 4), 100 * MS, 10**12)
    sequence.tally.first_token_ns = (100 + first_ms) * MS
    for _ in range(tokens):
        sequence.append(1)
    return sequence


@pytest.mark.parametrize(
    ("limits", "elapsed_ms", "expected"),
    [
        (Limits(), 10_000, "goodput_met"),
        (Limits(ttft_ns=50 * MS), 0, "goodput_met"),
        (Limits(ttft_ns=50 * MS), 21, "goodput_missed_ttft"),
        (Limits(tpot_ns=10 * MS), 0, "goodput_met"),
        (Limits(tpot_ns=9 * MS), 0, "goodput_missed_tpot"),
        (Limits(ttft_ns=1, tpot_ns=1), 0, "goodput_missed_ttft"),
    ],
)
def test_the_first_limit_missed_is_counted(limits: Limits, elapsed_ms: int, expected: str) -> None:
    request = replace(make_request("r", [1, 2, 3]), limits=limits, elapsed_ns=elapsed_ms * MS)
    assert goodput_counter(finished(request, first_ms=30, tokens=5), FinishReason.LENGTH, now_ns=170 * MS) == expected


@pytest.mark.parametrize(("ttft_ms", "expected"), [(20, "goodput_met"), (21, "goodput_missed_ttft")])
def test_a_first_token_that_an_earlier_attempt_delivered_counts_as_it_came(ttft_ms: int, expected: str) -> None:
    limits = Limits(ttft_ns=20 * MS)
    request = replace(make_request("r", [1, 2, 3]), limits=limits, generated=(7,), elapsed_ns=10**9)
    request = replace(request, ttft_ns=ttft_ms * MS)
    assert goodput_counter(finished(request, 30, 2), FinishReason.LENGTH, now_ns=140 * MS) == expected


def test_a_request_that_is_handed_over_is_counted_by_who_finishes_it() -> None:
    first = replace(make_request("r", [1, 2, 3], 1), limits=Limits(ttft_ns=1), hands_over=True)
    assert goodput_counter(finished(first, 30, 1), FinishReason.LENGTH, now_ns=10**9) is None
    assert goodput_counter(finished(first, 30, 1), FinishReason.STOP, now_ns=10**9) == "goodput_missed_ttft"


def test_one_token_has_no_gap() -> None:
    request = replace(make_request("r", [1, 2, 3]), limits=Limits(tpot_ns=1))
    assert goodput_counter(finished(request, 30, 1), FinishReason.LENGTH, now_ns=10**9) == "goodput_met"
