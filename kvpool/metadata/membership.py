"""One member of the pool: its lease, its place in the event stream, and whether it is under suspicion.  (pure)

A suspected worker is hidden from lookups at once. Two things bring it back, and both are needed:

- it answers a probe: the token in its heartbeat reply comes back with a later heartbeat. That shows that the process
  and its control plane live, and nothing about its data plane;
- a back-off is over. Because the probe cannot see a broken data plane, the back-off doubles with every suspicion that
  follows a restoration within `DirectoryLimits.suspicion_memory_ns`, up to a bound. A worker that keeps failing loads
  is thus offered ever more rarely, and one that failed once comes back soon.

A suspected worker whose membership lease ends is removed like any other.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.errors import IncompatibleError, RequestError
from kvpool.metadata.index import DEFAULT_MAX_ENTRIES, DEFAULT_MAX_WORKERS
from kvpool.reports import WorkerReport
from kvpool.types import MemberInfo, MemberState, Tier

MAX_NAME_LENGTH = 256
MAX_ADDRESS_BYTES = 64 * 1024
MAX_CALIBRATION = 64
_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class DirectoryLimits:
    """Bounds and times of a directory.

    Attributes:
        lease_ns: how long a member lives without a heartbeat.
        probe_backoff_ns: shortest time a suspect stays hidden; doubled by repetition.
        max_probe_backoff_ns: longest.
        suspicion_memory_ns: a restored worker that stays clean this long starts again at the shortest.
        max_entries: bound on the index's entries.
        max_workers: bound on members.
        max_fences: worker ids whose last epoch is remembered; the longest unseen are forgotten first.
    """

    lease_ns: int = 3_000 * _MS
    probe_backoff_ns: int = 1_000 * _MS
    max_probe_backoff_ns: int = 60_000 * _MS
    suspicion_memory_ns: int = 60_000 * _MS
    max_entries: int = DEFAULT_MAX_ENTRIES
    max_workers: int = DEFAULT_MAX_WORKERS
    max_fences: int = 100_000


@dataclass(slots=True)
class Suspicion:
    """A worker is hidden until the probe is answered and the back-off is over."""

    reason: str
    token: int
    until_ns: int
    answered: bool = False


@dataclass(slots=True)
class Member:
    """What the directory knows about one worker. Mutable, owned by `kvpool.metadata.state.DirectoryState`.

    Attributes:
        lease_until_ns: end of the membership lease.
        applied: sequence of the last applied batch, None before the first snapshot.
        broken: a gap was seen; nothing but a snapshot is accepted.
        repeats: suspicions in a row, for the back-off.
        event_lag_ns: age of the oldest event batch without an answer, as the worker said last.
    """

    info: MemberInfo
    lease_until_ns: int
    applied: int | None = None
    broken: bool = False
    draining: bool = False
    suspicion: Suspicion | None = None
    repeats: int = 0
    event_lag_ns: int = 0
    restored_ns: int = 0
    report: WorkerReport | None = None

    @property
    def state(self) -> MemberState:
        """Suspicion outranks draining: a draining worker that fails loads must not serve its readers either."""
        if self.suspicion is not None:
            return MemberState.SUSPECT
        return MemberState.DRAINING if self.draining else MemberState.ALIVE

    def suspect(self, reason: str, token: int, now_ns: int, limits: DirectoryLimits) -> bool:
        """Start a suspicion; False when there is one already, which reports of the same incident must not prolong."""
        if self.suspicion is not None:
            return False
        if self.repeats and now_ns - self.restored_ns > limits.suspicion_memory_ns:
            self.repeats = 0
        backoff_ns = min(limits.probe_backoff_ns << min(self.repeats, 32), limits.max_probe_backoff_ns)
        self.repeats += 1
        self.suspicion = Suspicion(reason, token, now_ns + backoff_ns)
        return True

    def answer_probe(self, token: int | None) -> None:
        """Take the probe token that came with a heartbeat."""
        if self.suspicion is not None and token == self.suspicion.token:
            self.suspicion.answered = True

    def restore(self, now_ns: int) -> bool:
        """End the suspicion if it may end; True when it did."""
        if self.suspicion is None or not self.suspicion.answered or now_ns < self.suspicion.until_ns:
            return False
        self.suspicion = None
        self.restored_ns = now_ns
        return True


def check_info(info: MemberInfo) -> None:
    """Refuse a malformed join.

    Raises:
        RequestError: names the field.
    """
    names = {
        "worker_id": info.key.worker_id,
        "transport": info.transport,
        "layout_fingerprint": info.layout_fingerprint,
        "hash_scheme": info.hash_scheme,
    }
    for name, value in names.items():
        if not 0 < len(value) <= MAX_NAME_LENGTH:
            raise RequestError(f"{name} must have 1 to {MAX_NAME_LENGTH} characters, got {len(value)}", field=name)
    counts = {
        "worker_epoch": (info.key.worker_epoch, 0),
        "block_tokens": (info.block_tokens, 1),
        "block_bytes": (info.block_bytes, 1),
        **{f"capacity_blocks[{tier}]": (blocks, 0) for tier, blocks in enumerate(info.capacity_blocks)},
    }
    for name, (count, least) in counts.items():
        if count < least:
            raise RequestError(f"{name} must be at least {least}, got {count}", field=name)
    if len(info.capacity_blocks) > len(Tier) or len(info.calibration) > MAX_CALIBRATION:
        raise RequestError(
            f"a member has at most {len(Tier)} tiers and {MAX_CALIBRATION} timed passes, got "
            f"{len(info.capacity_blocks)} and {len(info.calibration)}",
            field="capacity_blocks",
        )
    if len(info.control_address) > MAX_NAME_LENGTH:
        raise RequestError(f"control_address has more than {MAX_NAME_LENGTH} characters", field="control_address")
    if len(info.data_address) > MAX_ADDRESS_BYTES:
        raise RequestError(f"data_address has {len(info.data_address)} bytes, more than {MAX_ADDRESS_BYTES}")


def check_compatible(newcomer: MemberInfo, member: MemberInfo) -> None:
    """Refuse a worker that could not exchange blocks with the pool.

    Raises:
        IncompatibleError: names the field and both sides.
    """
    for field in ("hash_scheme", "layout_fingerprint", "block_tokens", "block_bytes"):
        theirs, ours = getattr(newcomer, field), getattr(member, field)
        if theirs != ours:
            raise IncompatibleError(
                f"{newcomer.key} has {field}={theirs} but the pool ({member.key}) has {field}={ours}; "
                "start it with the same model, dtype and block size, or in a pool of its own",
                field=field,
                worker=str(newcomer.key),
                worker_value=theirs,
                pool_member=str(member.key),
                pool_value=ours,
            )
