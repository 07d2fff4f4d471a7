"""What commands print is what they were given: no text of a user, a model or an error is taken for markup."""

import json

import pytest
import typer

from kvpool.cli.output import console, duration, fail, print_json, print_table, progress, readable_times
from kvpool.errors import KVPoolError, RequestError, UnavailableError

TEXT = "a[/b] [bold]c[/bold] :heart: [d=1]"


@pytest.mark.parametrize(("kind", "code"), [(RequestError, 2), (UnavailableError, 1)])
def test_an_error_is_printed_as_it_is_and_ends_with_its_code(
    kind: type[KVPoolError], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as caught:
        fail(kind(TEXT, field="prompt"), as_json=True)
    assert caught.value.exit_code == code
    shown = capsys.readouterr()
    assert f"{TEXT} [field=prompt]" in shown.err
    assert json.loads(shown.out) == {"error": TEXT, "code": kind.code, "details": {"field": "prompt"}}


def test_progress_tables_and_lines_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    progress(TEXT)
    print_table(TEXT, (TEXT,), [(TEXT,)])
    console.print(TEXT)
    shown = capsys.readouterr()
    assert TEXT in shown.err
    assert shown.out.count(TEXT) == 4


def test_lines_stay_whole_where_nobody_knows_a_width_and_tables_are_folded(capsys: pytest.CaptureFixture[str]) -> None:
    line = " ".join(["word"] * 60)
    progress(line)
    console.print(line)
    print_table("t", ("what",), [(line,)])
    shown = capsys.readouterr()
    assert shown.err == f"· {line}\n"
    first, *table = shown.out.splitlines()
    assert first == line
    assert max(map(len, table)) <= console.width


@pytest.mark.parametrize(
    ("value_ns", "text"),
    [
        (0, "0 s"),
        (7, "7 ns"),
        (1_500, "1.5 µs"),
        (12_135_691, "12.1 ms"),
        (999_700_000, "1 s"),
        (3_000_000_000, "3 s"),
        (979_815_530_806, "16.3 min"),
        (7.2e12, "2 h"),
        (4.5e15, "1250 h"),
        (-2e6, "-2 ms"),
    ],
)
def test_a_duration_has_three_digits_and_a_unit(value_ns: float, text: str) -> None:
    assert duration(value_ns) == text


def test_nanoseconds_become_readable_wherever_they_are_and_nothing_else_is_touched() -> None:
    status = {"lease_ns": 3e9, "age_ns": None, "members": [{"worker_epoch": 10**18, "load": {"idle_ns": 5_000}}]}
    assert readable_times(status) == {
        "lease": "3 s",
        "age_ns": None,
        "members": [{"worker_epoch": 10**18, "load": {"idle": "5 µs"}}],
    }
    both = {"load": 1, "load_ns": 2, "wait_ms": 0.5, "ns": 4, "busy_ns": True}
    assert readable_times(both) == both


def test_numbers_that_json_has_not_become_null(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [float("nan"), (float("inf"), 1.5)], "b": {"c": float("-inf")}})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "a": [None, [None, 1.5]],
        "b": {"c": None},
    }
