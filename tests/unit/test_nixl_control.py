"""What the NIXL transport refuses before it connects, and how its control stream is cut into messages."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest

from kvpool.errors import ConfigError, IncompatibleError, IntegrityError
from kvpool.transport.nixl.control import Endpoint, MessageBuffer, framed, own_address, refuse_tcp
from kvpool.transport.nixl.transport import NixlOptions
from kvpool.transport.wire import MAX_MESSAGE_BYTES


def test_addresses_survive_and_others_are_refused() -> None:
    endpoint = Endpoint(2**63 + 1, "10.0.0.7", 4711)
    assert Endpoint.decode(endpoint.encode()) == endpoint
    for strange in (b"", b"memory-1", bytes(10) + b"\xff\xfe"):
        with pytest.raises(IncompatibleError):
            Endpoint.decode(strange)


def test_another_host_is_refused_without_rdma_and_the_error_says_why(tmp_path: Path) -> None:
    refuse_tcp(7, 7, "w", tmp_path)
    for mine, theirs in ((7, 8), (0, 0)):
        with pytest.raises(IncompatibleError, match="kill the holder"):
            refuse_tcp(mine, theirs, "w", tmp_path)
        with pytest.raises(IncompatibleError, match="RDMA"):
            refuse_tcp(mine, theirs, "w", tmp_path / "none")
    (tmp_path / "mlx5_0").mkdir()
    refuse_tcp(7, 8, "w", tmp_path)


def test_the_control_path_leaves_the_loopback_only_where_rdma_can_follow(tmp_path: Path) -> None:
    assert own_address(tmp_path) == own_address(tmp_path / "none") == "127.0.0.1"
    (tmp_path / "mlx5_0").mkdir()
    ipaddress.ip_address(own_address(tmp_path))


def test_a_stream_is_cut_into_messages_wherever_it_breaks() -> None:
    messages = [b"", b"a", b"b" * 1000]
    stream = b"".join(map(framed, messages))
    for step in (1, 3, 7, len(stream)):
        buffer = MessageBuffer()
        got = [message for at in range(0, len(stream), step) for message in buffer.feed(stream[at : at + step])]
        assert got == messages


def test_a_message_that_is_announced_too_long_is_refused_at_once() -> None:
    with pytest.raises(IntegrityError):
        MessageBuffer().feed((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"))


def test_unknown_settings_are_refused() -> None:
    assert NixlOptions.from_settings({"HOST": "::1"}) == NixlOptions("::1")
    with pytest.raises(ConfigError, match="TLS"):
        NixlOptions.from_settings({"TLS": "tcp"})
