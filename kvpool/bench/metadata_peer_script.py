"""Runs a peer of the metadata service in a Python of its own, where the peer is installed and kvpool need not be.

``python metadata_peer_script.py dynamo WORKERS ENTRIES`` or ``… mooncake KEYS PUTS``. Says ``{"ready": true}``, then
obeys one command per line on stdin: each runs once and answers ``{"value": …}``. Ends when stdin ends.

- ``dynamo``: ``lookup`` answers the median microseconds of a lookup in Dynamo's `RadixTree`.
- ``mooncake``: ``lookup`` and ``publish`` answer the seconds of asking for KEYS keys in calls of 1,000, and of putting
  PUTS small objects in batches of 500 into a segment of another process.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpool.bench import peer_tools
else:
    import peer_tools

CHAIN_BLOCKS = 100
HOLDERS = 4
LOOKUPS = 500
KEYS_PER_CALL = 1_000
PUTS_PER_CALL = 500
OBJECT = b"x" * 64
SEGMENT_BYTES = 512 << 20


def dynamo(workers: int, entries: int) -> dict[str, Callable[[], float]]:
    """Dynamo's tree with the structure of `kvpool.bench.metadata`'s index rows."""
    from dynamo.llm import RadixTree

    tree, rng = RadixTree(), random.Random(workers)
    chains = []
    for number in range(entries // CHAIN_BLOCKS // HOLDERS * 2):
        chains.append([rng.getrandbits(63) for _ in range(CHAIN_BLOCKS)])
        for place, worker in enumerate(rng.sample(range(workers), HOLDERS)):
            stop = rng.randrange(1, CHAIN_BLOCKS) if place else CHAIN_BLOCKS
            blocks = [{"block_hash": item ^ 1, "tokens_hash": item} for item in chains[-1][:stop]]
            stored = {"stored": {"parent_hash": None, "blocks": blocks}}
            event = {"event_id": number, "data": stored, "dp_rank": 0}
            tree.apply_event(worker, json.dumps(event).encode())

    def lookup() -> float:
        taken = []
        for _ in range(LOOKUPS):
            chain = rng.choice(chains)
            start = time.perf_counter_ns()
            tree.find_matches(chain).scores  # noqa: B018 - the property builds the answer
            taken.append(time.perf_counter_ns() - start)
        return statistics.median(taken) / 1e3

    return {"lookup": lookup}


class Mooncake:
    """A master, a process that offers a segment, and a client without one."""

    def __init__(self, keys: int, puts: int) -> None:
        port = peer_tools.free_port()
        address = f"127.0.0.1:{port}"
        self._children = [peer_tools.mooncake_master(sys.executable, port)]
        command = [sys.executable, __file__, "holder", address]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self._children.append(holder)
        assert holder.stdout is not None
        if b"ready" not in holder.stdout.readline():
            raise RuntimeError("the segment's holder ended")
        self._store = peer_tools.mooncake_store(address, 0)
        self._keys, self._puts, self._round = keys, puts, 0
        self.publish()

    def lookup(self) -> float:
        """Seconds of asking for all keys."""
        known = [f"1-{number % self._puts}" for number in range(self._keys)]
        start = time.perf_counter()
        for at in range(0, len(known), KEYS_PER_CALL):
            assert all(self._store.batch_is_exist(known[at : at + KEYS_PER_CALL]))
        return time.perf_counter() - start

    def publish(self) -> float:
        """Seconds of putting new objects."""
        self._round += 1
        fresh = [f"{self._round}-{number}" for number in range(self._puts)]
        start = time.perf_counter()
        for at in range(0, len(fresh), PUTS_PER_CALL):
            part = fresh[at : at + PUTS_PER_CALL]
            if self._store.put_batch(part, [OBJECT] * len(part)):
                raise RuntimeError("a put failed")
        return time.perf_counter() - start

    def close(self) -> None:
        """End the client and the children."""
        self._store.close()
        for child in reversed(self._children):
            child.kill()
            child.wait(peer_tools.READY_TIMEOUT_S)


def main(arguments: list[str]) -> None:
    """See the module's docstring."""
    answers = peer_tools.answers()
    if arguments[0] == "holder":
        peer_tools.offer_segment(arguments[1], SEGMENT_BYTES, answers)
    first, second = int(arguments[1]), int(arguments[2])
    close: Callable[[], None] = lambda: None  # noqa: E731
    commands: dict[str, Callable[[], float]]
    if arguments[0] == "dynamo":
        commands = dynamo(first, second)
    else:
        mooncake = Mooncake(first, second)
        commands, close = {"lookup": mooncake.lookup, "publish": mooncake.publish}, mooncake.close
    print(json.dumps({"ready": True}), file=answers, flush=True)
    try:
        for line in sys.stdin:
            print(json.dumps({"value": commands[line.strip()]()}), file=answers, flush=True)
    finally:
        close()


if __name__ == "__main__":
    main(sys.argv[1:])
