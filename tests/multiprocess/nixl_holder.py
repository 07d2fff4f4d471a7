"""A process that serves generated blocks over NIXL until its stdin ends; prints its address first."""

from __future__ import annotations

import os
import sys

from kvpool.transport.nixl import NixlTransport
from tests.contract.transport_rig import start_end


def main(name: str, epoch: int, blocks: int, block_bytes: int) -> None:
    end = start_end(NixlTransport(), name, blocks=blocks, block_bytes=block_bytes, filled=True, epoch=epoch)
    print(end.transport.address.hex(), flush=True)
    sys.stdin.read()
    end.transport.close()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], *(int(item) for item in sys.argv[2:]))
