"""Wire format of the two-sided pull, and how blocks merge into runs.  (pure)

    reader                                       holder
      │  PULL   who I am, whom I expect, hashes     │
      │ ───────────────────────────────────────────▶│  pins, merges blocks into runs
      │  OFFER  per-block presence, xxh3, runs      │
      │ ◀───────────────────────────────────────────│  (or REFUSE: a typed error)
      │  posts receives for some runs               │
      │  GRANT  send runs below n                   │
      │ ───────────────────────────────────────────▶│
      │  run 0, run 1, …  (one data message each)   │
      │ ◀═══════════════════════════════════════════│  unpins when the last send is terminal
      │  STOP   no more runs wanted                 │

Over a slow link every run may come as a compressed frame instead (`kvpool.transport.compression`), when the reader's
PULL named a codec and the holder's OFFER took it up; the sums are those of the uncompressed blocks.

On one host the reader may fetch the runs from the holder's memory itself instead of granting them; it says so with
the STOP that ends the pull, and the holder keeps the blocks pinned until then.

A read lease is short. While a pull lasts the reader repeats its GRANT every `LEASE_RENEW_NS` (of no run, when it
fetches them itself), and the holder renews; so it does while bytes move on the link, until the PULL's deadline is over.

The reader grants a run only after its receive is posted, so a data message never arrives unexpected while its read
lives, and the reader alone decides the order, the pace and the bytes in flight. All integers are little-endian.
Every message starts with the magic, the version, its kind, and the pull's sequence number; a message that does not
parse raises `IntegrityError` and is never acted upon.

Tags: bit 63 set marks data (39 bits of pull sequence, 24 bits of run index); clear marks control.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kvpool import errors
from kvpool.errors import IntegrityError, KVPoolError, TransferError
from kvpool.types import BLOCK_HASH_BYTES, BlockHash, WorkerEpoch, WorkerId, WorkerKey

MAGIC = 0x4B56
VERSION = 3
CONTROL_TAG = 1
DATA_BIT = 1 << 63
RUN_BITS = 24
MAX_PULL_BLOCKS = 4096
MAX_MESSAGE_BYTES = 1 << 20
MAX_CODECS = 4
MAX_PID = (1 << 31) - 1
MAX_ADDRESS = 1 << 56  # of user space, so that sums of addresses and sizes stay numbers of 64 bits

_HEAD = struct.Struct("<HBBQ")  # magic, version, kind, sequence
_PULL = struct.Struct(
    "<QQQQQ4sIIII"
)  # link id, deadline, reader epoch, holder epoch, host, codecs, lengths of: ids (2), address, blocks
_OFFER = struct.Struct(
    "<QIIQQQB"
)  # identity digest, numbers of blocks and runs, window: pid (0: none), cookie at, cookie; codec
_GRANT = struct.Struct("<QI")
_LINK = struct.Struct("<Q")
_TEXT = struct.Struct("<HH")

_KIND_PULL, _KIND_OFFER, _KIND_REFUSE, _KIND_GRANT, _KIND_STOP, _KIND_BYE = range(1, 7)


@dataclass(frozen=True, slots=True)
class Pull:
    """A reader's request for at most `MAX_PULL_BLOCKS` blocks.

    Attributes:
        sequence: unique within the reader's incarnation.
        link_id: random name of the reader's connection; a new one replaces the reader's older ones.
        deadline_ns: the reader's remaining budget; the holder's read lease ends soon after it.
        reader, reader_address: who asks, and where its receives are posted.
        holder: the incarnation that is expected to answer.
        hashes: what is wanted, front first.
        offsets: destination byte offsets, so that the holder can merge neighbours.
        host: names the set of processes whose memory the reader may be able to read; 0 for none.
        codecs: of frames the reader would rather have than raw runs, at most `MAX_CODECS`, the preferred first
            (`kvpool.transport.compression.Codec`, never 0); a holder that knows none of them answers raw.
    """

    sequence: int
    link_id: int
    deadline_ns: int
    reader: WorkerKey
    reader_address: bytes
    holder: WorkerKey
    hashes: tuple[BlockHash, ...]
    offsets: tuple[int, ...]
    host: int = 0
    codecs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Window:
    """Where the runs of an offer lie in the holder's process, for a reader on the same host.

    Attributes:
        pid: the holder's process.
        cookie_at, cookie: a value that is at this address exactly as long as the holder's incarnation serves.
        addresses: of the first byte of each run.
    """

    pid: int
    cookie_at: int
    cookie: int
    addresses: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Offer:
    """The holder's answer.

    Attributes:
        identity: `identity_digest` of the hashes that were asked for; another value marks a confused reply.
        checksums: xxh3_64 per asked block, None where it is missing.
        run_blocks: blocks of each run; the runs cover the present blocks in asked order.
        window: where the reader may fetch the runs itself, None when it must grant them.
        codec: one the reader wanted, when every run comes as a frame; 0 for raw runs.
    """

    sequence: int
    identity: int
    checksums: tuple[int | None, ...]
    run_blocks: tuple[int, ...]
    window: Window | None = None
    codec: int = 0


@dataclass(frozen=True, slots=True)
class Refuse:
    """The holder does not serve this pull: the `KVPoolError.code` and why."""

    sequence: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Grant:
    """Receives are posted for every run below ``runs``; one that says nothing new asks for the lease to be renewed."""

    sequence: int
    link_id: int
    runs: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The reader wants no run that was not granted yet; ``fetched`` runs it took from the holder's memory."""

    sequence: int
    link_id: int
    fetched: int = 0


