"""A server on stdio, in plain Python, whose tool ``say`` writes the bytes that it is asked to.

Arguments of the tool, each of them optional:

* ``out``, ``err``: files, whose bytes are for the standard output and the standard error. ``@ID@``
  in them is replaced by the request's id.
* ``then``: ``answer`` (it begins a line and answers; what it does if nothing is said), ``nothing``,
  or ``exit``.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def say(message: Json) -> None:
    sys.stdout.buffer.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
    sys.stdout.buffer.flush()


def tool(request: Json) -> None:
    arguments: Json = request["params"].get("arguments") or {}
    for name, stream in (("out", sys.stdout.buffer), ("err", sys.stderr.buffer)):
        if name in arguments:
            data = Path(arguments[name]).read_bytes()
            stream.write(data.replace(b"@ID@", json.dumps(request["id"]).encode()))
            stream.flush()
    match arguments.get("then", "answer"):
        case "answer":
            if arguments.get("out"):
                sys.stdout.buffer.write(b"\n")
            say({"id": request["id"], "result": {"content": [{"type": "text", "text": "said"}]}})
        case "exit":
            os._exit(3)
        case _:
            pass


def main() -> None:
    for line in sys.stdin.buffer:
        message: Json = json.loads(line)
        if "id" not in message or "method" not in message:
            continue
        match message["method"]:
            case "initialize":
                capabilities: Json = {"tools": {}, "resources": {"subscribe": True}, "logging": {}}
                result = {
                    "protocolVersion": message["params"]["protocolVersion"],
                    "capabilities": capabilities,
                    "serverInfo": {"name": "says", "version": "1"},
                }
                say({"id": message["id"], "result": result})
            case "tools/call":
                tool(message)
            case "server/discover":
                error = {"code": -32601, "message": "Method not found"}
                say({"id": message["id"], "error": error})
            case _:
                say({"id": message["id"], "result": {}})


if __name__ == "__main__":
    main()
