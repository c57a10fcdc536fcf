"""A server on stdio, in plain Python and without an SDK, that can be notified how to misbehave.

``child_server.py [MISDEED [ARGUMENT]]``; see ``main``. Its tools are those of ``tool``. It counts
its calls in a file named in ``CALLS``, so that a test sees what ran twice.
"""

# It is started some hundred times: what is imported here costs more than what it does.
from __future__ import annotations

import json
import os
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

Json = dict[str, "Any"]

count: int = 0
"""What this process remembers: how often it was asked."""

subscribed: list[str] = []
level = "none"
client: Json = {}
asked = 0

asks_later: list[Any] = []
"""The requests whose calls wait until another one has them ask."""

later: list[Json] = []
"""What came while it asked."""


def say(message: Json) -> None:
    end = "\r\n" if sys.argv[1:2] == ["windows"] else "\n"
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + end)
    sys.stdout.flush()


def receive() -> Json:
    """The next message that was not received yet."""
    return later.pop(0) if later else read()


def read() -> Json:
    """Read one message; the end of the input is the end of this process."""
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    return json.loads(line)


def ask(method: str, params: Json) -> Json:
    """Ask the client, and answer nobody else meanwhile."""
    global asked
    asked += 1
    say({"id": f"q{asked}", "method": method, "params": params})
    while (message := read()).get("id") != f"q{asked}":
        later.append(message)
    return message


def text(value: object) -> Json:
    return {"content": [{"type": "text", "text": str(value)}], "ofAnotherKind": {"kept": True}}


def note(word: str) -> None:
    """Leave a line in the file that ``CALLS`` names."""
    if "CALLS" in os.environ:
        with open(os.environ["CALLS"], "a") as file:
            file.write(f"{word}\n")


