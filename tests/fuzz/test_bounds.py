"""Small inputs that would grow: refused before they take a machine's memory."""

from __future__ import annotations

import gzip
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.errors import IntegrityError, KVPoolError, RequestError
from kvpool.metadata import wire
from kvpool.metadata.v1 import metadata_pb2 as pb
from kvpool.transport import wire as data_wire
from router.openai import CompletionBody, parse_body
from router.simulation import trace

MIB = 1 << 20


def _peak_bytes(function: Callable[[], object], expected: type[KVPoolError] | None) -> int:
    tracemalloc.start()
    try:
        if expected is None:
            function()
        else:
            with pytest.raises(expected):
                function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("content", [b"0", b"[", b"\n"], ids=["digits", "brackets", "lines"])
def test_a_compressed_bomb_is_refused_line_by_line(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "MAX_FILE_CHARS", MIB // 4)
    monkeypatch.setattr(trace, "MAX_LINE_CHARS", MIB // 16)
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(content * 100 * MIB))
    assert path.stat().st_size < MIB
    assert _peak_bytes(lambda: trace.load_trace(path), RequestError) < 8 * MIB


@pytest.mark.parametrize("tokens", ["1e15", "99999999999999", "1e308"])
def test_a_csv_line_cannot_order_more_blocks_than_there_are(tokens: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n0,{tokens},1\n")
    assert _peak_bytes(lambda: trace.load_trace(path), RequestError) < MIB


def test_many_long_lines_of_a_csv_are_too_many_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MAX_TRACE_BLOCKS", 10_000)
    path = tmp_path / "t.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "0,100000,1\n" * 1000)
    with pytest.raises(RequestError, match="more than 10000 blocks"):
        trace.load_trace(path)


def test_unpacking_hashes_of_many_lengths_leaves_no_formats_behind() -> None:
    """`struct` keeps a compiled format, 32 bytes a hash, for each of a hundred lengths."""

    def many_lengths() -> None:
        for count in range(20_000, 20_030):
            assert len(wire.unpack_hashes(bytes(16 * count))) == count

    assert _peak_bytes(many_lengths, None) < 12 * MIB


def test_a_message_that_says_it_is_long_is_not_believed() -> None:
    raw = bytearray(data_wire.encode(data_wire.Offer(1, 2, (1, 2), (2,))))
    raw[20:28] = b"\xff\xff\xff\x0f\xff\xff\xff\x0f"
    assert _peak_bytes(lambda: data_wire.decode(bytes(raw)), IntegrityError) < MIB


@pytest.mark.parametrize(("pid", "cookie_at", "address"), [(2**31, 8, 8), (7, 2**64 - 1, 8), (7, 8, 2**64 - 1)])
def test_a_window_into_no_process_is_refused_before_anybody_computes_with_it(
    pid: int, cookie_at: int, address: int
) -> None:
    window = data_wire.Window(pid, cookie_at, 9, (address,))
    raw = data_wire.encode(data_wire.Offer(1, 2, (1, 2), (2,), window))
    with pytest.raises(IntegrityError, match="memory"):
        data_wire.decode(raw)


def test_a_report_is_no_way_to_fill_the_directory() -> None:
    names = [f"r{number}" * 100 for number in range(20_000)]
    message = pb.WorkerReport(key={"worker_id": "w"}, load={"served_request_ids": names})
    with pytest.raises(RequestError, match="report"):
        wire.report_from_wire(message)
    with pytest.raises(RequestError, match="worker_id"):
        wire.key_from_wire(pb.WorkerKey(worker_id="w" * 1000))


def test_a_body_that_nests_for_ever_is_refused() -> None:
    raw = b'{"prompt":' + b"[" * 4 * MIB
    assert _peak_bytes(lambda: parse_body(CompletionBody, raw), RequestError) < 64 * MIB
