"""The interface every routing policy implements, ours and the baselines alike.  (pure)"""

from __future__ import annotations

from random import Random
from typing import Protocol

from router.decide import Decision
from router.signals import RequestView, Snapshot
from router.waiting import NEVER, Hold


class Policy(Protocol):
    """Chooses worker and plan. Implementations keep no clock; a stateful one says what its state is."""

    @property
    def name(self) -> str:
        """Name in settings, records and reports."""

    @property
    def hold(self) -> Hold:
        """From when on requests wait at the router."""

    def choose(self, request: RequestView, snapshot: Snapshot, rng: Random) -> Decision:
        """Decide one request. ``rng`` is only for rules that are random by definition.

        Raises:
            UnavailableError: no worker can take it.
        """


class AtOnce:
    """Base of rules that send every request to a worker as it comes."""

    __slots__ = ()

    @property
    def hold(self) -> Hold:
        """Never."""
        return NEVER
