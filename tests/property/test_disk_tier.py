"""The disk tier against real files: random operations and injected damage; what is read is right or not there."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
import xxhash

from kvpool.errors import IntegrityError, UnavailableError
from kvpool.store import disk as disk_module
from kvpool.store.answers import Victim
from kvpool.store.blockfile import BlockFile, check_payload, decode_header, encode_header
from kvpool.store.disk import DiskConfig, DiskTier
from kvpool.store.disk_load import DiskLoad
from kvpool.types import BlockHash, BlockId
from tests.multiprocess.cluster_kit import wait_until

SIZE = 512
SLOTS = 16


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def content(number: int) -> bytes:
    return Random(number).randbytes(SIZE)


class Bench:
    """A disk tier, the memory it reads into, and what it announced."""

    def __init__(self, path: Path, max_blocks: int = 1000, fingerprint: str = "layout", queue_blocks: int = 64) -> None:
        self.announced: set[BlockHash] = set()
        self.memory = memoryview(bytearray(SIZE * SLOTS))
        header = len(encode_header(BlockFile(name(0), name(0), "", 1024, fingerprint, SIZE, 2**63)))
        config = DiskConfig(path, max_blocks * (SIZE + header), SIZE, fingerprint, queue_blocks * SIZE)
        self.tier = DiskTier(config, on_stored=self._stored, on_removed=self._removed)
        self.tier.start(self.memory)

    def _stored(self, hashes: list[BlockHash]) -> None:
        assert not self.announced & set(hashes)
        self.announced |= set(hashes)

    def _removed(self, hashes: list[BlockHash]) -> None:
        assert self.announced >= set(hashes)
        self.announced -= set(hashes)

    def offer(self, number: int, tenant: str = "") -> None:
        raw = content(number)
        victim = Victim(BlockId(0), name(number), name(number - 1) if number else None, tenant, 1024, 5, kept=False)
        self.tier.offer(victim, xxhash.xxh3_64_intdigest(raw), memoryview(raw))

    def settle(self) -> None:
        wait_until(
            lambda: not self.tier.status()["queued_bytes"] and not self.tier._queued, 10, "everything is written"
        )

    def read(self, numbers: list[int]) -> DiskLoad:
        self.memory[:] = bytes(len(self.memory))
        load = self.tier.load({i: (name(n), SIZE * i) for i, n in enumerate(numbers)}, 10_000_000_000)
        wait_until(lambda: load.progress().terminal, 10, "the load is terminal")
        for index, number in enumerate(numbers):
            page = bytes(self.memory[SIZE * index : SIZE * (index + 1)])
            assert page == (content(number) if index in load.progress().arrived else bytes(SIZE))
        return load

    def files(self) -> dict[int, Path]:
        found = self.tier.config.path.glob("*/*.kvb")
        return {int.from_bytes(bytes.fromhex(path.stem), "little"): path for path in found}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "disk")
    yield made
    assert made.tier.close()


def test_what_was_offered_can_be_read_and_is_announced(bench: Bench) -> None:
    for number in range(5):
        bench.offer(number)
    bench.settle()
    assert bench.announced == {name(number) for number in range(5)}
    assert bench.tier.run([name(0), name(1), name(9), name(2)], 0) == 2
    load = bench.read([0, 1, 2, 3, 4])
    assert load.progress().arrived == {0, 1, 2, 3, 4}
    assert load.progress().bytes_arrived == 5 * SIZE
    bench.offer(3)
    assert bench.tier.status()["queued_bytes"] == 0  # it is there already


def test_a_missing_block_ends_a_load_with_what_came_before_it(bench: Bench) -> None:
    bench.offer(0)
    bench.settle()
    load = bench.read([0, 7, 0])
    assert load.progress().arrived == {0}
    assert load.progress().failures == ("stale",)


@pytest.mark.parametrize("damage", ["flip", "truncate", "swap", "empty", "directory", "header"])
def test_a_damaged_file_is_a_miss_is_counted_and_is_removed(bench: Bench, damage: str) -> None:
    for number in range(3):
        bench.offer(number)
    bench.settle()
    path = bench.files()[1]
    raw = bytearray(path.read_bytes())
    if damage == "flip":
        raw[-7] ^= 1
    elif damage == "truncate":
        del raw[-100:]
    elif damage == "swap":
        raw = bytearray(bench.files()[2].read_bytes())
    elif damage == "empty":
        raw.clear()
    elif damage == "header":
        raw[20] ^= 1
    path.unlink()
    if damage == "directory":
        path.mkdir()
    else:
        path.write_bytes(raw)
    load = bench.read([0, 1, 2])
    assert load.progress().arrived == {0}
    status = bench.tier.status()
    assert status["corrupt"] + status["read_errors"] == 1
    assert status["last_error"]
    assert bench.announced == {name(0), name(2)}
    assert damage == "directory" or 1 not in bench.files()
    assert bench.tier.run([name(1)], 0) == 0


def test_space_is_bounded_and_the_least_recently_used_files_leave(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_blocks=4)
    for number in range(4):
        bench.offer(number)
        bench.settle()
    bench.read([0, 1])
    for number in (4, 5):
        bench.offer(number)
        bench.settle()
    assert set(bench.files()) == {0, 1, 4, 5}
    assert bench.announced == {name(number) for number in (0, 1, 4, 5)}
    assert bench.tier.status()["bytes"] <= bench.tier.config.max_bytes
    assert bench.tier.status()["removed_for_space"] == 2
    bench.tier.close()


def test_a_full_queue_drops_and_says_so(tmp_path: Path) -> None:
    bench = Bench(tmp_path, queue_blocks=2)
    for number in range(200):
        bench.offer(number)
    bench.settle()
    status = bench.tier.status()
    assert status["dropped"] > 0
    assert status["written"] + status["dropped"] == 200
    bench.tier.close()


def test_what_waits_to_be_written_can_be_selected_and_never_gets_there_once_removed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with files_wait(bench):
        for number in range(5):
            bench.offer(number, "acme" if number % 2 else "")
        mine = [block.block_hash for block in bench.tier.blocks() if block.tenant == "acme"]
        assert sorted(mine) == sorted([name(1), name(3)])
        assert bench.tier.remove(item for item in mine if item is not None) == 2
    bench.settle()
    assert sorted(bench.files()) == [0, 2, 4]
    bench.tier.close()


@contextmanager
def files_wait(bench: Bench) -> Iterator[None]:
    """Nothing is written meanwhile: the writer waits for its turn."""
    made, bench.tier._make_room = bench.tier._make_room, lambda _: gate.wait(10)  # type: ignore[method-assign]
    gate = threading.Event()
    try:
        yield
    finally:
        bench.tier._make_room = made  # type: ignore[method-assign]
        gate.set()


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """A disk that is full: the system refuses to write more into any file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_takes_no_more_costs_misses_and_leaves_no_rubbish(bench: Bench) -> None:
    bench.offer(1)
    bench.settle()
    with files_of_at_most(100):
        bench.offer(2)
        bench.settle()
    bench.offer(3)
    bench.settle()
    assert set(bench.files()) == {1, 3}
    assert not list(bench.tier.config.path.glob("*/*.aside"))
    assert bench.tier.status()["write_errors"] == 1
    assert "File too large" in bench.tier.status()["last_error"]


