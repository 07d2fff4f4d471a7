"""Our attention inside Hugging Face model code: write K/V into dense views, attend over each view's context.

Registered once under the name ``kvpool`` through the public attention and mask interfaces of transformers; a model
built with ``attn_implementation="kvpool"`` then calls `_attend` in every layer. The slices of a step travel to it as
the forward argument ``kvpool_step``, which transformers hands through to the attention function untouched. That
keeps the step explicit: no thread-local and no global could point at the wrong step. A model class that swallows its
extra arguments is found out when it is loaded (`workers.engine.probe`).

One forward runs all slices of a step as one packed row ``[1, total_tokens]``; only attention looks at sequences one
by one. No padding, no mask over other sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from kvpool.errors import ModelError

ATTENTION_NAME = "kvpool"
STEP_ARGUMENT = "kvpool_step"

_UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias")
"""What some models ask of attention that this function does not compute."""


@dataclass(frozen=True, slots=True)
class WindowedReading:
    """What a slice reads in layers with a sliding window, when the window cuts something off.

    Attributes:
        first: position of the first key any of the slice's tokens may see.
        mask: ``[new tokens, context - first]``, added to the scores; None for a single token.
    """

    first: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class SliceViews:
    """One slice of a step as attention sees it. Tensors alias the sequence's view; layers index the tuples.

    Attributes:
        row_begin, row_end: the slice's rows in the packed step.
        write_keys, write_values: per layer ``[kv_head, new tokens, dim]``, where this step's K/V goes.
        read_keys, read_values: per layer ``[1, kv_head, context, dim]``, everything up to the slice's end.
        mask: ``[new tokens, context]``, added to the scores: 0 or -inf; None when no mask is needed.
        causal: plain causal attention from position 0.
        windowed: how layers with a sliding window read instead; None when the window is not full yet.
    """

    row_begin: int
    row_end: int
    write_keys: tuple[torch.Tensor, ...]
    write_values: tuple[torch.Tensor, ...]
    read_keys: tuple[torch.Tensor, ...]
    read_values: tuple[torch.Tensor, ...]
    mask: torch.Tensor | None
    causal: bool
    windowed: WindowedReading | None


@dataclass(slots=True)
class Step:
    """The slices of one forward, and what every layer brought, for the probe.

    Attributes:
        slices: in the order of their rows.
        window_tokens: the sliding window the slices were cut for, None without.
        visits: per call of attention: layer, shape of the keys, shape of the values.
    """

    slices: tuple[SliceViews, ...]
    window_tokens: int | None = None
    visits: list[tuple[int, torch.Size, torch.Size]] = field(default_factory=list)


def slice_views(
    view: torch.Tensor, *, row_begin: int, start: int, stop: int, window_tokens: int | None = None
) -> SliceViews:
    """Cut what attention needs for positions ``[start, stop)`` out of a view, once for all layers.

    Args:
        view: ``[layer, K/V, kv_head, capacity, dim]``; the result aliases it.
        row_begin: first row of the slice in the packed step.
        start, stop: positions to compute, ``start < stop <= capacity``.
        window_tokens: sliding window of the layers that have one: a token sees itself and what lies less than this
            before it.
    """
    write = view[:, :, :, start:stop]
    read = view[:, :, :, :stop].unsqueeze(2)
    rows = stop - start
    mask = _blocked(view, rows, stop).triu_(start + 1) if start > 0 and rows > 1 else None
    return SliceViews(
        row_begin=row_begin,
        row_end=row_begin + rows,
        write_keys=write[:, 0].unbind(0),
        write_values=write[:, 1].unbind(0),
        read_keys=read[:, 0].unbind(0),
        read_values=read[:, 1].unbind(0),
        mask=mask,
        causal=start == 0 and rows > 1,
        windowed=_windowed(view, start, stop, window_tokens) if window_tokens and window_tokens < stop else None,
    )


def _windowed(view: torch.Tensor, start: int, stop: int, window_tokens: int) -> WindowedReading:
    first = max(0, start - window_tokens + 1)
    rows, columns, offset = stop - start, stop - first, start - first
    if rows == 1:
        return WindowedReading(first=first, mask=None)
    future = _blocked(view, rows, columns).triu_(offset + 1)
    past = _blocked(view, rows, columns).tril_(offset - window_tokens)
    return WindowedReading(first=first, mask=future + past)


def _blocked(view: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A mask that lets nothing through. Additive: a boolean one would be converted again in every layer."""
    return torch.full((rows, columns), -torch.inf, dtype=view.dtype, device=view.device)


