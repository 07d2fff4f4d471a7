"""A worker process with nothing but a data plane: the other side of transfer benchmarks, fault runs and tests.

``python -m kvpool.bench.peer '{"blocks": …}'`` serves a segment of generated blocks and obeys JSON commands, one per
line on stdin, with one JSON answer each on stdout. It ends when stdin ends, so it never outlives its parent.

`PeerProcess` is the parent's handle.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TextIO

import numpy as np
import xxhash

from kvpool.errors import TransferError
from kvpool.store.arena import Arena
from kvpool.transport.base import BlockWant, HeldBlock, Peer, ReadHandle, ReadRequest
from kvpool.transport.ucx import UcxOptions, UcxTransport
from kvpool.transport.ucx.settings import Compression
from kvpool.transport.wire import CONTROL_TAG, Message, encode
from kvpool.types import BlockHash, WorkerEpoch, WorkerId, WorkerKey

POISON = 0xA5
ANSWER_LIMIT_S = 60.0
SOCKET_BUFFER_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """What a peer process is.

    Attributes:
        worker_id, epoch: its identity.
        blocks, block_bytes: its segment.
        filled: whether it holds blocks 0..blocks; otherwise its pages are poison.
        settings: extra UCX settings.
        max_run_bytes: see `UcxOptions`.
        lease_slack_ns, max_lease_ns, compression: see `UcxOptions`.
        kv_like: its blocks are normal numbers in bf16, which compress as KV does; otherwise they do not compress.
    """

    worker_id: str = "holder"
    epoch: int = 1
    blocks: int = 64
    block_bytes: int = 1 << 20
    filled: bool = True
    settings: Mapping[str, str] = field(default_factory=dict)
    max_run_bytes: int = UcxOptions().max_run_bytes
    lease_slack_ns: int = UcxOptions().lease_slack_ns
    compression: str = Compression.AUTO.value
    kv_like: bool = False

    @property
    def key(self) -> WorkerKey:
        """Its identity."""
        return WorkerKey(WorkerId(self.worker_id), WorkerEpoch(self.epoch))

    def transport(self) -> UcxTransport:
        """A transport with these options."""
        bounds = UcxOptions(
            settings=self.settings,
            max_run_bytes=self.max_run_bytes,
            lease_slack_ns=self.lease_slack_ns,
            compression=Compression(self.compression),
        )
        return UcxTransport(bounds)


def block_hash(number: int) -> BlockHash:
    """Name of generated block ``number``."""
    return BlockHash(number.to_bytes(16, "little"))


def fill_block(target: np.ndarray[Any, np.dtype[np.uint8]], number: int) -> None:
    """Bytes of generated block ``number``: cheap, the same in every process, different for every block."""
    words = target[: len(target) // 8 * 8].view(np.uint64)
    words[:] = np.arange(len(words), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(number * 7919 + 1)
    target[len(words) * 8 :] = number % 251


def kv_like(number: int, block_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes of block ``number`` as a model might leave them: normal numbers in bf16."""
    numbers = np.random.default_rng(number).normal(size=-(-block_bytes // 2)).astype(np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)[:block_bytes]


class GeneratedStore:
    """A segment of generated blocks; implements `kvpool.transport.base.BlockSource`.

    Like a worker's segment it keeps a block that was evicted for as long as a lease names it, and no longer: then its
    page is overwritten.
    """

    def __init__(self, options: PeerOptions) -> None:
        self.block_bytes = options.block_bytes
        self.arena = Arena(options.blocks * options.block_bytes)
        self.segment = np.frombuffer(self.arena.memory, dtype=np.uint8)
        self.held: dict[BlockHash, HeldBlock] = {}
        self.leases: dict[int, frozenset[BlockHash]] = {}
        self._evicted: dict[BlockHash, int] = {}  # and the page to overwrite
        self._last_lease = 0
        self._lock = threading.Lock()
        if not options.filled:
            self.segment[:] = POISON
        for number in range(options.blocks if options.filled else 0):
            page = self.page(number)
            if options.kv_like:
                page[:] = kv_like(number, options.block_bytes)
            else:
                fill_block(page, number)
            self.held[block_hash(number)] = HeldBlock(number * options.block_bytes, xxhash.xxh3_64_intdigest(page.data))

    def page(self, slot: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Bytes of one page, writable."""
        return self.segment[slot * self.block_bytes : (slot + 1) * self.block_bytes]

    def pin(self, reader: WorkerKey, hashes: Sequence[BlockHash]) -> tuple[int, tuple[HeldBlock | None, ...]]:
        """Count a lease and say where blocks lie."""
        with self._lock:
            self._last_lease += 1
            self.leases[self._last_lease] = frozenset(hashes)
            return self._last_lease, tuple(self.held.get(item) for item in hashes)

    def renew(self, lease_id: int) -> None:
        """Leases here do not run out."""

    def unpin(self, lease_id: int) -> None:
        """Forget a lease."""
        with self._lock:
            self.leases.pop(lease_id, None)
            self._overwrite()

    def evict(self, numbers: Sequence[int]) -> None:
        """Withdraw blocks."""
        with self._lock:
            for number in numbers:
                if self.held.pop(block_hash(number), None) is not None:
                    self._evicted[block_hash(number)] = number
            self._overwrite()

    def _overwrite(self) -> None:
        if not self._evicted:
            return
        for name in set(self._evicted) - frozenset[BlockHash]().union(*self.leases.values()):
            self.page(self._evicted.pop(name))[:] = POISON


def read_request(
    peer: Peer,
    numbers: Sequence[int],
    block_bytes: int,
    deadline_ns: int,
    stall_ns: int,
    slots: Sequence[int] | None = None,
) -> ReadRequest:
    """Read generated blocks into the pages of the same number, or into ``slots``."""
    places = numbers if slots is None else slots
    wants = tuple(BlockWant(block_hash(n), slot * block_bytes) for n, slot in zip(numbers, places, strict=True))
    return ReadRequest(peer, wants, deadline_ns, stall_ns)


class PeerProcess:
    """The parent's handle on a peer process. Use as a context manager; leaving it kills the process.

    Args:
        options: what it is.
        prefix: command in front, for example ``("ip", "netns", "exec", "a")``.
    """

    def __init__(self, options: PeerOptions, prefix: Sequence[str] = ()) -> None:
        self.options = options
        command = [*prefix, sys.executable, "-m", "kvpool.bench.peer", json.dumps(asdict(options))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        ready = self._answer()
        self.pid = int(ready["pid"])
        self.address = bytes.fromhex(ready["address"])

    @property
    def peer(self) -> Peer:
        """How a reader addresses it."""
        return Peer(self.options.key, self.address)

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send one command and wait for its answer."""
        self.tell(command, **arguments)
        return self._answer()

    def tell(self, command: str, **arguments: Any) -> None:
        """Send one command and leave its answer for later."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self._process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process itself."""
        os.kill(self.pid, number)

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL, and reap. May be repeated."""
        if self.alive:
            self._process.kill()
            if self.pid != self._process.pid:
                os.kill(self.pid, signal.SIGKILL)
        self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # unsent commands to a dead peer are of no interest

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise TransferError("the peer process ended without an answer", worker=self.options.worker_id)
        answer: dict[str, Any] = json.loads(line)
        return answer


# ── the process itself ───────────────────────────────────────────────────────────────────────────────────────────────


_answers: TextIO = sys.stdout


class _Server:
    """Obeys commands. Every method named ``do_…`` is one; it returns the answer."""

    def __init__(self, options: PeerOptions) -> None:
        self.options = options
        self.store = GeneratedStore(options)
        self.transport = options.transport()
        self.transport.start(options.key, self.store.arena.memory, options.block_bytes, self.store)
        self._busy = BusyLoop()
        self._handles: list[ReadHandle] = []

    def do_corrupt(self, number: int) -> dict[str, Any]:
        """Flip a bit of a block after it was sealed; twice makes it right again."""
        self.store.page(number)[-1] ^= 1
        return {}

    def do_evict(self, numbers: list[int]) -> dict[str, Any]:
        """Withdraw blocks."""
        self.store.evict(numbers)
        return {}

    def do_stats(self) -> dict[str, Any]:
        """Counters, leases, CPU seconds, file descriptors, threads."""
        return {
            **asdict(self.transport.stats()),
            "leases": len(self.store.leases),
            "cpu_s": time.process_time(),
            "fds": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
        }

    def do_mangle(self, how: str) -> dict[str, Any]:
        """Make this holder's replies wrong from now on, or with ``none`` right again; see `mangle_replies`."""
        mangle_replies(self.transport, how)
        return {}

    def do_socket(self) -> dict[str, Any]:
        """Offer the segment over one plain TCP socket, as the reference of `kvpool bench transfer`."""
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=_serve_socket, args=(listener, self.store.arena.memory), daemon=True).start()
        return {"port": listener.getsockname()[1]}

    def do_busy(self, on: bool) -> dict[str, Any]:
        """Start or stop an engine-like loop on another thread."""
        self._busy.set(on)
        return {"steps": self._busy.steps}

    def do_read(self, holder: str, epoch: int, address: str, numbers: list[int], wait: bool) -> dict[str, Any]:
        """Read blocks from another process."""
        peer = Peer(WorkerKey(WorkerId(holder), WorkerEpoch(epoch)), bytes.fromhex(address))
        limit_ns = int(ANSWER_LIMIT_S * 1e9)
        handle = self.transport.read(read_request(peer, numbers, self.options.block_bytes, limit_ns, limit_ns))
        self._handles.append(handle)
        if not wait:
            return {}
        progress = handle.wait(limit_ns)
        return {"state": progress.state.value, "bytes": progress.bytes_arrived, "elapsed_ns": progress.elapsed_ns}

    def do_restart(self) -> dict[str, Any]:
        """Come back as the next epoch, in the same process."""
        self.transport.close()
        self.options = replace(self.options, epoch=self.options.epoch + 1)
        self.transport = self.options.transport()
        self.transport.start(self.options.key, self.store.arena.memory, self.options.block_bytes, self.store)
        return {"address": self.transport.address.hex(), "epoch": self.options.epoch}


def mangle_replies(transport: UcxTransport, how: str) -> None:
    """Reach into a transport and spoil what it replies, answers and data; the reader must notice."""
    running = transport._running
    assert running is not None
    server = running.server

    def cut(link: Any, message: Message) -> None:
        raw = encode(message)
        server._replies.append(link.connection.send(raw[: message.sequence * 7919 % len(raw)], CONTROL_TAG))

    def twice(link: Any, message: Message) -> None:
        for _ in range(2):
            server._replies.append(link.connection.send(encode(message), CONTROL_TAG))

    send_run = type(server)._send_run.__get__(server)

    def run_cut(link: Any, serve: Any, index: int, data: memoryview, staging: Any) -> None:
        send_run(link, serve, index, data[: len(data) * 2 // 3], staging)

    def run_twice(link: Any, serve: Any, index: int, data: memoryview, staging: Any) -> None:
        send_run(link, serve, index, data if staging is None else memoryview(bytes(data)), None)
        send_run(link, serve, index, data, staging)

    reply = type(server)._reply.__get__(server)
    server._reply, server._send_run = {  # type: ignore[method-assign]
        "cut": (cut, send_run),
        "data cut": (reply, run_cut),
        "twice": (twice, run_twice),
        "none": (reply, send_run),
    }[how]


def _serve_socket(listener: socket.socket, data: memoryview) -> None:
    connection, _ = listener.accept()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    with connection:
        while request := connection.recv(8):
            connection.sendall(data[: int.from_bytes(request, "little")])


class BusyLoop:
    """An engine-like load: torch operations back to back on one thread, with Python between them."""

    def __init__(self) -> None:
        self.steps = 0
        self._on = threading.Event()
        self._thread: threading.Thread | None = None

    def set(self, on: bool) -> None:
        """Start or pause."""
        if on and self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        if on:
            self._on.set()
        else:
            self._on.clear()

    def _run(self) -> None:
        import torch

        torch.set_num_threads(1)
        with torch.inference_mode():
            left, right = torch.rand(384, 384), torch.rand(384, 384)
            while True:
                self._on.wait()
                left = left @ right
                left /= left.abs().max()
                self.steps += 1


def main(raw_options: str) -> None:
    """Serve until stdin ends."""
    global _answers  # noqa: PLW0603 - one process, one stream
    _answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # UCX logs to stdout; answers must stay clean
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    server = _Server(PeerOptions(**json.loads(raw_options)))
    _say({"pid": os.getpid(), "address": server.transport.address.hex()})
    for line in sys.stdin:
        request = json.loads(line)
        do: Callable[..., dict[str, Any]] = getattr(server, "do_" + request.pop("command"))
        _say(do(**request))
    server.transport.close()
    os._exit(0)  # daemon threads of a busy loop must not delay the end


def _say(answer: Mapping[str, Any]) -> None:
    _answers.write(json.dumps(answer) + "\n")
    _answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
