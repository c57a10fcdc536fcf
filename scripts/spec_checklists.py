"""The checklists of ``spec/checklists.md``: which clauses a request meets, in which order.

There is one list for each transport and era. Stages that several lists share are written once here.
The page has them in full in each list, so that an implementer reads only one.
"""

from __future__ import annotations

import re

Stage = tuple[str, str]
"""A heading, and clause ids; ``KEY2-5`` is four of them."""

DOOR: Stage = (
    "Which clients may send anything at all",
    "SEC9 SES8 SES9 SEC1 HTP5 HTP6",
)
FORM: Stage = (
    "The form of the message",
    "KEY15 REQ1 REQ2 ASC10 ASC11 ERR8 ERR11",
)
OWNER: Stage = (
    "Which session it belongs to, and whether it may run",
    "ASC1 ASC2 ASC3 ASC4 ASC16 ASC17 ASC18 ASC19 ASC20 ASC21 SES3 SES7 SES10 SES11 SES12 "
    "ERR1 ERR2 ERR9 "
    "STT6 STT8 STT9 STT10 TKO5 TKO6 ERR5 GAT1 GAT2 ERR4 KEY8 KEY18 KEY13 ERR6 ERR10",
)
OWNER_MODERN: Stage = (
    OWNER[0],
    "ASC1 ASC2 ASC3 ASC4 ASC8 ASC16 ASC20 SES3 SES7 SES10 SES11 SES12 ERR1 ERR2 ERR9 STT6 "
    "STT8 STT9 STT10 "
    "GAT1 GAT2 ERR4 KEY8 KEY18 KEY13 ERR6 ERR10",
)
START: Stage = (
    "session/start and sessions/create",
    "STA2 STA3 STA4 STA5 SES1 SES4 SES5 SES6 ASC5 ASC6 CRE1 CRE3 CRE4 CRE5 CRE6 ATT2",
)
RESUME: Stage = (
    "session/resume",
    "RES2 RES3 RES4 RES5 RES6 RES8 RES9 RES10 RES11 RES12 RES13 RES14 CUP1 CUP3-13 CUP16 "
    "CUP17 CUP18 COA7",
)
END: Stage = (
    "session/end and sessions/delete",
    "END2-7 DEL2-4 SES17 SES18 ERR13 STA6",
)
RUN: Stage = (
    "A request that runs",
    "KEY2-7 KEY9-12 KEY14 KEY19-22 REQ4 REQ6 REQ7 REQ8 REQ10 STT7 STT12 STT13 EVT4 EVT5 EVT12 ERR7",
)
ANSWER: Stage = (
    "Its answer",
    "ASC12-15 STT5 STT11 SES16 ERR14 ERR16 COA6",
)
EVENTS: Stage = (
    "Events: storing and sending",
    "EVT1-3 EVT6-11 EVT13-15 ATT1 ATT3-6 COA1-5 SEC7",
)
TAKEOVER: Stage = (
    "When another connection takes the session",
    "TKO1-4 TKO8 TKO9 TKO12",
)
QUESTIONS: Stage = (
    "Questions of the server to its client",
    "ASK1-4 ASK6-7 END7 SEC10",
)
LIMITS: Stage = (
    "Ends and bounds",
    "SES13 SES14 SES15 SES19 SES20 SEC2 SEC3 SEC4 SEC8 ATT7 ATT8 ATT9 ATT10 TKO10 ERR15 ERR17",
)
DISCOVERY: Stage = ("Before anything else: the server's capabilities", "CAP1-4")

BOUND: Stage = (
    "If it binds conversations: sessions for hosts that start none",
    "CNV1-13 CNV15",
)
TASKS: Stage = ("In the modern era, if it has tasks", "TSK1-6")

