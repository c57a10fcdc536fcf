"""``mcp-sessions serve --config FILE``: the servers of a host's file, each on its own path."""

import json
import re
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from mcp_sessions.authentication import key_file
from mcp_sessions.cli.serve_options import parsed
from mcp_sessions.cli.serve_several import servers_by_path
from mcp_sessions.cli.servers_file import servers_of
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.external_server import HTTPServer, StdioServer
from mcp_sessions.policy import TaskPolicy
from mcp_sessions.server.upstream.external.children import can_follow
from tests.support.children import CHILD, children_of, is_alive
from tests.support.redis_server import namespace, shared_redis
from tests.support.serving import INITIALIZE, initialize, read_lines, serving

ACCEPT = "application/json, text/event-stream"
ENTRY: dict[str, Any] = {"command": sys.executable, "args": ["-S", CHILD]}


def written(here: Path, entries: object, name: str = "mcpServers") -> str:
    path = here / "mcp.json"
    path.write_text(json.dumps({name: entries}))
    return str(path)


def fetched(url: str) -> int | str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as failed:
        return failed.read().decode() if failed.code == 404 else failed.code


@pytest.mark.parametrize("store", ["memory://", "sqlite:///{server}.db"])
def test_each_server_of_the_file_is_served_and_stopped_with_the_others(
    tmp_path: Path, store: str
) -> None:
    dies = {**ENTRY, "args": [*ENTRY["args"], "dies", "key"]}
    file = written(tmp_path, {"one": ENTRY, "two": {**ENTRY, "per": "shared"}, "broken": dies})
    given = ("--config", file, "--store", store, "--health", "/", "--lazy")
    with serving(tmp_path, *given) as process:
        # On a disk each says first that its keys do not last.
        said = read_lines(process, 7 if store == "memory://" else 10)
        urls = re.findall(r"^  at +(http://127\.0\.0\.1:\d+/(?:one|two|broken)/mcp)$", said, re.M)
        assert len(urls) == 3 and f"serves {file}\n" in said and f"store       {store}" in said
        for url in urls[:2]:
            assert initialize(url)["serverInfo"] == {
                "name": "child",
                "version": "1",
                "ofAnotherKind": True,
            }
        root = urls[0].removesuffix("/one/mcp")
        assert [fetched(root + path) for path in ("/healthz", "/readyz")] == [200, 200]
        nothing = "Not Found. This server speaks MCP at /one/mcp, /two/mcp, /broken/mcp\n"
        assert {fetched(root + path) for path in ("/mcp", "/none/mcp", "/one")} == {nothing}
        children = children_of(process.pid)
        assert len(children) == 4, "two servers, and the guards of their layers"
        process.send_signal(signal.SIGTERM)
        process.wait(20)
        assert not any(is_alive(pid) for pid in children)
    if store != "memory://":
        assert {path.name for path in tmp_path.glob("*.db")} == {"one.db", "two.db", "broken.db"}


def test_each_server_of_a_file_is_tried_and_the_one_that_fails_is_named(tmp_path: Path) -> None:
    dies = {**ENTRY, "args": [*ENTRY["args"], "dies", "key"]}
    file = written(tmp_path, {"good": ENTRY, "broken": dies, "away": {"url": "http://localhost:1"}})
    with serving(tmp_path, "--config", file) as process:
        said = read_lines(process, 7)
        assert "WARNING" not in said, "it serves before that is known"
        said = read_lines(process, 3)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        warnings = [each for each in (said + process.stderr.read()).splitlines() if "WARN" in each]
    assert len(warnings) == 2
    for name, why in (("broken", "status 1: the key is missing"), ("away", "connection refused")):
        (warning,) = [each for each in warnings if f"the server {name}" in each]
        assert why in warning


