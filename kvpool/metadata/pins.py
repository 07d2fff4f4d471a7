"""Prefixes that administrators want to stay: a book of pins, and who should copy what.  (pure)

Directories and workers all keep the whole book, and books merge: of two pins with one id the one with the later stamp
counts, and a pin that was taken back leaves a trace that counts like any other. So nothing is lost when a directory
restarts (the workers bring their books), a directory that was away when a pin was taken back learns of it, and merging
is idempotent and order does not matter. The book is small: `MAX_PINS` pins, `MAX_PIN_BLOCKS` blocks in all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from kvpool.errors import CapacityError, RequestError
from kvpool.types import BLOCK_HASH_BYTES, BlockHash, MemberInfo, WorkerKey

MAX_PINS = 256
MAX_PIN_BLOCKS = 65_536
MAX_TRACES = 1024
"""Pins that were taken back and are still known; the oldest are forgotten."""

MAX_COPIES = 1024
MAX_TENANT_LENGTH = 256
MAX_DUTIES = 4
"""Chains that one worker is asked to copy at a time."""

MAX_DUTY_HOLDERS = 3


@dataclass(frozen=True, slots=True)
class Pin:
    """One prefix that should stay.

    Attributes:
        pin_id: hash of the chain's last block in hexadecimal.
        tenant: whose chain it is.
        chain: its block hashes; empty for the trace of a pin that was taken back.
        min_copies: workers that should hold it, 0 for a trace.
        stamp_ns: orders changes of one pin; wall clock of whoever made it, and larger than what it replaces.
    """

    pin_id: str
    tenant: str
    chain: tuple[BlockHash, ...]
    min_copies: int
    stamp_ns: int

    @classmethod
    def of(cls, tenant: str, chain: Sequence[BlockHash], min_copies: int, stamp_ns: int) -> Pin:
        """A pin of a chain that has at least one block."""
        return cls(chain[-1].hex(), tenant, tuple(chain), min_copies, stamp_ns)

    @property
    def active(self) -> bool:
        """Wanted, and not the trace of one that was."""
        return self.min_copies > 0


@dataclass(frozen=True, slots=True)
class HolderAt:
    """A worker that holds the first ``blocks`` of a pin's chain, and how to read from it."""

    key: WorkerKey
    transport: str
    data_address: bytes
    blocks: int


@dataclass(frozen=True, slots=True)
class Duty:
    """A worker should load a pin's chain from one of these holders, the longest first."""

    pin_id: str
    holders: tuple[HolderAt, ...]


@dataclass(frozen=True, slots=True)
class PinView:
    """A pin, who holds all of it, and how many leading blocks of it somebody holds."""

    pin: Pin
    holders: tuple[WorkerKey, ...]
    longest_blocks: int


@dataclass(frozen=True, slots=True)
class Tending:
    """The answer to a worker's housekeeping.

    Attributes:
        others: for each block asked about, how many other workers hold it.
        spare: for each, whether one of those will keep it longer than the asker.
        pins_digest: of the directory's book.
        pins: all pins, when the asker's book differs; else none.
        duties: what the asker should copy.
    """

    others: tuple[int, ...]
    spare: tuple[bool, ...]
    pins_digest: int
    pins: tuple[Pin, ...] = ()
    duties: tuple[Duty, ...] = ()


def check_pin(pin: Pin) -> None:
    """Refuse a malformed pin.

    Raises:
        RequestError: names the field.
    """
    if len(pin.pin_id) != 2 * BLOCK_HASH_BYTES:
        raise RequestError(f"a pin's id is a block hash in hexadecimal, got {pin.pin_id[:64]!r}", field="pin_id")
    if len(pin.tenant) > MAX_TENANT_LENGTH:
        raise RequestError(f"a tenant has at most {MAX_TENANT_LENGTH} characters", field="tenant")
    if not 0 <= pin.min_copies <= MAX_COPIES:
        raise RequestError(f"min_copies must be in [0, {MAX_COPIES}], got {pin.min_copies}", field="min_copies")
    if len(pin.chain) > MAX_PIN_BLOCKS:
        raise RequestError(f"a pin has at most {MAX_PIN_BLOCKS} blocks, got {len(pin.chain)}", field="hashes")
    if pin.active != bool(pin.chain) or (pin.chain and pin.chain[-1].hex() != pin.pin_id):
        raise RequestError(f"pin {pin.pin_id} does not go with its chain", field="hashes")


