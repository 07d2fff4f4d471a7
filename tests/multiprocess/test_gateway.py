"""The HTTP gateway over a running cluster: OpenAI's objects, errors by name, and no request lost or left behind."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from kvpool.cluster.gateway import start_gateway
from kvpool.cluster.launcher import Cluster
from kvpool.config import ClusterConfig, EngineConfig, GatewayConfig, WorkerConfig
from kvpool.errors import ConfigError
from tests.multiprocess.cluster_kit import ClusterKit, processes_of, wait_until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),  # Ray Serve's own settings
]

MAX_REQUESTS = 8
REPLY_TIMEOUT_S = 90
SETTLE_TIMEOUT_S = 30
WAITED_OUT_S = 30.0  # so long a request waits for faster decoding
LONG = {"prompt": "Once", "max_tokens": 8000, "ignore_eos": True, "timeout": 90}
HI = [{"role": "user", "content": "Hi"}]
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole HTTP answer."""

    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def json(self) -> dict[str, Any]:
        """The body."""
        value: dict[str, Any] = json.loads(self.raw)
        return value

    @property
    def error(self) -> dict[str, Any]:
        """The error object; fails when it has another shape than OpenAI's."""
        error: dict[str, Any] = self.json["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[str]:
        """Data of the server-sent events."""
        return [line.removeprefix("data: ") for line in self.raw.decode().splitlines() if line]


class Call:
    """One HTTP request on a connection of its own; leaving the block closes the connection, answered or not."""

    def __init__(self, port: int, method: str, path: str, body: object = None, **headers: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REPLY_TIMEOUT_S)
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        self._connection.request(method, path, raw, {name.replace("_", "-"): headers[name] for name in headers})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def first_event(self) -> str:
        """Wait until the stream has begun."""
        self._response = self._connection.getresponse()
        assert self._response.status == 200
        return self._response.readline().decode()

    def reply(self) -> Reply:
        """Wait for the whole answer."""
        with self._connection.getresponse() as response:
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, headers, response.read())


class Gateway:
    """A cluster with a gateway."""

    def __init__(self, kit: ClusterKit, port: int) -> None:
        self.kit = kit
        self.port = port

    def open(self, body: object, path: str = COMPLETIONS, **headers: str) -> Call:
        """Send a body and leave the answer to the caller."""
        return Call(self.port, "POST", path, body, **headers)

    def post(self, body: object, path: str = COMPLETIONS, **headers: str) -> Reply:
        """Send a body; the answer."""
        with self.open(body, path, **headers) as call:
            return call.reply()

    def get(self, path: str, method: str = "GET") -> Reply:
        """A request without a body; the answer."""
        with Call(self.port, method, path) as call:
            return call.reply()

    def running(self) -> int:
        """Requests that run or wait on the workers."""
        return sum(int(item["running"]) + int(item["waiting"]) for item in self.kit.status()["workers"].values())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def gateway(tiny_model_path: Path) -> Iterator[Gateway]:
    """Two workers and a gateway; nothing of it may be left when it is closed."""
    port = _free_port()
    engine = EngineConfig(model=str(tiny_model_path), num_blocks=4096)
    config = ClusterConfig(
        workers=(WorkerConfig(count=2, engine=engine),),
        gateway=GatewayConfig(port=port, max_requests=MAX_REQUESTS),
    )
    kit = ClusterKit(Cluster.start(config, name="gateway"))
    cluster_dir = kit.cluster.cluster_dir
    try:
        yield Gateway(kit, port)
    finally:
        kit.close()
    assert processes_of(str(cluster_dir)) == []
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


