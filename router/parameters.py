"""Policy parameters as plain data: what `kvpool tune` writes and `kvpool simulate --params` reads.  (pure)"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Any

from kvpool.errors import ConfigError
from router.planning import Params

FORMAT = "kvpool-params/1"
MAX_VALUE = 10**18
"""Of any parameter: 30 years in nanoseconds."""


def params_to_dict(params: Params) -> dict[str, Any]:
    """JSON-serialisable form with the format's name."""
    return {"format": FORMAT, "params": asdict(params)}


def params_from_dict(data: Any) -> Params:
    """Read what `params_to_dict` wrote; absent parameters keep their defaults.

    Raises:
        ConfigError: another format, an unknown parameter or a value out of range; the message names it.
    """
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
        raise ConfigError(f"policy parameters must be an object of format {FORMAT!r}, got {found!r}")
    made = _filled(Params(), data.get("params"), "params")
    assert isinstance(made, Params)
    return made


def with_values(params: Params, values: Mapping[str, float]) -> Params:
    """The parameters with some replaced, named by their path (``harm.base``).

    Raises:
        ConfigError: no such parameter.
    """
    nested: dict[str, Any] = {}
    for path, value in values.items():
        *parents, last = path.split(".")
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    made = _filled(params, nested, "params")
    assert isinstance(made, Params)
    return made


def value_of(params: Params, path: str) -> float:
    """One parameter by its path."""
    found: Any = params
    for part in path.split("."):
        found = getattr(found, part)
    return float(found)


def _filled(base: Any, data: Any, place: str) -> Any:
    """A copy of the dataclass ``base`` with values from ``data``, nested dataclasses included."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{place} must be an object, got {type(data).__name__}", field=place)
    known = [item.name for item in fields(base)]
    changed = {}
    for name, value in data.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are: {', '.join(known)}"
            wrong = f"{place}.{name}"[:200]
            raise ConfigError(f"unknown policy parameter {wrong}{hint}", field=wrong)
        old = getattr(base, name)
        changed[name] = (
            _filled(old, value, f"{place}.{name}") if is_dataclass(old) else _checked(old, value, place, name)
        )
    return replace(base, **changed)


def _checked(old: Any, value: Any, place: str, name: str) -> Any:
    """A number in range, of the kind of the one it replaces."""
    if isinstance(old, bool) or isinstance(value, bool):
        good = isinstance(old, bool) and isinstance(value, bool)
    elif isinstance(old, int):
        good = isinstance(value, int) and 0 <= value <= MAX_VALUE
    else:
        good = isinstance(value, int | float) and 0 <= value <= MAX_VALUE  # never NaN
    if not good:
        kind = type(old).__name__
        raise ConfigError(
            f"{place}.{name} must be a {kind} from 0 to {MAX_VALUE}, got {value!r:.80}", field=f"{place}.{name}"
        )
    return float(value) if isinstance(old, float) else value