HTTP_HANDSHAKE: list[Stage] = [
    (DOOR[0], DOOR[1] + " HTP1"),
    ("initialize", "HTL1 ASC7 HTL2 CAP1-4 RTE1"),
    ("The headers of every other request", "HTL13 HTL14 HTL15 HTL16 HTL18 HTP3 ASC9 HTP7"),
    (FORM[0], FORM[1] + " REQ3 REQ9"),
    OWNER,
    START,
    RESUME,
    END,
    RUN,
    (ANSWER[0], ANSWER[1] + " ERR3 HTP2 HTP8 HTL10 HTL11 HTL12 SEC11"),
    EVENTS,
    ("The GET stream", "HTL3 HTL4 HTL6 HTL7 HTL8 HTL9 HTL12 HTL19 HTL20 HTL21"),
    (TAKEOVER[0], TAKEOVER[1] + " HTL5"),
    QUESTIONS,
    ("DELETE", "HTL17 HTL14"),
    LIMITS,
    (BOUND[0], BOUND[1] + " CNV14"),
]
HTTP_MODERN: list[Stage] = [
    (DOOR[0], DOOR[1] + " HTP1 HTP7"),
    ("server/discover", "CAP1-4 RTE1"),
    ("The headers", "HTM11 HTM12 HTP3"),
    ("The form of the message", "KEY15 REQ1 ASC10 ASC11 ERR8 ERR12 ASC9"),
    OWNER_MODERN,
    (
        START[0],
        "STA2 STA3 STA4 STA5 SES1 SES4 SES5 SES6 CRE1 CRE3 CRE4 CRE5 CRE6 HTM5 HTM13",
    ),
    (
        RESUME[0],
        "RES2 RES3 RES4 RES5 RES9 RES10 RES11 RES13 RES14 HTM6 HTM9 CUP1 CUP3-13 CUP16 "
        "CUP17 CUP18 COA7",
    ),
    END,
    (RUN[0], RUN[1] + " REQ5 HTM14 HTM15"),
    (ANSWER[0], "ASC12-14 STT5 STT11 SES16 ERR14 ERR16 COA6 ERR3 HTP2 HTP8 HTM13"),
    (EVENTS[0], "EVT1-3 EVT6-11 EVT13-15 ATT1 ATT4-6 COA1-5 SEC7"),
    ("subscriptions/listen", "HTM1-4 HTM7-10 HTM16-18 SEC3"),
    (TAKEOVER[0], TAKEOVER[1] + " TKO14"),
    ("Questions of the server to its client: none", "ASK4"),
    LIMITS,
    BOUND,
    TASKS,
]
WEBSOCKET: list[Stage] = [
    ("The upgrade", "WSS1 WSS2 WSS6-9 WSS16 WSS18 SEC9 SES8 SES9 SEC1"),
    ("Each message", "WSS3-5 WSS14 WSS15 HTP5"),
    ("Which era it is of", "WSS10 WSS20 ASC7 ASC9 HTP7"),
    DISCOVERY,
    FORM,
    OWNER,
    START,
    RESUME,
    END,
    RUN,
    (ANSWER[0], ANSWER[1] + " WSS13 HTM13"),
    (EVENTS[0], EVENTS[1] + " WSS11"),
    ("subscriptions/listen", "WSS12 WSS19 HTM8 HTM10 HTM18 SEC3"),
    TAKEOVER,
    QUESTIONS,
    (LIMITS[0], LIMITS[1] + " WSS17"),
    BOUND,
    TASKS,
]
STDIO: list[Stage] = [
    ("The pipes", "STD1 STD2 STD4 SEC1"),
    ("Each line", "STD3 WSS14 HTP5"),
    ("Which era it is of", "WSS10 WSS20 STD5 ASC7 ASC9 HTP7"),
    DISCOVERY,
    FORM,
    OWNER,
    START,
    RESUME,
    END,
    RUN,
    (ANSWER[0], ANSWER[1] + " WSS13 HTM13"),
    (EVENTS[0], EVENTS[1] + " WSS11"),
    ("subscriptions/listen", "WSS12 WSS19 HTM8 HTM10 HTM18"),
    TAKEOVER,
    QUESTIONS,
    LIMITS,
    BOUND,
    TASKS,
]
WITHOUT_STORE: list[Stage] = [
    DISCOVERY,
    ("The form of the message", "ASC1 ASC3 ASC4 ASC10 ASC11 ASC16"),
    ("sessions/create and sessions/delete", "CRE1 CRE3-5 SLS1 SLS2 SLS4 SLS5 DEL2 SES4-6"),
    ("A request", "SLS3 STT6 STT8-10 STT12 STT13 ERR1-3 ERR8 SES10 GAT1 GAT2"),
    ("Its answer", "ASC12-14 STT5 STT11 SES16 ERR14 ERR16 HTP2"),
]
WAYS: dict[str, list[Stage]] = {
    "Streamable HTTP, handshake era": HTTP_HANDSHAKE,
    "Streamable HTTP, modern era": HTTP_MODERN,
    "WebSocket, both eras": WEBSOCKET,
    "stdio, both eras": STDIO,
    "A server without a store": WITHOUT_STORE,
}