def test_a_completion_is_what_the_client_generates(gateway: Gateway) -> None:
    reply = gateway.post({"prompt": "Hello there", "max_tokens": 5, "temperature": 0, "logprobs": 2})
    expected = gateway.kit.generate("Hello there", max_tokens=5, logprobs=2)
    assert reply.status == 200
    (choice,) = reply.json["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected.text, expected.finish.value)
    assert choice["logprobs"]["token_logprobs"] == pytest.approx([item.logprob for item in expected.logprobs], abs=1e-4)
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [2] * len(expected.tokens)
    assert reply.json["kvpool"]["worker_id"] in gateway.kit.cluster.worker_ids


def test_token_ids_are_taken_as_they_are(gateway: Gateway) -> None:
    reply = gateway.post({"prompt": [10, 11, 12], "max_tokens": 2, "temperature": 0})
    assert reply.json["choices"][0]["text"] == gateway.kit.generate([10, 11, 12], max_tokens=2).text
    assert reply.json["usage"]["prompt_tokens"] == 3


def test_a_chat_streams_the_text_of_the_whole_answer(gateway: Gateway) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    body = {"messages": messages, "max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 1}
    whole = gateway.post(body, CHAT).json
    reply = gateway.post({**body, "stream": True, "stream_options": {"include_usage": True}}, CHAT)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.events[-1] == "[DONE]"
    *events, last = [json.loads(event) for event in reply.events[:-1]]
    assert (
        "".join(event["choices"][0]["delta"]["content"] for event in events)
        == (whole["choices"][0]["message"]["content"])
    )
    shown = [item["token"] for event in events for item in event["choices"][0]["logprobs"]["content"]]
    assert shown == [item["token"] for item in whole["choices"][0]["logprobs"]["content"]]
    assert events[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert events[-1]["kvpool"]["attempts"] == 1
    assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert {event["id"] for event in events} == {reply.headers["x-request-id"]}


def test_usage_counts_the_prompt_tokens_that_were_not_computed_again(gateway: Gateway) -> None:
    body = {"prompt": list(range(100, 180)), "max_tokens": 1}
    assert gateway.post(body).json["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}

    def cached() -> int:
        return int(gateway.post(body).json["usage"]["prompt_tokens_details"]["cached_tokens"])

    wait_until(lambda: cached() >= 64, SETTLE_TIMEOUT_S, "a request that finds four of its five blocks")
    assert gateway.post({**body, "user": "other"}).json["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_a_request_id_comes_back_and_explains_the_request(gateway: Gateway) -> None:
    reply = gateway.post({"prompt": "x", "max_tokens": 1}, x_request_id="my-request")
    assert (reply.headers["x-request-id"], reply.json["id"]) == ("my-request", "my-request")
    record = gateway.kit.run(gateway.kit.client.explain("my-request"))
    assert record["worker"].partition("@")[0] == reply.json["kvpool"]["worker_id"]
    unnamed = gateway.post({"prompt": "x", "max_tokens": 1})
    assert unnamed.headers["x-request-id"] == unnamed.json["id"] != ""
    assert gateway.post({"prompt": "x"}, x_request_id="x" * 129).error["param"] == "x-request-id"


def test_models_and_health_are_answered(gateway: Gateway) -> None:
    (model,) = gateway.get("/v1/models").json["data"]
    assert model["id"] == gateway.kit.info.model
    assert gateway.post({"prompt": "x", "max_tokens": 1, "model": model["id"]}).status == 200
    assert gateway.get("/healthz").json == {"status": "ok"}


@pytest.mark.parametrize(
    ("path", "body", "param", "named"),
    [
        (COMPLETIONS, b"", "body", "JSON"),
        (COMPLETIONS, b"{", "body", "JSON"),
        (COMPLETIONS, {"prompt": "x", "modle": "y"}, "modle", "modle"),
        (COMPLETIONS, {"prompt": 5}, "prompt", "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "empty"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": -1}, "max_tokens", "-1"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 9000}, "max_tokens", "9000"),
        (COMPLETIONS, {"prompt": [1] * 9000}, "prompt", "9000"),
        (COMPLETIONS, {"prompt": "x", "temperature": float("nan")}, "temperature", "finite"),
        (COMPLETIONS, {"prompt": "x", "temperature": -1}, "temperature", "-1"),
        (COMPLETIONS, {"prompt": "x", "top_p": 0}, "top_p", "top_p"),
        (COMPLETIONS, {"prompt": "x", "model": "gpt-5"}, "model", "gpt-5"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": -1, "stream": True}, "max_tokens", "-1"),
        (CHAT, {"messages": []}, "messages", "messages"),
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    ],
)
def test_a_malformed_request_is_refused_by_the_name_of_its_field(
    gateway: Gateway, path: str, body: object, param: str, named: str
) -> None:
    reply = gateway.post(body, path)
    assert reply.status == 400
    assert (reply.error["param"], reply.error["type"]) == (param, "invalid_request_error")
    assert named in reply.error["message"]


def test_a_body_beyond_the_bound_is_refused(gateway: Gateway) -> None:
    reply = gateway.post({"prompt": "x" * (9 * 1024 * 1024)})
    assert (reply.status, reply.error["type"]) == (413, "invalid_request_error")
    assert "8388608" in reply.error["message"]


def test_wrong_paths_and_methods_are_answered_in_the_same_shape(gateway: Gateway) -> None:
    unknown, wrong = gateway.get("/v1/nonsense"), gateway.get(COMPLETIONS)
    assert (unknown.status, wrong.status, wrong.headers["allow"]) == (404, 405, "POST")
    assert "/v1/nonsense" in unknown.error["message"]
    assert "GET" in wrong.error["message"]


def test_a_request_out_of_time_is_a_504(gateway: Gateway) -> None:
    reply = gateway.post({**LONG, "timeout": 0.2})
    assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")


def test_an_error_after_the_first_token_is_the_last_event(gateway: Gateway) -> None:
    reply = gateway.post({**LONG, "timeout": 2, "stream": True})
    assert reply.status == 200
    assert "choices" in json.loads(reply.events[0])
    assert json.loads(reply.events[-1])["error"]["code"] == "deadline_exceeded"
    assert "[DONE]" not in reply.events


def test_a_client_that_hangs_up_takes_its_request_off_the_worker(gateway: Gateway) -> None:
    """All decode in the same batches: one that started later can only be gone first by being cancelled."""
    wait_until(lambda: gateway.running() == 0, SETTLE_TIMEOUT_S, "the workers are idle")
    stayed = gateway.open({**LONG, "stream": True})
    stayed.first_event()
    streamed, whole = gateway.open({**LONG, "stream": True}), gateway.open(LONG)
    streamed.first_event()
    wait_until(lambda: gateway.running() == 3, SETTLE_TIMEOUT_S, "all three run")
    streamed.close()
    whole.close()
    wait_until(lambda: gateway.running() == 1, SETTLE_TIMEOUT_S, "two are cancelled and one goes on")
    stayed.close()
    wait_until(lambda: gateway.running() == 0, SETTLE_TIMEOUT_S, "the last is cancelled")


def test_a_client_that_hangs_up_while_its_request_waits_at_the_router_ends_it(gateway: Gateway) -> None:
    def waiting() -> int:
        return int(gateway.kit.status()["router"]["admissions"]["queued_now"])

    too_fast = {"prompt": "Once upon a time", "max_tokens": 2, "tpot_limit": 0.000001}
    known = {**too_fast, "max_tokens": 64, "ignore_eos": True, "tpot_limit": 60}
    for _ in range(8):  # how fast workers decode
        assert gateway.post(known).status == 200
    with contextlib.ExitStack() as calls:
        for _ in range(4):  # something decodes whose end might help
            calls.enter_context(gateway.open({**LONG, "stream": True}))

        def decode() -> bool:
            status = gateway.kit.status()
            known = all(row["tpot_ms"] is not None for row in status["router"]["workers"])
            return known and all(item["running"] for item in status["workers"].values())

        wait_until(decode, SETTLE_TIMEOUT_S, "every worker decodes, and the router knows how fast")
        with gateway.open({**too_fast, "stream": True}), gateway.open(too_fast):
            wait_until(lambda: waiting() == 2, SETTLE_TIMEOUT_S, "both wait")
        wait_until(lambda: waiting() == 0, WAITED_OUT_S / 2, "nobody asks for them any more")
    wait_until(lambda: gateway.running() == 0, SETTLE_TIMEOUT_S, "the workers are idle")


def test_a_limit_that_cannot_be_met_is_refused_with_the_time_to_come_again(gateway: Gateway) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 4, "ttft_limit": 0.000001}
    refused = gateway.post(body)
    assert refused.status == 429
    assert refused.error["code"] == "overloaded"
    assert "limit on the first token" in refused.error["message"]
    assert int(refused.headers["retry-after"]) >= 1
    assert gateway.post({**body, "stream": True}).status == 429
    late = gateway.post({**body, "may_degrade": True})
    assert (late.status, late.json["usage"]["completion_tokens"]) == (200, 4)
    assert gateway.post({**body, "ttft_limit": 60, "tpot_limit": 60, "priority": 3}).status == 200
    malformed = gateway.post({**body, "priority": 1000})
    assert (malformed.status, malformed.error["param"]) == (400, "priority")
    status = gateway.kit.status()["router"]
    assert status["goodput"]["shed"] == 2
    assert status["admissions"]["degrade"] == 1

    def counted() -> bool:
        goodput = gateway.kit.status()["router"]["goodput"]
        return bool(goodput["missed_ttft"] == 1 and goodput["met"] >= 1)

    wait_until(counted, SETTLE_TIMEOUT_S, "the late request and one in time are counted")


def test_requests_beyond_the_limit_are_told_to_come_again(gateway: Gateway) -> None:
    calls = [gateway.open({**LONG, "stream": True}) for _ in range(MAX_REQUESTS)]
    for call in calls:
        call.first_event()
    refused = gateway.post({"prompt": "x"})
    healthy = gateway.get("/healthz")
    for call in calls:
        call.close()
    assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    assert "gateway.max_requests" in refused.error["message"]
    assert healthy.status == 200
    wait_until(lambda: gateway.post({"prompt": "x", "max_tokens": 1}).status == 200, SETTLE_TIMEOUT_S, "room again")


def test_a_request_id_that_runs_already_is_refused(gateway: Gateway) -> None:
    with gateway.open({**LONG, "stream": True}, x_request_id="twice") as call:
        call.first_event()
        reply = gateway.post({"prompt": "x"}, x_request_id="twice")
    assert (reply.status, reply.error["param"]) == (400, "request_id")


def test_requests_at_once_each_get_their_own_answer(gateway: Gateway) -> None:
    prompts = [f"Number {index} of several" for index in range(MAX_REQUESTS)]
    expected = [gateway.kit.generate(prompt, max_tokens=20).text for prompt in prompts]
    calls = [gateway.open({"prompt": prompt, "max_tokens": 20, "temperature": 0}) for prompt in prompts]
    assert [call.reply().json["choices"][0]["text"] for call in calls] == expected


def test_a_killed_router_loses_no_request(gateway: Gateway) -> None:
    body = {"prompt": "Once", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    expected = gateway.post(body).json["choices"][0]["text"]
    before = [gateway.open(body) for _ in range(MAX_REQUESTS // 2)]
    killed = gateway.kit.signal("router", signal.SIGKILL)
    after = [gateway.open(body) for _ in range(MAX_REQUESTS // 2)]
    replies = [call.reply() for call in (*before, *after)]
    assert [reply.status for reply in replies] == [200] * MAX_REQUESTS
    assert {reply.json["choices"][0]["text"] for reply in replies} == {expected}
    assert gateway.kit.pid_of("router") != killed


def test_health_follows_the_router(gateway: Gateway) -> None:
    wait_until(lambda: gateway.get("/healthz").status == 200, SETTLE_TIMEOUT_S, "healthy")
    stopped = gateway.kit.signal("router", signal.SIGSTOP)
    try:
        reply = gateway.get("/healthz")
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert (reply.status, reply.headers["retry-after"]) == (503, "1")
    assert reply.error["type"] == "server_error"
    wait_until(lambda: gateway.get("/healthz").status == 200, SETTLE_TIMEOUT_S, "healthy again")


def test_a_second_gateway_on_one_ray_cluster_is_refused_and_leaves_the_first_alone(gateway: Gateway) -> None:
    with pytest.raises(ConfigError, match="kvpool-gateway"):
        start_gateway(GatewayConfig(port=_free_port()), "second")
    assert gateway.get("/healthz").status == 200
    assert not logging.getLogger("ray.serve").isEnabledFor(logging.INFO)


def test_a_port_in_use_is_named_before_anything_starts(gateway: Gateway, tmp_path: Path, tiny_model_path: Path) -> None:
    command = [sys.executable, "-m", "kvpool.cli.main", "up", "--model", str(tiny_model_path), "--json"]
    done = subprocess.run(
        [*command, "--http-port", str(gateway.port)],
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=REPLY_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 2
    error = json.loads(done.stdout)
    assert (error["code"], str(gateway.port) in error["error"]) == ("invalid_config", True)
    assert "workers" not in done.stderr
    assert list(tmp_path.glob("kvpool-*")) == []
    wait_until(lambda: _processes_in(tmp_path) == [], SETTLE_TIMEOUT_S, "no process of the failed start is left")


def _processes_in(directory: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(directory) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found
