"""Check by running that a model's code does what the engine relies on. Runs once, when a model is loaded.

A handful of tokens goes through the model twice: the plain way, and in two slices through our attention. The model
is accepted when every layer called our attention exactly once, with the shapes of the layout, and the logits agree.
This finds what no config says: extra arguments that do not reach attention, layers that share a cache, score
transformations of the model's own, bidirectional attention.
"""

from __future__ import annotations

from typing import Any

import torch

from kvpool.errors import ModelError
from workers.engine.architecture import DecoderShape, refused
from workers.engine.attention import ATTENTION_NAME, STEP_ARGUMENT, Step, slice_views
from workers.engine.views import ViewShape

_PROBE_TOKENS = 7
_WIDEST_PROBED_WINDOW = 64
"""Windows up to this are filled by the probe; a wider one is taken at the word of the layer's own argument."""
_LAST_SLICE = 3
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 3e-2}
"""Largest difference of logits, relative to the largest logit."""


def check_model(model: Any, shape: DecoderShape, view_shape: ViewShape) -> None:
    """Accept a loaded model or refuse it.

    Raises:
        ModelError: its code does not fit; the message names the architecture and what differs.
    """
    device, dtype = model.device, model.dtype
    generator = torch.Generator().manual_seed(0)
    window = shape.window_tokens or 0
    count = _PROBE_TOKENS + (window if window <= _WIDEST_PROBED_WINDOW else 0)
    tokens = torch.randint(0, shape.vocab_size, (1, count), generator=generator).to(device)
    view = torch.zeros(view_shape.view(count), dtype=dtype, device=device)
    try:
        ours = _sliced_logits(model, tokens, view, shape)
        model.set_attn_implementation("eager")
        plain = model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits[0, -1]
    except ModelError as error:
        raise refused(shape.architecture, error.message) from error
    except (TypeError, AttributeError, RuntimeError, KeyError, ValueError) as error:
        reason = f"its code does not run with attention of ours ({type(error).__name__}: {error})"
        raise refused(shape.architecture, reason) from error
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    difference = float((ours.float() - plain.float()).abs().max() / plain.float().abs().max().clamp_min(1e-6))
    if not difference <= _TOLERANCE[dtype]:  # also when it is NaN
        raise refused(
            shape.architecture, f"its logits differ from the plain model's by {difference:.2g} of the largest"
        )


def _sliced_logits(model: Any, tokens: torch.Tensor, view: torch.Tensor, shape: DecoderShape) -> torch.Tensor:
    """Logits of the last token, computed in two slices over one view."""
    logits = torch.empty(0)
    cut, window = tokens.shape[1] - _LAST_SLICE, shape.window_tokens
    for start, stop in ((0, cut), (cut, tokens.shape[1])):
        part = slice_views(view, row_begin=0, start=start, stop=stop, window_tokens=window)
        step = Step(slices=(part,), window_tokens=window)
        logits = model(
            input_ids=tokens[:, start:stop],
            position_ids=torch.arange(start, stop, device=tokens.device)[None],
            use_cache=False,
            logits_to_keep=1,
            **{STEP_ARGUMENT: step},
        ).logits[0, -1]
        _check_visits(step, shape, rows=stop - start)
    return logits


def _check_visits(step: Step, shape: DecoderShape, *, rows: int) -> None:
    layers = [layer for layer, _, _ in step.visits]
    if sorted(layers) != list(range(shape.layers)):
        raise ModelError(
            f"{len(set(layers))} of its {shape.layers} layers used the attention interface, in {len(layers)} calls; "
            "every layer must, once"
        )
    expected = torch.Size((1, shape.kv_heads, rows, shape.head_dim))
    for layer, keys, values in step.visits:
        if keys != expected or values != expected:
            raise ModelError(
                f"layer {layer} has keys {list(keys)} and values {list(values)}, its config says {list(expected)}"
            )