@pytest.mark.redis
def test_several_processes_serve_a_file_and_a_session_has_one_child_among_them(
    tmp_path: Path,
) -> None:
    """Each request comes on a connection of its own, to whichever process takes it."""
    file = written(tmp_path, {"one": ENTRY, "two": ENTRY})
    store = f"{shared_redis().url}?namespace={namespace()}-{{server}}"
    given = ("--config", file, "--workers", "2", "--store", store, "--drain-delay", "0")
    with serving(tmp_path, *given) as keeper:
        said = read_lines(keeper, 6)
        one, two = re.findall(r"^  at +(http://\S+)$", said, re.M)
        assert (one[-8:], two[-8:]) == ("/one/mcp", "/two/mcp") and "2 workers" in said
        for url in (one, two):
            headers = {"accept": "application/json, text/event-stream"}
            begun = post(url, INITIALIZE, headers)
            headers["mcp-session-id"] = begun.headers["mcp-session-id"]
            headers["mcp-protocol-version"] = "2025-11-25"
            post(url, {"jsonrpc": "2.0", "method": "notifications/initialized"}, headers)
            params: dict[str, Any] = {"name": "count", "arguments": {}}
            call = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": params}
            counts = [result_of(post(url, call, headers).text) for _ in range(8)]
            assert [each["content"][0]["text"] for each in counts] == [f"{n}" for n in range(1, 9)]
            assert httpx.delete(url, headers=headers, trust_env=False).status_code == 200
        workers = children_of(keeper.pid)
        assert len(workers) >= 2
        left = [*workers, *(child for pid in workers for child in children_of(pid))]
        keeper.send_signal(signal.SIGTERM)
        assert keeper.wait(20) == 0
        assert not any(is_alive(pid) for pid in left)


