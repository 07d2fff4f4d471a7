"""The file of one block on disk: a header that says what it is, then the block's bytes.  (pure)

    magic "KVPB" · version · length of the fields · xxh3 of the fields · fields (JSON) · payload

The fields carry identity (hash, parent, tenant, layout fingerprint), the work a copy saves, and length and xxh3 of the
payload. A file is right when all of it agrees; anything else is an `IntegrityError`, and the reader treats it as a
miss. Checksums find torn writes, so a writer needs no fsync: after a power failure a file is right or not there.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass

import xxhash

from kvpool.errors import IntegrityError
from kvpool.types import BLOCK_HASH_BYTES, BlockHash

_PREFIX = struct.Struct("<4sHHQ")
MAGIC = b"KVPB"
VERSION = 1
MAX_FIELDS_BYTES = 4096
HEADER_BYTES = _PREFIX.size + MAX_FIELDS_BYTES
"""Enough of a file to decode its header."""


@dataclass(frozen=True, slots=True)
class BlockFile:
    """What a header says.

    Attributes:
        block_hash, parent: identity of the block and of the chain before it.
        tenant: whose it is.
        work: see `kvpool.store.worth`.
        fingerprint: of the layout that the payload has.
        payload_bytes, checksum: of the payload; xxh3.
    """

    block_hash: BlockHash
    parent: BlockHash | None
    tenant: str
    work: int
    fingerprint: str
    payload_bytes: int
    checksum: int


def encode_header(item: BlockFile) -> bytes:
    """Everything before the payload."""
    fields = json.dumps(
        {
            "hash": item.block_hash.hex(),
            "parent": None if item.parent is None else item.parent.hex(),
            "tenant": item.tenant,
            "work": item.work,
            "fingerprint": item.fingerprint,
            "bytes": item.payload_bytes,
            "xxh3": item.checksum,
        }
    ).encode()
    return _PREFIX.pack(MAGIC, VERSION, len(fields), xxhash.xxh3_64_intdigest(fields)) + fields


def decode_header(raw: bytes | memoryview) -> tuple[BlockFile, int]:
    """The header at the front of ``raw``, and where the payload begins.

    Raises:
        IntegrityError: it is none, or not whole.
    """
    if len(raw) < _PREFIX.size:
        raise IntegrityError(f"a block file of {len(raw)} bytes has no header")
    magic, version, length, checksum = _PREFIX.unpack_from(raw)
    fields = bytes(raw[_PREFIX.size : _PREFIX.size + length])
    if magic != MAGIC or version != VERSION or length > MAX_FIELDS_BYTES or len(fields) != length:
        raise IntegrityError("a block file has a header of another kind")
    if xxhash.xxh3_64_intdigest(fields) != checksum:
        raise IntegrityError("the header of a block file is damaged")
    try:
        return _item_of(json.loads(fields)), _PREFIX.size + length
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise IntegrityError(f"the header of a block file makes no sense: {error}"[:200]) from error


def check_payload(item: BlockFile, payload: memoryview) -> None:
    """Refuse bytes that are not those the header names.

    Raises:
        IntegrityError: length or checksum differ.
    """
    if len(payload) != item.payload_bytes or xxhash.xxh3_64_intdigest(payload) != item.checksum:
        raise IntegrityError("the bytes of a block file are damaged", block=item.block_hash.hex())


def _item_of(fields: dict[str, object]) -> BlockFile:
    parent = fields["parent"]
    tenant, fingerprint = fields["tenant"], fields["fingerprint"]
    work, payload_bytes, checksum = fields["work"], fields["bytes"], fields["xxh3"]
    if not isinstance(tenant, str) or not isinstance(fingerprint, str):
        raise TypeError("tenant and fingerprint are text")
    if not isinstance(work, int) or not isinstance(payload_bytes, int) or not isinstance(checksum, int):
        raise TypeError("work, bytes and xxh3 are numbers")
    return BlockFile(
        _hash_of(fields["hash"]),
        None if parent is None else _hash_of(parent),
        tenant,
        work,
        fingerprint,
        payload_bytes,
        checksum,
    )


def _hash_of(text: object) -> BlockHash:
    if not isinstance(text, str):
        raise TypeError("a hash is text")
    raw = bytes.fromhex(text)
    if len(raw) != BLOCK_HASH_BYTES:
        raise ValueError("a hash has another length")
    return BlockHash(raw)
