"""The control path of the NIXL transport: who serves where, and length-prefixed messages over one TCP stream.

A READ is one-sided, so identities, checksums and read leases need a path of their own. It carries the messages of
`kvpool.transport.wire`, and its end tells at once when a process died. An address names the host, so that a reader
refuses another host it could only reach over TCP before it connects.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from kvpool.errors import IncompatibleError, IntegrityError
from kvpool.transport.wire import MAX_MESSAGE_BYTES

HELLO = b"kvpool-nixl-1"
_LENGTH = struct.Struct("<I")
_ADDRESS = struct.Struct("<QH")
LOOPBACK = "127.0.0.1"
RDMA_DEVICES = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a holder's control path listens.

    Attributes:
        host_id: of `kvpool.transport.host`; 0 for unknown.
        address, port: of its TCP socket.
    """

    host_id: int
    address: str
    port: int

    def encode(self) -> bytes:
        """As an opaque address."""
        return _ADDRESS.pack(self.host_id, self.port) + self.address.encode()

    @classmethod
    def decode(cls, raw: bytes) -> Endpoint:
        """Parse an opaque address.

        Raises:
            IncompatibleError: it is not one of this transport.
        """
        try:
            host_id, port = _ADDRESS.unpack_from(raw)
            return cls(host_id, raw[_ADDRESS.size :].decode(), port)
        except (struct.error, UnicodeDecodeError) as error:
            raise IncompatibleError("this is no address of the nixl transport") from error


def has_rdma(devices: Path = RDMA_DEVICES) -> bool:
    """Whether this host has an RDMA device."""
    return devices.is_dir() and any(devices.iterdir())


def own_address(devices: Path = RDMA_DEVICES) -> str:
    """Where peers find the control path: this host's address in the network if RDMA can follow, else the loopback,
    since nobody on another host could read."""
    if not has_rdma(devices):
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; the kernel picks the address of the route
        except OSError:
            return LOOPBACK  # no route to anywhere
        return str(probe.getsockname()[0])


def refuse_tcp(mine: int, theirs: int, peer: str, devices: Path = RDMA_DEVICES) -> None:
    """Refuse a holder that only TCP could reach.

    Raises:
        IncompatibleError: it is on another host and this one has no RDMA device.
    """
    if mine and mine == theirs:
        return
    if has_rdma(devices):
        return
    raise IncompatibleError(
        f"{peer} is on another host and there is no RDMA device here; a NIXL READ over TCP can kill the holder when "
        "its reader dies, so it is refused: use the ucx transport",
        peer=peer,
    )


class MessageBuffer:
    """Cuts a stream into messages. Bounded: a longer message is refused by its length."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add what arrived; returns complete messages.

        Raises:
            IntegrityError: the stream announces a message that is too long.
        """
        self._data += data
        messages = []
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > MAX_MESSAGE_BYTES:
                raise IntegrityError(f"a control message of {length} bytes is longer than {MAX_MESSAGE_BYTES}")
            if len(self._data) < _LENGTH.size + length:
                break
            messages.append(bytes(self._data[_LENGTH.size : _LENGTH.size + length]))
            del self._data[: _LENGTH.size + length]
        return messages


def framed(message: bytes) -> bytes:
    """A message as it goes into the stream."""
    return _LENGTH.pack(len(message)) + message


def listen(address: str) -> socket.socket:
    """A listening socket on a free port, not blocking."""
    listener = socket.create_server((address, 0), backlog=128)
    listener.setblocking(False)
    return listener
