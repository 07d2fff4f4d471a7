"""Every function of ours that reads bytes from outside, and what nonsense to feed it.

A new ``parse_…``, ``decode…``, ``load_…``, ``read_…`` or ``from_…`` must be entered here: as a `Decoder`, or in
`NO_DECODERS` with the reason why nothing foreign reaches it. `test_decoders` fails until it is.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from hypothesis import strategies as st

from kvpool.cli import administer, records, simulate
from kvpool.cluster import state
from kvpool.config import load_config, parse_config
from kvpool.errors import StaleError
from kvpool.faults.checker import check_history
from kvpool.faults.history import parse_record, read_history
from kvpool.jsontext import parse_json
from kvpool.metadata import pins_wire, rpc, wire
from kvpool.metadata.events import MemberView
from kvpool.metadata.security import Security
from kvpool.metadata.server import parse_options
from kvpool.metadata.v1 import metadata_pb2 as pb
from kvpool.reports import LoadSample
from kvpool.store.blockfile import BlockFile, decode_header, encode_header
from kvpool.tokenizer import read_tokenizer_files
from kvpool.transport import wire as data_wire
from kvpool.transport.compression import Codec, PlanePlan, decode_frame, encode_frame, frame_bound
from kvpool.transport.nixl.control import Endpoint
from kvpool.transport.ucx import address
from kvpool.types import BlockHash, MemberState, Tier, WorkerEpoch, WorkerId, WorkerKey
from router import keeper
from router.learned import Learned
from router.openai import ChatBody, CompletionBody, parse_body
from router.parameters import params_from_dict, params_to_dict
from router.planning import Params
from router.replay import parse_record as parse_decision
from router.simulation.trace import from_mooncake, load_trace
from tests.contract.metadata_support import member
from tests.fuzz.strategies import json_files, json_lines, messages, mutants, spoilt


class Case(NamedTuple):
    """One input, and a folder for those that read files."""

    fed: Any
    folder: Path


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder under test.

    Attributes:
        name: its full name.
        feed: inputs, most of them wrong.
        call: hands one to it.
        also: exceptions beside `KVPoolError` that its docstring promises.
    """

    name: str
    feed: st.SearchStrategy[Any]
    call: Callable[[Case], Any]
    also: tuple[type[BaseException], ...] = ()


def _direct(name: str, function: Callable[[Any], Any], feed: st.SearchStrategy[Any], *also: Any) -> Decoder:
    return Decoder(name, feed, lambda case: function(case.fed), also)


def _file(
    name: str, function: Callable[[Path], Any], feed: st.SearchStrategy[bytes], suffix: str, *also: Any
) -> Decoder:
    """A decoder of files; the bytes are written to one first."""

    def call(case: Case) -> Any:
        path = case.folder / f"input{suffix}"
        path.write_bytes(case.fed)
        found = function(path)
        return list(found) if isinstance(found, Iterable) else found

    return Decoder(name, feed, call, also)


# -- samples: valid inputs ------------------------------------------------------------------------------------------

