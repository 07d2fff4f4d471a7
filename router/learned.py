"""Everything one router has learned, as one value that outlives it.  (pure)

Prefill and link curves, failure rates, and whose calibration is in them already: a calibration is heard again from
every restarted metadata service, and must not be learned twice. `to_dict` and `from_dict` carry all of it through
JSON; moments are kept as ages, because the clock of the next router is another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpool.errors import TransferCancelledError
from kvpool.reports import LoadSample
from kvpool.types import MemberInfo, Tier, WorkerEpoch, WorkerId, WorkerKey
from router.decoding import DecodeEstimators
from router.estimators import FailureEstimators, LinkEstimators, PrefillEstimators
from router.together import Together

VERSION = 2
MAX_SAVED_LINKS = 2000
"""About 3 MB of JSON; links observed longer ago fade to their tier anyway, which is saved."""


class Learned:
    """What a router learns from. Not thread-safe.

    Attributes:
        prefills, links, failures: see `router.estimators`.
        together: see `router.together`; new after a restart.
        decodes: see `router.decoding`; new after a restart, since a worker's next two reports teach it again.
        observations: grows with everything that is learned.
    """

    def __init__(self) -> None:
        self.prefills = PrefillEstimators()
        self.links = LinkEstimators()
        self.failures = FailureEstimators()
        self.decodes = DecodeEstimators()
        self.together = Together()
        self.observations = 0
        self._calibrated: dict[WorkerId, WorkerEpoch] = {}

    def member(self, info: MemberInfo) -> None:
        """Learn the calibration of a new incarnation, once."""
        worker_id, epoch = info.key.worker_id, info.key.worker_epoch
        if self._calibrated.get(worker_id) == epoch:
            return
        self._calibrated[worker_id] = epoch
        self.observations += 1
        for sample in info.calibration:
            self.prefills.observe(worker_id, sample.new_tokens, sample.context_tokens, sample.elapsed_ns)

    def prefill(self, worker: WorkerId, new_tokens: int, context_tokens: int, elapsed_ns: int, decoding: int) -> None:
        """See `PrefillEstimators.observe`."""
        self.observations += 1
        self.prefills.observe(worker, new_tokens, context_tokens, elapsed_ns, decoding)

    def load(self, reader: WorkerKey, load: LoadSample, tier: Tier | None, now_ns: int) -> bool:
        """Learn how a load from ``tier`` of its holder went; None when the holder is unknown.

        A load that was given up half-way timed the bytes that came, so a link that never keeps up is learned too.

        Returns:
            Whether the link's curve changed.
        """
        self.observations += 1
        if tier is None or load.bytes <= 0 or load.failure not in (None, TransferCancelledError.code):
            return False
        link = (load.holder.worker_id, reader.worker_id, tier)
        known = self.links.curve(*link, now_ns)
        if self.together.running(reader, now_ns) and load.elapsed_ns > known.time_ns(load.bytes):
            return False
        self.links.observe(link, load.bytes, load.elapsed_ns, now_ns)
        return True

    def forget(self, key: WorkerKey) -> None:
        """An incarnation is gone. Speeds stay: they are the machine's, and it may come back."""
        self.failures.forget(key)
        self.together.forget(key)

    def to_dict(self, now_ns: int) -> dict[str, Any]:
        """Plain data, bounded."""
        return {
            "version": VERSION,
            "now_ns": now_ns,
            "prefills": self.prefills.to_dict(),
            "links": self.links.to_dict(MAX_SAVED_LINKS),
            "failures": self.failures.to_dict(),
            "calibrated": dict(self._calibrated),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], now_ns: int, age_ns: int) -> Learned | None:
        """What `to_dict` saved ``age_ns`` ago; None when it is of another version or makes no sense."""
        if data.get("version") != VERSION:
            return None
        made = cls()
        try:
            shift_ns = now_ns - age_ns - int(data["now_ns"])
            made.prefills.restore(data["prefills"])
            made.links.restore(data["links"], shift_ns)
            made.failures.restore(data["failures"], shift_ns)
            epochs = data["calibrated"].items()
            made._calibrated = {WorkerId(name): WorkerEpoch(int(epoch)) for name, epoch in epochs}
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return None
        return made
