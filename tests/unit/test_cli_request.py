"""``kvpool generate``: what its options mean to the client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from kvpool.cli import main, request


class _Client:
    """Notes what it was asked for, and answers nothing."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def __enter__(self) -> _Client:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def stream(self, prompt: str, **options: Any) -> Iterator[Any]:
        self.options = {"prompt": prompt, **options}
        return iter(())


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
