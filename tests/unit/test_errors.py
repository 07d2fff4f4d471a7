"""The error tree: every class survives pickling, has its own code, and says what happened."""

import pickle

import pytest

from kvpool import errors
from kvpool.errors import InvariantViolation, KVPoolError, TransferError


def _tree() -> list[type[KVPoolError]]:
    found = [KVPoolError]
    for kind in found:
        found.extend(kind.__subclasses__())
    return found


@pytest.mark.parametrize("kind", _tree())
def test_every_error_survives_pickling_with_message_and_details(kind: type[KVPoolError]) -> None:
    error = kind("what is wrong", worker_id="worker-1", elapsed_ns=5)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (copy.message, copy.details) == (error.message, error.details)
    assert "worker_id=worker-1" in str(copy)


def test_codes_are_unique_so_that_failures_can_be_counted_by_name() -> None:
    codes = [kind.code for kind in _tree()]
    assert len(codes) == len(set(codes))


def test_invariant_violations_are_outside_the_tree_so_nobody_handles_them_by_accident() -> None:
    assert not issubclass(InvariantViolation, KVPoolError)


def test_the_drawn_tree_names_every_class() -> None:
    assert errors.__doc__ is not None
    missing = [kind.__name__ for kind in _tree() if kind.__name__ not in errors.__doc__]
    assert missing == []


def test_transfer_failures_can_be_caught_together() -> None:
    assert {kind.__name__ for kind in TransferError.__subclasses__()} == {
        "PeerGoneError",
        "StallError",
        "TransferCancelledError",
        "IntegrityError",
    }
