"""No spelling of something hidden reaches the server: by every door, however it is hidden."""

import json
import unicodedata
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import types
from mcp.server import Server

from mcp_sessions import Conversations, current_session
from mcp_sessions.core.spelling import folded
from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore
from tests.core.test_spelling import SERVERS, read_as
from tests.server.test_visibility import server_of
from tests.support.children import child, child_world
from tests.support.duplex import DuplexPeer, DuplexWorld, duplex_world
from tests.support.modern import ModernClient
from tests.support.raw import Json, RawClient
from tests.support.world import world

SECRET, TOOL = "file:///etc/secret", "pay"
URIS = (
    "file:///etc/secret", "file:/etc/secret", "FILE:///etc/secret", "file:///etc\\secret",
    "file://localhost/etc/secret", "file://x/etc/secret", "file:///etc/./x/../secret",
    "file:///x/..%2Fetc%5Csecret", "file:///etc/%73ecret", "file:///etc/%2573ecret",
    "file:////etc//secret", "file:///etc/se\tcret", " file:///etc/secret\n", "file:///etc/SECRET",
    "file:///etc/secret?x=1", "file:///etc/secret#x", "file:///etc/ｓecret", "file:etc/secret",
    "file:///etc/secret%00", "etc/secret", "file:///etc/secret/",
)  # fmt: skip
PLAIN = (SECRET, "FILE:///etc/secret", "file:///etc/%73ecret",
    "file:///etc/SECRET", "file:///etc/secret?x=1", "file:///etc/secret#x", "file:///etc/ｓecret",
    "file:///etc/secret/",
)  # fmt: skip
"""Those that are not refused."""

NAMES = ("pay", "PAY", " pay ", "ｐａｙ", "p\u00aday", "pay\n")
METHODS = ("resources/read", "resources/subscribe", "resources/unsubscribe", "resources/own")

Ask = Callable[[str, Json], Awaitable[Json]]


