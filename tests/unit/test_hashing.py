"""The block-hash scheme is fixed for ever: vectors, chaining, namespaces."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvpool.errors import RequestError
from kvpool.hashing import HASH_SCHEME, Namespace, block_hashes

VECTORS = Path(__file__).parent / "data" / "hash_vectors.json"
SPACE = Namespace(model="m@1", dtype="float32", layout="00ff", block_tokens=4)


def test_vectors_of_the_scheme_never_change() -> None:
    data = json.loads(VECTORS.read_text())
    assert data["scheme"] == HASH_SCHEME
    for case in data["cases"]:
        hashes = block_hashes(case["tokens"], Namespace(**case["namespace"]))
        assert [value.hex() for value in hashes] == case["hashes"]


def test_another_process_with_another_hash_seed_agrees() -> None:
    code = "from kvpool.hashing import *;print(block_hashes(range(8), Namespace('m@1','float32','00ff',4))[-1].hex())"
    output = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == block_hashes(range(8), SPACE)[-1].hex()


def test_only_full_blocks_are_hashed() -> None:
    assert [len(block_hashes(range(n), SPACE)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_hash_depends_on_everything_before_it() -> None:
    one = block_hashes([1, 2, 3, 4, 5, 6, 7, 8], SPACE)
    other = block_hashes([9, 2, 3, 4, 5, 6, 7, 8], SPACE)
    assert one[0] != other[0]
    assert one[1] != other[1]


@pytest.mark.parametrize("field", ["model", "dtype", "layout", "adapter", "tenant"])
def test_every_field_of_the_namespace_keeps_blocks_apart(field: str) -> None:
    assert block_hashes(range(4), SPACE) != block_hashes(range(4), replace(SPACE, **{field: "x"}))


def test_fields_cannot_run_into_each_other() -> None:
    assert replace(SPACE, adapter="ab", tenant="").root() != replace(SPACE, adapter="a", tenant="b").root()


@pytest.mark.parametrize("tokens", [[-1, 0, 0, 0], [2**32, 0, 0, 0], ["a", 0, 0, 0], [1.5, 0, 0, 0]])
def test_malformed_tokens_are_a_request_error(tokens: list[int]) -> None:
    with pytest.raises(RequestError, match="token ids"):
        block_hashes(tokens, SPACE)
