"""From what a user names as TRACE to a trace: a file, or ``gen:NAME[:key=value,…]`` for a made one."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import cast

from kvpool.errors import RequestError
from router.simulation.generators import GENERATORS, Shape
from router.simulation.trace import Trace, load_trace

PREFIX = "gen:"
_ALIASES = {"docqa": "documents", "hot": "hot-prompt"}
_SHAPE_KEYS = tuple(item.name for item in fields(Shape))


def open_trace(source: str, *, seed: int = 0, spread: bool = True, requests: int | None = None) -> Trace:
    """Read or make a trace.

    Args:
        source: path, or ``gen:NAME[:key=value,…]``.
        seed: of what a file lacks: prefixes of a CSV, and arrivals inside a shared timestamp.
        spread: arrivals that share a timestamp are spread up to the next one. Made traces need none.
        requests: keep so many from the start; None keeps all.

    Raises:
        RequestError: the file, a line, a generator or one of its keys is wrong; the message names it.
    """
    if requests is not None and requests < 1:
        raise RequestError(f"--requests must be at least 1, got {requests}", field="requests")
    trace = _made(source) if source.startswith(PREFIX) else _read(Path(source), seed, spread)
    return trace if requests is None else trace.head(requests)


def _read(path: Path, seed: int, spread: bool) -> Trace:
    trace = load_trace(path, seed=seed)
    return trace.spread(seed) if spread else trace


def _made(source: str) -> Trace:
    name, _, text = source.removeprefix(PREFIX).partition(":")
    maker = GENERATORS.get(_ALIASES.get(name, name))
    if maker is None:
        known = sorted({*GENERATORS, *_ALIASES})
        raise RequestError(f"unknown generator {name!r}{_hint(name, known)}", field="trace")
    own = [
        item.name
        for item in inspect.signature(maker).parameters.values()
        if item.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    values = _pairs(text, name, [*_SHAPE_KEYS, *own])
    shape = Shape(**{key: value for key, value in values.items() if key in _SHAPE_KEYS})  # type: ignore[arg-type]
    flexible = cast(Callable[..., Trace], maker)
    return flexible(shape, **{key: int(value) for key, value in values.items() if key in own})


def _pairs(text: str, name: str, known: list[str]) -> dict[str, int | float]:
    """``key=value`` pairs; every value is a positive whole number, but for the seed (any) and the rate (a fraction)."""
    found: dict[str, int | float] = {}
    for pair in filter(None, text.split(",")):
        key, _, value = pair.partition("=")
        key = key.strip().replace("-", "_")
        if key not in known:
            raise RequestError(f"unknown key {key!r} of gen:{name}{_hint(key, known)}", field="trace")
        kind = (
            "whole number" if key == "seed" else "positive number" if key == "per_second" else "positive whole number"
        )
        try:
            number = float(value) if key == "per_second" else int(value)
        except ValueError as error:
            raise RequestError(f"gen:{name}: {key} must be a {kind}, got {value!r}", field="trace") from error
        if key != "seed" and not 0 < number < float("inf"):
            raise RequestError(f"gen:{name}: {key} must be a {kind}, got {value!r}", field="trace")
        found[key] = number
    return found


def _hint(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return (f"; did you mean {near[0]!r}?" if near else ".") + f" Known: {', '.join(known)}"
