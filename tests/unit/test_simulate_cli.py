"""``kvpool simulate`` and ``tune`` as a user meets them: tables, JSON, reports, parameters, and every typo."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from kvpool.cli.output import EXIT_BAD_INPUT
from kvpool.cli.simulate import load_params, replay, simulate, tune
from kvpool.cli.trace_source import open_trace
from kvpool.errors import ConfigError, RequestError
from router.parameters import params_from_dict, params_to_dict, value_of, with_values
from router.planning import Params
from router.simulation.generators import Shape, multi_turn_chat
from router.simulation.presets import get_preset
from router.simulation.simulate import simulate as simulate_once
from router.simulation.sweep import TUNED, Run, Sweep, losses, regret, run_sweep
from router.simulation.tune import KNOBS, Tuning, tune_params

CHAT = "gen:chat:requests=60,per_second=30"
SMALL = ["--nodes", "3", "--bandwidth", "4"]

app = typer.Typer()
app.command()(simulate)
app.command()(tune)
app.command()(replay)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(item) for item in arguments])


def mooncake_line(**changes: object) -> str:
    return json.dumps({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2], **changes})


def test_the_table_names_every_policy_and_progress_stays_off_standard_output() -> None:
    result = run("simulate", CHAT, *SMALL, "--policy", "kvpool,round_robin")
    assert result.exit_code == 0
    assert "round_robin" in result.stdout
    assert "[2/2]" in result.stderr
    assert "[2/2]" not in result.stdout


def test_json_holds_one_run_per_policy_bandwidth_and_rate() -> None:
    result = run(
        "simulate", CHAT, "--nodes", 3, "--bandwidth", "2,4", "--rate", "1,2", "--policy", "kvpool,random", "--json"
    )
    data = json.loads(result.stdout)
    assert data["trace"]["requests"] == 60
    asked = {(item["policy"], item["bandwidth_gbytes_per_s"], item["rate"]) for item in data["runs"]}
    assert asked == {(name, gbytes, rate) for name in ("kvpool", "random") for gbytes in (2, 4) for rate in (1, 2)}
    assert all(sum(item["node_requests"]) == 60 and len(item["node_requests"]) == 3 for item in data["runs"])


def test_several_routers_are_named_in_heading_json_and_report(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    several = run("simulate", CHAT, *SMALL, "--policy", "kvpool", "--routers", 2, "--html", page)
    assert "3 × llama-70b, 2 routers, 4 GB/s" in several.stdout
    assert "<dt>Routers</dt><dd>2</dd>" in page.read_text()
    one = run("simulate", CHAT, *SMALL, "--policy", "kvpool")
    assert "router" not in one.stdout
    data = json.loads(run("simulate", CHAT, *SMALL, "--policy", "kvpool", "--routers", 2, "--json").stdout)
    assert [item["routers"] for item in data["runs"]] == [2]


def test_the_same_command_gives_the_same_numbers() -> None:
    first, second = (json.loads(run("simulate", CHAT, *SMALL, "--seed", 5, "--json").stdout) for _ in range(2))
    for item in (*first["runs"], *second["runs"]):
        del item["wall_s"]
    assert first == second


def test_a_watched_policy_decides_as_it_does_unwatched() -> None:
    trace = multi_turn_chat(Shape(requests=60, per_second=30))
    options = {"nodes": 3, "preset": get_preset("llama-70b")}
    (watched,) = run_sweep(Sweep(trace, bandwidths_bytes_per_s=(4e9,), policies=("kvpool",), **options))  # type: ignore[arg-type]
    plain = simulate_once(trace, bandwidth_bytes_per_s=4e9, policy="kvpool", **options)  # type: ignore[arg-type]
    assert replace(watched.report, wall_s=0.0) == replace(plain, wall_s=0.0)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl"),
        (["gen:chaat"], "did you mean 'chat'"),
        (["gen:chat:turn=3"], "did you mean 'turns'"),
        (["gen:chat:turns=0"], "turns must be a positive whole number, got '0'"),
        (["gen:chat:turns"], "turns must be a positive whole number"),
        (["gen:chat:seed=x"], "seed must be a whole number, got 'x'"),
        (["gen:docqa:per_second=-1"], "per_second must be a positive number"),
        ([CHAT, "--nodes", "0"], "at least 1 node, got 0"),
        ([CHAT, "--model", "llama"], "did you mean 'llama-70b'"),
        ([CHAT, "--policy", "kvpol"], "did you mean 'kvpool'"),
        ([CHAT, "--policy", "kvpool-tuned"], "--params"),
        ([CHAT, "--policy", ","], "at least one policy"),
        ([CHAT, "--bandwidth", "1,fast"], "'fast'"),
        ([CHAT, "--bandwidth", "0"], "bandwidth must be positive"),
        ([CHAT, "--rate", "nan"], "rate must be positive"),
        ([CHAT, "--requests", "0"], "--requests must be at least 1"),
        ([CHAT, "--faults", "rain=1"], "unknown fault 'rain'"),
        ([CHAT, "--faults", "stale=2"], "from 0 to 1, got '2'"),
        ([CHAT, "--html", "/nowhere/report.html"], "/nowhere/report.html"),
        ([CHAT, "--params", "/nowhere.json"], "/nowhere.json"),
    ],
)
def test_a_mistake_is_named_and_nothing_is_simulated(arguments: list[str], named: str) -> None:
    result = run("simulate", *arguments, "--json")
    assert result.exit_code == EXIT_BAD_INPUT
    assert named in json.loads(result.stdout)["error"]
    assert "[1/" not in result.stderr


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "line 2"),
        ("5", "line 2"),
        (mooncake_line(hash_ids=[1]), "line 2"),
        (mooncake_line(timestamp="soon"), "line 2"),
        (mooncake_line(timestamp=float("inf")), "infinity"),
    ],
)
def test_a_malformed_trace_line_is_refused(tmp_path: Path, line: str, named: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(mooncake_line() + "\n" + line + "\n")
    with pytest.raises(RequestError, match=named):
        open_trace(str(path))


def test_a_binary_file_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(RequestError, match=r"trace\.jsonl"):
        open_trace(str(path))


def test_an_azure_like_csv_is_simulated(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{i},{700 + i},20\n" for i in range(30)))
    result = run("simulate", path, *SMALL, "--policy", "kvpool", "--json")
    assert json.loads(result.stdout)["runs"][0]["requests"] == 30


def test_faults_reach_the_simulated_links() -> None:
    result = run("simulate", CHAT, *SMALL, "--bandwidth", "40", "--policy", "mooncake", "--faults", "stale=1", "--json")
    report = json.loads(result.stdout)["runs"][0]
    assert report["load_failures"] > 0
    assert report["loaded_share"] == 0.0


def test_requests_spread_over_several_routers_which_know_less_of_each_other_than_one_of_itself() -> None:
    one, three = (run("simulate", CHAT, *SMALL, "--policy", "kvpool", "--json", "--routers", n) for n in "13")
    alone, together = (json.loads(result.stdout)["runs"][0] for result in (one, three))
    assert alone["requests"] == together["requests"] == 60
    assert alone["ttft_mean_ms"] != together["ttft_mean_ms"]
    with pytest.raises(RequestError, match="1 to 8 routers"):
        simulate_once(
            open_trace(CHAT), nodes=1, preset="llama-70b", bandwidth_bytes_per_s=1e9, policy="kvpool", routers=9
        )


def test_default_parameters_from_a_file_decide_like_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "params.json"
    path.write_text(json.dumps(params_to_dict(Params())))
    result = run("simulate", CHAT, *SMALL, "--policy", "kvpool", "--params", path, "--json")
    ours, tuned = json.loads(result.stdout)["runs"]
    assert (ours["policy"], tuned["policy"]) == ("kvpool", TUNED)
    assert ours["ttft_mean_ms"] == tuned["ttft_mean_ms"]


def test_parameters_survive_their_file() -> None:
    params = with_values(Params(), {"harm.base": 0.7, "costs.notice_ns": 1e8, "deadline_factor": 2})
    assert params_from_dict(json.loads(json.dumps(params_to_dict(params)))) == params
    assert value_of(params, "harm.base") == 0.7


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({}, "format"),
        ([], "list"),
        ({"format": "kvpool-params/1", "params": {"harms": {}}}, "did you mean 'harm'"),
        ({"format": "kvpool-params/1", "params": {"harm": {"base": -1}}}, r"harm\.base"),
        ({"format": "kvpool-params/1", "params": {"harm": {"base": "much"}}}, "'much'"),
        ({"format": "kvpool-params/1", "params": {"harm": {"base": float("nan")}}}, r"harm\.base"),
        ({"format": "kvpool-params/1", "params": {"harm": 3}}, "object"),
        ({"format": "kvpool-params/1", "params": {"loads": 1}}, "loads"),
        ({"format": "kvpool-params/1", "params": {"priced_pairs": 0.5}}, "priced_pairs"),
    ],
)
def test_wrong_parameters_are_named(data: object, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        params_from_dict(data)


def test_a_params_file_that_is_not_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "params.json"
    path.write_text("harm = 1")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_params(path)


def sample(policy: str, mean_ms: float, p99_ms: float, goodput: float, unfinished: int = 0) -> Run:
    trace = multi_turn_chat(Shape(requests=4))
    report = simulate_once(trace, nodes=1, preset="llama-70b", bandwidth_bytes_per_s=1e9, policy="random")
    report = replace(
        report, policy=policy, ttft_mean_ms=mean_ms, ttft_p99_ms=p99_ms, goodput_rps=goodput, unfinished=unfinished
    )
    return Run(report, 1.0, (4,))


def test_losses_are_found_by_mean_p99_and_goodput_but_not_within_the_tolerance() -> None:
    ours, rival = sample("kvpool", 101.0, 150.0, 0.9), sample("plain", 100.0, 100.0, 1.0)
    found = {loss.measure.title: loss.behind for loss in losses([ours, rival])}
    assert found == {"p99 TTFT": pytest.approx(0.5), "goodput": pytest.approx(0.1)}


def test_a_policy_that_leaves_requests_unanswered_is_never_the_best() -> None:
    ours, rival = sample("kvpool", 100.0, 100.0, 1.0), sample("plain", 10.0, 10.0, 2.0, unfinished=1)
    assert losses([ours, rival]) == []
    assert regret(ours, [ours, rival]) == 0.0


# ---- tune


def tuning(**changes: object) -> Tuning:
    trace = multi_turn_chat(Shape(requests=60, per_second=30))
    values = {"nodes": 3, "bandwidths_bytes_per_s": (4e9,), "trials": 4, **changes}
    return Tuning(trace, get_preset("llama-70b"), **values)  # type: ignore[arg-type]


def test_every_knob_is_a_parameter_and_reaches_its_default() -> None:
    for knob in KNOBS:
        assert knob.low <= value_of(Params(), knob.path) <= knob.high, knob.path
        assert value_of(with_values(Params(), {knob.path: knob.high}), knob.path) == knob.high


def test_a_search_repeats_exactly_and_never_loses_to_the_defaults_where_it_searched() -> None:
    lines: list[str] = []
    first, second = tune_params(tuning(), lines.append), tune_params(tuning())
    assert first == second
    assert first.train_gain >= 0.0
    assert {cell.part for cell in first.cells} == {"searched", "held out"}
    assert sum("trial" in line for line in lines) == 4


def test_the_search_never_sees_the_held_out_part() -> None:
    whole = tuning()
    other_rest = replace(
        whole.trace, requests=(*whole.trace.requests[:30], *whole.trace.part(0, 30).faster(0.5).requests)
    )
    assert tune_params(whole).params == tune_params(replace(whole, trace=other_rest)).params


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--trials", "1"], "at least 2 trials"),
        (["--train", "1"], "between 0 and 1"),
        (["--requests", "30"], "longer trace"),
        (["--goal", "fame"], "unknown goal 'fame'"),
    ],
)
def test_a_search_that_cannot_work_is_refused(arguments: list[str], named: str) -> None:
    result = run("tune", CHAT, *SMALL, *arguments, "--json")
    assert result.exit_code == EXIT_BAD_INPUT
    assert named in json.loads(result.stdout)["error"]


def test_tune_without_optuna_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(RequestError, match=r"pip install 'kvpool\[tune\]'"):
        tune_params(tuning())


@pytest.mark.parametrize(("gain", "written"), [(0.1, True), (0.0, False), (-0.1, False)])
def test_parameters_are_written_only_when_they_gain_on_the_held_out_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gain: float, written: bool
) -> None:
    found = replace(tune_params(tuning(trials=2)), params=with_values(Params(), {"harm.base": 0.9}), held_out_gain=gain)
    monkeypatch.setattr("kvpool.cli.simulate.tune_params", lambda *_: found)
    out = tmp_path / "params.json"
    data = json.loads(run("tune", CHAT, *SMALL, "--out", out, "--json").stdout)
    assert out.exists() is written
    assert data["written"] == (str(out) if written else None)
    assert params_from_dict(data) == found.params
    if written:
        assert load_params(out) == found.params
