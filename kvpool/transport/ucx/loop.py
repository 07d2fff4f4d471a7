"""The progress thread of the UCX transport.

It owns UCX and both halves. It blocks on the workers' event descriptors when nothing is in flight, polls for some
microseconds when something is, and is woken by an eventfd for commands of other threads. It runs no user code except
`BlockSource.pin`/`unpin` and progress callbacks, which must not block.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from kvpool.errors import IntegrityError, TransferError
from kvpool.transport.ucx.fabric import Fabric, Port
from kvpool.transport.ucx.reader import ReaderHalf
from kvpool.transport.ucx.server import ServerHalf
from kvpool.transport.wire import decode

log = logging.getLogger(__name__)

ACTIVE_BLOCK_S = 0.005
IDLE_BLOCK_S = 1.0
ABANDON_NS = 2_000_000_000
PROGRESS_PER_STEP = 16  # UCX steps between two looks at messages and timers; one moves at most a run

Command = Callable[[int], None]
"""Runs on the progress thread; gets the time."""

OnFailure = Callable[[BaseException], None]


class ProgressLoop:
    """One thread that moves one `Fabric` and its two halves until `stop` and everything is terminal.

    Args:
        fabric, reader, server: what it owns from `start` on.
        spin_ns: how long it polls without progress, while something is in flight, before it blocks.
        clock_ns: monotonic clock.
        name: of the thread.
        on_failure: called once, on the thread, when a bug of ours ended it and every read is terminal.
    """

    def __init__(
        self,
        fabric: Fabric,
        reader: ReaderHalf,
        server: ServerHalf,
        *,
        spin_ns: int,
        clock_ns: Callable[[], int],
        name: str,
        on_failure: OnFailure | None = None,
    ) -> None:
        self._on_failure = on_failure
        self._fabric = fabric
        self._reader = reader
        self._server = server
        self._spin_ns = spin_ns
        self._clock_ns = clock_ns
        self._commands: deque[Command] = deque()
        # Closed with this object, not with the thread: a late `post` must not write into a reused descriptor.
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake_fd)
        self._sleeping = False
        self._stopping = False
        self._exited = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def post(self, command: Command) -> None:
        """Run ``command`` on the thread, soon; when the thread ended, run it here."""
        self._commands.append(command)
        if self._sleeping:
            os.eventfd_write(self._wake_fd, 1)
        elif self._exited:
            self._run_commands(self._clock_ns())

    def stop(self) -> None:
        """Close both halves; the thread ends once every read and every lease is terminal. May be repeated."""

        def close_halves(now_ns: int) -> None:
            if not self._stopping:
                self._stopping = True
                self._reader.close(now_ns)
                self._server.close(now_ns)

        self.post(close_halves)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; True when it ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            log.exception("the UCX progress thread failed; its reads are given up")
            self.failure = error
            self._abandon(error)
        self._exited = True
        self._run_last_commands()
        if self._reader.active or self._server.active:
            _abandoned.append(self._fabric)
        else:
            self._fabric.retire()
        if self.failure is not None and self._on_failure is not None:
            self._on_failure(self.failure)

    def _loop(self) -> None:
        with select.epoll() as poller:
            poller.register(self._wake_fd, select.EPOLLIN)
            watched: set[Port] = set()
            spin_until_ns = 0
            while True:
                now_ns = self._clock_ns()
                moved = self._step(now_ns)
                active = self._active
                if self._stopping and not active and not self._commands:
                    return
                if moved:
                    spin_until_ns = now_ns + self._spin_ns
                elif not active or now_ns >= spin_until_ns:
                    watched = self._watch(poller, watched)
                    self._block(poller, ACTIVE_BLOCK_S if active else IDLE_BLOCK_S)
                    spin_until_ns = 0

    @property
    def _active(self) -> bool:
        return self._reader.active or self._server.active or any(port.fetching for port in self._fabric.ports)

    def _step(self, now_ns: int) -> bool:
        moved = self._run_commands(now_ns)
        for port in self._fabric.ports:
            for _ in range(PROGRESS_PER_STEP):
                if not port.progress():
                    break
                moved = True
            half = self._server if port is self._fabric.server else self._reader
            for raw in port.messages():
                self._handle(raw, half, now_ns)
                moved = True
        moved |= self._reader.step(now_ns)
        moved |= self._server.step(now_ns)
        return moved

    def _run_commands(self, now_ns: int) -> bool:
        ran = False
        while self._commands:
            self._commands.popleft()(now_ns)
            ran = True
        return ran

    def _handle(self, raw: memoryview | None, half: ReaderHalf | ServerHalf, now_ns: int) -> None:
        if raw is None:
            half.protocol_errors += 1
            return
        try:
            message = decode(raw)
        except IntegrityError as error:
            half.on_malformed(error, now_ns)
            return
        half.on_message(message, now_ns)

    def _watch(self, poller: select.epoll, watched: set[Port]) -> set[Port]:
        """Watch ports that are new."""
        ports = set(self._fabric.ports)
        for port in ports - watched:
            poller.register(port.event_fd, select.EPOLLIN)
        return ports

    def _block(self, poller: select.epoll, timeout_s: float) -> None:
        self._sleeping = True
        try:
            # A command that came before `_sleeping` was set did not write the eventfd.
            if self._commands or not all(port.arm() for port in self._fabric.ports):
                return
            for fd, _ in poller.poll(timeout_s):
                if fd == self._wake_fd:
                    os.eventfd_read(self._wake_fd)
        finally:
            self._sleeping = False

    def _abandon(self, error: BaseException) -> None:
        """After a bug: give every read up, and finish each when its pages are safe. One whose answer the bug took is
        never finished; its pages stay out of use, and the owner is told all the same."""
        self._reader.fail_all(TransferError(f"the transport failed: {error!r}"), self._clock_ns())
        self._server.close(self._clock_ns())
        until_ns = self._clock_ns() + ABANDON_NS
        while (self._reader.active or self._server.active) and self._clock_ns() < until_ns:
            for port in self._fabric.ports:
                port.progress_all()
            self._run_last_commands()
            self._reader.step(self._clock_ns())
            self._server.step(self._clock_ns())
            time.sleep(ACTIVE_BLOCK_S)

    def _run_last_commands(self) -> None:
        try:
            self._run_commands(self._clock_ns())
        except BaseException:
            log.exception("a command failed while the transport ended")


_abandoned: list[Fabric] = []
"""Of transports that a bug ended with bytes under way. Destroying their ports could crash; the process ends soon."""
