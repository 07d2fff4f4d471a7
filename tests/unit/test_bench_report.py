"""The benchmark report: ratios point the same way for speed and cost, and a bar is never met by accident."""

import importlib

from kvpool.bench.report import Row, interleave, skipped, table
from kvpool.cli.bench import names


def test_ratio_above_one_is_better_for_speeds_and_for_costs() -> None:
    assert Row("speed", 4.0, 2.0, "GB/s").ratio == 2.0
    assert Row("cost", 2.0, 4.0, "ms", higher_is_better=False).ratio == 2.0


def test_a_bar_holds_only_when_the_ratio_reaches_it() -> None:
    assert Row("x", 1.0, 2.0, "GB/s", bar=0.5).holds is True
    assert Row("x", 0.9, 2.0, "GB/s", bar=0.5).holds is False
    assert Row("x", 0.9, 2.0, "GB/s").holds is None


def test_a_bar_without_a_measurement_does_not_hold() -> None:
    assert Row("x", 0.0, 2.0, "GB/s", bar=0.5).holds is False


def test_a_missing_peer_is_a_visible_row() -> None:
    row = skipped("transfer", "nixl", "not installed")
    assert row.holds is None
    assert "skipped: not installed" in table([row])[1]


def test_runs_are_interleaved_after_one_warm_up_each() -> None:
    order: list[str] = []
    seconds = interleave([lambda: order.append("a"), lambda: order.append("b")], runs=2)
    assert order == ["a", "b", "a", "b", "a", "b"]
    assert [len(values) for values in seconds] == [2, 2]


def test_every_benchmark_that_is_listed_can_be_run_and_helpers_are_not_listed() -> None:
    assert {"router", "transfer"} < set(names())
    assert not {"peer", "report", "metadata_peers"} & set(names())
    assert all(callable(importlib.import_module(f"kvpool.bench.{name}").run) for name in ("router", "metadata"))
