"""Block events that are lost, repeated or late between a real publisher and a real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvpool.metadata.disturbance import CALM, Disturbance
from kvpool.metadata.publisher import MetadataPublisher
from kvpool.metadata.watcher import MetadataWatcher
from kvpool.types import Tier
from tests.contract.metadata_support import WAIT_S, Owner, ThreadedServer, hashes, member, sees


@pytest.fixture
def server() -> Iterator[ThreadedServer]:
    running = ThreadedServer()
    yield running
    running.stop()


@pytest.mark.parametrize("disturbance", [Disturbance(loss=0.7), Disturbance(repetition=1.0), Disturbance(delay_s=0.05)])
def test_the_index_is_right_again_once_events_flow(server: ThreadedServer, disturbance: Disturbance) -> None:
    owner, info = Owner(), member()
    publisher = MetadataPublisher([server.address], info, owner.snapshot, lambda reason: None)
    watcher = MetadataWatcher([server.address])
    publisher.start()
    watcher.start()
    try:
        publisher.stored(Tier.DEVICE, owner.store(hashes(1)))
        assert publisher.flush(WAIT_S)
        publisher.disturb(disturbance)
        chain = hashes(20)
        for item in chain:
            publisher.stored(Tier.DEVICE, owner.store([item]))
        for item in reversed(chain[10:]):
            publisher.removed(Tier.DEVICE, owner.remove([item]))
        publisher.disturb(CALM)
        publisher.stored(Tier.DEVICE, owner.store(hashes(1)))  # whoever missed something sees the gap now
        assert sees(watcher, chain, info.key, 10)
    finally:
        watcher.close()
        publisher.close()
