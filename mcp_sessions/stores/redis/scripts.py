"""The Lua scripts of the Redis store, as they are shipped: ``lua/*.lua``.

Each write is one script, so that it is atomic and costs one round trip. They are plain scripts,
not functions: a function library has one name per server, which two releases of this library
on one Redis (every deploy has that moment) would fight for; a script is named by its content.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from importlib import resources

_NEEDS = re.compile(r"-- needs: ([a-z ]+)\n")


@dataclass(frozen=True, slots=True)
class Script:
    name: str
    text: str
    sha: str


def _load(name: str) -> Script:
    folder = resources.files("mcp_sessions.stores.redis") / "lua"

    def read(stem: str) -> str:
        return (folder / f"{stem}.lua").read_text("utf-8")

    own = read(name)
    needs = _NEEDS.match(own)
    parts = [read(library) for library in needs[1].split()] if needs is not None else []
    text = "\n".join([*parts, own])
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


# One session.
CREATE = _load("create")
LOAD = _load("load")
ADMIT = _load("admit")
TOUCH = _load("touch")
END = _load("end")
EXPIRE = _load("expire")
EVICT = _load("evict")
FALL_ASLEEP = _load("fall_asleep")
SIZE = _load("size")
APPEND = _load("append")
APPEND_CHANGE = _load("append_change")
IDS = _load("ids")
READ = _load("read")
HEAD = _load("head")
HEADS = _load("heads")
DROP_STREAM = _load("drop_stream")
DROP_ORIGIN = _load("drop_origin")
CARRY = _load("carry")
RELAY = _load("relay")
ATTACH = _load("attach")
DETACH = _load("detach")
CLAIM = _load("claim")
CHANGE = _load("change")
TELL = _load("tell")
SUBSCRIBE = _load("subscribe")
UNSUBSCRIBE = _load("unsubscribe")
CHANGE_STATE = _load("change_state")
FINISH = _load("finish")
LOAD_DATA = _load("load_data")
REPLACE_DATA = _load("replace_data")
WHOLE = _load("whole")
ADD_WHOLE = _load("add_whole")

# Scripts for facts of no single session.
RESERVE = _load("reserve")
RELEASE = _load("release")
NOTE_SUBSCRIBER = _load("note_subscriber")
DROP_SUBSCRIBER = _load("drop_subscriber")
REMEMBER_ENDS = _load("remember_ends")
