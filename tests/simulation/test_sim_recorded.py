"""What ``kvpool bench simulation`` makes of a recorded run, without a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.bench.simulation import Asked, Real, compare, replay
from kvpool.config import EngineConfig
from kvpool.reports import DECODE_NS, DECODE_REQUESTS

MS = 1_000_000
HAND_OVER_NS = 7 * MS
PROMPT = tuple(range(160))


def ttft_ns(computed: int) -> int:
    """On a quiet machine whose prefill takes 10 ms and 1 ms a token."""
    return 10 * MS + computed * MS


def asked(arrival_ns: int, computed: int) -> Asked:
    outcome = {"ttft_ns": ttft_ns(computed), "tokens_redone": computed}
    record: dict[str, Any] = {"plan": "redo", "outcome": outcome, "predicted_ttft_ns": ttft_ns(computed) + HAND_OVER_NS}
    return Asked(arrival_ns, PROMPT, ttft_ns(computed) + HAND_OVER_NS, record)


def test_a_run_that_went_as_learned_is_replayed_as_it_was() -> None:
    worker = {
        "prefill_t0_ms": 10.0,
        "prefill_us_per_token": 1000.0,
        "prefill_ps_per_pair": 0.0,
        "counters": {DECODE_REQUESTS: 10, DECODE_NS: 200 * MS},
    }
    real = Real(
        asked=[asked(0, 160), asked(5000 * MS, 16), asked(10_000 * MS, 16)],
        warm=1,
        status={"workers": [worker], "links": []},
        config=EngineConfig(),
        max_step_tokens=512,
        block_bytes=1 << 20,
        workers=1,
    )
    served = replay(real)
    assert [item.tokens_redone for item in served] == [160, 16, 16]
    rows = compare(real, served)
    assert {row.runs for row in rows} == {2}
    for row in rows:
        assert row.reference is not None
        assert row.ours == pytest.approx(row.reference, rel=0.01), row.name
