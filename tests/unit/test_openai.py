"""OpenAI's bodies and answers: what is served, what is refused and by which name, what an answer looks like."""

import json
from typing import Any

import pytest

from kvpool.client import TextChunk
from kvpool.errors import (
    CapacityError,
    DeadlineError,
    KVPoolError,
    NumericsError,
    RequestError,
    StaleError,
    UnavailableError,
)
from kvpool.request import FinishReason, GenerateResult, RequestStats, SamplingParams, TokenLogprobs
from kvpool.types import RequestId, WorkerId
from router.openai import Answer, Body, ChatBody, CompletionBody, error_body, parse_body, status_of

HI = [{"role": "user", "content": "Hi"}]
STATS = RequestStats(WorkerId("worker-1"), "split", prompt_tokens=10, tokens_cached=2, tokens_loaded=3, tokens_redone=5)
LOGPROBS = (TokenLogprobs(7, -0.1, ((7, -0.1), (8, -2.0))), TokenLogprobs(12, -0.2, ((12, -0.2), (9, -3.0))))
RESULT = GenerateResult(RequestId("r"), (7, 12), "<7><12>", FinishReason.LENGTH, STATS, LOGPROBS)


def _completion(**fields: Any) -> Body:
    return parse_body(CompletionBody, json.dumps({"prompt": "x", **fields}).encode())


def _chat(**fields: Any) -> Body:
    return parse_body(ChatBody, json.dumps({"messages": HI, **fields}).encode())


def _answer(body: Body) -> Answer:
    return Answer(body, "m", 5, lambda tokens: "".join(f"<{token}>" for token in tokens))


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"[]", "body"),
        (b'"x"', "body"),
        (b"\xff", "body"),
        (b"[" * 100_000, "body"),
        (b"{}", "prompt"),
        (b'{"prompt": null}', "prompt"),
        (b'{"prompt": 5}', "prompt"),
        (b'{"prompt": ["a", "b"]}', "prompt"),
        (b'{"prompt": [1, true]}', "prompt"),
        (b'{"prompt": "\\ud800"}', "body"),
        (b'{"prompt": "x", "modle": 1}', "modle"),
        (b'{"prompt": "x", "max_tokens": "5"}', "max_tokens"),
        (b'{"prompt": "x", "max_tokens": 1.5}', "max_tokens"),
        (b'{"prompt": "x", "max_tokens": true}', "max_tokens"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature"),
        (b'{"prompt": "x", "temperature": "hot"}', "temperature"),
        (b'{"prompt": "x", "top_p": Infinity}', "top_p"),
        (b'{"prompt": "x", "stream": "yes"}', "stream"),
        (b'{"prompt": "x", "stream_options": {"x": 1}}', "stream_options"),
        (b'{"prompt": "x", "stop": [1]}', "stop"),
        (b'{"prompt": "x", "n": 2}', "n"),
        (b'{"prompt": "x", "presence_penalty": 0.5}', "presence_penalty"),
        (b'{"prompt": "x", "echo": true}', "echo"),
        (b'{"prompt": "x", "logprobs": 21}', "logprobs"),
        (b'{"prompt": "x", "logprobs": -1}', "logprobs"),
        (b'{"prompt": "x", "timeout": 0}', "timeout"),
        (b'{"prompt": "x", "timeout": 1e300}', "timeout"),
    ],
)
def test_a_malformed_completion_body_is_refused_by_the_name_of_its_field(raw: bytes, field: str) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        parse_body(CompletionBody, raw)
    assert caught.value.details["field"] == field


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, r"messages\.0\.content"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, r"messages\.0\.role"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, r"messages\.0\.tool_calls"),
        ({"prompt": "x"}, "prompt"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"tools": []}, "tools"),
    ],
)
def test_a_malformed_chat_body_is_refused_by_the_name_of_its_field(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        _chat(**fields)


@pytest.mark.parametrize("name", ["timeout", "ttft_limit", "tpot_limit"])
def test_a_time_that_cannot_be_is_refused_with_its_unit_and_pythons_name_for_it_with_ours(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name}: .* seconds"):
        _completion(**{name: 0})
    with pytest.raises(RequestError, match=f"did you mean '{name}'"):
        _completion(**{f"{name}_s": 1.0})


def test_a_body_of_only_wrong_tokens_gets_one_short_message() -> None:
    with pytest.raises(RequestError) as caught:
        _completion(prompt=["a"] * 100_000)
    assert len(caught.value.message) < 300


def test_null_means_absent_as_openai_clients_send_it() -> None:
    body = _completion(max_tokens=None, stop=None, n=None, stream_options=None, logprobs=None)
    assert body == _completion()


def test_options_are_those_of_the_client() -> None:
    body = _completion(max_tokens=3, temperature=0, stop=["a"], user="tenant", timeout=9, stop_token_ids=[4])
    options = body.options()
    assert (options.pop("tenant"), options.pop("timeout_s")) == ("tenant", 9)
    limits = {name: options.pop(name) for name in ("ttft_limit_s", "tpot_limit_s", "priority", "may_degrade")}
    assert limits == {"ttft_limit_s": None, "tpot_limit_s": None, "priority": 0, "may_degrade": False}
    options["stop_token_ids"] = tuple(options["stop_token_ids"])
    options["stop"] = tuple(options["stop"])
    assert SamplingParams(**options) == SamplingParams(max_tokens=3, stop=("a",), stop_token_ids=(4,))


def test_the_newer_name_of_the_token_limit_wins() -> None:
    assert _chat(max_tokens=3, max_completion_tokens=4).options()["max_tokens"] == 4
    assert _chat(max_tokens=3).options()["max_tokens"] == 3


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        (_completion(), 0),
        (_completion(logprobs=0), 1),  # the chosen token's own needs one
        (_completion(logprobs=4), 4),
        (_chat(), 0),
        (_chat(logprobs=True), 1),
        (_chat(logprobs=True, top_logprobs=4), 4),
    ],
)
def test_log_probabilities_are_asked_for_when_they_are_shown(body: Body, asked: int) -> None:
    assert body.options()["logprobs"] == asked


