"""Bad input gets a typed error that names the thing and the way out, and the cluster goes on."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.cluster.launcher import Cluster
from kvpool.config import ClusterConfig, EngineConfig, MetadataConfig, WorkerConfig
from kvpool.errors import ConfigError, IncompatibleError, KVPoolError, ModelError, RequestError
from tests.multiprocess.cluster_kit import ClusterKit, processes_of, wait_until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def kit(tiny_model_path: Path) -> Iterator[ClusterKit]:
    """One worker with room for eight blocks of 16 tokens."""
    engine = EngineConfig(model=str(tiny_model_path), num_blocks=8)
    kit = ClusterKit(Cluster.start(ClusterConfig(workers=(WorkerConfig(count=1, engine=engine),)), name="bad-input"))
    yield kit
    kit.close()


@pytest.fixture(autouse=True)
def _goes_on(kit: ClusterKit) -> Iterator[None]:
    """Whatever a test does, the cluster serves afterwards."""
    yield
    assert len(kit.generate([5, 6, 7], max_tokens=2, ignore_eos=True).tokens) == 2


@pytest.mark.parametrize(
    ("prompt", "options", "named"),
    [
        ("hello", {"max_tokens": -1}, "max_tokens"),
        ("hello", {"max_tokens": 0}, "max_tokens"),
        ("hello", {"temperature": -1.0}, "temperature"),
        ("hello", {"top_p": 2.0}, "top_p"),
        ("hello", {"timeout_s": -1}, "timeout"),
        ([], {}, "prompt"),
        ([1, 2**40], {}, "token"),
        ([1, -5], {}, "token"),
        ([1, 60_000], {}, "60000|60,000"),
        ([1.5, 2], {}, "prompt"),
        (list(range(9000)), {}, "9000|9,000"),
        ([5] * 120, {"max_tokens": 64}, "block"),
        ([{"role": "user"}], {}, "chat template|messages"),
    ],
)
def test_a_malformed_request_is_refused_by_name(
    kit: ClusterKit, prompt: Any, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(RequestError, match=named):
        kit.generate(prompt, **options)


def test_an_unknown_request_id_is_named(kit: ClusterKit) -> None:
    with pytest.raises(RequestError, match="req-unknown"):
        kit.run(kit.client.explain("req-unknown"))


def test_workers_with_another_layout_are_refused_at_join_and_the_pool_goes_on(
    kit: ClusterKit, tiny_model_path: Path
) -> None:
    engine = EngineConfig(model=str(tiny_model_path), block_tokens=32, num_blocks=8)
    with pytest.raises(IncompatibleError, match=r"block_tokens|layout"):
        kit.cluster.add_workers(WorkerConfig(count=1, engine=engine))


def test_workers_with_the_same_layout_join_a_running_pool(kit: ClusterKit, tiny_model_path: Path) -> None:
    added = kit.cluster.add_workers(
        WorkerConfig(count=1, engine=EngineConfig(model=str(tiny_model_path), num_blocks=8))
    )
    assert kit.routes.member(added[0]).key.worker_id == added[0]
    wait_until(lambda: added[0] in kit.status()["workers"], 10, "status shows the worker that was added")


def _start_fails(config: ClusterConfig, kind: type[KVPoolError], named: str) -> None:
    with pytest.raises(kind, match=named):
        Cluster.start(config, name="never").close()


def test_two_layouts_in_one_configuration_are_refused_before_anything_starts(tiny_model_path: Path) -> None:
    groups = tuple(
        WorkerConfig(count=1, engine=EngineConfig(model=str(tiny_model_path), block_tokens=size)) for size in (16, 32)
    )
    _start_fails(ClusterConfig(workers=groups), ConfigError, r"workers\.1\.engine\.block_tokens")


def test_an_unknown_model_is_named_with_those_that_are_known() -> None:
    engine = EngineConfig(model="smollm3-nonsense")
    _start_fails(
        ClusterConfig(workers=(WorkerConfig(engine=engine),)), ModelError, r"smollm3-nonsense.*smollm2-135m-instruct"
    )


def test_an_unsupported_architecture_is_named_and_nothing_stays(tmp_path: Path, tiny_model_path: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=128, hidden_size=16, num_hidden_layers=1, state_size=4)
    MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "mamba" / name).write_bytes((tiny_model_path / name).read_bytes())
    engine = EngineConfig(model=str(tmp_path / "mamba"))
    # Ray runs in this process already, for the module's own cluster; the failed one must leave only that behind.
    _start_fails(ClusterConfig(workers=(WorkerConfig(count=1, engine=engine),)), ModelError, "[Mm]amba")


def test_a_port_in_use_is_named(tiny_model_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = ClusterConfig(
            workers=(WorkerConfig(count=1, engine=EngineConfig(model=str(tiny_model_path))),),
            metadata=MetadataConfig(port=port),
        )
        _start_fails(config, ConfigError, str(port))


def test_a_failed_start_leaves_no_process_behind(kit: ClusterKit, tiny_model_path: Path) -> None:
    test_a_port_in_use_is_named(tiny_model_path)
    assert processes_of("never") == []
    assert processes_of(str(kit.cluster.cluster_dir)) != []