def post(url: str, message: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
    return httpx.post(url, json=message, headers=headers, timeout=20, trust_env=False)


def result_of(body: str) -> dict[str, Any]:
    """Of a response, in whichever form."""
    if not body.startswith("{"):
        body = next(line[6:] for line in body.splitlines() if line.startswith("data: {"))
    return json.loads(body)["result"]


def test_what_hosts_write_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TOKEN", "t$x")
    entries = {
        "command": {
            **ENTRY,
            "type": "stdio",
            "env": {"A": "${TOKEN}"},
            "cwd": str(tmp_path),
            "autoApprove": ["x"],
            "warm": 2,
            "maxChildren": 8,
            "childIdle": 1.5,
        },
        "url": {"url": "https://host/mcp", "headers": {"Authorization": "Bearer ${env:TOKEN}"}},
        "own": {"url": "https://host/mcp", "headers": {"content-type": "application/json"}},
        "typed": {"type": "streamable-http", "url": "https://${HOST:-other}/mcp", "per": "shared"},
        "off": {"disabled": True},
        "not-on": {"enabled": False},
    }
    given = {"per": "principal", "max_children": 9, "start_timeout": 2.0}
    servers = servers_of(written(tmp_path, entries, "servers"), given)
    command, url, own, typed = servers.values()
    assert list(servers) == ["command", "url", "own", "typed"]
    assert isinstance(command, StdioServer) and command.args == ("-S", CHILD)
    assert (command.env["A"], command.cwd, command.per) == ("t$x", str(tmp_path), "principal")
    assert (command.warm, command.max_children) == (2, 8)
    assert (command.title, url.title) == ("the server command", "the server url")
    assert (command.child_idle, command.start_timeout, typed.max_children) == (1.5, 2.0, 9)
    assert isinstance(url, HTTPServer) and url.headers == {"Authorization": "Bearer t$x"}
    assert isinstance(own, HTTPServer) and own.headers == {}
    assert isinstance(typed, HTTPServer) and (typed.url, typed.per) == (
        "https://other/mcp",
        "shared",
    )
    warned = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert warned[0].endswith("command: serve ignores autoApprove")
    assert warned[1:] == ["the header 'content-type' is left out: the client sends it itself"]


def test_each_server_says_which_of_its_calls_are_tasks(tmp_path: Path) -> None:
    policy = {"always": ["build"], "maxTime": 60, "after": 0, "tools": True}
    said = {"own": policy, "yes": True, "no": False, "usual": None}
    entries = {name: {**ENTRY, "tasks": tasks} for name, tasks in said.items()}
    usual = TaskPolicy(after=7)
    servers = servers_of(written(tmp_path, entries), {}, {}, usual)
    assert {name: server.tasks for name, server in servers.items()} == {
        "own": TaskPolicy(after=0, always=("build",), max_time=60, tools=True),
        "yes": usual,
        "no": None,
        "usual": usual,
    }
    assert [server.tasks for server in servers_of(written(tmp_path, entries), {}).values()] == [
        TaskPolicy(after=0, always=("build",), max_time=60, tools=True),
        TaskPolicy(),
        None,
        None,
    ]


def test_each_server_says_where_its_hosts_send_request_keys(tmp_path: Path) -> None:
    usual, own = ("header:Idempotency-Key",), ["meta:claudecode/toolUseId"]
    entries: Any = {
        "a": ENTRY,
        "b": {**ENTRY, "requestKeys": own},
        "c": {**ENTRY, "requestKeys": []},
    }
    servers = servers_of(written(tmp_path, entries), {}, request_keys=usual)
    assert {name: each.request_keys for name, each in servers.items()} == {
        "a": usual,
        "b": tuple(own),
        "c": (),
    }
    assert not can_follow(servers["a"], servers["b"])


def test_a_server_whose_tasks_changed_is_served_anew(tmp_path: Path) -> None:
    before, same, after = (
        servers_of(written(tmp_path, {"a": {**ENTRY, "tasks": tasks}}), {})["a"]
        for tasks in (True, True, False)
    )
    assert can_follow(before, same)
    assert not can_follow(before, after)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ([], "a: must be an object"),
        ({}, "a: command must be a string"),
        ({"command": None}, "a: command must be a string, if there is no url"),
        ({**ENTRY, "disabled": "yes"}, "a: disabled must be true or false"),
        ({**ENTRY, "enabled": []}, "a: enabled must be true or false"),
        ({"type": ["http"], "url": "https://host/"}, "a: type: stdio or http"),
        ({**ENTRY, "env": {"K": "${input:key}"}}, "a: env.K: only editors know ${input:key}"),
        ({"command": "no-such-command"}, "a: command not found: no-such-command"),
        ({**ENTRY, "args": "-y"}, "a: args must be a list of strings"),
        ({**ENTRY, "env": {"A": 1}}, "a: env must be an object of strings"),
        (
            {**ENTRY, "env": {"A": "${NOT_SET_HERE}"}},
            "a: env.A: the variable NOT_SET_HERE is not set",
        ),
        ({**ENTRY, "env": {"P": "1", "PORT": 8080}}, "an object of strings, and PORT is none"),
        ({**ENTRY, "env": {"A": "${prompt:key}"}}, "a: env.A: only editors know ${prompt:key}"),
        ({**ENTRY, "cwd": "${workspaceFolder}/x"}, "a: cwd: only editors know ${workspaceFolder}"),
        ({**ENTRY, "env": {"A": "${HOME-x}"}}, "a: env.A: ${HOME-x} is no variable"),
        ({**ENTRY, "env": {"A": "${NO:-${HOME}}"}}, "a: env.A: the default of ${NO} has a"),
        ({"url": "https://h/", "headers": {"A": "Bearer ${EMPTY}"}}, "begins or ends with a space"),
        ({**ENTRY, "cwd": "/no/such/place"}, "a: cwd: no such directory"),
        ({**ENTRY, "per": "tenant"}, "a: per must be"),
        ({**ENTRY, "maxChildren": 0}, "a: maxChildren must be at least 1"),
        ({**ENTRY, "maxChildren": 1.5}, "a: maxChildren must be a whole number"),
        ({**ENTRY, "warm": True}, "a: warm must be a whole number"),
        ({**ENTRY, "childIdle": "soon"}, "a: childIdle must be a time"),
        ({**ENTRY, "childIdle": 1e999}, "a: childIdle must be a number of seconds"),
        ({"url": "https://host/", "warm": 1}, "a: warm is only for commands"),
        ({**ENTRY, "type": "http"}, "is not for servers of type http"),
        ({**ENTRY, "url": "https://host/"}, "is not for servers of type http"),
        ({"type": "carrier"}, "a: type: stdio or http"),
        ({**ENTRY, "requestKeys": "header:X"}, "a: requestKeys must be a list of places"),
        (
            {**ENTRY, "requestKeys": ["X"]},
            "a: requestKeys must be header:NAME or meta:NAME, not 'X'",
        ),
        ({**ENTRY, "tasks": "yes"}, "a: tasks must be true, false or an object"),
        ({**ENTRY, "tasks": {"every": ["build"]}}, "a: tasks has no every"),
        (
            {**ENTRY, "tasks": {"always": "build"}},
            "tasks: always must be a list of texts, not a",
        ),
        ({**ENTRY, "tasks": {"after": "soon"}}, "a: tasks.after must be a time"),
        ({**ENTRY, "tasks": {"maxTasks": 1.5}}, "a: tasks: maxTasks must be a whole number"),
        ({**ENTRY, "tasks": {"ttl": 0}}, "a: tasks: ttl must be a positive number"),
        ({"url": "ftp://host"}, "a: 'ftp://host': an address begins with http:// or https://"),
        ({"url": "https://host", "headers": {"A": "b\nc"}}, "a: the header 'A' cannot be sent"),
    ],
)
def test_an_entry_that_cannot_be_served_is_named_in_one_line(
    tmp_path: Path,
    entry: object,
    said: str,
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EMPTY", "")
    file = written(tmp_path, {"a": entry})
    error = refused("serve", "--config", file)
    assert f"{file}, line 1: a: " in error and said in error


@pytest.mark.parametrize("kind", ["sse", "ws"])
def test_a_server_of_a_kind_that_is_not_spoken_keeps_no_other_from_being_served(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Hosts that speak it have such entries: they are no mistake, whatever else they say."""
    old = {"type": kind, "url": "${NO_SUCH}", "headers": {"A": 1}, "perhaps": True}
    servers = servers_of(written(tmp_path, {"old": old, "new": {"url": "https://h/mcp"}}), {})
    assert list(servers) == ["new"]
    (warned,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert ": old is not served: " in warned and "only Streamable HTTP" in warned


@pytest.mark.parametrize(
    "entry",
    [
        {"serverUrl": "https://host/mcp"},
        {"httpUrl": "https://host/mcp"},
        {"type": "streamableHttp", "url": "https://host/mcp", "disabled": False},
        {"type": "streamable_http", "url": "https://host/mcp", "enabled": True},
    ],
)
def test_what_hosts_call_a_url_is_one(
    tmp_path: Path, entry: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    (server,) = servers_of(written(tmp_path, {"a": entry}), {}).values()
    assert isinstance(server, HTTPServer) and server.url == "https://host/mcp"
    assert not caplog.records


def test_what_hosts_leave_empty_and_what_is_no_path_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("EMPTY", "")
    entry = {**ENTRY, "url": None, "cwd": None, "headers": None}
    entry["env"] = {"A": "${EMPTY:-b}", "B": "{time} {level}", "C": "$HOME"}
    names = ["github.com/modelcontextprotocol/servers", "my toy", "@scope/toy"]
    servers = servers_of(written(tmp_path, dict.fromkeys(names, entry)), {})
    assert list(servers) == ["github.com-modelcontextprotocol-servers", "my-toy", "scope-toy"]
    server = servers["my-toy"]
    assert isinstance(server, StdioServer) and server.title == "the server my toy"
    assert {name: server.env[name] for name in "ABC"} == {
        "A": "b",
        "B": "{time} {level}",
        "C": "$HOME",
    }
    (warned, *_) = [record.getMessage() for record in caplog.records]
    assert warned == "env.C: $NAME is not expanded here; write ${NAME}"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_comments_and_last_commas_are_read_over_as_editors_do(
    tmp_path: Path, encoding: str
) -> None:
    file = tmp_path / "mcp.json"
    text = """{ // the "servers" of this, and /* no comment
  "servers": {
    "a": {"url": "https://host//mcp/*x*/", "headers": {"A": "b\\\\", "C": ",}",}, /* "x": 1
    */ },
  }, // last
}"""
    file.write_text(text, encoding=encoding)
    (server,) = servers_of(str(file), {}).values()
    assert isinstance(server, HTTPServer) and server.url == "https://host//mcp/*x*/"
    assert server.headers == {"A": "b\\", "C": ",}"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{/*\n*/\nb}", "line 3"),
        ('{"mcpServers": {"a": "', "Unterminated string"),
        ("{/*", "line 1"),
        ("", "line 1, column 1: Expecting value"),
        ('{\n"mcpServers": {"a": {}}\n"b"}', "line 3"),
        ("[]", 'must be {"mcpServers"'),
        ("{}", 'must be {"mcpServers"'),
        ('{"mcpServer": {"a": {}}}', "did you mean mcpServers?"),
        ('{"mcpservers": {"a": {}}}', "did you mean mcpServers?"),
        ('{"servers": {}, "mcpServers": {}}', "both mcpServers and servers"),
        ('{"mcpServers": {}}', "there is no server in it"),
        ('{"mcpServers": {"a": {"disabled": true}}}', "there is no server in it"),
        ('{"mcpServers": {"a": {"type": "sse"}}}', "there is no server in it that can be served"),
        ('{"mcpServers": {"a": {}, "a": {}}}', "the name 'a' is there twice"),
        ('{"mcpServers": {"..": {}}}', "its name is no path, or that of another one"),
        (
            '{"mcpServers": {"a b": {"url": "https://h/"}, "a/b": {"url": "https://h/"}}}',
            "a/b: its name is no path, or that of another one",
        ),
        ("[" * 100_000, "not JSON"),
        (" " * 2_000_000, "more than 1048576 bytes"),
        ("\xff", "not JSON"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "mcp.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigurationError, match=re.escape(said)) as refused:
        servers_of(str(file), {})
    assert "\n" not in str(refused.value)


def test_a_variable_is_passed_on_to_all_commands_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was refused, so each entry of a host's file had to be changed."""
    monkeypatch.setenv("TOKEN", "here")
    entries = {"a": ENTRY, "b": {**ENTRY, "env": {"A": "own"}}, "url": {"url": "https://host/mcp"}}
    file = written(tmp_path, entries)
    options = parsed(["--config", file, "--env", "TOKEN", "--env", "A=1"], {})
    servers = servers_by_path(options)
    for path, value in (("/a/mcp", "1"), ("/b/mcp", "own")):
        server = servers[path]
        assert isinstance(server, StdioServer)
        assert (server.env["TOKEN"], server.env["A"]) == ("here", value)
    assert servers.keys() == {"/a/mcp", "/b/mcp", "/url/mcp"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--store", "sqlite:///s.db"],
            "--store: each server of the --config file needs its own store",
        ),
        (["--stdio"], "--stdio serves one server"),
        (["--cwd", "/"], "--cwd is only for -- COMMAND"),
        (["--header", "A: 1"], "--header is only for a URL"),
    ],
)
def test_options_that_do_not_go_with_a_file_are_one_line(
    tmp_path: Path, arguments: list[str], said: str, refused: Callable[..., str]
) -> None:
    assert said in refused("serve", "--config", written(tmp_path, {"a": ENTRY}), *arguments)


