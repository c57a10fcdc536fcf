"""HTTPS and WebSocket over TLS, and what is said of a certificate that cannot be used."""

import datetime
import json
import os
import re
import ssl
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from mcp_sessions.errors import ConfigurationError
from mcp_sessions.security import KEYFILE_PASSWORD_VARIABLE
from mcp_sessions.serve.tls import Certificate, certificate_of
from tests.support.hostile import Setup, answer_on, closed_by_peer, hostile
from tests.support.serving import INITIALIZE, read_lines, serving

APP = 'from mcp.server import MCPServer\nmcp = MCPServer("notes")\n'
NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)


class Files:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = trustme.CA()
        self.trusts = ssl.create_default_context()
        self.trusts.load_verify_locations(cadata=self.authority.cert_pem.bytes().decode())

    def issue(
        self, name: str, begins: datetime.datetime | None = None, days: int = 9
    ) -> tuple[str, str]:
        """The files of a new certificate, with its chain, and of its key."""
        begins = begins or NOW - DAY
        issued = self.authority.issue_cert(
            "127.0.0.1", "localhost", not_before=begins, not_after=begins + days * DAY
        )
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        key.touch(0o600)
        issued.private_key_pem.write_to_path(str(key))
        chain = b"".join(each.bytes() for each in issued.cert_chain_pems)
        certificate.write_bytes(chain)
        return str(certificate), str(key)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """One authority for all tests."""
    return Files(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def served(files: Files) -> Iterator[str]:
    (files.folder / "app.py").write_text(APP)
    certificate, key = files.issue("served")
    pair = ("--ssl-certfile", certificate, "--ssl-keyfile", key)
    with serving(files.folder, "app.py", *pair, within=120) as process:
        found = re.search(r"https://(127\.0\.0\.1:\d+/mcp)", read_lines(process, 5))
        assert found is not None, "the address that is printed says https"
        yield found[1]


def test_http_is_served_over_tls(served: str, files: Files) -> None:
    headers = {"Accept": "application/json, text/event-stream"}
    with httpx.Client(verify=files.trusts, timeout=20, trust_env=False) as client:
        answered = client.post(f"https://{served}", json=INITIALIZE, headers=headers)
        # A page of this machine may have come by HTTPS, too.
        origin = {"Origin": "https://localhost:1234"}
        paged = client.post(f"https://{served}", json=INITIALIZE, headers=headers | origin)
    assert answered.status_code == paged.status_code == httpx.codes.OK
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://{served}", timeout=20, trust_env=False)


def test_websocket_is_served_over_tls(served: str, files: Files) -> None:
    protocol = [Subprotocol("mcp")]
    with connect(
        f"wss://{served}", ssl=files.trusts, subprotocols=protocol, proxy=None
    ) as websocket:
        websocket.send(json.dumps(INITIALIZE))
        answer: dict[str, Any] = json.loads(websocket.recv(timeout=20))
    assert answer["result"]["serverInfo"]["name"] == "notes"


def test_a_client_that_does_not_complete_its_handshake_is_cut(files: Files) -> None:
    """It has ``receive_timeout``, and a line in the log counts it.

    No other client connects here: on a busy machine a handshake takes longer than this timeout.
    """
    with over_tls(files, "--receive-timeout", "0.5") as setup:
        silent = setup.connect()
        assert closed_by_peer(silent) == b""
        assert "closed: no complete request came in time" in setup.log()


SILENT: dict[str, bytes] = {
    "nothing": b"",
    "half a handshake": b"\x16\x03\x01\x02\x00\x01\x00\x01",
    "no TLS": b"GET / HTTP/1.1\r\n\r\n",
}


@pytest.mark.skipif(os.name != "posix", reason="has no limit of file descriptors")
@pytest.mark.parametrize("what", SILENT)
def test_connections_without_a_handshake_keep_nobody_out(what: str, files: Files) -> None:
    """Rules 3 and 5 of ``open_connections.py``: before, nothing counted them, and each health check
    failed without a line in the log.
    """
    with over_tls(files, descriptors=64) as setup:
        for _ in range(80):
            setup.connect().sendall(SILENT[what])
        for _ in range(5):
            setup.health()
        assert setup.descriptors() < 64
        if what != "no TLS":
            assert "closed while idle, to make room" in read_lines(setup.process, 1)
        rest = setup.log()
        assert "connections were" not in rest and "Traceback" not in rest, rest


def test_a_stop_does_not_wait_for_a_handshake(files: Files) -> None:
    with over_tls(files) as setup:
        setup.connect()
        setup.health()
        setup.process.terminate()
        _, rest = setup.process.communicate(timeout=25)
        assert "draining" in rest and "graceful shutdown exceeded" not in rest, rest


def test_a_stop_does_not_wait_for_a_client_that_reads_nothing(files: Files) -> None:
    """It has no request, and says nothing when its TLS is ended. Before, a stop took 5 s more."""
    with over_tls(files) as setup:
        with files.trusts.wrap_socket(setup.connect(), server_hostname="127.0.0.1") as idle:
            idle.sendall(setup.head("GET /healthz"))
            assert answer_on(idle).startswith(b"HTTP/1.1 200")
            rest = setup.log()
        assert "every connection is closed" in rest
        assert "graceful shutdown exceeded" not in rest, rest


@contextmanager
def over_tls(files: Files, *arguments: str, descriptors: int | None = None) -> Generator[Setup]:
    certificate, key = files.issue("silent")
    given = ("--ssl-certfile", certificate, "--ssl-keyfile", key, *arguments)
    with hostile(files.folder, *given, descriptors=descriptors, trusts=files.trusts) as setup:
        yield setup


def unusable(certfile: str, keyfile: str | None = None) -> str:
    with pytest.raises(ConfigurationError) as refused:
        Certificate(certfile, keyfile, time.time)
    said = str(refused.value)
    assert "\n" not in said
    return said


def test_what_is_wrong_with_a_file_is_said_in_one_line(files: Files, tmp_path: Path) -> None:
    certificate, key = files.issue("good")
    _, other = files.issue("other")
    nothing, noise = str(tmp_path / "nothing"), tmp_path / "noise"
    noise.touch(0o600)
    noise.write_bytes(b"no PEM at all")
    assert unusable(nothing, key) == f"certificate {nothing}: no such file or directory"
    assert unusable(certificate, nothing) == f"key {nothing}: no such file or directory"
    assert unusable(str(tmp_path), key) == f"certificate {tmp_path}: is a directory"
    assert "there is no certificate in PEM format in it" in unusable(str(noise), key)
    for without in (str(noise), certificate):
        said = unusable(certificate, without)
        assert said == f"key {without}: there is no private key in PEM format in it"
    wrong = f"key {other}: it is not the key of certificate {certificate}"
    assert unusable(certificate, other) == wrong
    with pytest.raises(ConfigurationError, match="ssl_keyfile needs ssl_certfile"):
        certificate_of(None, key)


@pytest.mark.skipif(os.name != "posix", reason="files have no such modes")
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_key_that_others_may_read_or_change_is_refused(files: Files, mode: int) -> None:
    """As a file of API keys. Who has the key can pretend to be the server."""
    certificate, key = files.issue("open")
    Path(key).chmod(mode)
    said = unusable(certificate, key)
    assert said.startswith(f"key {key}: other users may read or change the file")
    assert said.endswith(f"(mode {mode:04o}): run chmod 600 {key}")
    Path(key).chmod(0o400)
    assert Certificate(certificate, key, time.time).facts.names


def test_a_certificate_is_refused_outside_of_its_time(files: Files) -> None:
    expired = files.issue("expired", NOW - 30.5 * DAY, 18)
    assert re.search(r"it expired on \d{4}-\d\d-\d\d, 12 days ago: renew it", unusable(*expired))
    early = files.issue("early", NOW + DAY)
    assert "it is not valid before" in unusable(*early)


def test_a_key_with_a_password_is_opened_by_the_environment(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cryptography.hazmat.primitives import serialization as pem

    certificate, key = files.issue("sealed")
    opened = pem.load_pem_private_key(Path(key).read_bytes(), None)
    sealed = tmp_path / "sealed.key"
    sealed.touch(0o600)
    sealed.write_bytes(
        opened.private_bytes(
            pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.BestAvailableEncryption(b"secret")
        )
    )
    assert f"set {KEYFILE_PASSWORD_VARIABLE} to its password" in unusable(certificate, str(sealed))
    monkeypatch.setenv(KEYFILE_PASSWORD_VARIABLE, "wrong")
    assert unusable(certificate, str(sealed)).endswith("does not open it")
    monkeypatch.setenv(KEYFILE_PASSWORD_VARIABLE, "secret")
    assert Certificate(certificate, str(sealed), time.time).facts.names == (
        "localhost",
        "127.0.0.1",
    )


def test_a_certificate_that_is_read_again_and_wrong_leaves_the_one_before(
    files: Files, tmp_path: Path
) -> None:
    before, after = files.issue("before"), files.issue("after")
    certfile, keyfile = tmp_path / "cert.pem", tmp_path / "key.pem"

    def put(certificate: str, key: str) -> None:
        certfile.write_bytes(Path(certificate).read_bytes())
        keyfile.write_bytes(Path(key).read_bytes())

    def shown() -> bytes:
        """What a client is shown: a handshake in memory."""
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = own.context.wrap_bio(to_server, to_client, server_side=True)
        client = files.trusts.wrap_bio(to_client, to_server, server_hostname="localhost")
        for _ in range(3):
            for side in (client, server):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
        shown = client.getpeercert(binary_form=True)
        assert shown is not None
        return shown

    keyfile.touch(0o600)
    put(*before)
    own = Certificate(str(certfile), str(keyfile), time.time)
    first = shown()
    put(after[0], before[1])
    with pytest.raises(ConfigurationError, match="it is not the key of certificate"):
        own.read_again()
    assert shown() == first
    put(*after)
    own.read_again()
    assert shown() != first
