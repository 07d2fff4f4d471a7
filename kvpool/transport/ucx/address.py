"""A seal around UCX worker addresses: magic, version and a checksum in front of what UCX made.  (pure)

UCX reads an address without a check of its own; one that is cut or damaged ends the whole process (an assertion in C,
or a read behind the end), which no error handling of ours could prevent. What was not made by `seal` never gets there.
It is no protection from a peer that means harm: that can seal what it likes.
"""

from __future__ import annotations

import struct

import xxhash

from kvpool.errors import PeerGoneError

_HEAD = struct.Struct("<4sBHQ")  # magic, version, length, xxh3 of the address
_MAGIC, _VERSION = b"kvux", 1
MAX_ADDRESS_BYTES = 0xFFFF


def seal(address: bytes) -> bytes:
    """What peers are told of a UCX worker's address."""
    return _HEAD.pack(_MAGIC, _VERSION, len(address), xxhash.xxh3_64_intdigest(address)) + address


def from_seal(sealed: bytes, peer: str) -> bytes:
    """The address that a peer sealed.

    Raises:
        PeerGoneError: it is not whole, or not such an address at all, so nobody can be reached there.
    """
    reason = _what_is_wrong(sealed)
    if reason is not None:
        raise PeerGoneError(f"the UCX address of {peer} cannot be used: {reason}", peer=peer)
    return sealed[_HEAD.size :]


def _what_is_wrong(sealed: bytes) -> str | None:
    if len(sealed) <= _HEAD.size:
        return f"it has {len(sealed)} bytes, which is too short"
    magic, version, length, checksum = _HEAD.unpack_from(sealed)
    if (magic, version) != (_MAGIC, _VERSION):
        return "it was not made by this version of kvpool; run the same one everywhere"
    address = sealed[_HEAD.size :]
    if len(address) != length:
        return f"{len(address)} of {length} bytes came"
    if xxhash.xxh3_64_intdigest(address) != checksum:
        return "its bytes were damaged on the way"
    return None
