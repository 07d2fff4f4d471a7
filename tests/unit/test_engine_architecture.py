"""Which models the torch engine accepts, and how it refuses the others: by name, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvpool.errors import ModelError
from tests.engine_parity import save_random_model, tiny_llama
from workers.engine.torch_engine import TorchEngine

_BASE: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tiny models gain nothing from threads and lose much on busy cores."""
    torch.set_num_threads(1)


def saved(tmp_path: Path, kind: str, **settings: Any) -> Path:
    """A random model of a transformers config class."""
    return save_random_model(getattr(transformers, f"{kind}Config")(**{**_BASE, **settings}), tmp_path / "model")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Qwen2", {"num_key_value_heads": 2}),
        ("Mistral", {"num_key_value_heads": 1, "sliding_window": None}),
        ("Mistral", {"num_key_value_heads": 1, "sliding_window": 16}),
        (
            "Qwen2",
            {"num_key_value_heads": 2, "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 100},
        ),
        ("Olmo3", {"sliding_window": 6}),
        ("Granite", {"num_key_value_heads": 2, "attention_multiplier": 0.3}),
        ("Olmo2", {}),
        ("Phi3", {"num_key_value_heads": 2}),
        ("Gemma", {"num_key_value_heads": 1, "head_dim": 16}),
        ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 4, "sliding_window": None}),
        ("GPTNeoX", {}),
    ],
)
def test_decoders_that_attend_over_keys_and_values_are_served(
    tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    engine = TorchEngine(saved(tmp_path, kind, **settings), block_tokens=4)
    assert engine.vocab_size == 67
    assert engine.max_context_tokens == 128
    engine.shutdown()
    engine.shutdown()


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("Gemma2", {"head_dim": 8}, "Gemma2Attention asks attention for softcap"),
        ("GptOss", {"num_local_experts": 2, "head_dim": 8}, "GptOssAttention asks attention for s_aux"),
        ("Mamba", {}, "MambaForCausalLM: it "),
        ("Bert", {}, "BertLMHeadModel: BertSelfAttention attends in both directions"),
        ("StableLm", {}, "StableLmAttention did not hand kvpool_step through"),
        ("Bloom", {"n_head": 4, "n_layer": 2}, "BloomForCausalLM: 0 of its 2 layers used the attention interface"),
        ("Llama4Text", {"head_dim": 8, "num_local_experts": 2}, "it has layers of kind chunked_attention"),
        ("Falcon", {}, "FalconForCausalLM: its code has no attention interface"),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rotary scheme 'dynamic' depends on the length",
        ),
    ],
)
def test_other_models_are_refused_by_name_and_reason(
    tmp_path: Path, kind: str, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelError) as caught:
        TorchEngine(saved(tmp_path, kind, **settings))
    assert reason in caught.value.message
    assert "Choose a decoder with causal attention" in caught.value.message


def test_a_model_whose_logits_differ_from_the_plain_code_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The canary of the probe: attention that scales its scores behind the interface's back must be noticed."""
    path = save_random_model(tiny_llama(), tmp_path / "model")
    build = AutoModelForCausalLM.from_pretrained

    def tampered(*arguments: Any, **settings: Any) -> Any:
        model, info = build(*arguments, **settings)
        plain_forward = model.forward

        def forward(**inputs: Any) -> Any:
            output = plain_forward(**inputs)
            if "kvpool_step" not in inputs:
                output.logits = output.logits * 1.01
            return output

        model.forward = forward
        return model, info

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", tampered)
    with pytest.raises(ModelError, match="logits differ from the plain model's"):
        TorchEngine(path)


def test_the_layout_counts_every_byte_of_a_block(tmp_path: Path) -> None:
    path = save_random_model(tiny_llama(), tmp_path / "model")
    layout = TorchEngine(path, block_tokens=8, dtype="bfloat16", model_id="tiny@1").layout
    assert layout.block_bytes == 3 * 2 * 2 * 8 * 8 * 2  # layers, K/V, kv heads, tokens, head dim, bytes
    assert (layout.model, layout.dtype, layout.block_tokens) == ("tiny@1", "bfloat16", 8)
    assert layout.fingerprint() != TorchEngine(path, block_tokens=8).layout.fingerprint()


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    path = save_random_model(tiny_llama(), tmp_path / "model")
    assert TorchEngine(path).eos_token_ids == {3}
    (path / "generation_config.json").write_text('{"eos_token_id": [5, 9]}')
    assert TorchEngine(path).eos_token_ids == {5, 9}


def test_settings_that_cannot_work_are_named(tmp_path: Path) -> None:
    path = save_random_model(tiny_llama(), tmp_path / "model")
    with pytest.raises(ModelError, match="unknown dtype 'int3'; choose one of float32"):
        TorchEngine(path, dtype="int3")
    with pytest.raises(ModelError, match="device 'quantum' is not usable"):
        TorchEngine(path, device="quantum")


def test_a_directory_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        TorchEngine(tmp_path / "nowhere")
    path = save_random_model(tiny_llama(), tmp_path / "model")
    (path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelError, match="cannot load LlamaForCausalLM from"):
        TorchEngine(path)
    (path / "config.json").write_text('{"model_type": "no-such-kind"}')
    with pytest.raises(ModelError, match="no-such-kind"):
        TorchEngine(path)


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    path = save_random_model(tiny_llama(), tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights of LlamaForCausalLM, model\.layers\.1\.mlp\.up_proj"):
        TorchEngine(path)