def test_a_whole_completion_has_text_logprobs_usage_and_how_it_was_served() -> None:
    answer = _answer(_completion(logprobs=1)).whole(RESULT)
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "<7><12>",
            "logprobs": {
                "tokens": ["<7>", "<12>"],
                "token_logprobs": [-0.1, -0.2],
                "top_logprobs": [{"<7>": -0.1}, {"<12>": -0.2}],
                "text_offset": [0, 3],
            },
            "finish_reason": "length",
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 2,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 5},
    }
    assert (answer["id"], answer["object"], answer["created"], answer["model"]) == ("r", "text_completion", 5, "m")
    assert (answer["kvpool"]["worker_id"], answer["kvpool"]["plan"]) == ("worker-1", "split")
    json.dumps(answer)


def test_a_whole_chat_answer_has_a_message_and_logprobs_by_token() -> None:
    answer = _answer(_chat(logprobs=True)).whole(RESULT)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "<7><12>"}
    first = {"token": "<7>", "logprob": -0.1, "bytes": [60, 55, 62], "top_logprobs": []}
    assert choice["logprobs"]["content"][0] == first
    assert answer["object"] == "chat.completion"
    assert _answer(_chat()).whole(RESULT)["choices"][0]["logprobs"] is None


def _chunks() -> list[TextChunk]:
    request_id = RequestId("r")
    return [
        TextChunk(request_id, "<7>", (7,), None, LOGPROBS[:1]),
        TextChunk(request_id, "<12>", (12,), RESULT, LOGPROBS[1:]),
    ]


def test_chat_events_add_up_to_the_whole_answer() -> None:
    answer = _answer(_chat(stream=True, logprobs=True, top_logprobs=2, stream_options={"include_usage": True}))
    events = [event for chunk in _chunks() for event in answer.events(chunk)]
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas == [{"role": "assistant", "content": "<7>"}, {"content": "<12>"}]
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, "length"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}
    shown = [item for event in events[:-1] for item in event["choices"][0]["logprobs"]["content"]]
    assert shown == answer.whole(RESULT)["choices"][0]["logprobs"]["content"]
    assert [("kvpool" in event, "usage" in event) for event in events] == [(False, False), (True, False), (False, True)]


def test_completion_events_count_their_text_offsets_on_and_leave_usage_out_unless_asked() -> None:
    answer = _answer(_completion(stream=True, logprobs=0))
    events = [event for chunk in _chunks() for event in answer.events(chunk)]
    assert [event["choices"][0]["text"] for event in events] == ["<7>", "<12>"]
    assert [event["choices"][0]["logprobs"]["text_offset"] for event in events] == [[0], [3]]
    assert [event["choices"][0]["logprobs"]["top_logprobs"] for event in events] == [[{}], [{}]]
    assert not any("usage" in event for event in events)


def _caused(error: KVPoolError, cause: KVPoolError) -> KVPoolError:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("x"), 400, "invalid_request_error"),
        (NumericsError("x"), 500, "server_error"),
        (CapacityError("x"), 429, "rate_limit_error"),
        (_caused(DeadlineError("x"), CapacityError("full")), 429, "rate_limit_error"),
        (_caused(DeadlineError("x"), UnavailableError("gone")), 504, "server_error"),
        (DeadlineError("x"), 504, "server_error"),
        (UnavailableError("x"), 503, "server_error"),
        (StaleError("x"), 503, "server_error"),
    ],
)
def test_every_error_has_the_status_of_what_the_caller_does_next(error: KVPoolError, status: int, kind: str) -> None:
    assert status_of(error) == status
    body = error_body(error.message, status=status, code=error.code, field="f")
    assert body == {"error": {"message": "x", "type": kind, "param": "f", "code": error.code}}
