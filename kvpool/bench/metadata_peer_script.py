"""Runs a peer of the metadata service in a Python of its own, where the peer is installed and kvpool need not be.

``python metadata_peer_script.py dynamo WORKERS ENTRIES`` or ``… mooncake KEYS PUTS``. Says ``{"ready": true}``, then
obeys one command per line on stdin: each runs once and answers ``{"value": …}``. Ends when stdin ends.

- ``dynamo``: ``lookup`` answers the median microseconds of a lookup in Dynamo's `RadixTree`.
- ``mooncake``: ``lookup`` and ``publish`` answer the seconds of asking for KEYS keys in calls of 1,000, and of putting
  PUTS small objects in batches of 500 into a segment of another process.
"""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

CHAIN_BLOCKS = 100
HOLDERS = 4
LOOKUPS = 500
KEYS_PER_CALL = 1_000
PUTS_PER_CALL = 500
OBJECT = b"x" * 64
SEGMENT_BYTES = 512 << 20
BUFFER_BYTES = 64 << 20
READY_TIMEOUT_S = 30.0


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
        master = os.path.join(os.path.dirname(sys.executable), "mooncake_master")
        port, metrics = _free_port(), _free_port()
        command = [master, f"--rpc_port={port}", f"--metrics_port={metrics}"]
        self._address = f"127.0.0.1:{port}"
        self._children = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)]
        _wait_for_port(port)
        command = [sys.executable, __file__, "holder", self._address]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self._children.append(holder)
        assert holder.stdout is not None
        while b"ready" not in holder.stdout.readline():
            if holder.poll() is not None:
                raise RuntimeError("the segment's holder ended")
        self._store = connect(self._address, 0)
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
            child.wait(READY_TIMEOUT_S)


def connect(master: str, segment_bytes: int) -> Any:
    """A store client."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    if store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, BUFFER_BYTES, "tcp", "", master):
        raise RuntimeError("the store cannot be set up")
    return store


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for_port(port: int) -> None:
    end = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def _hold(master: str) -> None:
    """Offer a segment until the parent goes."""
    store = connect(master, SEGMENT_BYTES)
    print("ready", flush=True)
    sys.stdin.read()
    store.close()


def main(arguments: list[str]) -> None:
    """See the module's docstring."""
    if arguments[0] == "holder":
        _hold(arguments[1])
        return
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # peers log to stdout
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
