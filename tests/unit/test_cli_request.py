"""``kvpool generate``: what its options mean to the client, and what it says of the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from kvpool.cli import main, request
from kvpool.client import TextChunk
from kvpool.errors import OverloadError
from kvpool.request import FinishReason, GenerateResult, RequestStats
from kvpool.types import RequestId, WorkerId

STATS = RequestStats(WorkerId("w-0"), "redo", 3, 0, 0, 3, ttft_ns=50_000_000, waited_ns=1_200_000_000)
RESULT = GenerateResult(RequestId("req-1"), (1, 2, 3), "a b", FinishReason.LENGTH, STATS)


class _Client:
    """Notes what it was asked for, and answers the same to all, or refuses them."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.refusal: OverloadError | None = None

    def __enter__(self) -> _Client:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def stream(self, prompt: str, **options: Any) -> Iterator[Any]:
        self.options = {"prompt": prompt, **options}
        if self.refusal is not None:
            raise self.refusal
        return iter((TextChunk(RESULT.request_id, "a", (1,)), TextChunk(RESULT.request_id, " b", (2, 3), RESULT)))


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> _Client:
    """What the command opens instead of a cluster."""
    made = _Client()
    monkeypatch.setattr(request, "open_client", lambda _address, _name: made)
    return made


LIMITS = ("ttft_limit_s", "tpot_limit_s", "priority", "may_degrade")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ((), (None, None, 0, False)),
        (("--ttft-limit", "2", "--tpot-limit", "0.05"), (2.0, 0.05, 0, False)),
        (("--priority", "-7", "--may-degrade"), (None, None, -7, True)),
    ],
)
def test_the_limits_of_a_request_are_options_in_seconds(
    given: tuple[str, ...], meant: tuple[object, ...], client: _Client
) -> None:
    done = CliRunner().invoke(main.app, ["generate", "Hi", *given])
    assert done.exit_code == 0, done.output
    assert tuple(client.options[name] for name in LIMITS) == meant


def test_the_first_token_is_timed_from_the_call_on_and_json_is_the_result(client: _Client) -> None:
    done = CliRunner().invoke(main.app, ["generate", "Hi"])
    assert done.stdout == "a b\n"
    assert "req-1: w-0, redo" in done.stderr
    assert "TTFT 1250 ms (1200 until the router had decided)" in done.stderr
    assert "missed" not in done.stderr
    done = CliRunner().invoke(main.app, ["generate", "Hi", "--json"])
    stats = json.loads(done.stdout)["stats"]
    assert (stats["waited_ns"], stats["ttft_ns"], done.stderr) == (1_200_000_000, 50_000_000, "")


@pytest.mark.parametrize(
    ("limits", "gap_s", "missed"),
    [
        ((None, None), 9.0, []),
        ((1.25, 0.1), 0.1, []),
        ((1.2, 0.1), 0.1, ["the first token came after 1.25 s, the limit is 1.2 s"]),
        ((1.25, 0.05), 0.1234, ["tokens came every 0.123 s, the limit is 0.05 s"]),
        ((1.25, 0.05), None, []),
        ((0.5, 0.05), 1.0, ["the first token came after", "tokens came every"]),
    ],
)
def test_a_missed_limit_is_said_of_each_kind(
    limits: tuple[float | None, float | None], gap_s: float | None, missed: list[str]
) -> None:
    told = list(request._missed(RESULT, gap_s, *limits))
    assert len(told) == len(missed)
    assert all(f"missed its limit: {part}" in line for part, line in zip(missed, told, strict=True))


def test_the_gap_is_that_of_the_tokens_after_the_first_ones(client: _Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request.time, "monotonic", iter((10.0, 13.0)).__next__)
    assert request._received(client.stream("Hi"), as_json=True) == (RESULT, 1.5)
    monkeypatch.undo()
    alone = replace(RESULT, tokens=(1,))
    assert request._received([TextChunk(RESULT.request_id, "a", (1,), alone)], as_json=True) == (alone, None)
    none = replace(RESULT, tokens=())
    assert request._received([TextChunk(RESULT.request_id, "", (), none)], as_json=True) == (none, None)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ((), "'kvpool explain req-1' says why"),
        (("--name", "nu"), "'kvpool explain req-1 --name nu' says why"),
        (("--address", "h:1"), "'kvpool explain req-1 --address h:1' says why"),
    ],
)
def test_a_refused_request_says_its_id_and_how_to_ask_why(where: tuple[str, ...], words: str, client: _Client) -> None:
    client.refusal = OverloadError("too late", retry_after_s=2.0, request_id="req-1")
    done = CliRunner().invoke(main.app, ["generate", "Hi", *where])
    assert (done.exit_code, done.stdout) == (1, "")
    assert "request_id=req-1" in done.stderr
    assert done.stderr.splitlines()[-1] == f"· {words}"
    client.refusal = OverloadError("too late", retry_after_s=2.0, request_id="req-1")
    done = CliRunner().invoke(main.app, ["generate", "Hi", *where, "--json"])
    assert json.loads(done.stdout)["details"] == {"retry_after_s": 2.0, "request_id": "req-1"}
