"""Servers that bind conversations and get it wrong, and the vector that each is caught by.

They are apart from the other faults, as the vectors are from the others: both are about a server
whose operator wants conversations bound.
"""

from typing import Any

from mcp_sessions_conformance.fault import Case, Fault, Http, Rewritten
from mcp_sessions_conformance.faults.shared_faults import (
    arguments,
    in_results,
    meta_of,
    one_principal,
    params_of,
    refuse,
    tool,
)
from mcp_sessions_conformance.values import SESSION, Json

KEY_MEMBER, OTHER_MEMBER = "openai/session", "threadId"


def _knows_no_keys(case: Case) -> Rewritten:
    return [case.message] if meta_of(case.message).pop(KEY_MEMBER, None) is not None else None


def _one_for_all(case: Case) -> Rewritten:
    meta = meta_of(case.message)
    if KEY_MEMBER not in meta:
        return None
    meta[KEY_MEMBER] = case.memory.setdefault("key", meta[KEY_MEMBER])
    return [case.message]


def _by_connection(case: Case) -> Rewritten:
    meta = meta_of(case.message)
    if not isinstance(meta.get(KEY_MEMBER), str):
        return None
    # Over HTTP a client of the modern era has no connection: each request is one.
    case.memory["requests"] = case.memory.get("requests", 0) + 1
    meta[KEY_MEMBER] += f" {case.talk.name} {case.memory['requests']}"
    return [case.message]


def _ignores_null(case: Case) -> Rewritten:
    meta = meta_of(case.message)
    if KEY_MEMBER not in meta or meta.get(SESSION, ...) is not None:
        return None
    del meta[SESSION]
    return [case.message]


def _conversation_before_named(case: Case) -> Rewritten:
    meta = meta_of(case.message)
    if KEY_MEMBER not in meta or not meta.get(SESSION):
        return None
    del meta[SESSION]
    return [case.message]


def _finds_another(case: Case) -> Rewritten:
    is_refused = case.message.get("error", {}).get("code") == -32043
    if not is_refused or case.asked is None or KEY_MEMBER not in meta_of(case.asked):
        return None
    result: Json = {"content": [{"type": "text", "text": "nothing"}], "resultType": "complete"}
    return [{"jsonrpc": "2.0", "id": case.message["id"], "result": result}]


def _conversation_before_current(case: Case) -> Rewritten:
    meta = meta_of(case.message)
    if KEY_MEMBER not in meta or SESSION in meta or not case.talk.sessions:
        return None
    # Its session is another one than the connection's, which is not used up by it.
    meta[SESSION] = {"sessionId": "of-the-conversation"}
    return [case.message]


def _one_source(case: Case) -> Rewritten:
    meta = meta_of(case.message)
    if OTHER_MEMBER not in meta:
        return None
    meta[KEY_MEMBER] = meta.pop(OTHER_MEMBER)
    return [case.message]


def _refuses_odd_keys(case: Case) -> Rewritten:
    meta = meta_of(case.message)
    if KEY_MEMBER not in meta or (isinstance(meta[KEY_MEMBER], str) and meta[KEY_MEMBER]):
        return None
    case.answers.append(refuse(case.message, -32602, "Invalid params"))
    return []


def _takes_odd_keys(case: Case) -> Rewritten:
    meta = meta_of(case.message)
    if KEY_MEMBER not in meta or isinstance(meta[KEY_MEMBER], str):
        return None
    meta[KEY_MEMBER] = repr(meta[KEY_MEMBER])
    return [case.message]


def _names_session(result: Json, case: Case) -> None:
    if case.asked is not None and KEY_MEMBER in meta_of(case.asked):
        members: Any = result.setdefault("_meta", {})
        members[SESSION] = {"sessionId": "of-the-conversation"}


def _key_is_a_credential(case: Case) -> Rewritten:
    meta = meta_of(case.message)
    known = [session for talk in case.talks.values() for session in talk.sessions]
    if meta.get(KEY_MEMBER) not in known:
        return None
    meta[SESSION] = {"sessionId": meta.pop(KEY_MEMBER)}
    return [case.message]


def _names_what_is_bound(case: Case) -> Rewritten:
    meta = meta_of(case.message)
    named = meta.get(SESSION)
    if isinstance(named, dict) and len(str(named.get("sessionId"))) == 64:  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        del meta[SESSION]
        return [case.message]
    return None


def _takes_anybodys(http: Http) -> None:
    for name in ("x-forwarded-for", "forwarded"):
        http.asked.pop(name, None)


