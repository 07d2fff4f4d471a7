"""Runs a peer of the data plane in a Python of its own, where the peer is installed and kvpool need not be.

``python transfer_peer_script.py mooncake|nixl BLOCK_BYTES BLOCKS FABRIC``, FABRIC ``host`` or ``tcp``. A holder process
offers BLOCKS blocks, this one reads them into one huge-page-backed, registered buffer. Says ``{"ready": true}``; then
every line ``load`` on stdin reads the batch once and answers ``{"value": seconds}``. Ends when stdin ends.

- ``mooncake``: a master and a store of its own; the batch is one `batch_get_into`. TCP only.
- ``nixl``: one agent on each side; the batch is one READ of prepared descriptors, which is how vLLM and Dynamo use it.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpool.bench import peer_tools
else:
    import peer_tools

LOAD_TIMEOUT_S = 60.0
SLACK_BYTES = 64 << 20
HUGE_PAGE_BYTES = 2 << 20
TCP_SETTINGS = {
    "UCX_TLS": "tcp,self",
    "UCX_TCP_TX_SEG_SIZE": "256K",
    "UCX_TCP_RX_SEG_SIZE": "256K",
    "UCX_TCP_SNDBUF": "4M",
    "UCX_TCP_RCVBUF": "4M",
}
"""What our own transport uses; NIXL's defaults are two to three times slower here."""

Load = Callable[[], float]


class Buffer:
    """Touched, huge-page-backed memory."""

    def __init__(self, size_bytes: int, fill: int) -> None:
        self._map = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.address = start + -start % HUGE_PAGE_BYTES
        self.size_bytes = size_bytes
        ctypes.memset(self.address, fill, size_bytes)

    def spoil_end(self) -> None:
        """So that a read that does nothing is noticed."""
        ctypes.memset(self.address + self.size_bytes - 1, 0, 1)

    def check_end(self, fill: int) -> None:
        """Refuse a batch whose last byte did not come."""
        if ctypes.string_at(self.address + self.size_bytes - 1, 1)[0] != fill:
            raise RuntimeError("the end of the batch did not come")

    def check(self, fill: int) -> None:
        """Refuse a batch that did not arrive whole."""
        if ctypes.string_at(self.address, self.size_bytes) != bytes([fill]) * self.size_bytes:
            raise RuntimeError("the batch did not arrive whole")


def mooncake(block_bytes: int, blocks: int, fabric: str, children: list[Any]) -> Load:
    """A reader without a segment of its own, so that every block comes from the holder."""
    if fabric != "tcp":
        raise RuntimeError("the store moves data over TCP here")
    port = peer_tools.free_port()
    address = f"127.0.0.1:{port}"
    children.append(peer_tools.mooncake_master(sys.executable, port))
    _holder(children, "mooncake", block_bytes, blocks, address)
    store = peer_tools.mooncake_store(address, 0)
    target = Buffer(block_bytes * blocks, 0)
    if store.register_buffer(target.address, target.size_bytes):
        raise RuntimeError("the buffer cannot be registered")
    keys = [f"block-{number}" for number in range(blocks)]
    places = [target.address + number * block_bytes for number in range(blocks)]
    sizes = [block_bytes] * blocks

    def load() -> float:
        target.spoil_end()
        start = time.perf_counter()
        got = store.batch_get_into(keys, places, sizes)
        taken = time.perf_counter() - start
        if got != sizes:
            raise RuntimeError("a block did not come")
        target.check_end(1)
        return taken

    load()
    target.check(1)
    return load


def hold_mooncake(block_bytes: int, blocks: int, master: str) -> tuple[str, object]:
    """Put the blocks into a segment of this process."""
    store = peer_tools.mooncake_store(master, block_bytes * blocks * 2 + SLACK_BYTES)
    source = Buffer(block_bytes * blocks, 1)
    store.register_buffer(source.address, source.size_bytes)
    keys = [f"block-{number}" for number in range(blocks)]
    places = [source.address + number * block_bytes for number in range(blocks)]
    if any(store.batch_put_from(keys, places, [block_bytes] * blocks)):
        raise RuntimeError("a put failed")
    return "put", store


