"""What administrators do to a running cluster: drain a worker, evict blocks, pin prefixes.

Thin: the directory decides what is spare and who copies what, workers decide what they can evict. Everything here may
be repeated, and whoever is interrupted leaves a cluster that serves: a half-drained worker takes no new requests until
the command is given again. Answers count what was refused because it was in use; nothing is passed over silently.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvpool.cluster.connection import ClusterConnection
from kvpool.errors import KVPoolError, RequestError, UnavailableError
from kvpool.hashing import block_hashes
from kvpool.metadata.client import MetadataClient
from kvpool.metadata.pins import MAX_COPIES, Pin, PinView
from kvpool.prompts import Prompt
from kvpool.request import require_name
from kvpool.store.selection import HotChain, Selection
from kvpool.types import BLOCK_HASH_BYTES, BlockHash, MemberState, WorkerEpoch, WorkerId, WorkerKey
from workers.assemble import Evicted, Leaving
from workers.puller import PullOrder, PullResult, PullSource

DRAIN_TIMEOUT_S = 60.0
PIN_TIMEOUT_S = 15.0
PULL_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.1
LEAVE_MARGIN_S = 1.0
MAX_WAIT_S = 30 * 86_400.0
MAX_AGE_S = 1e9 * 86_400.0

Progress = Callable[[str], None]
_T = TypeVar("_T")


@dataclass(slots=True)
class DrainReport:
    """How a worker left.

    Attributes:
        worker: who.
        chains, moved_chains: hot chains that lived only there, and how many of them live elsewhere now.
        sole_blocks, moved_blocks: the same in blocks.
        move_failures: why chains were not moved, by error code.
        cut_short: requests and reads that had not ended at the deadline; their clients went on elsewhere.
        elapsed_ns: how long it took.
    """

    worker: str
    chains: int = 0
    moved_chains: int = 0
    sole_blocks: int = 0
    moved_blocks: int = 0
    move_failures: dict[str, int] = field(default_factory=dict)
    cut_short: int = 0
    elapsed_ns: int = 0


@dataclass(frozen=True, slots=True)
class EvictReport:
    """What was evicted, in blocks: sums, and by worker (`workers.assemble.Evicted`). ``unreachable``: who could not be
    asked, and why."""

    evicted: int
    evicted_bytes: int
    in_use: int
    kept: int
    needed: int
    removed_from_disk: int
    workers: dict[str, Evicted]
    unreachable: dict[str, str]


@dataclass(frozen=True, slots=True)
class PinReport:
    """A pin as it stands: ``holders`` have all of its blocks, ``longest_blocks`` of them lie somewhere."""

    pin_id: str
    tenant: str
    blocks: int
    min_copies: int
    holders: tuple[str, ...]
    longest_blocks: int


class AsyncAdministrator:
    """Administration of one cluster, for asyncio programs. Made by `AsyncKVPoolClient.admin`.

    Args:
        connection: to the cluster.
        tokens_of: a prompt → its token ids.
    """

    def __init__(
        self, connection: ClusterConnection, tokens_of: Callable[[Prompt], Awaitable[tuple[int, ...]]]
    ) -> None:
        self._connection = connection
        self._tokens_of = tokens_of

    async def drain(
        self,
        worker: str,
        *,
        timeout_s: float = DRAIN_TIMEOUT_S,
        force: bool = False,
        progress: Progress | None = None,
    ) -> DrainReport:
        """Take a worker out: it gets no new requests, hot blocks that only it holds move to others, running requests
        and readers finish, then it leaves for good. May be repeated.

        Args:
            worker: its name.
            timeout_s: bound on all of it; what has not ended then is cut short, and its clients go on elsewhere.
            force: drain the last worker that takes requests, too.
            progress: told what is going on.

        Raises:
            RequestError: no such member, it is the last one, or the timeout is out of range.
            UnavailableError: the metadata service or the worker does not answer.
        """
        _require_seconds(timeout_s, MAX_WAIT_S, "timeout")
        say = progress or _silent
        started_ns, deadline_s = time.monotonic_ns(), time.monotonic() + timeout_s
        report = DrainReport(worker)
        targets = await self._targets(worker, force=force)
        actor = await self._metadata(lambda client: _drained(client, worker))
        await self._connection.call(actor, "drain")
        say(f"{worker} takes no new requests")
        await self._move(actor, report, targets, deadline_s, say)
        report.cut_short = await self._finish(actor, worker, deadline_s, say)
        await self._end(actor, worker)
        say(f"{worker} has left")
        report.elapsed_ns = time.monotonic_ns() - started_ns
        return report

    async def evict(
        self,
        prefix: Prompt | None = None,
        *,
        block_hash: str | None = None,
        tenant: str | None = None,
        older_than_s: float | None = None,
    ) -> EvictReport:
        """Evict blocks everywhere, as far as nobody needs them now. Conditions add up; at least one is given.

        Args:
            prefix: whole blocks of this prompt and everything that continues them.
            block_hash: one block, in hexadecimal, and everything that continues it; instead of ``prefix``.
            tenant: blocks of this tenant; with ``prefix``, whose prefix it is.
            older_than_s: blocks that nobody used for so long.

        Raises:
            RequestError: nothing is selected, the prefix is shorter than a block, or a value is out of range.
            UnavailableError: no worker could be asked.
        """
        if older_than_s is not None:
            _require_seconds(older_than_s, MAX_AGE_S, "older_than")
        if prefix is not None and block_hash is not None:
            raise RequestError("give a prefix or a block hash, not both", field="block_hash")
        chain: tuple[BlockHash, ...] = () if block_hash is None else (_parse_hash(block_hash),)
        if prefix is not None:
            chain = await self._chain(prefix, tenant or "")
        idle_ns = None if older_than_s is None else int(older_than_s * 1e9)
        selection = Selection(chain, tenant, idle_ns)
        members = await self._members()
        answers = await asyncio.gather(
            *(self._try(self._connection.call(item["control_address"], "evict", selection)) for item in members)
        )
        done: dict[str, Evicted] = {}
        unreachable: dict[str, str] = {}
        for item, answer in zip(members, answers, strict=True):
            if isinstance(answer, KVPoolError):
                unreachable[item["worker_id"]] = str(answer)
            else:
                done[item["worker_id"]] = answer
        if not done:
            raise UnavailableError(f"no worker could be asked to evict: {unreachable or 'the pool has no members'}")
        sums = {name: sum(getattr(item, name) for item in done.values()) for name in Evicted.__dataclass_fields__}
        return EvictReport(**sums, workers=done, unreachable=unreachable)

    async def pin(
        self, prefix: Prompt, *, tenant: str = "", min_copies: int = 1, timeout_s: float = PIN_TIMEOUT_S
    ) -> PinReport:
        """Keep the whole blocks of a prompt, on at least ``min_copies`` workers, until `unpin`.

        A prefix that nobody holds yet is kept and copied as soon as somebody does. Waits until the copies are there,
        at most ``timeout_s``; those still missing then are made later.

        Raises:
            RequestError: the prefix is shorter than a block, or a number is out of range.
            CapacityError: there are too many pins.
            UnavailableError: the metadata service does not answer.
        """
        _require_seconds(timeout_s, MAX_WAIT_S, "timeout")
        chain = await self._chain(prefix, tenant)
        if not 1 <= min_copies <= MAX_COPIES:
            raise RequestError(f"min_copies must be in [1, {MAX_COPIES}], got {min_copies}", field="min_copies")
        before = await self._find(chain[-1].hex())
        stamp_ns = max(time.time_ns(), before.pin.stamp_ns + 1 if before else 0)
        pin = Pin.of(tenant, chain, min_copies, stamp_ns)
        await self._metadata(lambda client: client.pins([pin]))
        deadline_s = time.monotonic() + timeout_s
        while True:
            view = await self._find(pin.pin_id)
            if view is None:
                raise UnavailableError("a replica of the metadata service does not know the pin yet; ask again")
            enough = len(view.holders) >= min_copies or not view.longest_blocks
            if enough or time.monotonic() + POLL_S > deadline_s:
                return _pin_report(view)
            await asyncio.sleep(POLL_S)

    async def unpin(self, prefix: Prompt | None = None, *, tenant: str = "", pin_id: str | None = None) -> PinReport:
        """Take a pin back; its blocks are then evicted like any other.

        Args:
            prefix: as it was pinned.
            tenant: as it was pinned.
            pin_id: the pin's id, instead of a prefix.

        Raises:
            RequestError: there is no such pin.
            UnavailableError: the metadata service does not answer.
        """
        if (prefix is None) == (pin_id is None):
            raise RequestError("give the prefix or the id of the pin, one of them", field="prefix")
        wanted = pin_id if prefix is None else (await self._chain(prefix, tenant))[-1].hex()
        assert wanted is not None
        view = await self._find(wanted)
        if view is None:
            raise RequestError(f"there is no pin {wanted}; 'kvpool pins' lists those there are", field="pin_id")
        trace = Pin(wanted, "", (), 0, max(time.time_ns(), view.pin.stamp_ns + 1))
        await self._metadata(lambda client: client.pins([trace]))
        return _pin_report(view)

    async def pins(self) -> list[PinReport]:
        """All pins, the oldest first."""
        return [_pin_report(view) for view in await self._metadata(lambda client: client.pins())]

    # -- private

    async def _metadata(self, ask: Callable[[MetadataClient], _T]) -> _T:
        addresses = (await self._connection.info()).metadata

        def call() -> _T:
            with MetadataClient(addresses) as client:
                return ask(client)

        return await asyncio.to_thread(call)

    async def _members(self) -> list[dict[str, Any]]:
        members: list[dict[str, Any]] = (await self._metadata(lambda client: client.describe()))["members"]
        return members

    async def _chain(self, prefix: Prompt, tenant: str) -> tuple[BlockHash, ...]:
        """Hashes of the whole blocks of a prompt.

        Raises:
            RequestError: it has none, or the tenant is no name.
        """
        require_name(tenant, "tenant")
        tokens = await self._tokens_of(prefix)
        namespace = (await self._connection.info()).namespace.for_tenant(tenant)
        chain = block_hashes(tokens, namespace)
        if not chain:
            raise RequestError(
                f"the prefix has {len(tokens)} tokens, less than one block of {namespace.block_tokens}; only whole "
                "blocks are held, so give a longer one",
                field="prefix",
                tokens=len(tokens),
                block_tokens=namespace.block_tokens,
            )
        return chain

    async def _find(self, pin_id: str) -> PinView | None:
        views = await self._metadata(lambda client: client.pins())
        return next((view for view in views if view.pin.pin_id == pin_id), None)

    async def _targets(self, worker: str, *, force: bool) -> dict[str, int]:
        """Actors of the members that may take over, with their free blocks."""
        members = await self._members()
        if not any(item["worker_id"] == worker for item in members):
            known = ", ".join(sorted(item["worker_id"] for item in members)) or "none"
            raise RequestError(f"no member is called {worker!r}; members: {known}", worker=worker)
        targets = {
            str(item["control_address"]): int((item["load"] or {}).get("free_blocks", 0))
            for item in members
            if item["worker_id"] != worker and item["state"] == MemberState.ALIVE.value
        }
        if not targets and not force:
            raise RequestError(
                f"{worker} is the last worker that takes requests; start another one first, or force it", worker=worker
            )
        return targets

    async def _move(
        self, actor: str, report: DrainReport, targets: dict[str, int], deadline_s: float, say: Progress
    ) -> None:
        """Make others load what only the leaving worker holds, the most valuable chains first."""
        if not targets:
            return
        leaving: Leaving = await self._connection.call(actor, "leaving")
        report.chains = len(leaving.chains)
        report.sole_blocks = sum(chain.sole_blocks for chain in leaving.chains)
        failures: Counter[str] = Counter()
        for number, chain in enumerate(leaving.chains, start=1):
            left_s = min(PULL_TIMEOUT_S, deadline_s - LEAVE_MARGIN_S - time.monotonic())
            if left_s <= 0:
                failures["deadline_exceeded"] += 1
                continue
            target = max(targets, key=lambda name: (targets[name], name))
            targets[target] -= len(chain.chain)
            result = await self._try(self._pull(target, leaving, chain, left_s))
            if isinstance(result, KVPoolError):
                failures[result.code] += 1
            elif result.held < result.blocks:
                failures.update(result.failures[:1])
            else:
                report.moved_chains += 1
                report.moved_blocks += chain.sole_blocks
            say(f"moved {number} of {report.chains} hot chains")
        report.move_failures = dict(failures)

    async def _pull(self, target: str, leaving: Leaving, chain: HotChain, timeout_s: float) -> PullResult:
        source = PullSource(leaving.key, leaving.transport, leaving.data_address, len(chain.chain))
        order = PullOrder(chain.tenant, chain.chain, (source,), int(timeout_s * 1e9))
        result: PullResult = await self._connection.call(target, "pull", order, timeout_s=timeout_s + LEAVE_MARGIN_S)
        return result

    async def _finish(self, actor: str, worker: str, deadline_s: float, say: Progress) -> int:
        """Wait until the worker has nothing to do; returns what is left at the deadline."""
        told = -1
        while True:
            status = await self._connection.call(actor, "status")
            busy = status["running"] + status["waiting"] + status["loads_in_flight"] + status["read_leases"]
            if not busy or time.monotonic() + POLL_S > deadline_s:
                return int(busy)
            if busy != told:
                say(f"{worker} still serves {busy} requests and readers")
                told = busy
            await asyncio.sleep(POLL_S)

    async def _end(self, actor: str, worker: str) -> None:
        """Leave, and end the process for good, whether it answers or not."""
        members = {item["worker_id"]: item["worker_epoch"] for item in await self._members()}
        await self._try(self._connection.call(actor, "stop", timeout_s=STOP_TIMEOUT_S))
        self._connection.end(actor)
        if worker in members:
            key = WorkerKey(WorkerId(worker), WorkerEpoch(members[worker]))
            await self._metadata(lambda client: client.leave(key))  # again, in case it could not say so itself

    async def _try(self, call: Coroutine[Any, Any, _T]) -> _T | KVPoolError:
        try:
            return await call
        except KVPoolError as error:
            return error


class Administrator:
    """The same for ordinary programs: every call blocks. Made by `KVPoolClient.admin`; arguments and errors are those
    of `AsyncAdministrator`."""

    def __init__(self, admin: AsyncAdministrator, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._admin = admin
        self._run = run

    def drain(self, worker: str, **options: Any) -> DrainReport:
        """See `AsyncAdministrator.drain`."""
        report: DrainReport = self._run(self._admin.drain(worker, **options))
        return report

    def evict(self, prefix: Prompt | None = None, **options: Any) -> EvictReport:
        """See `AsyncAdministrator.evict`."""
        report: EvictReport = self._run(self._admin.evict(prefix, **options))
        return report

    def pin(self, prefix: Prompt, **options: Any) -> PinReport:
        """See `AsyncAdministrator.pin`."""
        report: PinReport = self._run(self._admin.pin(prefix, **options))
        return report

    def unpin(self, prefix: Prompt | None = None, **options: Any) -> PinReport:
        """See `AsyncAdministrator.unpin`."""
        report: PinReport = self._run(self._admin.unpin(prefix, **options))
        return report

    def pins(self) -> list[PinReport]:
        """See `AsyncAdministrator.pins`."""
        reports: list[PinReport] = self._run(self._admin.pins())
        return reports


def _silent(_: str) -> None:
    return


def _drained(client: MetadataClient, worker: str) -> str:
    """Stop offering a worker; returns its actor's name."""
    client.drain(WorkerId(worker))
    members: Sequence[dict[str, Any]] = client.describe()["members"]
    return str(next(item["control_address"] for item in members if item["worker_id"] == worker))


def _require_seconds(value: float, most_s: float, field_name: str) -> None:
    """Refuse what is no duration: a wait until "nan" would never end."""
    if not 0 <= value <= most_s:
        raise RequestError(f"{field_name} must be in [0, {most_s:.0f}] seconds, got {value!r}", field=field_name)


def _parse_hash(text: str) -> BlockHash:
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        raw = b""
    if len(raw) != BLOCK_HASH_BYTES:
        raise RequestError(
            f"a block hash has {2 * BLOCK_HASH_BYTES} hexadecimal digits, got {text[:64]!r}", field="block_hash"
        )
    return BlockHash(raw)


def _pin_report(view: PinView) -> PinReport:
    pin = view.pin
    holders = tuple(str(key.worker_id) for key in view.holders)
    return PinReport(pin.pin_id, pin.tenant, len(pin.chain), pin.min_copies, holders, view.longest_blocks)
