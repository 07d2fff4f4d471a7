"""What a reader takes from several holders at once, against the sum of its single links.  (pure)

Single links say nothing about it: the reader's own end may be the narrowest. So it is learned per reader from loads
over several holders: 1 at first, which tries it; what they really took corrects it at once; and unobserved it fades
back to 1, which tries again. While such a load runs, a sample of one of its links that is slower than the link was
known to be says nothing about that link alone, and is not learned.
"""

from __future__ import annotations

from kvpool.types import WorkerKey

LEAST = 0.2
_LEARN = 0.7
_HALF_LIFE_NS = 60_000_000_000


class Together:
    """Per reader; bounded by the members.

    Attributes:
        shares: what decisions read; a reader that is absent has 1.
    """

    def __init__(self) -> None:
        self.shares: dict[WorkerKey, float] = {}
        self._seen_ns: dict[WorkerKey, int] = {}
        self._until_ns: dict[WorkerKey, int] = {}

    def begin(self, reader: WorkerKey, until_ns: int) -> None:
        """A load over several holders was planned; it is over by ``until_ns`` at the latest."""
        self._until_ns[reader] = max(until_ns, self._until_ns.get(reader, 0))

    def running(self, reader: WorkerKey, now_ns: int) -> bool:
        """Such a load may be running."""
        return now_ns < self._until_ns.get(reader, 0)

    def observe(self, reader: WorkerKey, expected_ns: float, taken_ns: float, now_ns: int) -> None:
        """A load over several holders was expected to take so long and took so long."""
        if expected_ns <= 0.0 or taken_ns <= 0.0:
            return
        share = self.shares.get(reader, 1.0)
        seen = share * expected_ns / taken_ns
        self.shares[reader] = min(1.0, max(LEAST, (1 - _LEARN) * share + _LEARN * seen))
        self._seen_ns[reader] = now_ns

    def fade(self, reader: WorkerKey, now_ns: int) -> None:
        """Time passed without an observation."""
        share = self.shares.get(reader)
        if share is None:
            return
        missing = (1.0 - share) * 0.5 ** ((now_ns - self._seen_ns[reader]) / _HALF_LIFE_NS)
        self._seen_ns[reader] = now_ns
        if missing < 0.01:
            del self.shares[reader]
        else:
            self.shares[reader] = 1.0 - missing

    def forget(self, reader: WorkerKey) -> None:
        """An incarnation is gone."""
        for kept in (self.shares, self._seen_ns, self._until_ns):
            kept.pop(reader, None)
