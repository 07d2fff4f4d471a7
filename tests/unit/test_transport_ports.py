"""Which UCX worker a reader connects through."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvpool.errors import PeerGoneError
from kvpool.transport.ucx import fabric
from kvpool.transport.ucx.address import seal
from kvpool.transport.ucx.fabric import MAX_PORTS, PortSet

A = seal(b"a")


class FakePort:
    """Counts connections; the context says how many can be made."""

    def __init__(self, context: Iterator[int]) -> None:
        try:
            self.number = next(context)
        except StopIteration:
            raise RuntimeError("No such device") from None

    def connect(self, address: bytes, peer: str) -> int:
        return self.number


@pytest.fixture(autouse=True)
def fake_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabric, "Port", FakePort)


def test_one_worker_serves_any_number_of_peers() -> None:
    ports = PortSet(iter(range(100)))
    assert {ports.connect(seal(bytes([number])), "peer") for number in range(50)} == {0}


def test_connecting_to_one_address_again_goes_round_a_bounded_number_of_workers() -> None:
    ports = PortSet(iter(range(100)))
    used = [ports.connect(A, "peer") for _ in range(2 * MAX_PORTS + 1)]
    assert used == [*range(MAX_PORTS), *range(MAX_PORTS), 0]


def test_when_ucx_makes_no_further_worker_the_ones_there_are_must_do() -> None:
    made = iter(range(3))
    ports = PortSet(made)
    assert [ports.connect(A, "peer") for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert len(ports.ports) == 3


def test_a_malformed_address_costs_no_worker() -> None:
    ports = PortSet(iter(range(100)))
    for _ in range(3):
        with pytest.raises(PeerGoneError, match="cannot be used"):
            ports.connect(A[:-1], "peer")
    assert (ports.connect(A, "peer"), len(ports.ports)) == (0, 1)
