"""The metadata protocol through hundreds of seeded disasters: nothing false meanwhile, everything true afterwards.

Replay one seed: ``KVPOOL_SIM_SEED=123 pytest tests/simulation/test_metadata_simulation.py -k replay``.
More seeds: ``KVPOOL_SIM_SEEDS=5000 pytest tests/simulation/test_metadata_simulation.py``.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from kvpool.errors import InvariantViolation
from kvpool.metadata.events import BatchAck, EventBatch
from kvpool.metadata.outbox import Outbox
from kvpool.metadata.state import DirectoryState
from tests.simulation.metadata_processes import NO_FAULTS, Faults
from tests.simulation.metadata_world import World

SEEDS = int(os.environ.get("KVPOOL_SIM_SEEDS", "500"))
GROUP = 50
CALM_NETWORK = Faults(drop=0, duplicate=0, slow=0)


def _run(seed: int, faults: Faults, **options: Any) -> None:
    try:
        World(seed, faults, **options).run()
    except (AssertionError, InvariantViolation) as error:
        raise AssertionError(
            f"seed {seed} with {faults}: {error}\n"
            f"replay: KVPOOL_SIM_SEED={seed} pytest tests/simulation/test_metadata_simulation.py -k replay"
        ) from error


def _faults(seed: int) -> Faults:
    return (Faults(), CALM_NETWORK, Faults(drop=0.2, duplicate=0.2, slow=0.3))[seed % 3]


@pytest.mark.parametrize("first", range(0, SEEDS, GROUP))
def test_after_any_disaster_every_copy_equals_the_workers_truth(first: int) -> None:
    for seed in range(first, min(first + GROUP, SEEDS)):
        _run(seed, _faults(seed))


def test_replay_of_one_seed() -> None:
    seed = int(os.environ.get("KVPOOL_SIM_SEED", "0"))
    _run(seed, _faults(seed))


def test_a_run_is_reproducible() -> None:
    worlds = [World(7, _faults(6)) for _ in range(2)]
    for world in worlds:
        world.run()
    first, second = ([replica.state.counters for replica in world.replicas] for world in worlds)
    assert first == second


def test_without_faults_nothing_is_resent_and_no_snapshot_is_repeated() -> None:
    world = World(3, NO_FAULTS)
    world.run()
    for replica in world.replicas:
        counters = replica.state.counters
        assert (counters.gaps, counters.duplicate_batches, counters.expired, counters.fenced) == (0, 0, 0, 0)


class IgnoresGaps(DirectoryState):
    """A directory with the bug that the sequence numbers are there to prevent."""

    def publish(self, batch: EventBatch) -> tuple[BatchAck, Any]:
        known = self._members.get(batch.key.worker_id)
        if known is not None and known.applied is not None and batch.sequence > known.applied:
            known.applied, known.broken = batch.sequence - 1, False
        return super().publish(batch)


class ForgetsFences(DirectoryState):
    """A directory that lets zombies back in."""

    def _fence(self, *_: Any) -> None:
        return


def _found(**options: Any) -> bool:
    """Whether one of a few seeds shows that something is wrong."""
    for seed in range(60):
        try:
            _run(seed, _faults(seed), **options)
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("broken", [IgnoresGaps, ForgetsFences])
def test_canary_a_broken_directory_is_found(broken: type[DirectoryState]) -> None:
    assert _found(make_state=broken)


def test_canary_an_outbox_that_never_resyncs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Outbox.acked
    monkeypatch.setattr(
        Outbox, "acked", lambda self, ack: original(self, BatchAck(ack.received, ack.received, resync=False))
    )
    assert _found()
