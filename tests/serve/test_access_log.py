"""What a line of the access log says of a request, and what it never does."""

import json
import logging
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from mcp_sessions.ids import digest
from mcp_sessions.serve.access_log import AccessLog

ID = "session-abc"
CALL = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "echo"}}


async def logged(
    caplog: pytest.LogCaptureFixture,
    body: bytes,
    headers: list[tuple[bytes, bytes]] | None = None,
    answer: list[tuple[bytes, bytes]] | None = None,
    pieces: int = 1,
    path: bytes = b"/mcp?a=b",
    verb: str = "POST",
) -> dict[str, Any]:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": answer or []})

    size = max(1, -(-len(body) // pieces))
    parts = [body[at : at + size] for at in range(0, len(body), size)] or [b""]

    async def receive() -> Message:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message: Message) -> None:
        pass

    scope = {"type": "http", "method": verb, "headers": headers or [], "raw_path": path}
    with caplog.at_level(logging.INFO, "mcp_sessions.access"):
        await AccessLog(app)(scope, receive, send)
    record = caplog.records[-1]
    assert ID not in record.getMessage()
    return vars(record)


@pytest.mark.parametrize("pieces", [1, 7])
async def test_the_method_and_the_session_of_a_header(
    caplog: pytest.LogCaptureFixture, pieces: int
) -> None:
    header = [(b"mcp-session-id", ID.encode())]

    said = await logged(caplog, json.dumps(CALL).encode(), header, pieces=pieces)

    assert (said["mcp.method.name"], said["mcp_sessions.session"]) == ("tools/call", digest(ID))
    assert said["path"] == "/mcp"


MINTED = "YTzQN8u7ccDPS-3IskNBjmuspIVW6aqU44BmBPPUpl8"
"""As the ids of sessions are."""


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        (f"/{MINTED}", f"/{digest(MINTED)}"),
        (f"/mcp/{MINTED}/?x={MINTED}", f"/mcp/{digest(MINTED)}/"),
        (f"//a;id={MINTED}", f"//{digest(f'a;id={MINTED}')}"),
        ("/" + "a" * 190 + "/" + MINTED, "/" + "a" * 190 + "/" + digest(MINTED)[:8]),
        ("/.well-known/oauth-protected-resource/mcp",) * 2,
        ("/mcp/v2/no%0Asuch",) * 2,
    ],
)
async def test_what_may_be_an_id_or_a_token_in_a_path_is_a_digest(
    caplog: pytest.LogCaptureFixture, path: str, shown: str
) -> None:
    """SEC2. Whether or not the path is served: the answer to a wrong one comes from other code."""
    said = await logged(caplog, b"", path=path.encode())
    assert said["path"] == shown and MINTED not in said["message"]


async def test_an_http_method_that_a_client_invents_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert (await logged(caplog, b"", verb=MINTED))["method"] == "-"


async def test_the_session_that_was_opened(caplog: pytest.LogCaptureFixture) -> None:
    said = await logged(caplog, b"{}", None, [(b"mcp-session-id", ID.encode())])
    assert said["mcp_sessions.session"] == digest(ID)


@pytest.mark.parametrize("method", ["session/end", "session/resume"])
async def test_the_session_that_a_method_is_about(
    caplog: pytest.LogCaptureFixture, method: str
) -> None:
    message = {**CALL, "method": method, "params": {"sessionId": ID}}
    said = await logged(caplog, json.dumps(message).encode())
    assert (said["mcp.method.name"], said["mcp_sessions.session"]) == (method, digest(ID))


@pytest.mark.parametrize(
    ("body", "method"),
    [
        (b"", None),
        (b"{", None),
        (b"[1]", None),
        (b'{"method": 5}', None),
        (b'{"jsonrpc": "2.0", "method": "session-abc"}', "a method that is not the protocol's"),
        (b'{"id": 1, "method": "tools/call", "params": ["x"]}', "tools/call"),
        (b'{"jsonrpc": "2.0", "result": {}}', "an answer"),
        (b'{"jsonrpc": "2.0", "id": 1, "result": {}}', "an answer"),
        (b'{"method": "tools/call", "params": "' + b"x" * 300_000 + b'"}', None),
    ],
)
async def test_what_is_no_message_is_logged_too(
    caplog: pytest.LogCaptureFixture, body: bytes, method: str | None
) -> None:
    """A client chooses the text of a method: what the protocol does not have is not logged."""
    assert (await logged(caplog, body))["mcp.method.name"] == method