def nixl(block_bytes: int, blocks: int, fabric: str, children: list[Any]) -> Load:
    """One prepared READ of all blocks."""
    if fabric == "tcp":
        os.environ.update(TCP_SETTINGS)
    offer = json.loads(_holder(children, "nixl", block_bytes, blocks, ""))
    agent, target = _agent("reader"), Buffer(block_bytes * blocks, 0)
    agent.register_memory([(target.address, target.size_bytes, 0, "")], "DRAM")
    holder = agent.add_remote_agent(bytes.fromhex(offer["metadata"]))
    ours = agent.prep_xfer_dlist("NIXL_INIT_AGENT", _descriptors(target.address, block_bytes, blocks), "DRAM")
    theirs = agent.prep_xfer_dlist(holder, _descriptors(offer["address"], block_bytes, blocks), "DRAM")
    numbers = list(range(blocks))

    def load() -> float:
        target.spoil_end()
        start = time.perf_counter()
        handle = agent.make_prepped_xfer("READ", ours, numbers, theirs, numbers)
        state = agent.transfer(handle)
        while state == "PROC" and time.perf_counter() - start < LOAD_TIMEOUT_S:
            state = agent.check_xfer_state(handle)
        taken = time.perf_counter() - start
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"the read ended {state}")
        target.check_end(1)
        return taken

    load()
    target.check(1)
    return load


def hold_nixl(block_bytes: int, blocks: int, _: str) -> tuple[str, object]:
    """Register the blocks and say where they are."""
    agent, source = _agent("holder"), Buffer(block_bytes * blocks, 1)
    agent.register_memory([(source.address, source.size_bytes, 0, "")], "DRAM")
    offer = {"metadata": agent.get_agent_metadata().hex(), "address": source.address}
    return json.dumps(offer), (agent, source)


def _agent(name: str) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def _descriptors(address: int, block_bytes: int, blocks: int) -> list[tuple[int, int, int]]:
    return [(address + number * block_bytes, block_bytes, 0) for number in range(blocks)]


PEERS = {"mooncake": (mooncake, hold_mooncake), "nixl": (nixl, hold_nixl)}


def _holder(children: list[Any], name: str, block_bytes: int, blocks: int, where: str) -> str:
    """Start the other process and wait until it offers the blocks; returns what it says."""
    command = [sys.executable, str(Path(__file__)), "holder", name, str(block_bytes), str(blocks), where]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    children.append(child)
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise RuntimeError("the holder ended")
    return line.decode()


def _serve(answers: Any, say: Callable[[], object]) -> None:
    for line in sys.stdin:
        if line.strip() != "load":
            raise RuntimeError(f"unknown command {line!r}")
        print(json.dumps({"value": say()}), file=answers, flush=True)


def main(arguments: list[str]) -> None:
    """See the module's docstring."""
    answers = peer_tools.answers()
    if arguments[0] == "holder":
        _, name, block_bytes, blocks, where = arguments
        said, keep = PEERS[name][1](int(block_bytes), int(blocks), where)
        print(said, file=answers, flush=True)
        sys.stdin.read()
        del keep
        os._exit(0)  # NIXL's UCX may crash an orderly exit
    name, block_bytes, blocks, fabric = arguments
    children: list[Any] = []
    status = 1
    try:
        load = PEERS[name][0](int(block_bytes), int(blocks), fabric, children)
        print(json.dumps({"ready": True}), file=answers, flush=True)
        _serve(answers, load)
        status = 0
    except Exception:  # noqa: BLE001 - the process ends with it, and `os._exit` would not show it
        traceback.print_exc()
    finally:
        for child in reversed(children):
            child.kill()
            child.wait(peer_tools.READY_TIMEOUT_S)
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
