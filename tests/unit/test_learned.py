"""What a router learned survives it: as data, and as a file that may be missing, old, cut or altered."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpool.reports import LoadSample
from kvpool.types import MemberState, PrefillSample, Tier
from router.keeper import FILE_NAME, MAX_AGE_NS, Keeper, UnusableFile, read_learned, write_learned
from router.learned import Learned
from tests.unit.router_kit import MS, S, key, member

LOAD = LoadSample(key(1), 1_000_000, 10, 100 * MS)


def taught() -> Learned:
    learned = Learned()
    learned.member(replace(member(0), calibration=(PrefillSample(512, 0, 80 * MS),)))
    for number in range(20):
        learned.prefill(key(0).worker_id, 512 + number, 0, 90 * MS, 0)
        learned.load(key(0), LOAD, Tier.HOST, number * S)
    learned.failures.observe(key(1), True, 19 * S)
    return learned


def saved(learned: Learned, now_ns: int = 20 * S) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(learned.to_dict(now_ns)))
    return data


def test_everything_learned_comes_back_through_json() -> None:
    learned = taught()
    again = Learned.from_dict(saved(learned), 1000 * S, 0)
    assert again is not None
    assert again.prefills.curve(key(0).worker_id) == learned.prefills.curve(key(0).worker_id)
    link = (key(1).worker_id, key(0).worker_id, Tier.HOST)
    assert again.links.curve(*link, 1000 * S) == learned.links.curve(*link, 20 * S)
    assert again.failures.probability(key(1), 1000 * S) == learned.failures.probability(key(1), 20 * S)


def test_the_time_between_save_and_restore_counts_as_silence() -> None:
    learned = taught()
    again = Learned.from_dict(saved(learned), 1000 * S, 30 * S)
    assert again is not None
    assert again.failures.probability(key(1), 1000 * S) == learned.failures.probability(key(1), 50 * S)


def test_a_calibration_is_learned_once_for_each_incarnation_across_restarts() -> None:
    learned = taught()
    info = replace(member(0), calibration=(PrefillSample(512, 0, 800 * MS),))
    before = learned.prefills.samples(key(0).worker_id)
    again = Learned.from_dict(saved(learned), 0, 0)
    assert again is not None
    again.member(info)
    assert again.prefills.samples(key(0).worker_id) == before
    again.member(replace(info, key=key(0, epoch=2)))
    assert again.prefills.samples(key(0).worker_id) == before + 1


def _without(data: dict[str, Any], *path: str) -> dict[str, Any]:
    place = data
    for name in path[:-1]:
        place = place[name]
    del place[path[-1]]
    return data


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: {},
        lambda data: {**data, "version": 1},
        lambda data: _without(data, "prefills"),
        lambda data: _without(data, "prefills", "all", "gram"),
        lambda data: _without(data, "now_ns"),
        lambda data: {**data, "links": []},
        lambda data: {**data, "links": {"tiers": {"TAPE": [0, {}]}, "links": []}},
        lambda data: {**data, "failures": {"holders": [["w", 1, 5.0, 1.0, 0]]}},
        lambda data: {**data, "failures": {"holders": [["w", 1, float("nan"), 1.0, 0]]}},
        lambda data: {**data, "calibrated": 3},
        lambda data: json.loads(json.dumps(data).replace('"coefficients": [', '"coefficients": [-1.0, ')),
        lambda data: json.loads(json.dumps(data).replace('"rhs": [', '"rhs": [NaN, ')),
    ],
)
def test_data_that_makes_no_sense_is_refused_as_a_whole(spoil: Any) -> None:
    assert Learned.from_dict(spoil(saved(taught())), 0, 0) is None


def test_a_file_comes_back_with_its_age(tmp_path: Path) -> None:
    path = tmp_path / "learned"
    write_learned(path, {"a": 1}, 5 * S)
    write_learned(path, {"a": 2}, 7 * S)
    assert read_learned(path, 10 * S) == ({"a": 2}, 3 * S)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_from_the_future_is_taken_as_new(tmp_path: Path) -> None:
    write_learned(tmp_path / "learned", {}, 50 * S)
    assert read_learned(tmp_path / "learned", 10 * S) == ({}, 0)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "cut or altered"),
        (b"\n{}", "cut or altered"),
        (b"[]\n{}", "cut or altered"),
        (b'{"format": "kvpool-learned/0"}\n{}', "format 'kvpool-learned/0'"),
        (b'{"format": "kvpool-learned/1", "at_unix_ns": 1, "crc32": 7}\n{}', "checksum"),
    ],
)
def test_a_file_that_is_not_ours_says_why_it_is_not_used(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "learned"
    path.write_bytes(content)
    with pytest.raises(UnusableFile, match=why):
        read_learned(path, 0)


def test_every_cut_and_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "learned"
    write_learned(path, {"speed": [1.5, 2.5]}, S)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place])
        with pytest.raises(UnusableFile):
            read_learned(path, S)
        body_starts = whole.index(b"\n") + 1
        if place >= body_starts:
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(UnusableFile):
                read_learned(path, S)


def test_an_old_file_is_not_used(tmp_path: Path) -> None:
    write_learned(tmp_path / "learned", {}, 0)
    with pytest.raises(UnusableFile, match="61 minutes old"):
        read_learned(tmp_path / "learned", MAX_AGE_NS + 60 * S)


class Saver:
    """A router's side of a keeper."""

    def __init__(self) -> None:
        self.number = 1
        self.restored: list[dict[str, Any]] = []
        self.takes = True

    def learned(self) -> tuple[int, dict[str, Any]]:
        return self.number, {"number": self.number}

    def restore(self, data: dict[str, Any], age_ns: int) -> bool:
        self.restored.append(data)
        return self.takes


