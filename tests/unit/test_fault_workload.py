"""Histories as files, the seeded workload, and the digest by which holdings are compared."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from kvpool.errors import RequestError
from kvpool.faults.history import HistoryWriter, Kind, history_path, parse_record, read_history
from kvpool.faults.workload import Style, WorkloadConfig, plan_chats, schedule
from kvpool.hashing import set_digest
from kvpool.types import BlockHash

S = 1_000_000_000


def test_a_history_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    clock = itertools.count(10)
    path = tmp_path / "run.jsonl"
    with HistoryWriter(path, lambda: next(clock)) as history:
        assert history.add(Kind.START) == 10
        history.add(Kind.CHUNK, id="q", tokens=(1, 2))
        assert len(list(read_history(path))) == 2  # readable while it is being written
    first, second = read_history(path)
    assert (first.line, first.at_ns, first.kind) == (1, 10, Kind.START)
    assert second.data == {"id": "q", "tokens": [1, 2]}


def test_a_history_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    HistoryWriter(path, lambda: 0).close()
    with pytest.raises(RequestError, match="never overwritten"):
        HistoryWriter(path, lambda: 0)


def test_runs_of_one_scenario_and_seed_keep_their_histories_apart(tmp_path: Path) -> None:
    scenarios = ["kill-holder"]
    first = history_path(tmp_path / "new", scenarios, 3)
    first.touch()
    second = history_path(tmp_path / "new", scenarios, 3)
    assert (first.name, second.name) == ("kill-holder-seed3-1.jsonl", "kill-holder-seed3-2.jsonl")
    with pytest.raises(RequestError, match="cannot keep histories"):
        history_path(first, scenarios, 3)


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"at_ns":1,"kind":"gossip"}', '{"at_ns":"x","kind":"start"}'])
def test_what_is_no_record_is_refused_by_its_line(line: str) -> None:
    with pytest.raises(RequestError, match="line 7"):
        parse_record(7, line)


def test_a_seed_decides_everything_that_is_sent() -> None:
    config = WorkloadConfig(seed=3)
    assert plan_chats(config) == plan_chats(config)
    assert plan_chats(config) != plan_chats(WorkloadConfig(seed=4))
    first, again = (list(itertools.islice(schedule(config), 200)) for _ in range(2))
    assert first == again


def test_chats_share_system_prompts_and_keep_the_order_of_their_turns() -> None:
    config = WorkloadConfig(systems=2, chats=5, turns=3)
    assert len({chat.system for chat in plan_chats(config)}) == 2
    one_round = list(itertools.islice(schedule(config), config.chats * config.turns))
    assert len({item.prompt for item in one_round}) == len(one_round)
    for chat in range(config.chats):
        turns = [item.prompt for item in one_round if item.prompt and item.prompt.startswith(f"chat-{chat}.")]
        assert turns == sorted(turns)


def test_a_new_round_shares_no_block_with_the_one_before() -> None:
    config = WorkloadConfig(chats=2, turns=2)
    items = list(itertools.islice(schedule(config), 8))
    assert [item.tenant for item in items] == ["run-0"] * 4 + ["run-1"] * 4


def test_requests_come_at_the_set_rate_in_all_styles() -> None:
    config = WorkloadConfig(rate_rps=5.0, cancel_share=0.1, tight_share=0.1)
    items = list(itertools.islice(schedule(config), 2000))
    assert all(a.at_ns <= b.at_ns for a, b in itertools.pairwise(items))
    assert 1800 < items[-1].at_ns / S * config.rate_rps < 2200
    assert {item.style for item in items} == set(Style)
    assert {item.timeout_ns for item in items if item.may_expire} == {config.tight_timeout_ns}


def test_a_digest_knows_a_set_and_not_its_order() -> None:
    hashes = [BlockHash(bytes([number]) * 16) for number in range(5)]
    assert set_digest(hashes) == set_digest(reversed(hashes))
    assert set_digest(hashes) != set_digest(hashes[1:])
    assert set_digest([]) == "0:" + "0" * 32