_KEYS = [WorkerKey(WorkerId(name), WorkerEpoch(7)) for name in ("reader", "holder")]
_HASHES = tuple(BlockHash(bytes([number]) * 16) for number in range(3))
CONTROL = [
    data_wire.Pull(5, 6, 10**9, _KEYS[0], b"address", _KEYS[1], _HASHES, (0, 64, 128)),
    data_wire.Offer(5, 9, (1, None, 3), (1, 1)),
    data_wire.Offer(5, 9, (1, None, 3), (1, 1), data_wire.Window(7, 64, 9, (4096, 8192))),
    data_wire.Refuse(5, "stale", "gone"),
    data_wire.Grant(5, 6, 2),
    data_wire.Stop(5, 6),
    data_wire.Bye(5, 6),
]
MOONCAKE = [
    {"timestamp": 10 * number, "input_length": 700, "output_length": 5, "hash_ids": [1, number]} for number in range(3)
]
CSV = b"TIMESTAMP,ContextTokens,GeneratedTokens\n0.5,900,10\n2023-11-16 18:17:03.9799600,30,4\n1.5,20,1\n"
DECISION: dict[str, Any] = {
    "decision_id": "d", "policy": "kvpool", "worker": "w@1", "plan": "redo", "price_ns": 5, "own_blocks": 0,
    "loads": [{"holder": "x@1", "start": 0, "stop": 4}], "outcome": {"ttft_ns": 5},
    "candidates": [{"worker": "w@1", "plan": "redo", "price_ns": 5, "wait_ns": 1, "own_blocks": 0, "source": None,
                    "boundary_blocks": 0}],
}  # fmt: skip
HISTORY: list[dict[str, Any]] = [
    {"at_ns": 1, "kind": "run", "scenario": "x", "seed": 1, "lease_ns": 10, "ttft_limit_ns": 5, "rate_rps": 1.0},
    {"at_ns": 2, "kind": "reference", "prompt": "p", "tokens": [1, 2]},
    {"at_ns": 2, "kind": "start"},
    {"at_ns": 3, "kind": "invoke", "id": "r", "prompt": "p", "style": "plain", "timeout_ns": 9, "max_tokens": 2},
    {"at_ns": 4, "kind": "attempt", "id": "r", "number": 1, "worker": "w", "plan": "redo", "holders": ["h"]},
    {"at_ns": 5, "kind": "chunk", "id": "r", "tokens": [1]},
    {"at_ns": 5, "kind": "cancel", "id": "r"},
    {"at_ns": 6, "kind": "attempt_end", "id": "r", "number": 1, "code": None},
    {"at_ns": 7, "kind": "response", "id": "r", "tokens": [1, 2], "finish": "length", "stats": {}},
    {"at_ns": 7, "kind": "error", "id": "r", "code": "stale", "message": "m"},
    {"at_ns": 8, "kind": "fault", "fault": "f", "name": "kill", "target": "w", "key": "w@1", "mechanism": "SIGKILL"},
    {"at_ns": 9, "kind": "heal", "fault": "f", "how": "back"},
    {"at_ns": 9, "kind": "state", "alive": ["w"], "suspect": [], "error": None},
    {"at_ns": 9, "kind": "rest"},
    {"at_ns": 9, "kind": "audit", "workers": {}, "router": {}, "directories": {}},
    {"at_ns": 10, "kind": "end", "errors": []},
]
CLUSTER = dataclasses.asdict(state.ClusterState("x", "h:1", ("h:2",), os.getpid(), 0.0, "/tmp/none"))
CONFIG = {"workers": [{"count": 2, "engine": {"num_blocks": 5}}], "metadata": {"lease_ms": 500}, "router": {}}
FRAME_BYTES = 256
TOML = b'[[workers]]\ncount = 2\nrole = "mixed"\n[workers.engine]\nnum_blocks = 64\n[metadata]\nreplicas = 2\n'
COMPLETION = {"prompt": "x", "max_tokens": 3, "stop": ["a"], "stream_options": {"include_usage": True}, "seed": 1}
CHAT = {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2, "logprobs": True, "temperature": 0.5}
TOKENIZER = {"chat_template": "{{ x }}", "bos_token": "<s>", "eos_token": {"content": "</s>"}}
RPC_ERROR = {"code": StaleError.code, "message": "m", "details": {"reason": "x"}}


# -- calls that need more than their input --------------------------------------------------------------------------


def _offered_runs(case: Case) -> Any:
    found = data_wire.decode(case.fed)
    return data_wire.runs_of_offer(found, [0, 64, 128, 192], 64) if isinstance(found, data_wire.Offer) else found