def test_a_keeper_saves_at_its_end_and_the_next_one_restores(tmp_path: Path) -> None:
    saver = Saver()
    first = Keeper(tmp_path, saver.learned, saver.restore)
    assert first.status()["started_from"] == "priors: nothing was saved yet"
    first.stop()
    first.stop()
    assert first.status() == {"started_from": "priors: nothing was saved yet", "saves": 1, "save_failures": 0}
    second = Keeper(tmp_path, saver.learned, saver.restore)
    second.stop()
    assert saver.restored == [{"number": 1}]
    assert second.status()["started_from"].startswith("saved state, ")


def test_a_keeper_names_why_it_began_with_priors(tmp_path: Path) -> None:
    saver = Saver()
    absent = Keeper(tmp_path / "elsewhere", saver.learned, saver.restore)
    absent.stop()
    assert "not on this node" in absent.status()["started_from"]
    (tmp_path / FILE_NAME).write_bytes(b"nonsense")
    altered = Keeper(tmp_path, saver.learned, saver.restore)
    altered.stop()
    assert "cut or altered" in altered.status()["started_from"]
    write_learned(tmp_path / FILE_NAME, {}, time.time_ns())
    saver.takes = False
    strange = Keeper(tmp_path, saver.learned, saver.restore)
    strange.stop()
    assert "another version" in strange.status()["started_from"]


def test_a_keeper_that_cannot_write_counts_it_and_goes_on(tmp_path: Path) -> None:
    directory = tmp_path / "gone"
    directory.mkdir()
    saver = Saver()
    keeper = Keeper(directory, saver.learned, saver.restore)
    directory.rmdir()
    keeper.stop()
    assert keeper.status()["save_failures"] == 1


def test_a_restored_router_prices_with_what_it_had_learned() -> None:
    from tests.unit.test_router_core import make_core, report

    core, _, _ = make_core()
    for sequence in range(1, 20):
        core.on_report(report(0, sequence, prefills=(PrefillSample(512, 0, 800 * MS),), loads=(LOAD,)))
    number, data = core.learned()
    assert number > 0
    fresh, _, _ = make_core()
    assert fresh.restore(json.loads(json.dumps(data)), age_ns=S)
    fresh.on_member_change(member(0), MemberState.ALIVE)
    assert fresh.status()["links"] == core.status()["links"]
    ours, theirs = (item.status()["workers"][0]["prefill_us_per_token"] for item in (core, fresh))
    assert ours == theirs