@pytest.mark.parametrize("more", [["app.py"], ["--", "npx"]])
def test_a_file_or_one_server_is_served(more: list[str], refused: Callable[..., str]) -> None:
    assert "--config serves the servers of its file" in refused(
        "serve", "--config", "mcp.json", *more
    )


def test_a_file_that_is_not_there_is_one_line(refused: Callable[..., str]) -> None:
    assert "/no/such/file.json: there is no folder /no/such" in refused(
        "serve", "--config", "/no/such/file.json"
    )


def test_an_entry_may_need_scopes(tmp_path: Path) -> None:
    auth = {"scopes": ["files"], "tools": {"delete_*": ["files.write"]}}
    found = servers_of(written(tmp_path, {"a": {**ENTRY, "auth": auth}, "b": ENTRY}), {})
    assert (found["a"].scopes, found["a"].tool_scopes) == (
        ("files",),
        {"delete_*": ("files.write",)},
    )
    assert not found["b"].asks_for_scopes


@pytest.mark.parametrize(
    ("auth", "said"),
    [
        ("files", "auth must be an object"),
        ({"scopes": "files"}, "scopes must be a list of texts, not a str"),
        ({"scopes": ["a b"]}, "scopes: must be a list of scopes"),
        ({"tools": ["delete"]}, "auth.tools must be a mapping, not a list"),
        ({"tools": {"delete": "files"}}, "each value of auth.tools must be a list of texts"),
        ({"tools": {"delete": [1]}}, "each value of auth.tools must be a text, not an int"),
        ({"tools": {"": ["a"]}}, "auth.tools: a pattern, or its list of scopes, is empty"),
        ({"tools": {"delete": []}}, "auth.tools: a pattern, or its list of scopes, is empty"),
        ({"CLIENT_ID": "mine", "scopes": ["a"]}, "auth: has scopes and tools, and no CLIENT_ID"),
    ],
)
def test_scopes_that_are_not_understood_are_no_lock_and_are_refused(
    tmp_path: Path, auth: Any, said: str
) -> None:
    """Some hosts have ``auth`` for what they themselves send."""
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        servers_of(written(tmp_path, {"a": {**ENTRY, "auth": auth}}), {})


