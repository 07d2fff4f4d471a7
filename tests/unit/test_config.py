"""Settings: defaults work, every mistake is named with the way out."""

from pathlib import Path

import pytest

from kvpool.config import ClusterConfig, load_config, parse_config
from kvpool.errors import ConfigError


def test_defaults_are_three_mixed_workers_and_one_metadata_server() -> None:
    config = ClusterConfig()
    assert (config.num_workers, config.metadata.replicas) == (3, 1)


def test_a_toml_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "kvpool.toml"
    path.write_text("[[workers]]\ncount = 2\n[workers.engine]\nnum_blocks = 64\n[metadata]\nreplicas = 2\n")
    config = load_config(path)
    assert (config.num_workers, config.workers[0].engine.num_blocks, config.metadata.replicas) == (2, 64, 2)


def test_an_unknown_key_is_named_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"workers\.0\.engine\.block_token.*did you mean 'block_tokens'"):
        parse_config({"workers": [{"engine": {"block_token": 16}}]})


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"workers": [{"count": 0}]}, "workers.0.count"),
        ({"workers": [{"role": "chef"}]}, "workers.0.role"),
        ({"metadata": {"port": 70000}}, "metadata.port"),
        ({"workers": []}, "at least one group"),
        ({"router": {"max_records": "many"}}, "router.max_records"),
    ],
)
def test_a_wrong_value_is_named(data: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        parse_config(data)


def test_a_missing_or_broken_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("[workers")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(tmp_path / "broken.toml")


def test_routers_and_replicas_cannot_have_the_same_ports_for_their_metrics() -> None:
    parse_config({"router": {"count": 2, "metrics_port": 9100}, "metadata": {"metrics_port": 9102}})
    with pytest.raises(ConfigError, match="9100 to 9101 and 9101 to 9101; move one"):
        parse_config({"router": {"count": 2, "metrics_port": 9100}, "metadata": {"metrics_port": 9101}})
