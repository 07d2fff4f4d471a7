"""Requests refuse what makes no sense, naming the field."""

from typing import Any

import pytest

from kvpool.errors import RequestError
from kvpool.request import GenerateRequest, SamplingParams
from kvpool.types import RequestId


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ("",)}, "stop"),
    ],
)
def test_sampling_refuses_values_out_of_range(options: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**options)
    assert caught.value.details["field"] == field


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": "3"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": None}, "temperature"),
        ({"top_p": None}, "top_p"),
        ({"seed": 1.5}, "seed"),
        ({"logprobs": 2.5}, "logprobs"),
        ({"stop": (5,)}, "stop"),
        ({"stop_token_ids": ("a",)}, "stop_token_ids"),
    ],
)
def test_sampling_refuses_values_of_another_type_that_would_break_an_engine(
    options: dict[str, Any], field: str
) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**options)
    assert caught.value.details["field"] == field


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"prompt": ()}, "prompt"),
        ({"timeout_ns": 0}, "timeout"),
        ({"generated": (1, 2)}, "generated"),
        ({"tenant": 5}, "tenant"),
        ({"tenant": "\ud800"}, "tenant"),
        ({"request_id": "half \ud800"}, "request_id"),
        ({"request_id": "r" * 257}, "request_id"),
        ({"request_id": ""}, "request_id"),
    ],
)
def test_a_request_refuses_what_cannot_be_served(options: dict[str, Any], field: str) -> None:
    base: dict[str, Any] = {
        "request_id": RequestId("r"),
        "prompt": (1,),
        "sampling": SamplingParams(max_tokens=2),
    }
    with pytest.raises(RequestError) as caught:
        GenerateRequest(**{**base, **options})
    assert caught.value.details["field"] == field
