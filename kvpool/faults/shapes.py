"""What the fields of a history's lines must look like, so that whoever judges it may rely on them.  (pure)

A field that is named here is checked where it is present; `REQUIRED` must be. Other fields are for readers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Shape = Callable[[Any], bool]

_MAX_NUMBER = 2**63


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MAX_NUMBER


def _number(value: Any) -> bool:
    return _count(value) or (isinstance(value, float) and abs(value) < _MAX_NUMBER)  # neither infinite nor NaN


def _maybe(shape: Shape) -> Shape:
    return lambda value: value is None or shape(value)


def _many(shape: Shape) -> Shape:
    return lambda value: isinstance(value, list) and all(map(shape, value))


def _mapping(shape: Shape) -> Shape:
    return lambda value: isinstance(value, dict) and all(map(shape, value.values()))


def _object(required: Mapping[str, Shape], optional: Mapping[str, Shape]) -> Shape:
    def holds(value: Any) -> bool:
        return isinstance(value, dict) and not first_wrong(value, required, optional)

    return holds


def first_wrong(data: Mapping[str, Any], required: Mapping[str, Shape], optional: Mapping[str, Shape]) -> str | None:
    """Name of the first field that is missing or has another shape; None when all is well."""
    for name, shape in required.items():
        if name not in data or not shape(data[name]):
            return name
    return next((name for name, shape in optional.items() if name in data and not shape(data[name])), None)


_STATS = _object(
    {}, {"load_failures": _many(_text), "tokens_loaded": _count, "attempts": _count, "ttft_ns": _count, "plan": _text}
)
_SILENT = _object({"error": _text}, {})
_AUDITED = _object(
    {"key": _text, "digest": lambda value: True, "active": lambda value: True}, {"failures": _mapping(_count)}
)
_BELIEF = _mapping(lambda value: True)

ALWAYS: dict[str, Shape] = {"at_ns": _count}
"""What every line has."""

REQUIRED: Mapping[str, dict[str, Shape]] = {
    "reference": {"prompt": _text, "tokens": _many(_count)},
    "invoke": {"id": _text, "style": _text, "timeout_ns": _count, "max_tokens": _count},
    "attempt": {"id": _text, "number": _count, "worker": _text, "plan": _text},
    "attempt_end": {"id": _text, "number": _count},
    "chunk": {"id": _text, "tokens": _many(_count)},
    "cancel": {"id": _text},
    "response": {"id": _text, "finish": _text, "tokens": _many(_count)},
    "error": {"id": _text, "code": _text},
    "fault": {"fault": _text, "name": _text, "target": _text},
    "heal": {"fault": _text},
    "audit": {
        "workers": _mapping(lambda value: _SILENT(value) or _AUDITED(value)),
        "router": _BELIEF,
        "directories": _mapping(_BELIEF),
    },
}
"""By kind of line: fields that must be there."""

OPTIONAL: Mapping[str, Mapping[str, Shape]] = {
    "run": {"lease_ns": _count, "ttft_limit_ns": _count, "rate_rps": _number, "seed": _count, "scenario": _text},
    "invoke": {"prompt": _maybe(_text), "may_expire": _flag},
    "attempt": {"holders": _many(_text), "planned_tokens": _count, "forced": _flag},
    "attempt_end": {"code": _maybe(_text)},
    "response": {"stats": _STATS},
    "fault": {"mechanism": _text, "key": _maybe(_text)},
    "state": {"alive": _many(_text), "error": _maybe(_text)},
    "end": {"errors": _many(_text)},
}
"""By kind of line: fields that may be missing."""
