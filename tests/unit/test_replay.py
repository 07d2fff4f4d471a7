"""Recorded decisions decided again: what changes, what it would have cost, and what replay refuses to guess."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpool.cli.records import read_records, write_records
from kvpool.errors import ConfigError, RequestError
from router.planning import Harm, Params
from router.policies import POLICIES, KVPoolPolicy
from router.replay import REPLAYABLE, replay_records
from router.simulation.cluster import Cluster
from router.simulation.generators import Shape, multi_turn_chat
from router.simulation.presets import get_preset


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """Decisions of our policy without harm to others, so that it takes the least price, each with its outcome."""
    cluster = Cluster(
        multi_turn_chat(Shape(requests=80, per_second=20)),
        get_preset("llama-70b"),
        nodes=4,
        bandwidth_bytes_per_s=20e9,
        policy=KVPoolPolicy(replace(Params(), harm=Harm())),
    )
    cluster.run()
    return [json.dumps(record.to_dict()) for record in cluster.core.records()]


@pytest.fixture(scope="module")
def records(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines]


def test_the_rule_that_recorded_changes_nothing(records: list[dict[str, Any]]) -> None:
    result = replay_records(records, "kvpool")
    assert (result.decisions, result.changed, result.difference_ms) == (80, 0, 0.0)
    assert result.outcomes == 80
    assert result.recorded_policies == {"kvpool": 80}


def test_without_loads_no_decision_gets_cheaper_and_those_that_loaded_change(records: list[dict[str, Any]]) -> None:
    loading = sum(1 for record in records if record["loads"])
    result = replay_records(records, "redo_only")
    assert loading > 0
    assert result.changed == loading
    assert result.cheaper == 0
    assert result.difference_ms >= 0.0


def test_the_difference_is_that_between_the_recorded_prices(records: list[dict[str, Any]]) -> None:
    result = replay_records(records, "redo_only")
    best = [min(item["price_ns"] for item in record["candidates"] if item["plan"] == "redo") for record in records]
    taken = [record["price_ns"] for record in records]
    assert result.difference_ms == pytest.approx((sum(best) - sum(taken)) / len(records) / 1e6)
    assert result.replayed_ms == pytest.approx(sum(best) / len(records) / 1e6)


def test_round_robin_takes_workers_in_turn(records: list[dict[str, Any]]) -> None:
    result = replay_records(records, "round_robin")
    workers = sorted({item["worker"] for record in records for item in record["candidates"]})
    turns = [workers[number % 4] for number in range(len(records))]
    same = sum(not record["loads"] and record["worker"] == turn for record, turn in zip(records, turns, strict=True))
    assert result.changed == result.decisions - same
    assert result.cheaper == 0
    assert result.dearer > 0


def test_a_random_rule_repeats_with_its_seed(records: list[dict[str, Any]]) -> None:
    assert replay_records(records, "random", 3) == replay_records(records, "random", 3)
    assert replay_records(records, "random", 3) != replay_records(records, "random", 4)


def test_affinity_follows_the_longest_prefix(records: list[dict[str, Any]]) -> None:
    (record,) = [json.loads(json.dumps(item)) for item in records[-1:]]
    redos = [item for item in record["candidates"] if item["plan"] == "redo"]
    for place, item in enumerate(redos):
        item["own_blocks"] = place
    assert replay_records([record], "affinity").replayed_ms == redos[-1]["price_ns"] / 1e6


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - set(REPLAYABLE)))
def test_a_rule_that_records_cannot_feed_is_refused_with_the_way_out(
    records: list[dict[str, Any]], policy: str
) -> None:
    with pytest.raises(RequestError, match="kvpool simulate"):
        replay_records(records, policy)


def test_an_unknown_policy_is_said_to_be_one(records: list[dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match="did you mean 'affinity'"):
        replay_records(records, "afinity")


@pytest.mark.parametrize("key", ["candidates", "worker", "price_ns", "loads", "outcome", "policy"])
def test_a_record_without_a_key_is_named_by_number(records: list[dict[str, Any]], key: str) -> None:
    broken = {name: value for name, value in records[1].items() if name != key}
    with pytest.raises(RequestError, match="record 2"):
        replay_records([records[0], broken], "kvpool")


def test_a_record_without_candidates_is_refused(records: list[dict[str, Any]]) -> None:
    with pytest.raises(RequestError, match="record 1 has no candidate"):
        replay_records([{**records[0], "candidates": []}], "kvpool")


def test_nothing_to_replay_is_an_error() -> None:
    with pytest.raises(RequestError, match="no records"):
        replay_records([], "kvpool")


def test_a_record_without_its_outcome_counts_but_judges_no_prediction(records: list[dict[str, Any]]) -> None:
    result = replay_records([{**record, "outcome": None} for record in records], "kvpool")
    assert (result.decisions, result.outcomes, result.median_error) == (80, 0, None)


# ---- files


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_file_of_records_replays_like_the_records(
    tmp_path: Path, lines: list[str], records: list[dict[str, Any]], ending: str
) -> None:
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / f"records.{ending}"
    write_records(path, lines)
    assert replay_records(read_records(path), "redo_only") == replay_records(records, "redo_only")


def test_parquet_without_pyarrow_says_how_to_install_it(
    tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(RequestError, match=r"pip install 'kvpool\[parquet\]'"):
        write_records(tmp_path / "records.parquet", lines)


def test_a_number_that_parquet_cannot_hold_is_a_typed_error(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    pytest.importorskip("pyarrow")
    line = json.dumps({**records[0], "price_ns": 1 << 70})
    with pytest.raises(RequestError, match=r"use \.jsonl"):
        write_records(tmp_path / "records.parquet", [line])


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("records.jsonl", "{}\n{", "line 2 is not JSON"),
        ("records.jsonl", "[]\n", "line 1 must be an object"),
        ("records.parquet", "none", "not a Parquet file"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, text: str, named: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(RequestError, match=named):
        read_records(path)


@pytest.mark.parametrize("target", ["records.txt", "nowhere/records.jsonl"])
def test_a_target_that_cannot_be_written_is_refused(tmp_path: Path, target: str) -> None:
    with pytest.raises(RequestError, match="records"):
        write_records(tmp_path / target, [])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"gone\.jsonl"):
        read_records(tmp_path / "gone.jsonl")
