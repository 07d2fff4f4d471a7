"""Puts runs in flight, in the order and windows of `kvpool.transport.fair`: posts receives, or gives them to helpers.

Owned by the progress thread. What is in flight is the reader's half's to end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from kvpool.errors import KVPoolError
from kvpool.transport.compression import Codec
from kvpool.transport.fair import Claim, Room, share
from kvpool.transport.handle import LocalEnd
from kvpool.transport.ucx.direct import DirectMemory, Fetched, Fragment
from kvpool.transport.ucx.frames import FrameReader
from kvpool.transport.ucx.links import Flight, Link, OpenPull, PostedRun
from kvpool.transport.ucx.settings import UcxOptions
from kvpool.transport.verify import Helpers
from kvpool.transport.wire import Window, data_tag

FETCH_BYTES = 4 << 20  # what a helper fetches before it reports
_MANY = 1 << 30  # runs, where their number is not limited

OnFetched = Callable[[Link, list[Flight], Fetched, int], None]


class Granter:
    """Lets runs of pulls move into the segment."""

    def __init__(
        self, local: LocalEnd, options: UcxOptions, helpers: Helpers, memory: DirectMemory, frames: FrameReader
    ) -> None:
        self._segment = local.segment
        self._block_bytes = local.block_bytes
        self._options = options
        self._helpers = helpers
        self._memory = memory
        self._frames = frames
        self._turns = 0

    def give(
        self, links: Iterable[Link], fetched: OnFetched, now_ns: int
    ) -> tuple[list[OpenPull], list[tuple[Link, KVPoolError]]]:
        """Put in flight what has its turn and fits.

        Args:
            links: every living one.
            fetched: told about each batch of runs that helpers fetched.
            now_ns: now.

        Returns:
            Pulls whose holders must be told how far they are granted, and links that failed.
        """
        living = list(links)
        lanes = {link.link_id: link for link in living if self._takes_runs(link)}
        pulls = [pull for link in lanes.values() for pull in link.to_grant]
        if not pulls:
            return [], []
        claims = [
            Claim(pull.reading.link.link_id, pull.urgency_ns, pull.sequence, pull.run_bytes, pull.granted)
            for pull in pulls
        ]
        # What a fence still holds is not on its way any more and must not starve the living links.
        used = sum(link.in_flight_bytes for link in living)
        process = Room(self._options.process_window_bytes - used, _MANY, not used, self._turns)
        shares = share(claims, {name: self._room_of(link) for name, link in lanes.items()}, process)
        self._turns = shares.process.turns
        for name, room in shares.lanes.items():
            lanes[name].turns = room.turns
        granted: dict[OpenPull, None] = {}
        failed: dict[Link, KVPoolError] = {}
        for index, runs in shares.turns:
            pull = pulls[index]
            link = pull.reading.link
            if pull.window is not None:
                self._fetch(pull, pull.window, runs, fetched)
            elif link not in failed:
                try:
                    self._post(pull, runs, now_ns)
                    granted[pull] = None
                except KVPoolError as error:
                    failed[link] = error
        return list(granted), list(failed.items())

    def _takes_runs(self, link: Link) -> bool:
        if link.broken_ns is not None or not link.connection.alive:
            return False
        if link.fetches:
            return True
        # A message per freed run would cost more than it gains.
        options = self._options
        return (
            link.in_flight_bytes <= options.link_window_bytes // 2 and len(link.posted) <= options.link_window_runs // 2
        )

    def _room_of(self, link: Link) -> Room:
        options, used = self._options, link.in_flight_bytes
        if link.fetches:
            return Room(options.fetch_window_bytes - used, _MANY, not used, link.turns)
        return Room(options.link_window_bytes - used, options.link_window_runs - len(link.posted), not used, link.turns)

    def _post(self, pull: OpenPull, runs: int, now_ns: int) -> None:
        link = pull.reading.link
        for _ in range(runs):
            flight = pull.next_flight()
            staging = None
            if pull.codec is not Codec.RAW:
                if not self._frames.fits(flight.run_bytes):
                    return  # what is unpacked makes room
                staging = self._frames.take(flight.run_bytes)
            into = self._segment[flight.offset : flight.offset + flight.run_bytes] if staging is None else staging.view
            try:
                operation = link.connection.receive(into, data_tag(pull.sequence, flight.index))
            except KVPoolError:
                if staging is not None:
                    self._frames.release(staging)
                raise
            pull.launch(flight)
            link.meter.began(now_ns)
            link.posted.append(PostedRun(operation, flight, staging))

    def _fetch(self, pull: OpenPull, window: Window, runs: int, fetched: OnFetched) -> None:
        """Give runs to the helpers, some at a time."""
        flights: list[Flight] = []
        size = 0
        for left in reversed(range(runs)):
            flights.append(pull.next_flight())
            pull.launch(flights[-1])
            size += flights[-1].run_bytes
            if size >= FETCH_BYTES or not left:
                self._helpers.submit(
                    functools.partial(self._fetch_now, window, flights),
                    functools.partial(fetched, pull.reading.link, flights),
                )
                flights, size = [], 0

    def _fetch_now(self, window: Window, flights: list[Flight]) -> Fetched:
        """On a helper's thread."""
        reading = flights[0].pull.reading
        fragments = [
            Fragment(window.addresses[flight.index], flight.offset, flight.check(self._segment, self._block_bytes))
            for flight in flights
        ]
        return self._memory.fetch(window, fragments, lambda: reading.gave_up_ns is None)
