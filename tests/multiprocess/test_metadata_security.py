"""TLS and tokens in front of the metadata service."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvpool.errors import ConfigError, RequestError, UnavailableError
from kvpool.metadata.client import MetadataClient
from kvpool.metadata.publisher import MetadataPublisher
from kvpool.metadata.security import PREFIX, Security
from kvpool.metadata.watcher import MetadataWatcher
from kvpool.types import Tier
from tests.contract.metadata_support import WAIT_S, Owner, hashes, member, sees
from tests.multiprocess.test_metadata_process import ServerProcess


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for the loopback address, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-keyout", key, "-out", certificate, "-subj", "/CN=kvpool", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True, timeout=WAIT_S,
    )  # fmt: skip
    return certificate, key


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def _works(stack: ExitStack, address: str) -> bool:
    """Every kind of call goes through: unary, publish, watch."""
    chain = hashes(3)
    publisher = MetadataPublisher([address], member(), Owner(chain).snapshot, lambda reason: None)
    stack.callback(publisher.close, leave=False)
    publisher.start()
    watcher = MetadataWatcher([address])
    stack.callback(watcher.close)
    watcher.start()
    with MetadataClient([address]) as client:
        found = publisher.flush(WAIT_S) and client.lookup(chain)
    return found == {member().key: {Tier.DEVICE: 3}} and sees(watcher, chain, member().key, 3)


def test_with_a_token_those_who_have_it_get_in_and_others_learn_why_not(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("sesame\n")
    monkeypatch.setenv(f"{PREFIX}TOKEN_FILE", str(token))
    server = ServerProcess()
    stack.callback(server.end)
    assert _works(stack, server.address)
    token.write_text("guess")
    with MetadataClient([server.address]) as client, pytest.raises(RequestError, match=f"{PREFIX}TOKEN_FILE"):
        client.describe()
    monkeypatch.delenv(f"{PREFIX}TOKEN_FILE")
    with pytest.raises(RequestError, match="token"):
        MetadataPublisher([server.address], member("w9"), Owner().snapshot, lambda reason: None).start()
    channel = stack.enter_context(grpc.insecure_channel(server.address))
    reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_with_certificates_both_sides_prove_themselves(
    stack: ExitStack, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = map(str, pair)
    for name, value in (("CERT", certificate), ("KEY", key), ("CA", certificate)):
        monkeypatch.setenv(PREFIX + name, value)
    server = ServerProcess()
    stack.callback(server.end)
    assert _works(stack, server.address)
    for missing in ("CERT", "KEY"):
        monkeypatch.delenv(PREFIX + missing)
    with MetadataClient([server.address], timeout_s=1) as client, pytest.raises(UnavailableError):
        client.describe()
    monkeypatch.delenv(f"{PREFIX}CA")
    with MetadataClient([server.address], timeout_s=1) as client, pytest.raises(UnavailableError):
        client.describe()


def test_unreadable_or_half_configured_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{PREFIX}CA names /nowhere"):
        Security.from_environment({f"{PREFIX}CA": "/nowhere"})
    present = tmp_path / "cert"
    present.write_bytes(b"x")
    with pytest.raises(ConfigError, match=f"{PREFIX}KEY together"):
        Security.from_environment({f"{PREFIX}CERT": str(present)})
    present.write_bytes(b"two\nlines")
    with pytest.raises(ConfigError, match="one line"):
        Security.from_environment({f"{PREFIX}TOKEN_FILE": str(present)})


def test_a_server_with_an_unreadable_file_ends_with_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{PREFIX}TOKEN_FILE", "/nowhere")
    command = [sys.executable, "-m", "kvpool.metadata.server"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 2
    assert f"{PREFIX}TOKEN_FILE names /nowhere" in done.stderr.strip().splitlines()[-1]


def test_secrets_do_not_show_in_logs() -> None:
    shown = repr(Security(certificate=b"cert", key=b"private", token="sesame"))
    assert "private" not in shown
    assert "sesame" not in shown
