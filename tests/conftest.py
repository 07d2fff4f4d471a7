"""Shared fixtures: models to serve, and the proof that a test left nothing behind."""

from __future__ import annotations

import os
import shutil
import tempfile

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # before torch: tests share the cores with the clusters they start

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.cluster.guardian import cluster_processes
from kvpool.config import DEFAULT_MODEL


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's directory; fetched once."""
    from workers.engine.models import resolve_model

    return resolve_model(DEFAULT_MODEL).path


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Path:
    """A random two-layer Llama with the default model's tokenizer: loads in a moment, prefills in milliseconds."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
    )
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    LlamaForCausalLM(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (smollm2_path / name).exists():
            (path / name).write_bytes((smollm2_path / name).read_bytes())
    return path


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """No directory or process of a cluster outlives the tests that started it.

    The tests get a directory for temporary files of their own, so that clusters of others do not count. Its name is
    short because the paths of Ray's sockets have 107 characters at most.
    """
    before = tempfile.tempdir, os.environ.get("TMPDIR")
    own = Path(tempfile.mkdtemp(prefix="kvt-"))
    tempfile.tempdir = os.environ["TMPDIR"] = str(own)
    try:
        yield
        directories = list(own.glob("kvpool-*"))
        left = [str(item) for path in directories for item in (path, *cluster_processes(path))]
        assert left == []
    finally:
        tempfile.tempdir = before[0]
        os.environ.pop("TMPDIR") if before[1] is None else os.environ.update(TMPDIR=before[1])
        shutil.rmtree(own, ignore_errors=True)