_IDS = re.compile(r"([A-Z]{3})([0-9]+)(?:-([0-9]+))?")


def ids(listed: str) -> list[str]:
    found: list[str] = []
    for prefix, first, last in _IDS.findall(listed):
        found += [f"{prefix}{n}" for n in range(int(first), int(last or first) + 1)]
    return list(dict.fromkeys(found))


OPENING = """\
# Checklists

Generated by `scripts/spec_generated.py` from `scripts/spec_checklists.py`: do not edit.

These lists hold a server's duties, in the order in which a request meets them. Each transport and
era has one list, which is complete for a server of only that one. Each line is a clause. **Bold**
is a MUST. A ✓ says that a vector fails if the clause is broken ([proof.md](proof.md)). The duties
of a client are in [client.md](client.md).

[walkthrough.md](walkthrough.md) shows two sessions on one HTTP connection, from the wire.

## The short way: HTTP of one era

1. Read [the words and how to read a clause](README.md#words). Then read only these sections:

   * SES, ASC, the methods and CAP of [sessions.md](sessions.md)
   * [events.md](events.md) and [errors.md](errors.md)
   * HTP, and HTL **or** HTM, of [transports.md](transports.md)
   * [state.md](state.md), if you want `sessions/create`
   * [requests.md](requests.md) from KEY on, if you want request keys

   You need nothing of WSS, STD and the other era.
2. Take the handshake era if your clients are those of today: they `initialize` and open a GET.
   Take the modern era if they `listen`. The modern era has no current session (rule 2), no
   `-31010`, no GET stream and no question to the client. It is about a third shorter.
3. You may first leave out request keys (feature `requestKey`), `create` and `delete`. Advertise so
   (CAP3). The rest is a log with ids, one attachment per session, and `session/start`,
   `session/resume`, `session/end`. The runner does not play vectors that need a feature which you
   do not advertise, and its report says so.
4. Serve the fixture tools of [`conformance/README.md`](../conformance/README.md), and play the
   vectors while you work:

   ```sh
   URL=http://127.0.0.1:8000/mcp
   mcp-sessions conformance --era handshake --suite start-resume-end --suite association $URL
   mcp-sessions conformance --era handshake --suite events --suite catch-up --suite takeover $URL
   mcp-sessions conformance --era handshake $URL
   ```

   `--only HTL9` plays the vectors about one clause. `--era modern` does the same for the other
   era. Vectors about both eras are played only without `--era`. A server of one era is conformant
   with that option.
5. Then go through the list below, line by line, for the clauses that no vector shows.
"""


def page(levels: dict[str, tuple[str, str]], proven: set[str]) -> str:
    """``checklists.md``.

    Args:
        levels: Clause → its level and its title.
        proven: The clauses whose violation a vector catches.
    """
    parts = [OPENING.rstrip()]
    for way, stages in WAYS.items():
        parts.append(f"## {way}")
        for number, (heading, listed) in enumerate(stages, start=1):
            lines = [f"### {number}. {heading}", ""]
            for clause in ids(listed):
                level, title = levels[clause]
                shown = f"**{clause}**" if level == "MUST" else clause
                tick = " ✓" if clause in proven else ""
                lines.append(f"- [ ] {shown} {title}{tick}")
            parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"
