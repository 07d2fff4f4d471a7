"""Another store under the same faults: from its reader's lines to the rows of the report."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from kvpool.faults.beside import COLUMNS, Comparison, Outcome, Times, calls_of, tally
from kvpool.faults.measures import Bounds
from kvpool.faults.report import as_data, cells, html, row
from tests.unit.test_fault_checker import honest

MS, S = 1_000_000, 1_000_000_000
TIMES = Times(fault_ns=10 * S, heal_ns=11 * S, end_ns=20 * S)
PERIOD_S, KEYS = 0.05, 32
NAME = "Mooncake Store"


class Reader:
    """Writes lines as `kvpool.bench.fault_peer_script` does, through text and back."""

    def __init__(self) -> None:
        self.lines: list[list[Any]] = []

    def call(self, what: str, key: int, at_s: float, outcome: str | None, took_s: float = 0.002) -> None:
        number = len(self.lines)
        self.lines.append([number, what, f"key-{key}", int(at_s * S), None])
        if outcome is not None:
            self.lines.append([number, what, f"key-{key}", int((at_s + took_s) * S), outcome])

    def gets(self, from_s: float, to_s: float, outcome: str) -> None:
        for at in range(round((to_s - from_s) / PERIOD_S)):
            self.call("get", at % KEYS, from_s + at * PERIOD_S, outcome)

    def tally(self, *, detectable: bool = True) -> Outcome:
        calls = calls_of(json.loads(json.dumps(line)) for line in self.lines)
        return tally("kill-holder", NAME, calls, TIMES, Bounds(), detectable=detectable)


def killed_holder() -> Reader:
    """As it was seen: errors until the lease is over, then misses until every key was put again."""
    reader = Reader()
    reader.gets(7.0, 10.0, "ok")
    for at in range(12):
        reader.call("get", at, 10.0 + at / 4, "-800", took_s=1.0)
    reader.call("ask", 0, 9.99, "missed", took_s=0.5)  # asked before the fault: says nothing about it
    reader.call("ask", 0, 12.0, "there")
    reader.call("ask", 0, 12.8, "missed", took_s=0.01)
    reader.gets(13.0, 14.6, "missed")
    reader.gets(14.6, 20.0, "ok")
    return reader


def test_a_killed_holder_costs_errors_then_misses_and_every_key() -> None:
    outcome = killed_holder().tally()
    assert (outcome.requests, outcome.ok, outcome.missed, outcome.failed) == (212, 168, 32, 12)
    assert (outcome.wrong, outcome.hung, outcome.lost_keys) == (0, 0, 32)
    assert outcome.codes == (("-800", 12),)
    assert outcome.max_stall_ms == 1000.0
    assert round(outcome.detect_ms or 0) == 2810
    assert outcome.recover_ms == 3200.0  # from the eighth but last miss on nine of ten are good


def test_a_fault_that_takes_the_memory_of_all_keys_is_not_detected_by_a_miss() -> None:
    assert killed_holder().tally(detectable=False).detect_ms is None


def test_a_store_that_goes_on_as_before_has_recovered_at_once() -> None:
    reader = Reader()
    reader.gets(7.0, 20.0, "ok")
    outcome = reader.tally()
    assert outcome.recover_ms == 0
    assert (outcome.lost_keys, outcome.detect_ms) == (0, None)


def test_a_store_that_never_comes_back_has_no_time_of_recovery() -> None:
    reader = Reader()
    reader.gets(7.0, 10.0, "ok")
    reader.gets(10.0, 20.0, "-900")
    assert reader.tally().recover_ms is None


def test_a_get_that_never_ends_is_hung_and_one_that_just_began_is_nothing_yet() -> None:
    reader = Reader()
    reader.gets(7.0, 10.0, "ok")
    reader.call("get", 1, 10.1, None)
    reader.call("get", 2, 19.9, None)
    outcome = reader.tally()
    assert (outcome.hung, outcome.requests) == (1, 61)
    assert round(outcome.max_stall_ms or 0) == 9900
    assert any("1 gets never ended" in line for line in Comparison(NAME, "", (outcome,)).remarks())


def test_other_bytes_than_were_put_are_wrong_and_neither_ok_nor_failed() -> None:
    reader = Reader()
    reader.call("get", 1, 12.0, "wrong")
    outcome = reader.tally()
    assert (outcome.wrong, outcome.ok, outcome.failed) == (1, 0, 0)


def test_the_report_shows_theirs_beneath_ours_and_judges_only_ours() -> None:
    verdict = honest().judge()
    fault = row(verdict)["scenario"]
    outcome = replace(killed_holder().tally(), fault=fault, wrong=3)
    comparison = Comparison(NAME, "over TCP", (outcome,))
    shown = [cells(numbers, COLUMNS) for numbers in comparison.rows([row(verdict), {"scenario": "kill-router"}])]
    assert [line[:2] for line in shown] == [[fault, "kvpool"], [fault, NAME]]
    assert shown[1][2:8] == ["212", "168", "32", "12", "3", "0"]
    page = html([(verdict, "h.jsonl")], comparison)
    assert NAME in page
    assert "class=bad" not in page
    assert as_data(verdict, "h.jsonl")["holds"] is True
    assert json.loads(json.dumps(comparison.as_dict()))["outcomes"][0]["codes"] == {"-800": 12}


def test_where_it_is_not_installed_or_did_not_start_the_report_says_so_in_a_line() -> None:
    missing = Comparison(NAME, "over TCP", why_not="not installed; set KVPOOL_MOONCAKE_PYTHON")
    (line,) = missing.remarks()
    assert line.startswith(f"without the optional comparison with {NAME}, another KV store: not installed; set KVPOOL_")
    assert "KVPOOL_MOONCAKE_PYTHON" in html([(honest().judge(), "h.jsonl")], missing)
    broken = Comparison(NAME, "over TCP", (Outcome("kill-holder", NAME, note="did not start"),))
    assert broken.rows([{"scenario": "kill-holder"}]) == []
    assert f"kill-holder on {NAME}: did not start" in broken.remarks()
