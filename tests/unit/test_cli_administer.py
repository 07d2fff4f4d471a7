"""What the administration commands print for people."""

from __future__ import annotations

import pytest

from kvpool.cli import administer
from kvpool.cluster.administration import DrainReport, EvictReport, PinReport
from kvpool.errors import RequestError
from workers.assemble import Evicted


def test_an_eviction_shows_every_worker_the_sum_and_who_was_not_asked(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = Evicted(3, 3000, 1, 0, 2, 4), Evicted(1, 1000, 0, 5, 0, 0)
    report = EvictReport(4, 4000, 1, 5, 2, 4, {"worker-0": one, "worker-1": two}, {"worker-2": "no answer [x]"})
    administer._print_eviction(report, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert any("worker-2 could not be asked: no answer [x]" in line for line in lines)
    rows = [line.replace("│", " ").split() for line in lines]
    assert ["worker-0", "3", "3000", "1", "0", "2", "4"] in rows
    assert ["all", "4", "4000", "1", "5", "2", "4"] in rows


def test_pins_show_copies_beside_the_floor(capsys: pytest.CaptureFixture[str]) -> None:
    reports = [PinReport("ab" * 16, "", 3, 2, ("worker-0",), 3), PinReport("cd" * 16, "acme", 1, 1, (), 0)]
    administer._print_pins(reports, as_json=False, one=False)
    shown = capsys.readouterr().out
    assert "1 of 2" in shown
    assert "0 of 1" in shown
    assert "acme" in shown
    administer._print_pins(reports[:1], as_json=True, one=True)
    assert '"min_copies": 2' in capsys.readouterr().out


def test_a_drain_says_what_moved_and_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    report = DrainReport("worker-1", 3, 2, 9, 6, {"capacity": 1}, 0, 1_500_000_000)
    administer._print_drain(report, as_json=False)
    shown = capsys.readouterr().out
    for text in ("worker-1 has left", "2 of 3", "6 of 9", "capacity 1", "1.5 s"):
        assert text in shown


def test_prefixes_are_text_or_tokens_and_not_both() -> None:
    assert administer._prefix(None, "1,2, 3") == [1, 2, 3]
    assert administer._required("text", None) == "text"
    for text, tokens in (("a", "1"), (None, "1,x"), (None, "")):
        with pytest.raises(RequestError):
            administer._prefix(text, tokens)
    with pytest.raises(RequestError, match="give a prefix"):
        administer._required(None, None)
