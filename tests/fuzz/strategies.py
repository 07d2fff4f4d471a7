"""Input that nobody meant to send: spoilt copies of valid input, and noise."""

from __future__ import annotations

import copy
import json
import os
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("KVPOOL_FUZZ_EXAMPLES", "60"))
"""Examples per decoder; the whole suite takes seconds at the default."""

fuzzing = settings(
    max_examples=EXAMPLES,
    derandomize="KVPOOL_FUZZ_EXAMPLES" not in os.environ,  # the same every day, until somebody looks for more
    deadline=None,  # machines differ; the test's own timeout ends what hangs
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)

DEEP = 20_000
_SCRAPS = [b"", b"\0", b"\xff", b"\xed\xa0\x80", b"[" * DEEP, b"{", b'"', b"9" * 5000, b"-1", b"1e999", b"NaN", b"\n"]

NONSENSE: list[Any] = [
    None, True, False, 0, -1, 0.5, 1e308, float("inf"), float("nan"), 2**31, 2**63, 2**64, 10**400, -(2**70),
    "", "0", "nan", "\x00", "\ud800", "x" * 5000, [], {}, [[]], [None], {"": {}}, ["x"], [2**70], {"id": []},
]  # fmt: skip
"""Values that are rarely expected where they appear."""


@st.composite
def mutants(draw: st.DrawFn, sample: bytes) -> bytes:
    """A valid input with a few cuts, copies, flips and insertions, or noise."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=300))
    raw = bytearray(sample)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(raw)))
        end = min(len(raw), at + draw(st.integers(0, 40)))
        match draw(st.integers(0, 4)):
            case 0:
                del raw[at:end]
            case 1:
                raw[at:at] = raw[at:end]
            case 2:
                raw[at:end] = draw(st.binary(min_size=end - at, max_size=end - at))
            case 3:
                raw[at:at] = draw(st.sampled_from(_SCRAPS))
            case 4:
                del raw[at:]
    return bytes(raw)


@st.composite
def spoilt(draw: st.DrawFn, sample: Any) -> Any:
    """A valid tree of lists and mappings in which a few values are replaced, removed or joined by strangers."""
    tree = [copy.deepcopy(sample)]
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(tree))
        owner, key = places[draw(st.integers(0, len(places) - 1))]
        match draw(st.integers(0, 4)):
            case 0 if len(places) > 1 and owner is not tree:
                del owner[key]
            case 1 if isinstance(owner, dict):
                owner[draw(st.text(max_size=4))] = copy.deepcopy(draw(st.sampled_from(NONSENSE)))
            case _:
                owner[key] = copy.deepcopy(draw(st.sampled_from(NONSENSE)))
    return tree[0]


def _places(owner: Any) -> Any:
    for key in list(owner) if isinstance(owner, dict) else range(len(owner)):
        yield owner, key
        if isinstance(owner[key], dict | list):
            yield from _places(owner[key])


def json_files(*samples: Any) -> st.SearchStrategy[bytes]:
    """Files of one JSON text."""
    chosen = st.sampled_from(samples)
    return st.one_of(
        chosen.flatmap(spoilt).map(_text), chosen.map(_text).flatmap(mutants), st.just(b"[" * DEEP), st.just(b"\xff")
    )


def json_lines(*samples: Any) -> st.SearchStrategy[bytes]:
    """Files of JSON lines."""
    whole = b"\n".join(map(_text, samples)) + b"\n"
    lines = st.lists(st.sampled_from(samples).flatmap(spoilt).map(_text), min_size=1, max_size=4)
    return st.one_of(lines.map(lambda found: whole + b"\n".join(found)), lines.map(b"\n".join), mutants(whole))


def _text(value: Any) -> bytes:
    return json.dumps(value).encode()


def messages(kind: Any, overrides: dict[str, st.SearchStrategy[Any]] | None = None) -> st.SearchStrategy[Any]:
    """Valid messages of a protobuf class with values that make no sense. ``overrides`` are by name of the field."""
    return st.deferred(lambda: _message(kind, overrides or {}))


@st.composite
def _message(draw: st.DrawFn, kind: Any, overrides: dict[str, st.SearchStrategy[Any]]) -> Any:
    made = kind()
    for field in kind.DESCRIPTOR.fields:
        if draw(st.integers(0, 5)) == 0:
            continue
        values = overrides[field.name] if field.name in overrides else _values(field, overrides)
        many = field.is_repeated if hasattr(field, "is_repeated") else field.label == FieldDescriptor.LABEL_REPEATED
        if many:
            getattr(made, field.name).extend(draw(st.lists(values, max_size=3)))
        elif field.message_type is not None:
            getattr(made, field.name).CopyFrom(draw(values))
        else:
            setattr(made, field.name, draw(values))
    return made


_NUMBERS = {FieldDescriptor.TYPE_UINT32: 32, FieldDescriptor.TYPE_UINT64: 64, FieldDescriptor.TYPE_FIXED64: 64}


def _values(field: Any, overrides: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return messages(field.message_type._concrete_class, overrides)
    if bits := _NUMBERS.get(field.type):
        return st.one_of(st.integers(0, 3), st.sampled_from([2**bits - 1, 2 ** (bits - 1), 65_537, 1 << 20]))
    return {
        FieldDescriptor.TYPE_BOOL: st.booleans(),
        FieldDescriptor.TYPE_STRING: st.sampled_from(["", "x", "ü\0", "x" * 300, "x" * 20_000]),
        FieldDescriptor.TYPE_BYTES: st.one_of(
            st.integers(0, 3).map(lambda count: bytes(16 * count)), st.binary(max_size=33), st.just(bytes(100_000))
        ),
        FieldDescriptor.TYPE_ENUM: st.integers(-1, 9),
    }[field.type]