@pytest.mark.parametrize("lock", [(), ("--no-auth",)])
def test_scopes_need_authentication(
    tmp_path: Path, refused: Callable[..., str], lock: tuple[str, ...]
) -> None:
    file = written(tmp_path, {"a": {**ENTRY, "auth": {"scopes": ["files"]}}})
    assert "a: scopes need authentication, such as --api-keys FILE" in refused(
        "serve", "--port", "0", "--config", file, *lock
    )


def test_keys_with_scopes_reach_the_servers_of_a_file_that_they_are_for(tmp_path: Path) -> None:
    keys = str(tmp_path / "keys.json")
    made: dict[str, str] = {}
    for name, scopes in (("reads", ["one"]), ("writes", ["one", "two"])):
        key, entry = key_file.minted(name, scopes, time.time(), None)
        key_file.change(keys, lambda before, entry=entry: [*before, entry])
        made[name] = key
    entries = {
        "one": {**ENTRY, "auth": {"scopes": ["one"], "tools": {"echo": ["two"]}}},
        "two": {**ENTRY, "auth": {"scopes": ["two"]}},
    }
    given = ("--config", written(tmp_path, entries), "--api-keys", keys, "--lazy")
    with serving(tmp_path, *given) as process:
        urls = re.findall(r"^  at +(http://\S+)$", read_lines(process, 6), re.M)

        def status(name: str, url: str) -> int:
            return httpx.post(
                url,
                json=INITIALIZE,
                headers={"Authorization": f"Bearer {made[name]}", "Accept": ACCEPT},
                trust_env=False,
                timeout=20,
            ).status_code

        assert [status("reads", url) for url in urls] == [200, 403]
        assert [status("writes", url) for url in urls] == [200, 200]