class Recorder:
    """A server that takes any name, and says which it was sent."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.server = Server[dict[str, Any]](
            "recorder",
            version="1",
            on_call_tool=self._tool,
            on_get_prompt=self._prompt,
            on_read_resource=self._read,
            on_subscribe_resource=self._subscribe,
            on_unsubscribe_resource=self._subscribe,
            on_completion=self._complete,
            on_list_tools=self._tools,
        )

    async def _tools(self, ctx: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[])

    async def _tool(self, ctx: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        if params.name == "hide":
            await current_session().hide(tools=[TOOL], prompts=[TOOL], resources=[SECRET])
        else:
            self.seen.append(params.name)
        return types.CallToolResult(content=[])

    async def _prompt(self, ctx: Any, params: types.GetPromptRequestParams) -> Any:
        self.seen.append(params.name)
        return types.GetPromptResult(messages=[])

    async def _read(self, ctx: Any, params: types.ReadResourceRequestParams) -> Any:
        self.seen.append(params.uri)
        return types.ReadResourceResult(contents=[])

    async def _subscribe(self, ctx: Any, params: Any) -> types.EmptyResult:
        self.seen.append(params.uri)
        return types.EmptyResult()

    async def _complete(self, ctx: Any, params: types.CompleteRequestParams) -> Any:
        ref = params.ref
        self.seen.append(ref.name if isinstance(ref, types.PromptReference) else ref.uri)
        return types.CompleteResult(completion=types.Completion(values=[]))


def is_taken_for_the_secret(sent: str) -> bool:
    """Whether some server takes what it was sent for what is hidden."""
    sent = unicodedata.normalize("NFKC", sent)
    read = (read_as(server, sent) or "" for server in SERVERS.values())
    return folded(sent) == TOOL or any("/etc/secret" in each.lower() for each in read)


async def ask_for_everything(ask: Ask) -> None:
    """Each spelling, by each method that has a name."""
    for uri in URIS:
        for method in METHODS:
            await ask(method, {"uri": uri})
        await ask("completion/complete", reference({"type": "ref/resource", "uri": uri}))
    for name in NAMES:
        await ask("tools/call", {"name": name, "arguments": {}})
        await ask("prompts/get", {"name": name})
        await ask("completion/complete", reference({"type": "ref/prompt", "name": name}))


def reference(ref: Json) -> Json:
    return {"ref": ref, "argument": {"name": "a", "value": "b"}}


@asynccontextmanager
async def door(w: DuplexWorld, kind: str) -> AsyncGenerator[Ask]:
    where, _, era = kind.partition(" ")
    if where == "http":
        meta = {"openai/session": "one"}
        modern, plain = ModernClient(w.inner.carrier), RawClient(w.inner.carrier)
        if era != "modern":
            await plain.initialize()

        async def ask(method: str, params: Json) -> Json:
            if era == "modern":
                return await modern.send(method, params, meta=meta).answer()
            return await plain.send(method, params).answer()

        yield ask
        return
    peer: DuplexPeer = await w.connected(where, modern=era == "modern")

    async def said(method: str, params: Json) -> Json:
        meta = {"openai/session": "one"} if era == "modern" else None
        return await peer.answer(await peer.send(method, params, meta=meta))

    yield said


DOORS = (
    "http handshake",
    "http modern",
    "websocket handshake",
    "websocket modern",
    "stdio handshake",
)


@pytest.mark.parametrize("way", ["hidden", "session.hide"])
@pytest.mark.parametrize("kind", DOORS)
async def test_the_server_sees_no_spelling_of_what_is_hidden(kind: str, way: str) -> None:
    recorder = Recorder()
    hidden = {TOOL, SECRET} if way == "hidden" else set[str]()
    on = Conversations(anonymous=True)
    async with duplex_world(server=recorder.server, hidden=hidden, conversations=on) as w:
        async with door(w, kind) as ask:
            if way == "session.hide":
                await ask("tools/call", {"name": "hide", "arguments": {}})
            await ask_for_everything(ask)
            assert not [sent for sent in recorder.seen if is_taken_for_the_secret(sent)]
            assert len(recorder.seen) > len(URIS)
            said = await ask("resources/read", {"uri": "etc/secret"})
            assert said["error"]["code"] == -32602
            assert "another spelling" in said["error"]["message"]
            await ask("resources/read", {"uri": "file:///etc/hours"})
            assert recorder.seen[-1] == "file:///etc/hours"


@pytest.mark.parametrize("kind", DOORS)
async def test_where_nothing_is_hidden_every_spelling_passes(kind: str) -> None:
    recorder = Recorder()
    async with duplex_world(server=recorder.server) as w, door(w, kind) as ask:
        for uri in (SECRET, "etc/secret", "file:/etc/secret"):
            await ask("resources/read", {"uri": uri})
        assert recorder.seen == [SECRET, "etc/secret", "file:/etc/secret"]


async def test_a_command_sees_none_either(tmp_path: Path) -> None:
    """It has no part in what is hidden, and answers any method."""
    calls = tmp_path / "calls"
    options = {"env": {"CALLS": str(calls)}}
    async with duplex_world(server=child(**options), hidden={TOOL, SECRET}) as w:
        for kind in DOORS:
            async with door(w, kind) as ask:
                for name in NAMES:
                    await ask("tools/call", {"name": name, "arguments": {}})
                for uri in URIS:
                    said = await ask("own/method", {"a": uri})
                    assert said["result"]["mine"]["a"] == uri
                    for method in ("resources/subscribe", "resources/read"):
                        await ask(method, {"uri": uri})
                state = await ask("tools/call", {"name": "state", "arguments": {}})
                assert "secret" not in json.dumps(state).lower()
    seen = calls.read_text().split("\n")
    assert not [sent for sent in seen if is_taken_for_the_secret(sent)]


OPEN: tuple[tuple[str, Json], ...] = (
    ("tools/call", {"name": [TOOL], "arguments": {}}),
    ("tools/call", {"name": "state", "Name": TOOL}),
    ("tools/call", {"NAME": TOOL}),
    ("prompts/get", {"name": [TOOL]}),
    ("prompts/get", {"name": "p", "Name": TOOL}),
    *(
        (f"resources/{method}", params)
        for method in ("read", "subscribe", "unsubscribe")
        for params in ({"uri": [SECRET]}, {"uri": "info://hours", "URI": SECRET}, {"Uri": SECRET})
    ),
    ("completion/complete", reference({"type": "ref/prompt", "name": [TOOL]})),
    ("completion/complete", reference({"type": "ref/resource", "uri": "a://b", "URI": SECRET})),
    ("completion/complete", reference({"type": ["ref/resource"], "uri": SECRET})),
    ("completion/complete", reference({"type": "ref/other", "uri": SECRET})),
    ("completion/complete", reference({"uri": SECRET})),
    ("completion/complete", {"Ref": {"type": "ref/resource", "uri": SECRET}}),
)
"""Requests that leave open which name a server reads."""


@pytest.mark.parametrize("kind", DOORS)
async def test_no_request_that_leaves_its_name_open_reaches_the_server(
    kind: str, tmp_path: Path
) -> None:
    """A command gets what the client sent: nothing before it checks the params."""
    calls = tmp_path / "calls"
    options = {"env": {"CALLS": str(calls)}}
    async with duplex_world(server=child(**options), hidden={TOOL, SECRET}) as w:
        async with door(w, kind) as ask:
            for method, params in OPEN:
                said = await ask(method, params)
                # Over HTTP the header with the name is compared before (-32020).
                codes = {-32602, -32020} if kind == "http modern" else {-32602}
                assert said["error"]["code"] in codes, (method, params)
            await ask("tools/call", {"name": "state", "arguments": {}})
    assert set(calls.read_text().split()) == {"started", "state"}


@pytest.mark.parametrize("named", [True, False])
async def test_nobody_listens_to_a_spelling_of_what_is_hidden(named: bool) -> None:
    """By a listen, whose URIs come back as they were sent; unusual ones are refused."""
    async with world(server=server_of("sdk"), hidden={SECRET}) as w:
        client = ModernClient(w.carrier)
        session = (await client.start())["sessionId"] if named else None
        asked = [*PLAIN]
        received = await client.listening(session, *asked, "info://hours")
        [ack] = await received.has(1)
        assert ack["params"]["notifications"]["resourceSubscriptions"] == [*asked, "info://hours"]
        for uri in (*asked, "info://hours"):
            await w.layer.notify_resource_updated(uri)
        assert [each["params"]["uri"] for each in await received.has_events(1)] == ["info://hours"]
        for uri in set(URIS) - set(asked):
            refused = await client.listen(session, uri).error()
            assert refused["code"] == -32602


async def test_a_subscription_that_is_older_than_what_hides_it_is_not_notified(
    tmp_path: Path,
) -> None:
    """And a command that begins anew is not notified of it either."""
    path = str(tmp_path / "sessions.db")
    async with world(store=SQLiteStore(path), server=child()) as w:
        client = await w.connected()
        session = (await client.start())["sessionId"]
        for uri in (SECRET, "info://hours"):
            await client.result("resources/subscribe", {"uri": uri})
    async with world(store=SQLiteStore(path), server=child(), hidden={SECRET}) as w:
        client = await w.connected()
        await client.result("session/resume", {"sessionId": session})
        assert json.loads(await client.text("state"))["subscribed"] == ["info://hours"]
        for uri in (SECRET, "info://hours"):
            await w.layer.notify_resource_updated(uri)
        stream = client.get()
        await stream.until(lambda: "info://hours" in str(stream.messages), "what is not hidden")
        assert SECRET not in str(stream.messages)


async def test_nothing_is_sent_of_what_is_hidden_below_what_is_not() -> None:
    """A server may tell whoever subscribed to a directory of a file in it."""
    async with child_world(hidden={SECRET}) as w:
        client = await w.connected()
        await client.start()
        await client.result("resources/subscribe", {"uri": "file:///etc"})
        for uri in (SECRET, "FILE:///etc/secret", "file:///etc/hours"):
            await client.text("update", uri=uri)
        stream = client.get()
        await stream.until(lambda: "hours" in str(stream.messages), "what is not hidden")
        assert "secret" not in str(stream.messages)


async def test_no_result_links_to_what_is_hidden_or_holds_it() -> None:
    """Of a tool, of a prompt, and of a resource that is several."""
    link = {"type": "resource_link", "name": "s", "uri": "file:/etc/secret"}
    held = {"type": "resource", "resource": {"uri": SECRET, "text": "the key"}}
    text = {"type": "text", "text": "see"}
    shown = {"type": "resource_link", "name": "h", "uri": "info://hours"}
    blocks: list[types.ContentBlock] = [
        types.TextContent.model_validate(text),
        types.ResourceLink.model_validate(link),
        types.EmbeddedResource.model_validate(held),
        types.ResourceLink.model_validate(shown),
    ]

    async def tool(ctx: Any, params: Any) -> types.CallToolResult:
        return types.CallToolResult(content=blocks)

    async def prompt(ctx: Any, params: Any) -> types.GetPromptResult:
        return types.GetPromptResult(
            messages=[types.PromptMessage(role="user", content=each) for each in blocks]
        )

    async def read(ctx: Any, params: Any) -> types.ReadResourceResult:
        uris = (SECRET, "info://hours", "file:///etc%2fsecret")
        return types.ReadResourceResult(
            contents=[types.TextResourceContents(uri=uri, text="t") for uri in uris]
        )

    server = Server[dict[str, Any]](
        "s", version="1", on_call_tool=tool, on_get_prompt=prompt, on_read_resource=read
    )
    async with duplex_world(server=server, hidden={SECRET}) as w:
        for kind in DOORS:
            async with door(w, kind) as ask:
                said = await ask("tools/call", {"name": "t", "arguments": {}})
                kept = said["result"]["content"]
                assert [each.get("uri", each.get("text")) for each in kept] == [
                    "see",
                    "info://hours",
                ]
                said = await ask("prompts/get", {"name": "p"})
                assert len(said["result"]["messages"]) == 2
                said = await ask("resources/read", {"uri": "info://all"})
                assert [each["uri"] for each in said["result"]["contents"]] == ["info://hours"]


async def test_a_tool_that_needs_a_session_needs_it_in_any_spelling() -> None:
    recorder = Recorder()
    async with world(server=recorder.server) as w:
        w.layer.require_session(tools={TOOL})
        for name in (*NAMES, " " * 5_000 + "pay"):
            said = await (await w.connected()).error("tools/call", {"name": name, "arguments": {}})
            assert said["code"] == -31044
        assert recorder.seen == []


@pytest.mark.parametrize("member", ["Name", "NAME"])
async def test_nor_does_a_call_that_leaves_open_which_tool_it_means(member: str) -> None:
    """A server may read a list as a text, or a member of another case."""
    async with child_world() as w:
        w.layer.require_session(tools={TOOL})
        client = await w.connected()
        for params in ({"name": [TOOL]}, {"name": "state", member: TOOL}, {member: TOOL}):
            assert (await client.error("tools/call", params))["code"] == -31044
        assert (await client.error("tools/call", {"name": TOOL}))["code"] == -31044
