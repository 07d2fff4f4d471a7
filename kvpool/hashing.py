"""Tokens → chained block hashes: the identity of a block everywhere in the pool.

Scheme ``kvpool-blake2b-v1``. Every digest is BLAKE2b with a 16-byte output and the fixed personalisation
``kvpool-block-v1``; no per-process seed takes part, so every process of every version of this scheme agrees.

    root    = H(namespace encoded as length-prefixed UTF-8 fields, in the order of `Namespace`)
    hash[i] = H(hash[i-1] (root for i = 0) || tokens of block i as little-endian uint32)

A hash names the block *and* everything before it, so equal hashes mean equal KV and a position needs no tree.
Only full blocks are hashed. Test vectors: ``tests/unit/data/hash_vectors.json``.

Source of the idea: vLLM's chained prefix hashing; BLAKE2b is RFC 7693.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from hashlib import blake2b

from kvpool.errors import RequestError
from kvpool.types import BLOCK_HASH_BYTES, BlockHash

HASH_SCHEME = "kvpool-blake2b-v1"
_PERSON = b"kvpool-block-v1"


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything besides tokens that changes a block's KV or who may share it.

    Attributes:
        model: model name and revision, as the launcher resolved it.
        dtype: dtype of the KV, for example ``float32``.
        layout: layout fingerprint of `kvpool.layout.KVLayout`.
        block_tokens: tokens per block.
        adapter: LoRA or other adapter, empty for none.
        tenant: salt that keeps tenants apart, empty to share.
    """

    model: str
    dtype: str
    layout: str
    block_tokens: int
    adapter: str = ""
    tenant: str = ""

    def for_tenant(self, tenant: str) -> Namespace:
        """The same namespace for another tenant."""
        return replace(self, tenant=tenant)

    def root(self) -> BlockHash:
        """Hash of the empty chain in this namespace, 16 bytes."""
        digest = blake2b(digest_size=BLOCK_HASH_BYTES, person=_PERSON)
        for field in astuple(self):
            raw = str(field).encode()
            digest.update(struct.pack("<I", len(raw)) + raw)
        return BlockHash(digest.digest())


def block_hashes(tokens: Sequence[int], namespace: Namespace) -> tuple[BlockHash, ...]:
    """Chain of hashes of every *full* block of ``tokens``.

    Args:
        tokens: token ids, each in [0, 2**32).
        namespace: what the chain is rooted in.

    Raises:
        RequestError: a token id is out of range.
    """
    return tuple(iter_block_hashes(tokens, namespace.root(), namespace.block_tokens))


def iter_block_hashes(tokens: Sequence[int], parent: BlockHash, block_tokens: int) -> Iterator[BlockHash]:
    """Hashes of the full blocks of ``tokens`` that follow ``parent``, lazily, in order."""
    try:
        raw = array("I", tokens).tobytes()
    except (OverflowError, TypeError, ValueError) as error:
        raise RequestError("token ids must be integers in [0, 2**32)") from error
    step = 4 * block_tokens
    for start in range(0, len(raw) - step + 1, step):
        parent = BlockHash(
            blake2b(parent + raw[start : start + step], digest_size=BLOCK_HASH_BYTES, person=_PERSON).digest()
        )
        yield parent


def set_digest(hashes: Iterable[BlockHash]) -> str:
    """Digest of a set of distinct block hashes, whatever their order: ``count:xor`` in hexadecimal.

    Two holders of equal digests hold the same blocks: the hashes are themselves outputs of a cryptographic hash.
    """
    count, mixed = 0, 0
    for item in hashes:
        count += 1
        mixed ^= int.from_bytes(item)
    return f"{count}:{mixed:0{2 * BLOCK_HASH_BYTES}x}"