def _frames() -> list[bytes]:
    """Valid frames of `FRAME_BYTES` bytes, one a codec."""
    raw = memoryview(b"\x01\x02\x03\x04" * (FRAME_BYTES // 4))
    made = []
    for planes in ((Codec.ZSTD,), (Codec.LZ4, Codec.RAW), (Codec.RAW,) * 3):
        into = memoryview(bytearray(frame_bound(FRAME_BYTES)))
        made.append(bytes(into[: encode_frame(raw, PlanePlan(planes), into)]))
    return made


def _learned() -> Learned:
    """Something of everything."""
    made, (reader, holder) = Learned(), _KEYS
    for tokens in (16, 64, 300):
        made.prefill(reader.worker_id, tokens, 0, tokens * 10**5, 0)
    for size in (10**5, 10**6):
        made.load(reader, LoadSample(holder, size, 4, size), Tier.HOST, 5)
    made.failures.observe(holder, True, 5)
    made.member(member())
    return made


def _useful(data: Any) -> Any:
    """A router that was restored can still say what it knows."""
    found = Learned.from_dict(data, 10**9, 5) if isinstance(data, dict) else None
    if found is not None:
        curve = found.prefills.curve(_KEYS[0].worker_id)
        assert min(curve.t0_ns, curve.token_ns) >= 0
        link = found.links.curve(_KEYS[1].worker_id, _KEYS[0].worker_id, Tier.HOST, 10**9)
        assert min(link.alpha_ns, link.byte_ns) >= 0
        assert 0 <= found.failures.probability(_KEYS[1], 10**9) <= 1
        json.dumps(found.to_dict(10**9))
    return found


def _saved(header: Any) -> bytes:
    return json.dumps(header).encode() + b"\n{}"


def _read_state(case: Case) -> Any:
    os.environ["XDG_STATE_HOME"] = str(case.folder)
    try:
        path = state.state_path("fuzz")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(case.fed)
        return state.read_state("fuzz")
    finally:
        del os.environ["XDG_STATE_HOME"]


def _read_tokenizer(case: Case) -> Any:
    (case.folder / "tokenizer.json").write_bytes(b"{}")
    (case.folder / "tokenizer_config.json").write_bytes(case.fed)
    return read_tokenizer_files(case.folder, "m")


def _security(case: Case) -> Any:
    path = case.folder / "token"
    path.write_bytes(case.fed)
    found = Security.from_environment({"KVPOOL_METADATA_TOKEN_FILE": str(path)})
    return found.call_metadata


class _Failed(grpc.RpcError):
    """A failed call that brought trailing metadata."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def code(self) -> Any:
        return grpc.StatusCode.ABORTED

    def trailing_metadata(self) -> Any:
        return ((rpc.ERROR_METADATA_KEY, self._raw),)


def _error_from_rpc(case: Case) -> Any:
    raise rpc.error_from_rpc(_Failed(case.fed), "host:1")


def _body(kind: Any) -> Callable[[Case], Any]:
    def call(case: Case) -> Any:
        body = parse_body(kind, case.fed)
        return body.options(), body.content

    return call


def _judged(raw: bytes) -> Any:
    verdict = check_history(parse_record(number, line) for number, line in enumerate(_lines(raw), 1))
    return [str(violation) for violation in verdict.violations]


def _lines(raw: bytes) -> list[str]:
    return raw.decode(errors="replace").splitlines()


_HEADER = {"format": keeper.FORMAT, "at_unix_ns": 5, "crc32": zlib.crc32(b"{}")}
_HISTORY_LINES = json_lines(*HISTORY)
_WHOLE_HISTORIES = spoilt(HISTORY).map(
    lambda found: b"\n".join(json.dumps(line).encode() for line in (found if isinstance(found, list) else [found]))
)
_JSON_LINES = json_lines(*MOONCAKE)
_MEMBERS = [MemberView(member(), MemberState.ALIVE, None, False)]
_ARGUMENTS = ["--host", "--port", "--lease-ms", "--max-entries", "--exit-with-parent", "0", "-1", "9" * 30, "x", "\0"]
_MESSAGES = {
    "key": pb.WorkerKey, "info": pb.MemberInfo, "welcome": pb.JoinResponse, "heartbeat": pb.HeartbeatRequest,
    "pulse": pb.HeartbeatResponse, "batch": pb.EventBatch, "ack": pb.BatchAck, "load": pb.WorkerLoad,
    "report": pb.WorkerReport, "header": pb.SnapshotHeader, "delta": pb.Delta,
}  # fmt: skip

BLOCK_HEADER = encode_header(BlockFile(_HASHES[0], _HASHES[1], "tenant", 1024, "layout", 64, 1 << 63))

TABLE: tuple[Decoder, ...] = (
    _direct("kvpool.transport.compression.decode_frame",
            lambda raw: decode_frame(memoryview(raw), memoryview(bytearray(FRAME_BYTES))),
            st.sampled_from(_frames()).flatmap(mutants)),
    _direct("kvpool.jsontext.parse_json", parse_json, json_files(MOONCAKE), ValueError),
    _direct("kvpool.transport.nixl.control.Endpoint.decode", Endpoint.decode,
            st.just(Endpoint(7, "10.0.0.1", 99).encode()).flatmap(mutants)),
    _direct("kvpool.transport.ucx.address.from_seal", lambda raw: address.from_seal(raw, "a peer"),
            st.just(address.seal(b"an address")).flatmap(mutants)),
    Decoder("kvpool.transport.wire.decode", st.sampled_from(CONTROL).map(data_wire.encode).flatmap(mutants),
            _offered_runs),
    *(_direct(f"kvpool.metadata.wire.{name}_from_wire", getattr(wire, f"{name}_from_wire"), messages(kind))
      for name, kind in _MESSAGES.items()),
    _direct("kvpool.metadata.wire.state_from_wire", wire.state_from_wire, st.integers(-(2**31), 2**31 - 1)),
    _direct("kvpool.metadata.wire.placement_from_wire", lambda made: wire.placement_from_wire(made, _MEMBERS),
            messages(pb.Placement, {"member": st.integers(0, 2)})),
    _direct("kvpool.metadata.wire.prefixes_from_wire", wire.prefixes_from_wire,
            st.lists(messages(pb.WorkerPrefix), max_size=3)),
    _direct("kvpool.metadata.pins_wire.pins_from_wire", pins_wire.pins_from_wire,
            st.lists(messages(pb.Pin), max_size=3)),
    _direct("kvpool.metadata.pins_wire.view_from_wire", pins_wire.view_from_wire, messages(pb.PinView)),
    _direct("kvpool.metadata.pins_wire.tending_from_wire", pins_wire.tending_from_wire, messages(pb.TendResponse)),
    _direct("kvpool.store.blockfile.decode_header", decode_header, st.just(BLOCK_HEADER).flatmap(mutants)),
    Decoder("kvpool.metadata.rpc.error_from_rpc", json_files(RPC_ERROR), _error_from_rpc),
    Decoder("kvpool.metadata.security.Security.from_environment", st.binary(max_size=60), _security),
    _direct("kvpool.metadata.server.parse_options", parse_options, st.lists(st.sampled_from(_ARGUMENTS), max_size=4),
            SystemExit),
    _file("kvpool.config.load_config", load_config, st.one_of(mutants(TOML), st.just(b"x=" + b"[" * 100_000)), ".toml"),
    _direct("kvpool.config.parse_config", parse_config, spoilt(CONFIG)),
    Decoder("router.openai.parse_body", json_files(COMPLETION), _body(CompletionBody)),
    Decoder("router.openai.parse_body", json_files(CHAT), _body(ChatBody)),
    _direct("router.simulation.trace.from_mooncake", lambda raw: from_mooncake("t", _lines(raw)), _JSON_LINES),
    _file("router.simulation.trace.load_trace", load_trace, _JSON_LINES, ".jsonl"),
    _file("router.simulation.trace.load_trace", load_trace, mutants(CSV), ".csv"),
    _file("router.simulation.trace.load_trace", load_trace, _JSON_LINES.map(gzip.compress).flatmap(mutants), ".gz"),
    _file("router.simulation.trace.load_trace", load_trace, _JSON_LINES.map(lzma.compress).flatmap(mutants), ".xz"),
    _file("router.simulation.trace.load_trace", load_trace, mutants(CSV).map(gzip.compress), ".csv.gz"),
    _direct("router.replay.parse_record", lambda record: parse_decision(1, record), spoilt(DECISION)),
    _direct("router.parameters.params_from_dict", params_from_dict, spoilt(params_to_dict(Params()))),
    _file("kvpool.cli.simulate.load_params", simulate.load_params, json_files(params_to_dict(Params())), ".json"),
    _direct("kvpool.cli.administer.parse_age_s", administer.parse_age_s, st.text("0123456789.smhd e+-", max_size=12)),
    _direct("kvpool.cli.simulate.parse_faults", simulate.parse_faults,
            mutants(b"load_death=0.1,stale=1").map(lambda raw: raw.decode(errors="replace"))),
    _file("kvpool.cli.records.read_records", records.read_records, json_lines(DECISION), ".jsonl"),
    _file("kvpool.cli.records.read_records", records.read_records, mutants(b"PAR1" + bytes(40) + b"PAR1"), ".parquet"),
    _file("kvpool.faults.history.read_history", read_history, _HISTORY_LINES, ".jsonl"),
    _direct("kvpool.faults.history.parse_record", lambda raw: [parse_record(1, line) for line in _lines(raw)],
            _HISTORY_LINES),
    _direct("kvpool.faults.story.read_story", _judged, _WHOLE_HISTORIES),
    _direct("router.learned.Learned.from_dict", _useful, spoilt(_learned().to_dict(10**9))),
    _file("router.keeper.read_learned", lambda path: keeper.read_learned(path, 10**9),
          st.one_of(spoilt(_HEADER).map(_saved), mutants(_saved(_HEADER))), "", keeper.UnusableFile),
    Decoder("kvpool.cluster.state.read_state", json_files(CLUSTER), _read_state),
    Decoder("kvpool.tokenizer.read_tokenizer_files", json_files(TOKENIZER), _read_tokenizer),
)  # fmt: skip

NO_DECODERS = {
    "kvpool.metadata.outbox.Outbox.load_snapshot": "takes our own store's blocks",
    "kvpool.tokenizer.Tokenizer.decode": "takes token ids that our own engine chose",
    "kvpool.transport.base.Transport.read": "a command; what the peer answers is parsed by kvpool.transport.wire",
    "kvpool.transport.memory.MemoryTransport.read": "a command",
    "kvpool.transport.shaping.ShapingTransport.read": "a command",
    "kvpool.transport.netns.NamespacedTransport.read": "a command",
    "kvpool.transfer.loader.Loader.read": "a command",
    "kvpool.store.disk.DiskTier.load": "a command; the files it reads are parsed by kvpool.store.blockfile",
    "kvpool.transport.ucx.transport.UcxTransport.read": "a command",
    "kvpool.transport.nixl.transport.NixlTransport.read": "a command; answers are parsed by kvpool.transport.wire",
    "kvpool.transport.nixl.agent.Agent.read": "a command; the library moves the bytes, the checksum judges them",
    "kvpool.transport.nixl.transport.NixlOptions.from_settings": "settings that the program chose, refused by name",
    "kvpool.transport.ucx.errors.from_ucx": "maps an exception",
    "kvpool.cluster.manual.ManualRouter.load": "builds a plan in a program",
    "router.policies.common.Rule.load_on": "builds a decision",
    "workers.engine.architecture.parse_dtype": "a look-up in a table of names",
    "workers.engine.architecture.read_shape": "takes a config that transformers has parsed",
    "router.learned.Learned.load": "learns from a sample",
    "workers.reporter.Reporter.load": "takes a sample of our own",
    "workers.core.WorkerCore.load": "the length of the queue",
    "workers.engine.base.Engine.load_blocks": "verified pages into a view",
    "workers.engine.torch_engine.TorchEngine.load_blocks": "verified pages into a view",
    "workers.engine.base.Engine.load_device_blocks": "copies of verified pages into a view",
    "workers.engine.torch_engine.TorchEngine.load_device_blocks": "copies of verified pages into a view",
    "workers.engine.views.load_pages": "verified pages into a view",
    "workers.engine.reference.PlainModel.decode": "a step of the model",
}
"""Functions whose names sound like decoders."""
