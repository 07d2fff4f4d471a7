"""The data plane of the simulated pool: reads as the transport contract promises them, over a hostile network.

PULL → OFFER → GRANT → data, piece by piece, → BYE, each a message that may be lost, doubled, late or overtaken. Bytes
are those that lie in the holder's memory when a piece leaves, so that a page reused under a read shows as a checksum
that differs. Data lands in two steps; a read is terminal only when nothing of it can land. Checked at every landing:
the read is not terminal, and its page is in flight in the reader's pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import xxhash

from kvpool.errors import KVPoolError, PeerGoneError, StaleError, StallError, TransferCancelledError
from kvpool.store.pool import BlockState
from kvpool.transport.base import BlockStatus, HeldBlock, ReadRequest
from kvpool.transport.handle import ReadTask, SegmentShape
from kvpool.types import BlockHash, BlockId, WorkerKey

if TYPE_CHECKING:
    from tests.simulation.pool_worker import PoolWorker

MS = 1_000_000
PIECE_BLOCKS = 3
TIMER_NS = 10 * MS
LEASE_SLACK_NS = 50 * MS


@dataclass(slots=True, eq=False)
class Pull:
    """One read, at its reader."""

    task: ReadTask
    holder: PoolWorker
    number: int
    offered: dict[int, HeldBlock] | None = None
    settled: set[int] = field(default_factory=set)
    landing: int = 0
    progress_ns: int = 0


class SimTransport:
    """One worker's end. ``name`` and `read` are what `kvpool.transfer.loader.Loader` needs."""

    name = "sim"

    def __init__(self, worker: PoolWorker) -> None:
        self.worker = worker
        self.world = worker.world
        self.pulls: dict[int, Pull] = {}
        self.leases: dict[tuple[WorkerKey, int], int] = {}
        self.offers: dict[tuple[WorkerKey, int], tuple[HeldBlock | None, ...]] = {}
        self.served: set[tuple[WorkerKey, int]] = set()
        self._numbers = 0

    # -- the reader

    def read(self, request: ReadRequest) -> ReadTask:
        """Start a read from whoever runs under the peer's address now."""
        worker = self.worker
        size = worker.engine.layout.block_bytes
        SegmentShape(len(worker.memory), size).check(request)
        task = ReadTask(request, size, lambda: worker.now_ns, self._cancel)
        holder = self.world.at_address(request.peer.address)
        self._numbers += 1
        number = self._numbers
        pull = self.pulls[number] = Pull(task, holder, number, progress_ns=worker.now_ns)
        task.begin()
        hashes = [want.block_hash for want in request.blocks]
        key, deadline_ns = request.peer.key, request.deadline_ns
        self.world.send(worker, holder, lambda: holder.transport.on_pull(worker, number, key, hashes, deadline_ns))
        self._watch(pull)
        return task

    def _cancel(self, task: ReadTask) -> None:
        for pull in list(self.pulls.values()):
            if pull.task is task:
                self._give_up(pull, TransferCancelledError("given up"))

    def on_refuse(self, number: int, error: KVPoolError) -> None:
        pull = self.pulls.get(number)
        if pull is not None:
            self._give_up(pull, error)

    def on_offer(self, number: int, held: tuple[HeldBlock | None, ...]) -> None:
        pull = self.pulls.get(number)
        if pull is None or pull.task.error is not None or pull.offered is not None:
            return
        pull.progress_ns = self.worker.now_ns
        pull.offered = {index: block for index, block in enumerate(held) if block is not None}
        self._settle(pull, [index for index, block in enumerate(held) if block is None], BlockStatus.MISSING)
        holder = pull.holder
        if number in self.pulls:
            key = self.worker.info.key
            self.world.send(self.worker, holder, lambda: holder.transport.on_grant(self.worker, key, number))

    def on_data(self, number: int, first: int, pieces: Sequence[tuple[int, bytes]]) -> None:
        """A piece begins to land; a stray of an earlier read falls nowhere."""
        pull = self.pulls.get(number)
        if pull is None or pull.offered is None or pull.task.error is not None:
            return
        fresh = [(index, data) for index, data in pieces if index not in pull.settled]
        if not fresh:
            return
        pull.settled.update(index for index, _ in fresh)
        pull.landing += 1
        delay_ns = self.world.rng.randrange(self.world.swarm.landing_ns)
        self.world.after(delay_ns, lambda: self._land(pull, fresh))

    def _land(self, pull: Pull, pieces: Sequence[tuple[int, bytes]]) -> None:
        worker, task = self.worker, pull.task
        if not worker.up:
            return
        assert not task.done(), "a byte landed after its read was terminal"
        assert pull.offered is not None
        good: list[int] = []
        spoilt: list[int] = []
        for index, data in pieces:
            offset = task.request.blocks[index].dest_offset
            page = BlockId(offset // task.block_bytes)
            assert worker.segment._pool._state(page) is BlockState.IN_FLIGHT, "a byte landed in a page in use"
            worker.memory[offset : offset + task.block_bytes] = data
            right = xxhash.xxh3_64_intdigest(data) == pull.offered[index].checksum
            (good if right else spoilt).append(index)
        pull.landing -= 1
        pull.progress_ns = worker.now_ns
        if task.error is None:
            task.mark(good, BlockStatus.ARRIVED)
            task.mark(spoilt, BlockStatus.CORRUPT)
            task.publish()
        self._finish_if_over(pull)

    def _settle(self, pull: Pull, indices: list[int], status: BlockStatus) -> None:
        pull.settled.update(indices)
        pull.task.mark(indices, status)
        pull.task.publish()
        self._finish_if_over(pull)

    def _give_up(self, pull: Pull, error: KVPoolError) -> None:
        pull.task.give_up(error)
        self._finish_if_over(pull)

    def _finish_if_over(self, pull: Pull) -> None:
        """Terminal exactly when nothing can land any more."""
        whole = len(pull.settled) == len(pull.task.request.blocks)
        if pull.landing or pull.task.done() or not (whole or pull.task.error is not None):
            return
        del self.pulls[pull.number]
        holder, key, number = pull.holder, self.worker.info.key, pull.number
        self.world.send(self.worker, holder, lambda: holder.transport.on_bye(key, number))
        pull.task.finish()

    def _watch(self, pull: Pull) -> None:
        """Deadline and stall bound; a paused reader looks later."""

        def look() -> None:
            if pull.number not in self.pulls:
                return
            now_ns, request = self.worker.now_ns, pull.task.request
            if not pull.holder.up:
                self._give_up(pull, PeerGoneError("the connection broke"))
            elif now_ns > pull.task.deadline_at_ns:
                self._give_up(pull, StallError("past its deadline", slow=True))
            elif now_ns - pull.progress_ns > request.stall_ns:
                self._give_up(pull, StallError("nothing came"))
            self._watch(pull)

        self.world.after(TIMER_NS, lambda: self.worker.deliver(look))

    # -- the holder

    def on_pull(
        self, reader: PoolWorker, number: int, asked: WorkerKey, hashes: Sequence[BlockHash], deadline_ns: int
    ) -> None:
        """Pin and offer; another incarnation than the one asked refuses."""
        worker, name = self.worker, (reader.info.key, number)
        if name in self.served:
            return
        self.served.add(name)
        if asked != worker.info.key:
            error = StaleError(f"asked for {asked}, this is {worker.info.key}")
            self.world.send(worker, reader, lambda: reader.transport.on_refuse(number, error))
            return
        lease, held = worker.segment.pin(reader.info.key, hashes)
        self.leases[name] = lease
        self.offers[name] = held
        self.world.after(deadline_ns + LEASE_SLACK_NS, lambda: worker.deliver(lambda: self.on_bye(*name)))
        self.world.send(worker, reader, lambda: reader.transport.on_offer(number, held))

    def on_grant(self, reader: PoolWorker, key: WorkerKey, number: int) -> None:
        """Send what was offered, piece by piece, at the link's pace."""
        held = self.offers.pop((key, number), None)
        if held is None:
            return
        indices = [index for index, block in enumerate(held) if block is not None]
        when_ns = 0
        for start in range(0, len(indices), PIECE_BLOCKS):
            part = indices[start : start + PIECE_BLOCKS]
            when_ns += self.world.piece_ns(self.worker, reader, len(part))
            self.world.after(
                when_ns, lambda part=part: self.worker.deliver(lambda: self._send(reader, (key, number), held, part))
            )

    def _send(
        self, reader: PoolWorker, name: tuple[WorkerKey, int], held: tuple[HeldBlock | None, ...], part: list[int]
    ) -> None:
        if name not in self.leases:
            return  # the reader has gone, or time is over: nothing is sent without a lease
        self.worker.segment.renew(self.leases[name])
        pieces: list[tuple[int, bytes]] = []
        for index in part:
            block = held[index]
            assert block is not None
            data = bytearray(self.worker.memory[block.offset : block.offset + self.worker.engine.layout.block_bytes])
            if self.world.strikes("corrupt"):
                data[self.world.rng.randrange(len(data))] ^= 0x40
            pieces.append((index, bytes(data)))
        self.world.send(self.worker, reader, lambda: reader.transport.on_data(name[1], part[0], pieces))

    def on_bye(self, key: WorkerKey, number: int) -> None:
        """The read is over, here or there."""
        self.offers.pop((key, number), None)
        lease = self.leases.pop((key, number), None)
        if lease is not None:
            self.worker.segment.unpin(lease)