def test_a_successor_goes_on_with_whole_files_of_its_layout_and_removes_the_rest(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for number in range(6):
        bench.offer(number, tenant="t")
    bench.settle()
    bench.tier.close()
    files = bench.files()
    files[1].write_bytes(files[1].read_bytes()[:-1])
    os.rename(files[2], files[2].with_name(name(99).hex() + ".kvb"))
    (files[3].parent / "left.aside").write_bytes(b"half")
    files[4].write_bytes(b"rubbish")
    again = Bench(tmp_path)
    assert again.announced == {name(number) for number in (0, 3, 5)}
    assert set(again.files()) == {0, 3, 5}
    assert again.tier.status()["removed_at_start"] == 3
    assert again.read([0, 3, 5]).progress().arrived == {0, 1, 2}
    assert {(block.parent, block.tenant) for block in again.tier.blocks()} == {
        (None, "t"),
        (name(2), "t"),
        (name(4), "t"),
    }
    again.tier.close()
    other = Bench(tmp_path, fingerprint="another layout")
    assert other.announced == set()
    assert other.files() == {}
    other.tier.close()


def test_two_processes_never_share_a_directory(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "TAKE_S", 0.0)
    with pytest.raises(UnavailableError, match="another process uses"):
        Bench(bench.tier.config.path)


def test_a_cancelled_or_closed_load_becomes_terminal(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for number in range(8):
        bench.offer(number)
    bench.settle()
    loads = [bench.tier.load({0: (name(n), 0)}, 10**10) for n in range(8)]
    for load in loads:
        load.cancel()
    bench.tier.close()
    assert all(load.progress().terminal for load in loads)
    with pytest.raises(UnavailableError):
        bench.tier.load({}, 10**9)


@pytest.mark.parametrize("seed", range(12))
def test_random_operations_and_damage_never_give_wrong_bytes(tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    bench = Bench(tmp_path, max_blocks=10)
    for _ in range(60):
        action = rng.randrange(8)
        if action < 3:
            bench.offer(rng.randrange(20))
        elif action == 3:
            bench.settle()
            bench.read([rng.randrange(20) for _ in range(rng.randrange(1, 6))])
        elif action == 4:
            bench.tier.remove([name(rng.randrange(20))])
        elif action == 5 and (files := sorted(bench.files().items())):
            path = rng.choice(files)[1]
            try:
                raw = bytearray(path.read_bytes())
                raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
                path.write_bytes(raw if rng.random() < 0.5 else raw[: rng.randrange(len(raw))])
            except FileNotFoundError:
                continue  # it left meanwhile
        elif action == 6:
            bench.settle()
            bench.tier.close()
            bench = Bench(tmp_path, max_blocks=10)
        assert bench.tier.status()["bytes"] <= bench.tier.config.max_bytes
    bench.settle()
    bench.read(list(range(16)))
    assert bench.announced == set(bench.tier.held_hashes())
    bench.tier.close()


def test_headers_survive_and_any_damage_to_one_is_found() -> None:
    raw = content(3)
    item = BlockFile(name(3), None, "tenant ä", 2048, "layout", SIZE, xxhash.xxh3_64_intdigest(raw))
    header = encode_header(item)
    assert decode_header(header + raw) == (item, len(header))
    check_payload(item, memoryview(raw))
    for place in range(len(header)):
        broken = bytearray(header)
        broken[place] ^= 0x10
        with pytest.raises(IntegrityError):
            decode_header(bytes(broken))
        with pytest.raises(IntegrityError):
            decode_header(header[:place])
    with pytest.raises(IntegrityError):
        check_payload(item, memoryview(raw[:-1]))
