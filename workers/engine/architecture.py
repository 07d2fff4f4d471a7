"""Which models the torch engine serves: read the config, refuse by name what cannot be exact, describe the layout.

Served are decoders whose layers attend causally over keys and values (MHA, GQA, MQA), all of them or a sliding
window of them: Llama, Mistral, Qwen2, Qwen3, SmolLM, Granite, OLMo, Phi-3, Gemma 3 and their like, mixtures of
experts included. Layers with a window keep all their KV here like the others: exact, and more bytes than they need.
Refused are models whose cache is something else (latent or linear attention, chunks, states), encoders, and rotary
schemes whose angles depend on the length of the batch, because their keys cannot be reused at all.

The config says what a model *claims*; `workers.engine.probe` then checks what its code *does*.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvpool.errors import ModelError
from kvpool.layout import AttentionKind, KVGroup, KVLayout

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_SERVED_LAYERS = frozenset({"full_attention", "sliding_attention"})
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
_LATENT_KEYS = ("kv_lora_rank",)
_STATE_KEYS = ("ssm_cfg", "state_size", "conv_kernel", "mamba_d_state", "linear_num_key_heads")


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What the engine needs to know of a supported model.

    Attributes:
        window_tokens: sliding window of the layers that have one, None when no layer does.
    """

    architecture: str
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_tokens: int
    window_tokens: int | None

    def layout(self, *, model: str, dtype: str, block_tokens: int) -> KVLayout:
        """One group of full attention. ``model`` is name and revision."""
        entry_bytes = 2 * self.kv_heads * self.head_dim * DTYPES[dtype].itemsize
        group = KVGroup(kind=AttentionKind.FULL, layers=self.layers, entry_bytes=entry_bytes)
        return KVLayout(model=model, dtype=dtype, block_tokens=block_tokens, groups=(group,))


def parse_dtype(name: str) -> torch.dtype:
    """The torch dtype of a setting.

    Raises:
        ModelError: unknown name; the message lists the known ones.
    """
    if name not in DTYPES:
        raise ModelError(f"unknown dtype {name!r}; choose one of {', '.join(DTYPES)}", dtype=name)
    return DTYPES[name]


def read_shape(config: Any) -> DecoderShape:
    """Read a transformers config.

    Raises:
        ModelError: the architecture is not served; the message names it and the reason.
    """
    architecture = _architecture_name(config)
    if getattr(config, "is_encoder_decoder", False):
        raise refused(architecture, "it is an encoder-decoder")
    text = config.get_text_config(decoder=True)
    _refuse_other_kinds(architecture, text)
    _refuse_length_dependent_rope(architecture, text)
    try:
        heads = int(text.num_attention_heads)
        return DecoderShape(
            architecture=architecture,
            layers=int(text.num_hidden_layers),
            kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
            vocab_size=int(text.vocab_size),
            max_context_tokens=int(text.max_position_embeddings),
            window_tokens=_window_tokens(text),
        )
    except (AttributeError, TypeError) as error:
        raise refused(architecture, f"its config does not describe attention heads ({error})") from error


def _architecture_name(config: Any) -> str:
    listed = getattr(config, "architectures", None)
    return str(listed[0]) if listed else str(config.model_type)


def refused(architecture: str, reason: str) -> ModelError:
    """The error for a model this engine does not serve."""
    return ModelError(
        f"the torch engine does not serve {architecture}: {reason}. "
        "Choose a decoder with causal attention over keys and values (Llama, Qwen2, Qwen3, Mistral, Granite, …)",
        architecture=architecture,
    )


def _refuse_other_kinds(architecture: str, text: Any) -> None:
    if other := sorted(set(getattr(text, "layer_types", None) or ()) - _SERVED_LAYERS):
        raise refused(architecture, f"it has layers of kind {', '.join(other)}")
    if any(getattr(text, key, None) for key in _LATENT_KEYS):
        raise refused(architecture, "it keeps latent attention entries")
    if any(getattr(text, key, None) for key in _STATE_KEYS):
        raise refused(architecture, "it keeps states instead of keys and values")


def _window_tokens(text: Any) -> int | None:
    """The window in use. Configs without layer types apply it to every layer."""
    kinds = getattr(text, "layer_types", None)
    in_use = "sliding_attention" in kinds if kinds else getattr(text, "use_sliding_window", True)
    window = getattr(text, "sliding_window", None)
    return int(window) if window and in_use else None


def _refuse_length_dependent_rope(architecture: str, text: Any) -> None:
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind in _LENGTH_DEPENDENT_ROPE:
        raise refused(architecture, f"its rotary scheme {kind!r} depends on the length of the batch")
