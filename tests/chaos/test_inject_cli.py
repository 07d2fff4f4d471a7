"""`kvpool inject` without a cluster: lists, refusals, and judging a history again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvpool.cli.inject import print_comparison
from kvpool.cli.main import app
from kvpool.faults.beside import Comparison, Outcome
from kvpool.faults.scenarios import SCENARIOS, Needs
from tests.unit.test_fault_checker import Story, honest, wrong_token

runner = CliRunner()


def _write(story: Story, path: Path) -> Path:
    ordered = sorted(story.lines, key=lambda line: line["at_ns"])
    path.write_text("".join(json.dumps(line) + "\n" for line in ordered))
    return path


def test_the_list_says_of_every_scenario_how_it_is_made() -> None:
    result = runner.invoke(app, ["inject", "list", "--json"])
    assert result.exit_code == 0
    listed = json.loads(result.stdout)
    assert {item["name"] for item in listed} == set(SCENARIOS)
    assert all(item["mechanism"] and item["breaks"] and item["proves"] for item in listed)


def test_an_unknown_scenario_is_refused_with_the_nearest_one() -> None:
    result = runner.invoke(app, ["inject", "kill-holdr", "--json"])
    assert result.exit_code == 2
    assert "kill-holder" in json.loads(result.stdout)["error"]


def test_a_mix_needs_its_scenarios() -> None:
    assert runner.invoke(app, ["inject", "mix"]).exit_code == 2
    assert runner.invoke(app, ["inject", "kill-holder", "--mix", "kill-router"]).exit_code == 2


def test_what_needs_an_embedded_cluster_is_refused_on_a_running_one() -> None:
    result = runner.invoke(app, ["inject", "node-join-storm", "--address", "127.0.0.1:1", "--json"])
    assert result.exit_code == 2
    assert "embedded" in json.loads(result.stdout)["error"]


def test_an_honest_history_is_judged_again_with_exit_code_0(tmp_path: Path) -> None:
    path = _write(honest(), tmp_path / "honest.jsonl")
    report = tmp_path / "report.html"
    result = runner.invoke(app, ["inject", "check", "--history", str(path), "--report", str(report), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["holds"] is True
    assert "<svg" in report.read_text()


def test_a_history_that_breaks_the_law_ends_with_exit_code_1(tmp_path: Path) -> None:
    story = honest()
    wrong_token(story)
    result = runner.invoke(app, ["inject", "check", "--history", str(_write(story, tmp_path / "bad.jsonl")), "--json"])
    assert result.exit_code == 1
    (run,) = json.loads(result.stdout)["runs"]
    assert [item["rule"] for item in run["violations"]] == ["outputs equal the reference run"]


def test_the_text_ends_with_the_verdict_of_every_run(tmp_path: Path) -> None:
    story = honest()
    good = runner.invoke(app, ["inject", "check", "--history", str(_write(story, tmp_path / "good.jsonl"))])
    assert "kill-holder: every rule holds" in good.stdout
    wrong_token(story)
    bad = runner.invoke(app, ["inject", "check", "--history", str(_write(story, tmp_path / "bad.jsonl"))])
    assert "kill-holder: 1 rule broken: outputs equal the reference run" in bad.stdout
    assert "sent = ok + cancelled" in bad.stdout


def test_a_file_that_is_no_history_is_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "no.jsonl"
    path.write_text('{"at_ns":1,"kind":"start"}\nnot a record\n')
    result = runner.invoke(app, ["inject", "check", "--history", str(path), "--json"])
    assert result.exit_code == 2
    assert "line 2" in json.loads(result.stdout)["error"]


def test_a_mix_needs_what_its_scenarios_need_together() -> None:
    needs = SCENARIOS["kill-one-replica"].needs | SCENARIOS["link-drop"].needs | SCENARIOS["evict-storm"].needs
    assert needs == Needs(metadata_replicas=2, num_blocks=128, shaped=True, links=True)


def test_another_store_is_printed_beside_ours_a_table_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    theirs = Outcome("kill-holder", "Mooncake Store", requests=182, ok=136, missed=32, failed=14, lost_keys=32)
    unknown = Outcome("kill-metadata", "Mooncake Store", note="its master did not start")
    print_comparison(
        Comparison("Mooncake Store", "over TCP", (theirs, unknown)), [{"scenario": "kill-holder", "ok": 79}]
    )
    printed = capsys.readouterr().out
    assert "kill-holder, beside" in printed
    assert "kill-metadata, beside" not in printed
    assert "79" in printed
    assert "182" in printed
    assert "its master did not start" in printed