def register_attention() -> None:
    """Make ``attn_implementation="kvpool"`` known to transformers. May be repeated."""
    AttentionInterface.register(ATTENTION_NAME, _attend)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


def _no_mask(**arguments: Any) -> None:
    """The model builds no mask: every slice brings its own.

    Raises:
        ModelError: the model adds rules of its own to the causal mask (transformers then asks for a vmapped mask).
    """
    if arguments.get("use_vmap"):
        raise ModelError("the model adds rules of its own to the causal mask")


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer over every slice of the step; keys come in with their rotary positions applied.

    Args:
        module: the layer's attention module; ``layer_idx`` says which layer it is.
        query: ``[1, head, rows, dim]``.
        key, value: ``[1, kv_head, rows, dim]``.
        attention_mask: None, or a mask of the model's own making, which is refused.
        scaling: factor on the scores; None means ``dim ** -0.5``.
        arguments: whatever else the model passes, the step among it.

    Returns:
        ``[1, rows, head, dim]`` and no attention weights.
    """
    step = arguments.get(STEP_ARGUMENT)
    if step is None:
        raise ModelError(f"{type(module).__name__} did not hand {STEP_ARGUMENT} through to attention")
    _refuse_unsupported(module, attention_mask, arguments, step.window_tokens)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    step.visits.append((layer, key.shape, value.shape))
    windowed = arguments.get("sliding_window") is not None
    if len(step.slices) == 1:
        part = step.slices[0]
        return _attend_slice(part, layer, query, key[0], value[0], scaling=scaling, windowed=windowed), None
    outputs = []
    for part in step.slices:
        rows = slice(part.row_begin, part.row_end)
        cut = (query[:, :, rows], key[0, :, rows], value[0, :, rows])
        outputs.append(_attend_slice(part, layer, *cut, scaling=scaling, windowed=windowed))
    return torch.cat(outputs, dim=1), None


def _refuse_unsupported(
    module: torch.nn.Module, mask: torch.Tensor | None, arguments: dict[str, Any], window_tokens: int | None
) -> None:
    window = arguments.get("sliding_window")
    if window is not None and window != window_tokens:
        raise ModelError(f"{type(module).__name__} has a window of {window} tokens, its config says {window_tokens}")
    if mask is not None:
        raise ModelError(f"{type(module).__name__} brings an attention mask of its own")
    if not (getattr(module, "is_causal", True) and arguments.get("is_causal") in (None, True)):
        raise ModelError(f"{type(module).__name__} attends in both directions")
    for name in _UNSUPPORTED_ARGUMENTS:
        if arguments.get(name) is not None:
            raise ModelError(f"{type(module).__name__} asks attention for {name}, which the engine does not compute")


def _attend_slice(
    part: SliceViews,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float | None,
    windowed: bool,
) -> torch.Tensor:
    part.write_keys[layer].copy_(key)
    part.write_values[layer].copy_(value)
    keys, values, mask, causal = part.read_keys[layer], part.read_values[layer], part.mask, part.causal
    if windowed and part.windowed is not None:
        first = part.windowed.first
        keys, values, mask, causal = keys[:, :, first:], values[:, :, first:], part.windowed.mask, False
    output = scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=mask,
        is_causal=causal,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[0],
    )
    return output.transpose(1, 2)
