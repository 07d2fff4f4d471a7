"""A process whose data plane hangs on a hub: prints its address, then reads every block from whom stdin names."""

from __future__ import annotations

import json
import os
import sys

import numpy as np

from kvpool.transport import create_transport
from kvpool.transport.base import Peer
from kvpool.types import WorkerEpoch, WorkerId, WorkerKey
from tests.contract.transport_rig import S, pattern, request, start_end

BLOCKS, BLOCK_BYTES = 32, 256 << 10
DEADLINE_NS, STALL_NS = 10 * S, S


def main(name: str, hub: str) -> None:
    transport = create_transport(f"netns:{hub}:ucx")
    end = start_end(transport, name, blocks=BLOCKS, block_bytes=BLOCK_BYTES, filled=name == "holder")
    print(json.dumps({"address": transport.address.hex()}), flush=True)
    for line in sys.stdin:
        peer = Peer(WorkerKey(WorkerId("holder"), WorkerEpoch(1)), bytes.fromhex(line.strip()))
        wanted = request(peer, range(BLOCKS), BLOCK_BYTES, deadline_ns=DEADLINE_NS, stall_ns=STALL_NS)
        progress = transport.read(wanted).wait(30 * S)
        right = all(np.array_equal(end.slot(number), pattern(number, BLOCK_BYTES)) for number in range(BLOCKS))
        answer = {"state": progress.state.value, "right": right, "elapsed_ns": progress.elapsed_ns}
        print(json.dumps({**answer, "error": progress.error and progress.error.code}), flush=True)
        end.store.segment[:] = 0
    transport.close()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