class PinBook:
    """All pins that one process knows, and the traces of former ones. Not thread-safe."""

    def __init__(self) -> None:
        self._pins: dict[str, Pin] = {}
        self._blocks = self._active = 0
        self.digest = 0
        """Of the whole content: books with equal digests hold the same."""

    def all(self) -> tuple[Pin, ...]:
        """Pins and traces."""
        return tuple(self._pins.values())

    def active(self) -> tuple[Pin, ...]:
        """Pins, the oldest first."""
        return tuple(sorted((pin for pin in self._pins.values() if pin.active), key=lambda pin: pin.stamp_ns))

    def get(self, pin_id: str) -> Pin | None:
        """The active pin with this id."""
        pin = self._pins.get(pin_id)
        return pin if pin is not None and pin.active else None

    def merge(self, pins: Iterable[Pin]) -> tuple[int, int]:
        """Take what is newer; returns how many changed and how many found no room.

        Raises:
            RequestError: one is malformed; those before it were taken.
        """
        changed = refused = 0
        for pin in pins:
            check_pin(pin)
            known = self._pins.get(pin.pin_id)
            if known is not None and _precedence(known) >= _precedence(pin):
                continue
            if not self._fits(pin, known):
                refused += 1
                continue
            self._put(pin, known)
            changed += 1
        return changed, refused

    def wanted(self, limit: int) -> list[BlockHash]:
        """The first ``limit`` blocks to keep: the oldest pins first, each from its front."""
        found: dict[BlockHash, None] = {}
        for pin in self.active():
            for block_hash in pin.chain:
                if len(found) >= limit:
                    return list(found)
                found[block_hash] = None
        return list(found)

    def _fits(self, pin: Pin, known: Pin | None) -> bool:
        before = (known.active, len(known.chain)) if known is not None else (False, 0)
        active = self._active - before[0] + pin.active
        return not pin.active or (active <= MAX_PINS and self._blocks - before[1] + len(pin.chain) <= MAX_PIN_BLOCKS)

    def _put(self, pin: Pin, known: Pin | None) -> None:
        if known is not None:
            self._drop(known)
        self._pins[pin.pin_id] = pin
        self._blocks += len(pin.chain)
        self._active += pin.active
        self.digest ^= _digest(pin)
        traces = len(self._pins) - self._active
        if traces > MAX_TRACES:
            self._drop(min((item for item in self._pins.values() if not item.active), key=lambda item: item.stamp_ns))

    def _drop(self, pin: Pin) -> None:
        del self._pins[pin.pin_id]
        self._blocks -= len(pin.chain)
        self._active -= pin.active
        self.digest ^= _digest(pin)


def refuse_full(refused: int) -> None:
    """Say that pins found no room.

    Raises:
        CapacityError: when ``refused`` is not 0.
    """
    if refused:
        raise CapacityError(
            f"there is room for {MAX_PINS} pins of {MAX_PIN_BLOCKS} blocks in all; unpin another prefix first",
            max_pins=MAX_PINS,
            max_blocks=MAX_PIN_BLOCKS,
        )


def view_of(pin: Pin, lengths: dict[WorkerKey, int]) -> PinView:
    """A pin beside the prefixes of it that visible workers hold."""
    full = tuple(sorted((key for key, blocks in lengths.items() if blocks >= len(pin.chain)), key=str))
    return PinView(pin, full, max(lengths.values(), default=0))


def assign(
    pins: Iterable[Pin], members: Sequence[MemberInfo], lengths_of: Callable[[Pin], dict[WorkerKey, int]]
) -> dict[WorkerKey, tuple[Duty, ...]]:
    """Who should copy what, so that every pin gets its copies.

    Of a pin with too few whole copies, the longest prefix that somebody holds is copied by as many members as are
    missing, always the same ones for the same members: those with the least hash of (pin, worker).

    Args:
        pins: active ones.
        members: that may be asked, alive and not draining.
        lengths_of: leading blocks of a pin's chain by visible worker.
    """
    duties: dict[WorkerKey, list[Duty]] = {}
    infos = {info.key: info for info in members}
    for pin in pins:
        lengths = {key: blocks for key, blocks in lengths_of(pin).items() if key in infos}
        longest = max(lengths.values(), default=0)
        best = [key for key, blocks in lengths.items() if blocks == longest]
        missing = pin.min_copies - len(best)
        if not longest or missing <= 0:
            continue
        best.sort(key=lambda key: _rank(pin, key))
        holders = tuple(
            HolderAt(key, infos[key].transport, infos[key].data_address, longest) for key in best[:MAX_DUTY_HOLDERS]
        )
        lacking = sorted((key for key in infos if lengths.get(key, 0) < longest), key=lambda key: _rank(pin, key))
        for key in lacking[:missing]:
            given = duties.setdefault(key, [])
            if len(given) < MAX_DUTIES:
                given.append(Duty(pin.pin_id, holders))
    return {key: tuple(given) for key, given in duties.items()}


def _precedence(pin: Pin) -> tuple[int, int, str]:
    return (pin.stamp_ns, -pin.min_copies, pin.tenant)  # of equal stamps, the same one everywhere


def _digest(pin: Pin) -> int:
    raw = f"{pin.pin_id}/{pin.stamp_ns}/{pin.min_copies}/{pin.tenant}".encode()
    return int.from_bytes(blake2b(raw, digest_size=8).digest())


def _rank(pin: Pin, key: WorkerKey) -> bytes:
    return blake2b(f"{pin.pin_id}/{key.worker_id}".encode(), digest_size=8).digest()
