"""Whatever bytes come from outside, a decoder of ours answers with a value or with an error of ours, and stays small.

More examples: ``KVPOOL_FUZZ_EXAMPLES=5000 pytest tests/fuzz``.
"""

from __future__ import annotations

import ast
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpool
from kvpool.errors import KVPoolError
from tests.fuzz.decoders import NO_DECODERS, TABLE, Case, Decoder
from tests.fuzz.strategies import fuzzing

ROOT = Path(kvpool.__file__).parents[1]
PACKAGES = ("kvpool", "router", "workers")
LEFT_OUT = ("kvpool/metadata/v1", "kvpool/bench")  # generated; a tool that reads what it wrote itself
SOUNDS_LIKE = re.compile(r"(?!.*_to_)((parse|decode|load|read)(_|$)|from_|[a-z].*_from_(wire|bytes|dict|rpc)$)")
MAX_ERROR_CHARS = 30_000
MAX_PEAK_BYTES = 64 << 20
"""What one decoder may take for one of these inputs, the largest of which has some 100 KB."""


@pytest.mark.parametrize("decoder", TABLE, ids=lambda decoder: decoder.name.partition(".")[2])
def test_nonsense_is_answered_with_a_value_or_an_error_of_ours(decoder: Decoder, tmp_path: Path) -> None:
    @fuzzing
    @given(decoder.feed)
    def holds(fed: object) -> None:
        _feed(decoder, Case(fed, tmp_path))

    holds()


def _feed(decoder: Decoder, case: Case) -> None:
    told = ""
    tracemalloc.start()
    try:
        decoder.call(case)
    except (KVPoolError, *decoder.also) as error:
        told = str(error)
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak_bytes < MAX_PEAK_BYTES
    assert len(told) < MAX_ERROR_CHARS, "an error is for reading"


def test_every_decoder_of_our_packages_is_in_the_table() -> None:
    found = {name for package in PACKAGES for name in _decoders_of(package)}
    entered = {decoder.name for decoder in TABLE}
    missing = sorted(found - entered - NO_DECODERS.keys())
    assert not missing, f"enter in tests/fuzz/decoders.py what reads foreign input: {missing}"
    assert not sorted((entered | NO_DECODERS.keys()) - found), "the table names what is no longer there"


def _decoders_of(package: str) -> Iterator[str]:
    for path in sorted((ROOT / package).rglob("*.py")):
        name = path.relative_to(ROOT).with_suffix("").as_posix()
        if not name.startswith(LEFT_OUT):
            yield from _functions(ast.parse(path.read_text()).body, name.replace("/", "."))


def _functions(body: list[ast.stmt], place: str) -> Iterator[str]:
    for item in body:
        if isinstance(item, ast.ClassDef):
            yield from _functions(item.body, f"{place}.{item.name}")
        elif isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            marks = {mark.id for mark in item.decorator_list if isinstance(mark, ast.Name)}
            if SOUNDS_LIKE.match(item.name) and "property" not in marks:
                yield f"{place}.{item.name}"


@pytest.mark.parametrize("wrong", [ValueError("x"), MemoryError()])
def test_canary_a_decoder_that_lets_another_error_through_is_found(wrong: Exception, tmp_path: Path) -> None:
    def broken(case: Case) -> None:
        if len(case.fed) > 3:
            raise wrong

    with pytest.raises(type(wrong)):
        _feed(Decoder("broken", st.none(), broken), Case(b"long", tmp_path))


def test_canary_a_decoder_that_takes_much_memory_is_found(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        _feed(Decoder("broken", st.none(), lambda case: bytes(case.fed)), Case(MAX_PEAK_BYTES, tmp_path))