def _ends_its_own(case: Case) -> bool:
    return tool(case.asked) == "revoke" and not arguments(case.asked or {})


def _aborts(case: Case) -> Rewritten:
    if not _ends_its_own(case):
        return None
    return [refuse(case.message, -32043, "Session not found")]


def _lives_on(case: Case) -> Rewritten:
    if tool(case.message) != "revoke" or arguments(case.message):
        return None
    params_of(case.message).update(name="echo", arguments={"msg": "revoked"})
    return [case.message]


def _notes_header(http: Http) -> None:
    said = http.asked.get("mcp-protocol-version", "")
    http.memory["bare"] = said.startswith("2025") and "mcp-session-id" not in http.asked


def _wants_a_header(case: Case) -> Rewritten:
    if not case.memory.get("bare") or case.message.get("method") != "tools/call":
        return None
    case.answers.append(refuse(case.message, -32600, "Missing session ID"))
    return []


def _serves_what_ended(http: Http) -> None:
    ended = http.memory.setdefault("over", set[str]())
    named = http.asked.get("mcp-session-id", "")
    if http.verb == "DELETE":
        ended.add(named)
    elif named in ended:
        del http.asked["mcp-session-id"]


CAUGHT_BY: tuple[tuple[Fault, str], ...] = (
    (
        Fault("knows-no-keys", "serves no conversation", to_server=_knows_no_keys),
        "a-conversation-is-one-session",
    ),
    (
        Fault("one-conversation", "has one session for all of them", to_server=_one_for_all),
        "a-conversation-is-one-session",
    ),
    (
        Fault("by-connection", "binds them to connections", to_server=_by_connection),
        "a-conversation-is-one-session",
    ),
    (
        Fault("null-is-no-answer", "takes null for nothing said", to_server=_ignores_null),
        "null-is-no-conversation",
    ),
    (
        Fault(
            "conversation-first",
            "serves the conversation's session in place of a named one",
            to_server=_conversation_before_named,
        ),
        "a-named-session-comes-before-the-conversation",
    ),
    (
        Fault(
            "conversation-for-the-lost",
            "serves the conversation's session in place of one that is not there",
            to_client=_finds_another,
        ),
        "a-named-session-comes-before-the-conversation",
    ),
    (
        Fault(
            "conversation-before-current",
            "looks for the conversation first on a connection with a current session",
            to_server=_conversation_before_current,
        ),
        "a-current-session-comes-before-the-conversation",
    ),
    (
        Fault("keys-are-credentials", "asks nobody who he is", http=one_principal),
        "a-key-is-no-credential",
    ),
    (
        Fault("one-source", "looks at the text only", to_server=_one_source),
        "one-text-under-two-names-is-two-conversations",
    ),
    (
        Fault("picky-about-keys", "refuses what is no key", to_server=_refuses_odd_keys),
        "what-is-no-key-is-ignored",
    ),
    (
        Fault("takes-anything", "makes a key of what is none", to_server=_takes_odd_keys),
        "what-is-no-key-is-ignored",
    ),
    (
        Fault("tells", "names the session in results", to_client=in_results((), _names_session)),
        "nothing-of-a-conversation-is-sent",
    ),
    (
        Fault("opens-by-key", "takes a session's id for a key", to_server=_key_is_a_credential),
        "what-is-bound-is-named-by-nobody",
    ),
    (
        Fault("believes-strangers", "takes keys from anywhere", http=_takes_anybodys),
        "a-strangers-key-is-not-used-behind-a-proxy",
    ),
    (
        Fault("aborts", "aborts what runs in a session that ends", to_client=_aborts),
        "the-end-of-a-conversations-session-aborts-nothing",
    ),
    (
        Fault("goes-on", "serves on in a session that ended", to_server=_lives_on),
        "the-end-of-a-conversations-session-aborts-nothing",
    ),
    (
        Fault(
            "wants-a-header",
            "refuses a POST without a header",
            to_server=_wants_a_header,
            http=_notes_header,
        ),
        "no-door-is-shut-for-want-of-a-header",
    ),
    (
        Fault("serves-the-dead", "takes an id that has ended for none", http=_serves_what_ended),
        "no-door-is-shut-for-want-of-a-header",
    ),
    (
        Fault("names-the-bound", "takes what it shows for a name", to_server=_names_what_is_bound),
        "what-is-bound-is-named-by-nobody",
    ),
)
"""Fault, and the id of a vector that fails because of it."""
