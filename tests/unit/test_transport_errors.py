"""Every foreign error has a place in our tree, and unsafe settings are refused."""

from __future__ import annotations

import inspect

import pytest
from ucxx import exceptions as ucxx_exceptions
from ucxx._lib import libucxx

from kvpool.errors import ConfigError, InvariantViolation, KVPoolError, PeerGoneError, TransferError
from kvpool.transport.ucx.errors import BY_CLASS, MAPPING, from_ucx
from kvpool.transport.ucx.settings import UcxOptions


def ucxx_errors() -> dict[str, type[BaseException]]:
    return {
        name: item
        for module in (libucxx, ucxx_exceptions)
        for name, item in vars(module).items()
        if inspect.isclass(item) and issubclass(item, BaseException) and name.startswith("UCX")
    }


def test_every_exception_of_ucxx_is_mapped() -> None:
    missing = {name for name, cls in ucxx_errors().items() if cls not in BY_CLASS}
    assert not missing, f"map these in kvpool/transport/ucx/errors.py: {sorted(missing)}"
    assert set(MAPPING) <= set(ucxx_errors()), "the mapping names errors that ucxx does not have"


def test_a_mapped_error_carries_its_cause_and_who_it_concerns() -> None:
    for cls in ucxx_errors().values():
        cause = cls("boom")
        mapped = from_ucx(cause, "sending", "worker-1@2")
        assert isinstance(mapped, KVPoolError)
        assert mapped.__cause__ is cause
        assert mapped.details["peer"] == "worker-1@2"


def test_the_specific_class_wins_over_its_base() -> None:
    assert type(from_ucx(libucxx.UCXConnectionResetError("x"), "a", "b")) is PeerGoneError
    assert type(from_ucx(RuntimeError("x"), "a", "b")) is TransferError


def test_what_is_not_from_ucxx_is_our_bug() -> None:
    with pytest.raises(InvariantViolation):
        from_ucx(KeyError("x"), "a", "b")


def test_settings_that_break_the_fence_are_refused() -> None:
    with pytest.raises(ConfigError, match="put_zcopy"):
        UcxOptions(settings={"RNDV_SCHEME": "put_zcopy"}).context_settings()
    merged = UcxOptions(settings={"TCP_PUT_ENABLE": "y", "RNDV_THRESH": "inf", "TLS": "tcp"}).context_settings()
    assert merged["TCP_PUT_ENABLE"] == "n"
    assert merged["RNDV_THRESH"] == "8192"
    assert merged["TLS"] == "tcp"