def tool(request: Json) -> Json | None:
    global count
    params: Json = request["params"]
    name: str = params["name"]
    arguments: Json = params.get("arguments") or {}
    count += 1
    note(name)
    match name:
        case "echo":
            return text(arguments["text"])
        case "count":
            return text(count)
        case "mark":
            note(f"ran {arguments['text']}")
            return text(count)
        case "mark_and_wait":
            note(f"ran {arguments['text']}")
            time.sleep(arguments.get("seconds", 600))
            return text("waited")
        case "pid":
            return text(os.getpid())
        case "params":
            return text(json.dumps(params, sort_keys=True))
        case "client":
            return text(json.dumps(client, sort_keys=True))
        case "environ":
            return text(json.dumps({"env": dict(os.environ), "cwd": os.getcwd()}))
        case "state":
            return text(json.dumps({"level": level, "subscribed": sorted(subscribed)}))
        case "progress":
            token = params["_meta"]["progressToken"]
            for step in range(1, arguments.get("steps", 2) + 1):
                report = {"progressToken": token, "progress": step, "ofAnotherKind": step}
                if "size" in arguments:
                    report["message"] = "x" * arguments["size"]
                say({"method": "notifications/progress", "params": report})
            return text("reported")
        case "log":
            notified: Json = {"level": arguments.get("level", "info"), "data": arguments["text"]}
            say({"method": "notifications/message", "params": notified})
            return text("logged")
        case "update":
            about = {"uri": arguments["uri"]}
            say({"method": "notifications/resources/updated", "params": about})
            return text("updated")
        case "changed":
            say({"method": "notifications/tools/list_changed"})
            return text("changed")
        case "ask":
            schema = {"type": "object", "properties": {"answer": {"type": "string"}}}
            question: Json = {"message": arguments["question"], "requestedSchema": schema}
            answer = ask("elicitation/create", question)
            return text(json.dumps(answer.get("result") or answer.get("error"), sort_keys=True))
        case "ask twice":
            asked_for: Json = {"message": "one", "requestedSchema": {"type": "object"}}
            answers = [ask("elicitation/create", {**asked_for, "message": m}) for m in "ab"]
            report = {"progressToken": params.get("_meta", {}).get("progressToken"), "progress": 1}
            say({"method": "notifications/progress", "params": report})
            return text(json.dumps([answer.get("result") for answer in answers]))
        case "hold" | "ask later":
            asks_later.append(request["id"])
            return None
        case "have it ask":
            # Of which of the calls this is nothing says.
            asking, *_ = asks_later
            form: Json = {"message": "how many?", "requestedSchema": {"type": "object"}}
            say({"id": "late", "method": "elicitation/create", "params": form})
            say({"id": request["id"], "result": text("asked")})
            while (said := read()).get("id") != "late":
                if arguments.get("until") == said.get("method"):
                    say({"id": asking, "result": text("by itself")})
                later.append(said)
            say({"id": asking, "result": text(json.dumps(said.get("result") or said["error"]))})
            return None
        case "ask in vain":
            say({"id": "vain", "method": "roots/list"})
            later.append(read())
            return text("x" * int(arguments["size"]))
        case "list roots":
            return text(json.dumps(ask("roots/list", {}).get("result")))
        case "wait":
            # Until it is cancelled.
            while (message := receive()).get("method") != "notifications/cancelled":
                pass
            note(f"cancelled {message['params']['requestId'] == request['id']}")
            return None
        case "leave":
            # Something of its own, in its group, that holds its pipes.
            import subprocess

            other = subprocess.Popen(
                [sys.executable, "-c", "import signal, time\nsignal.signal(15, 1)\ntime.sleep(600)"]
            )
            return text(other.pid)
        case "leave apart":
            # In a group of its own, where nobody looks for it.
            import subprocess

            program = [sys.executable, "-c", "import time\ntime.sleep(600)"]
            return text(subprocess.Popen(program, start_new_session=True).pid)
        case "large":
            return text("x" * int(arguments["size"]))
        case "endless":
            size = int(arguments["size"])
            sys.stdout.write('{"jsonrpc":"2.0","result":{"x":"')
            for _ in range(size // 1_000_000):
                sys.stdout.write("x" * 1_000_000)
            sys.stdout.write('"},"id":' + json.dumps(request["id"]) + "}\n")
            sys.stdout.flush()
            return None
        case "anonymous":
            sys.stdout.write('{"x":"' + "x" * int(arguments["size"]) + '"}\n')
            sys.stdout.flush()
            return None
        case "die":
            sys.stderr.write("a last word\n")
            sys.exit(3)
        case "half":
            sys.stdout.write('{"jsonrpc":"2.0","id":')
            sys.stdout.flush()
            sys.exit(0)
        case "no_json":
            answer = {"jsonrpc": "2.0", "id": request["id"], "result": {"n": "?"}}
            if arguments.get("id") == "last":
                answer["id"] = answer.pop("id")
            line = json.dumps(answer).replace('"?"', arguments["given"])
            sys.stdout.buffer.write(line.encode("latin-1") + b"\n")
            sys.stdout.flush()
            return None
        case "prints":
            given = arguments["given"].replace("@", json.dumps(request["id"]))
            sys.stdout.write(given.replace("$", "x" * arguments.get("size", 0)) + "\n")
            sys.stdout.flush()
            return None
        case "no_id":
            say({"id": json.loads(arguments["id"]), "result": text("whose?")})
            return text("later")
        case "twice":
            say({"id": request["id"], "result": text("first")})
            return text("second")
        case "malformed":
            say({"id": request["id"], "result": "no object"})
            return None
        case "noise":
            sys.stdout.write(("no message".ljust(109) + "\n") * int(arguments["lines"]))
            sys.stdout.flush()
            return text("noisy")
        case "errors":
            for number in range(int(arguments["lines"])):
                sys.stderr.write(f"error {number} " + "e" * 80 + "\n")
            sys.stderr.flush()
            return text("told")
        case "pings":
            # Whose answers it does not read.
            for number in range(int(arguments["count"])):
                say({"id": f"{number} " + "p" * int(arguments["size"]), "method": "ping"})
            time.sleep(600)
        case "deaf and mute":
            # Once there is something that it does not read.
            select.select([0], [], [])
            os.close(0)
            time.sleep(600)
        case "deaf":
            os.close(0)
            say({"id": request["id"], "result": text("deaf")})
            time.sleep(600)
        case _:
            # A server that dies of it is started again, and tests would compare its deaths.
            unknown = {"code": -32602, "message": f"Unknown tool: {name}"}
            say({"id": request["id"], "error": unknown})
            return None
    raise AssertionError("unreachable")


def serve(request: Json) -> None:
    global level
    method: str = request["method"]
    params: Json = request.get("params") or {}
    result: Json | None = {}
    match method:
        case "tools/call":
            result = tool(request)
        case "tools/list":
            schema: Json = {"type": "object"}
            if sys.argv[1:2] == ["headers"]:
                region = {"type": "string", "x-mcp-header": "Region"}
                schema["properties"] = {"region": region}
            result = {"tools": [{"name": "echo", "inputSchema": schema}]}
        case "resources/list":
            result = {"resources": [{"uri": "test://a", "name": "a"}]}
        case "resources/read":
            roots = ask("roots/list", {}).get("result")
            contents = [{"uri": params["uri"], "text": json.dumps(roots)}]
            result = {"contents": contents}
        case "completion/complete":
            # As a tool might: it logs, and asks.
            data = {"level": "error", "data": params["argument"]["value"]}
            say({"method": "notifications/message", "params": data})
            question: Json = {"message": params["argument"]["value"], "requestedSchema": {}}
            answer = ask("elicitation/create", question)
            notified = answer.get("result") or answer["error"]
            result = {"completion": {"values": [json.dumps(notified, sort_keys=True)]}}
        case "resources/subscribe" if params["uri"] == "test://refused":
            say({"id": request["id"], "error": {"code": -32602, "message": "no such resource"}})
            return
        case "resources/subscribe" if params["uri"].startswith("test://mute"):
            return
        case "resources/subscribe":
            subscribed.append(params["uri"])
        case "resources/unsubscribe":
            subscribed.remove(params["uri"])
        case "logging/setLevel" if sys.argv[1:2] == ["mute about levels"]:
            note("level")
            return
        case "logging/setLevel":
            level = params["level"]
        case "ping":
            pass
        case "own/method":
            result = {"mine": params}
        case _:
            error = {"code": -32601, "message": "Method not found", "data": method}
            say({"id": request["id"], "error": error})
            return
    if result is not None:
        say({"id": request["id"], "result": result})
    if sys.argv[1:2] == ["logs late"]:
        say({"method": "notifications/message", "params": {"level": "error", "data": method}})


def is_refused(misdeed: str, name: str, request: Json) -> bool:
    """Whether a client may not shake hands."""
    return misdeed == "refuses" and request["params"]["clientInfo"]["name"] == name


def main(misdeed: str = "", argument: str = "") -> None:
    global client
    match misdeed:
        case "banner":
            for _ in range(int(argument)):
                sys.stdout.write("Welcome! " * 30 + "\n")
        case "windows":
            sys.stdout.buffer.write(b"\xef\xbb\xbf")
        case "dies":
            note("started")
            sys.exit(f"the {argument} is missing")
        case "silent":
            note("started")
            time.sleep(600)
        case "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            note(str(os.getpid()))
        case "early":
            say({"id": "early", "method": "roots/list"})
            say({"method": "notifications/message", "params": {"level": "info", "data": "early"}})
            say({"id": "p", "method": "ping"})
        case _:
            pass
    while (request := receive())["method"] != "initialize" or is_refused(
        misdeed, argument, request
    ):
        if misdeed == "impatient":
            note("started")
            sys.exit("that is no handshake")
        error: Json = {"code": -32601, "message": "Method not found", "data": request["method"]}
        if request["method"] == "initialize":
            note("refused")
            error = {"code": -32010, "message": "not this one", "data": {"try": "another"}}
        if "id" in request and misdeed != "mute":
            say({"id": request["id"], "error": error})
    client = request["params"]
    if misdeed == "dies of" and client["clientInfo"]["name"].startswith(argument):
        note("died")
        sys.exit("cannot read that name")
    note("started")
    while misdeed == "slow" and not os.path.exists(argument):
        time.sleep(0.01)
    version = argument if misdeed == "version" else client["protocolVersion"]
    capabilities: Json = {"tools": {}, "resources": {"subscribe": True}, "logging": {}}
    if misdeed == "no logging":
        del capabilities["logging"]
    info = {"name": "child", "version": "1", "ofAnotherKind": True}
    result = {"protocolVersion": version, "capabilities": capabilities, "serverInfo": info}
    say({"id": request["id"], "result": {**result, "instructions": "ask me"}})
    if misdeed == "early":
        for _ in range(2):
            note(json.dumps(receive()))
    while True:
        try:
            message = receive()
        except KeyboardInterrupt:
            return
        if "id" in message and "method" in message:
            serve(message)
        elif misdeed == "asks for roots" and message["method"] == "notifications/initialized":
            answer = ask("roots/list", {})
            note(f"roots {json.dumps(answer.get('result'))}")
        elif misdeed == "answers all":
            error = {"code": -32601, "message": "Method not found"}
            say({"id": message.get("id"), "error": error})
        elif message.get("method") != "notifications/initialized":
            note(json.dumps(message))


if __name__ == "__main__":
    if sys.argv[1:2] == ["stubborn"]:
        try:
            main(*sys.argv[1:])
        except SystemExit:
            # The end of its input is none for it, either.
            time.sleep(600)
    main(*sys.argv[1:])