@dataclass(frozen=True, slots=True)
class Bye:
    """The reader closes the connection ``link_id``; everything it was sent is over."""

    sequence: int
    link_id: int


Message = Pull | Offer | Refuse | Grant | Stop | Bye


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks ``[first, first + blocks)`` of a pull that are neighbours in both segments, moved as one message."""

    first: int
    blocks: int


_ERRORS: dict[str, type[KVPoolError]] = {
    cls.code: cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, KVPoolError) and cls is not KVPoolError
}


def error_of(refusal: Refuse, peer: str) -> KVPoolError:
    """What a refusal means to the reader."""
    return _ERRORS.get(refusal.code, TransferError)(refusal.message, peer=peer)


def data_tag(sequence: int, run_index: int) -> int:
    """64-bit tag of one data message."""
    return DATA_BIT | sequence << RUN_BITS | run_index


def is_data_tag(tag: int) -> bool:
    """Whether a tag marks a data message."""
    return bool(tag & DATA_BIT)


def identity_digest(hashes: Sequence[BlockHash]) -> int:
    """xxh3_64 over the asked hashes in order."""
    return xxhash.xxh3_64_intdigest(b"".join(hashes))


def merge_runs(
    sources: Sequence[int | None], destinations: Sequence[int], block_bytes: int, max_run_bytes: int
) -> tuple[Run, ...]:
    """Cut the present blocks into runs that are contiguous on both sides and at most ``max_run_bytes`` long.

    A single block larger than the cap is a run of its own.
    """
    runs: list[Run] = []
    limit = max(1, max_run_bytes // block_bytes)
    first = length = 0
    for index, source in enumerate(sources):
        joins = (
            0 < length < limit
            and source is not None
            and source == _after(sources[index - 1], block_bytes)
            and destinations[index] == destinations[index - 1] + block_bytes
        )
        if joins:
            length += 1
            continue
        if length:
            runs.append(Run(first, length))
        first, length = index, 0 if source is None else 1
    if length:
        runs.append(Run(first, length))
    return tuple(runs)


def runs_of_offer(offer: Offer, offsets: Sequence[int], block_bytes: int) -> tuple[Run, ...]:
    """Rebuild the holder's runs and check them against what was asked.

    Raises:
        IntegrityError: the runs do not cover exactly the present blocks, or one is not contiguous at the destination.
    """
    present = [index for index, checksum in enumerate(offer.checksums) if checksum is not None]
    if sum(offer.run_blocks) != len(present) or 0 in offer.run_blocks:
        raise IntegrityError("the holder's runs do not cover the blocks it offers", sequence=offer.sequence)
    runs: list[Run] = []
    cursor = 0
    for blocks in offer.run_blocks:
        first = present[cursor]
        for step in range(1, blocks):
            at = present[cursor + step]
            if at != first + step or offsets[at] != offsets[first] + step * block_bytes:
                raise IntegrityError("a run of the offer is not contiguous here", sequence=offer.sequence)
        runs.append(Run(first, blocks))
        cursor += blocks
    return tuple(runs)


def encode(message: Message) -> bytes:
    """Bytes of one control message."""
    match message:
        case Pull():
            return _encode_pull(message)
        case Offer():
            return _encode_offer(message)
        case Refuse(sequence, code, text):
            raw_code, raw_text = code.encode()[:0xFF], text.encode()[:0x3FFF]
            return _head(_KIND_REFUSE, sequence) + _TEXT.pack(len(raw_code), len(raw_text)) + raw_code + raw_text
        case Grant(sequence, link_id, runs):
            return _head(_KIND_GRANT, sequence) + _GRANT.pack(link_id, runs)
        case Stop(sequence, link_id, fetched):
            return _head(_KIND_STOP, sequence) + _GRANT.pack(link_id, fetched)
        case Bye(sequence, link_id):
            return _head(_KIND_BYE, sequence) + _LINK.pack(link_id)


def decode(raw: bytes | bytearray | memoryview) -> Message:
    """Parse one control message.

    Raises:
        IntegrityError: it is truncated, has another magic or version, or is inconsistent. ``details`` carry the
            sequence number when that much could be read.
    """
    view = memoryview(raw)
    sequence: int | None = None
    try:
        magic, version, kind, sequence = _HEAD.unpack_from(view)
        if magic != MAGIC or version != VERSION:
            raise IntegrityError(f"unknown message: magic {magic:#x}, version {version}; both ends need one release")
        return _decode_body(kind, sequence, view[_HEAD.size :])
    except (struct.error, ValueError) as error:
        raise IntegrityError(f"truncated or malformed message: {error}", sequence=sequence) from error


def _head(kind: int, sequence: int) -> bytes:
    return _HEAD.pack(MAGIC, VERSION, kind, sequence)


def _after(source: int | None, block_bytes: int) -> int | None:
    return None if source is None else source + block_bytes


def _encode_pull(pull: Pull) -> bytes:
    reader, holder = pull.reader.worker_id.encode(), pull.holder.worker_id.encode()
    fixed = _PULL.pack(
        pull.link_id,
        pull.deadline_ns,
        pull.reader.worker_epoch,
        pull.holder.worker_epoch,
        pull.host,
        bytes(pull.codecs),
        len(reader),
        len(holder),
        len(pull.reader_address),
        len(pull.hashes),
    )
    offsets = struct.pack(f"<{len(pull.offsets)}Q", *pull.offsets)
    parts = (_head(_KIND_PULL, pull.sequence), fixed, reader, holder, pull.reader_address, *pull.hashes, offsets)
    return b"".join(parts)


def _encode_offer(offer: Offer) -> bytes:
    blocks = len(offer.checksums)
    present = bytes(checksum is not None for checksum in offer.checksums)
    sums = struct.pack(f"<{blocks}Q", *(checksum or 0 for checksum in offer.checksums))
    runs = struct.pack(f"<{len(offer.run_blocks)}I", *offer.run_blocks)
    window = offer.window or Window(0, 0, 0, ())
    places = struct.pack(f"<{len(window.addresses)}Q", *window.addresses)
    counts = (blocks, len(offer.run_blocks))
    fixed = _OFFER.pack(offer.identity, *counts, window.pid, window.cookie_at, window.cookie, offer.codec)
    return _head(_KIND_OFFER, offer.sequence) + fixed + present + sums + runs + places


def _decode_body(kind: int, sequence: int, body: memoryview) -> Message:
    if kind == _KIND_PULL:
        return _decode_pull(sequence, body)
    if kind == _KIND_OFFER:
        return _decode_offer(sequence, body)
    if kind == _KIND_REFUSE:
        code_length, text_length = _TEXT.unpack_from(body)
        code, text = _split(body[_TEXT.size :], code_length, text_length)
        return Refuse(sequence, bytes(code).decode(), bytes(text).decode(errors="replace"))
    if kind == _KIND_GRANT:
        return Grant(sequence, *_GRANT.unpack(body))
    if kind == _KIND_STOP:
        return Stop(sequence, *_GRANT.unpack(body))
    if kind == _KIND_BYE:
        return Bye(sequence, *_LINK.unpack(body))
    raise ValueError(f"unknown kind {kind}")


def _decode_pull(sequence: int, body: memoryview) -> Pull:
    link_id, deadline_ns, reader_epoch, holder_epoch, host, codecs, *lengths = _PULL.unpack_from(body)
    reader_length, holder_length, address_length, blocks = lengths
    reader, holder, address, raw_hashes, raw_offsets = _split(
        body[_PULL.size :], reader_length, holder_length, address_length, blocks * BLOCK_HASH_BYTES, blocks * 8
    )
    joined = bytes(raw_hashes)
    return Pull(
        sequence=sequence,
        link_id=link_id,
        deadline_ns=deadline_ns,
        reader=WorkerKey(WorkerId(bytes(reader).decode()), WorkerEpoch(reader_epoch)),
        reader_address=bytes(address),
        holder=WorkerKey(WorkerId(bytes(holder).decode()), WorkerEpoch(holder_epoch)),
        hashes=tuple(BlockHash(joined[at : at + BLOCK_HASH_BYTES]) for at in range(0, len(joined), BLOCK_HASH_BYTES)),
        offsets=struct.unpack(f"<{blocks}Q", raw_offsets),
        host=host,
        codecs=tuple(codecs.rstrip(b"\0")),
    )


def _decode_offer(sequence: int, body: memoryview) -> Offer:
    identity, blocks, runs, pid, cookie_at, cookie, codec = _OFFER.unpack_from(body)
    places = runs if pid else 0
    present, raw_sums, raw_runs, raw_places = _split(body[_OFFER.size :], blocks, blocks * 8, runs * 4, places * 8)
    window = Window(pid, cookie_at, cookie, struct.unpack(f"<{places}Q", raw_places)) if pid else None
    if window and (pid > MAX_PID or max(cookie_at, *window.addresses, 0) > MAX_ADDRESS):
        raise ValueError("no process or no memory of a process is there")
    sums = struct.unpack(f"<{blocks}Q", raw_sums)
    return Offer(
        sequence=sequence,
        identity=identity,
        checksums=tuple(total if here else None for here, total in zip(present, sums, strict=True)),
        run_blocks=struct.unpack(f"<{runs}I", raw_runs),
        window=window,
        codec=codec,
    )


def _split(body: memoryview, *lengths: int) -> list[memoryview]:
    if sum(lengths) != len(body):
        raise ValueError(f"expected {sum(lengths)} bytes of body, got {len(body)}")
    pieces = []
    for length in lengths:
        pieces.append(body[:length])
        body = body[length:]
    return pieces
