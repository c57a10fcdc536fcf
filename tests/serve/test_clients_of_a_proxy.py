"""A server behind a proxy that it trusts, or trusts not: who its clients are."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.serving import INITIALIZE, serving

APP = 'from mcp.server import MCPServer\nmcp = MCPServer("notes")\n'
ACCEPT = {"Accept": "application/json, text/event-stream"}
ADA, BOB = "203.0.113.7", "203.0.113.8"


def started(process: Any) -> str:
    """The address of a server, once it serves."""
    for line in process.stderr:
        found = re.search(r"http://(127\.0\.0\.1:\d+/mcp)", line)
        if found is not None:
            return found[1]
    raise AssertionError("it did not start")


def stopped(process: Any) -> str:
    """The rest of the log, after the server has stopped."""
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate()
    assert process.returncode == 0
    return said


def initialize(address: str, client: str) -> Any:
    headers = {**ACCEPT, "X-Forwarded-For": client}
    return httpx.post(
        f"http://{address}", json=INITIALIZE, headers=headers, timeout=20, trust_env=False
    ).json()


@pytest.mark.parametrize("trusted", [True, False, None])
def test_log_audit_and_limits_name_the_client_of_a_trusted_proxy(
    tmp_path: Path, trusted: bool | None
) -> None:
    """What another peer says of its clients counts for nothing: anybody can say it. If no proxy is
    named (None), nobody is believed, also not on loopback.
    """
    (tmp_path / "app.py").write_text(APP)
    audit, proxies = tmp_path / "audit", "127.0.0.1" if trusted else "192.0.2.1"
    named = () if trusted is None else ("--forwarded-allow-ips", proxies)
    given = ("app.py", "--audit", str(audit), "--access-log")
    with serving(
        tmp_path, *given, *named, "--max-requests-per-principal", "0.001", within=120
    ) as process:
        address = started(process)
        answers = [initialize(address, client) for client in (ADA, ADA, BOB)]
        said = stopped(process)
    refused = [answer.get("error", {}).get("data", {}).get("limit") for answer in answers]
    limit = "max_requests_per_principal"
    assert refused == ([None, limit, None] if trusted else [None, limit, limit])
    of = [ADA, ADA, BOB] if trusted else ["127.0.0.1"] * 3
    assert re.findall(r"access: (\S+) POST /mcp", said) == of
    entries = [json.loads(line) for line in audit.read_text().splitlines()]
    asked = [each["client.address"] for each in entries if "mcp.method.name" in each]
    assert asked == of
    assert f"The limit {limit} (0.001) is reached. To raise it, set {limit} in" in said
