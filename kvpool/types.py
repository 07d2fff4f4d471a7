"""Identifiers and small values every package speaks in.

Pure values only: no I/O, no clock, no third-party import. Everything is frozen, so it may be shared between
threads and pickled by Ray. Times are integer nanoseconds, sizes integer bytes, counts plain ints.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple, NewType

WorkerId = NewType("WorkerId", str)
"""Stable name of a worker across restarts, for example ``worker-0``. Never an address."""

WorkerEpoch = NewType("WorkerEpoch", int)
"""One incarnation of a worker. Strictly larger for every restart; fences zombies of the incarnation before."""

BlockHash = NewType("BlockHash", bytes)
"""Global identity of a block: 16 bytes, chained over everything before it (see `kvpool.hashing`)."""

BlockId = NewType("BlockId", int)
"""Local index of a block inside one segment; its byte offset is ``block_id * block_bytes``."""

RequestId = NewType("RequestId", str)
"""Identity of one user request. Retries of the same request keep it."""

BLOCK_HASH_BYTES = 16


class Role(Enum):
    """What a worker does. ``MIXED`` prefills and decodes."""

    MIXED = "mixed"
    PREFILL = "prefill"
    DECODE = "decode"


class Tier(IntEnum):
    """Where a replica lies, fastest first. The number is the wire value."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class MemberState(Enum):
    """How the directory sees a worker. Only ``ALIVE`` workers are offered as holders or receive new requests."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DRAINING = "draining"


class WorkerKey(NamedTuple):
    """One incarnation of one worker: the only thing that identifies a peer.

    A tuple, which hashes without a call into Python.
    """

    worker_id: WorkerId
    worker_epoch: WorkerEpoch

    def __str__(self) -> str:
        return f"{self.worker_id}@{self.worker_epoch}"


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """One prefill pass of one request: ``new_tokens`` over ``context_tokens`` already there took ``elapsed_ns``."""

    new_tokens: int
    context_tokens: int
    elapsed_ns: int


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """What a worker tells the directory when it joins.

    Attributes:
        key: worker id and epoch.
        role: what the worker does.
        transport: name of the data-plane transport, for example ``ucx``.
        data_address: opaque bytes by which a peer's transport reaches this worker.
        layout_fingerprint: digest of model, dtype, groups and block size; all members of a pool share it.
        hash_scheme: name of the block-hash scheme; all members share it.
        block_tokens: tokens per block.
        block_bytes: bytes of one block on the wire (all groups of a full block).
        capacity_blocks: blocks per tier this worker offers, indexed by `Tier`.
        control_address: how the launcher's runtime names the worker (the Ray actor name).
        calibration: prefill passes timed before the worker joined, so that routers price its first requests from
            evidence, whenever they start.
    """

    key: WorkerKey
    role: Role
    transport: str
    data_address: bytes
    layout_fingerprint: str
    hash_scheme: str
    block_tokens: int
    block_bytes: int
    capacity_blocks: tuple[int, ...]
    control_address: str
    calibration: tuple[PrefillSample, ...] = ()
