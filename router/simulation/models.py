"""Layouts of real models, from their published configurations (bf16 unless the model's cache is fp8)."""

from __future__ import annotations

from kvpool.layout import AttentionKind, KVGroup, KVLayout

_FULL, _LATENT, _SLIDING = AttentionKind.FULL, AttentionKind.LATENT, AttentionKind.SLIDING
_SPARSE, _LINEAR = AttentionKind.SPARSE, AttentionKind.LINEAR
_BF16 = 2
_MLA_BYTES = (512 + 64) * _BF16
_V4_ENTRY_BYTES = 448 + 64 * _BF16 + 8  # fp8 latent, bf16 rope part, scales
_DSA_ENTRY_BYTES = 512 + 64 * _BF16 + 16
_INDEX_KEY_BYTES = 128 + 4  # fp8 key and its scale


def _gqa(layers: int, kv_heads: int, head_dim: int) -> KVGroup:
    return KVGroup(_FULL, layers, kv_heads * 2 * head_dim * _BF16)


def _swa(layers: int, kv_heads: int, head_dim: int, window: int) -> KVGroup:
    return KVGroup(_SLIDING, layers, kv_heads * 2 * head_dim * _BF16, window=window)


def _delta_states(layers: int, heads: int, head_dim: int, conv_channels: int) -> KVGroup:
    """Gated delta and KDA layers: an fp32 matrix per head and the last three inputs of a width-4 convolution."""
    layer_bytes = heads * head_dim * head_dim * 4 + 3 * conv_channels * _BF16
    return KVGroup(_LINEAR, layers, 0, fixed_bytes=layers * layer_bytes)


def _v4(csa: int, hca: int, swa: int, top_k: int) -> tuple[KVGroup, ...]:
    return (
        KVGroup(_SPARSE, csa, _V4_ENTRY_BYTES, entry_tokens=4, selector_bytes=_INDEX_KEY_BYTES, top_k=top_k),
        KVGroup(_LATENT, hca, _V4_ENTRY_BYTES, entry_tokens=128),
        KVGroup(_SLIDING, csa + hca + swa, _V4_ENTRY_BYTES, window=128),
    )


_NSA_BYTES = 4 * (192 + 128) * _BF16
_LLAMA_8B_BYTES = 8 * 2 * 128 * _BF16
_MOBA_BLOCK = 4096

MODEL_GROUPS: dict[str, tuple[KVGroup, ...]] = {
    "Llama-3.1-8B": (_gqa(32, 8, 128),),
    "Llama-3.1-70B": (_gqa(80, 8, 128),),
    "Qwen3-8B": (_gqa(36, 8, 128),),
    "Qwen3-32B": (_gqa(64, 8, 128),),
    "Qwen3-235B-A22B": (_gqa(94, 4, 128),),
    "Mistral-7B-v0.1 (SWA 4096)": (_swa(32, 8, 128, 4096),),
    "Gemma-3-27B (52 SWA1024 + 10 full)": (_gqa(10, 16, 128), _swa(52, 16, 128, 1024)),
    "gpt-oss-20b (12 SWA128 + 12 full)": (_gqa(12, 8, 64), _swa(12, 8, 64, 128)),
    "gpt-oss-120b (18 SWA128 + 18 full)": (_gqa(18, 8, 64), _swa(18, 8, 64, 128)),
    "DeepSeek-V3 (MLA bf16)": (KVGroup(_LATENT, 61, _MLA_BYTES),),
    "DeepSeek-V3.2 (DSA, fp8 rows)": (
        KVGroup(_SPARSE, 61, _DSA_ENTRY_BYTES, selector_bytes=_INDEX_KEY_BYTES, top_k=2048),
    ),
    "Kimi-Linear-48B (20 KDA + 7 MLA)": (KVGroup(_LATENT, 7, _MLA_BYTES), _delta_states(20, 32, 128, 3 * 4096)),
    "Qwen3-Next-80B (36 GDN + 12 full)": (_gqa(12, 2, 256), _delta_states(36, 32, 128, 8192)),
    "SmolLM2-135M": (_gqa(30, 3, 64),),
    "DeepSeek-V4-Flash (21 CSA + 20 HCA + 2 SWA)": _v4(21, 20, 2, 512),
    "DeepSeek-V4-Pro (30 CSA + 31 HCA)": _v4(30, 31, 0, 1024),
    "NSA paper 27B-A3B (30 layers)": (
        KVGroup(_SPARSE, 30, _NSA_BYTES, top_k=16 * 64),
        KVGroup(_FULL, 30, _NSA_BYTES, entry_tokens=16),
        KVGroup(_SLIDING, 30, _NSA_BYTES, window=512),
    ),
    "MoBA on Llama-8B (29 MoBA 4096x12 + 3 full)": (
        KVGroup(_FULL, 3, _LLAMA_8B_BYTES),
        KVGroup(_SPARSE, 29, _LLAMA_8B_BYTES, top_k=12 * _MOBA_BLOCK),
        KVGroup(_FULL, 29, 8 * 128 * _BF16, entry_tokens=_MOBA_BLOCK),  # a mean key per block and head
    ),
}


def model_layout(name: str, block_tokens: int = 512) -> KVLayout:
    """Layout of one of `MODEL_GROUPS`; blocks grow to a whole number of the model's entries."""
    groups = MODEL_GROUPS[name]
    step = max(group.entry_tokens for group in groups)
    return KVLayout(name, "bf16", -(-block_tokens // step) * step, groups)
