from typing import Any, cast

from mcp_sessions_conformance.fault import Case, Fault, Late, Rewritten
from mcp_sessions_conformance.faults.shared_faults import (
    CREATE,
    RESUME,
    START,
    UPDATED,
    answer,
    arguments,
    due_of,
    event_like,
    in_events,
    in_results,
    is_event,
    named,
    params_of,
    refuse,
)
from mcp_sessions_conformance.values import SESSION, Json


def _in_every_session(case: Case) -> Rewritten:
    if not is_event(case.message):
        return None
    session, copies = named(case.message), list[Json | Late]()
    for number, other in enumerate(case.talk.sessions):
        if other != session:
            event_id = f"9999999999999999999-{number:012d}"
            copies.append(event_like(other, str(params_of(case.message).get("uri")), event_id))
    return [case.message, *copies]


def _no_list_changes(case: Case) -> Rewritten:
    return [] if str(case.message.get("method")).endswith("list_changed") else None


def _numbers_progress(case: Case) -> Rewritten:
    if case.message.get("method") != "notifications/progress":
        return None
    case.message["params"]["sessionEventId"] = "1"
    return [case.message]


def _one_id(event: Json, case: Case) -> None:
    event["sessionEventId"] = case.memory.setdefault("id", event["sessionEventId"])


def _sends_state(event: Json, case: Case) -> None:
    event["_meta"][SESSION]["state"] = "c2VjcmV0"


def _bare_copy(case: Case) -> Rewritten:
    if not is_event(case.message):
        return None
    uri = params_of(case.message).get("uri")
    return [case.message, {"jsonrpc": "2.0", "method": UPDATED, "params": {"uri": uri}}]


def _forgets_own_changes(result: Json, case: Case) -> None:
    if result.get("replayed"):
        result["replayed"] = 0


def _decorates(case: Case) -> Rewritten:
    if case.message.get("method") != UPDATED or is_event(case.message):
        return None
    case.message["params"]["sessionEventId"] = "1"
    return [case.message]


def _keeps_subscribed(case: Case) -> Rewritten:
    if case.message.get("method") == "resources/unsubscribe":
        case.answers.append(answer(case.message, {}))
        return []
    if case.message.get("method") == "subscriptions/listen":
        known = case.memory.setdefault(named(case.message), list[str]())
        wanted = cast("Json", params_of(case.message).get("notifications") or {})
        known += wanted.get("resourceSubscriptions", [])
        wanted["resourceSubscriptions"] = list(known)
        return [case.message]
    return None


def _deaf_until_resumed(case: Case) -> Rewritten:
    if (case.asked or {}).get("method") == "session/resume":
        case.memory["resumed"] = True
    return [] if is_event(case.message) and not case.memory.get("resumed") else None


def _stutters(case: Case) -> Rewritten:
    return [case.message, case.message] if is_event(case.message) else None


def _replays_twice(case: Case) -> Rewritten:
    if not is_event(case.message):
        return None
    seen = case.memory.setdefault("seen", set())
    event_id = params_of(case.message)["sessionEventId"]
    if event_id in seen:
        return [case.message, case.message]
    seen.add(event_id)
    return None


def _coalesces_live(case: Case) -> Rewritten:
    uri = params_of(case.message).get("uri")
    if not is_event(case.message) or uri is None:
        return None
    if case.memory.get("last") == uri:
        return []
    case.memory["last"] = uri
    return None


def _swaps(case: Case) -> Rewritten:
    if not is_event(case.message):
        return None
    held: Any = case.memory.pop("held", None)
    if held is None and case.message["params"].get("uri", "").endswith("n3"):
        case.memory["held"] = case.message
        return []
    return [case.message, held] if held is not None else None


def _from_the_beginning(case: Case) -> Rewritten:
    if case.message.get("method") != "session/resume":
        return None
    begun = case.memory.get(params_of(case.message).get("sessionId"))
    if begun is None or "lastSessionEventId" not in params_of(case.message):
        return None
    case.message["params"]["lastSessionEventId"] = begun
    return [case.message]


def _learns_begin(result: Json, case: Case) -> None:
    case.memory[result.get("sessionId")] = result.get("sessionEventId")


def _always_catches_up(result: Json, case: Case) -> None:
    result["catchup"] = True
    result.pop("reason", None)


def _no_positions(case: Case) -> Rewritten:
    if case.message.get("method") != "session/resume":
        return None
    params_of(case.message).pop("lastSessionEventId", None)
    return [case.message]


def _positions_are_errors(case: Case) -> Rewritten:
    result: Any = case.message.get("result")
    if isinstance(result, dict) and cast("Json", result).get("catchup") is False:
        return [refuse(case.message, -32602, "bad position")]
    return None


def _renumbers_replay(event: Json, case: Case) -> None:
    seen = case.memory.setdefault("seen", set())
    if event["sessionEventId"] in seen:
        event["sessionEventId"] = f"9{event['sessionEventId'][1:]}"
    seen.add(event["sessionEventId"])


def _old_head(result: Json, case: Case) -> None:
    if result.get("replayed"):
        result["sessionEventId"] = params_of(case.asked or {})["lastSessionEventId"]


def _replaced_are_gone(case: Case) -> Rewritten:
    position = params_of(case.message).get("lastSessionEventId")
    if case.message.get("method") == "session/resume" and position in case.memory.get("gone", ()):
        case.message["params"]["lastSessionEventId"] = "gone"
        return [case.message]
    return None


def _learns_replaced(event: Json, case: Case) -> None:
    newest = case.memory.setdefault("newest", {})
    gone = case.memory.setdefault("gone", set())
    uri, event_id = event.get("uri"), event["sessionEventId"]
    if newest.get(uri) not in (None, event_id):
        gone.add(newest[uri])
    newest[uri] = event_id


def _drops_large(case: Case) -> Rewritten:
    if (case.asked or {}).get("method") == "session/resume" and case.memory.get("large"):
        return [answer(case.message, {**case.message["result"], "replayed": 0})]
    return None


def _learns_large(case: Case) -> Rewritten:
    if arguments(case.message).get("length", 0) > 50_000:
        case.memory["large"] = True
    return None


def _coalesces_messages(case: Case) -> Rewritten:
    if case.message.get("method") != "notifications/message" or not is_event(case.message):
        return None
    data = params_of(case.message).get("data")
    if case.memory.get("last") == data:
        return []
    case.memory["last"] = data
    return None


def _live_before_replay(case: Case) -> Rewritten:
    due = due_of(case)
    if not due:
        return None
    case.memory["due"] = due - 1
    return [Late(case.message)]


FAULTS = (
    Fault(
        "in-every-session", "makes one session's event an event of all", to_client=_in_every_session
    ),
    Fault("no-list-changes", "does not tell of changed lists", to_client=_no_list_changes),
    Fault("numbers-progress", "makes progress an event", to_client=_numbers_progress),
    Fault("one-event-id", "gives all events one id", to_client=in_events(_one_id)),
    Fault("tells-state", "puts state into events", to_client=in_events(_sends_state)),
    Fault("bare-copies", "sends a plain copy in addition to each event", to_client=_bare_copy),
    Fault(
        "forgets-own-changes",
        "stores a change after it answered its request",
        to_client=in_results([RESUME], _forgets_own_changes),
    ),
    Fault("decorates-plain", "numbers messages that belong to no session", to_client=_decorates),
    Fault("keeps-subscribed", "never forgets a subscription", to_server=_keeps_subscribed),
    Fault(
        "deaf-until-resumed",
        "attaches a session only when it is resumed",
        to_client=_deaf_until_resumed,
    ),
    Fault("stutters", "sends every event twice", to_client=_stutters),
    Fault("replays-twice", "replays every event twice", to_client=_replays_twice),
    Fault("coalesces-live", "holds live events back to coalesce them", to_client=_coalesces_live),
    Fault("swaps-events", "sends events out of order", to_client=_swaps),
    Fault(
        "replays-from-the-beginning",
        "ignores the position",
        to_server=_from_the_beginning,
        to_client=in_results([START, CREATE], _learns_begin),
    ),
    Fault(
        "always-catches-up",
        "always says that it caught up",
        to_client=in_results([RESUME], _always_catches_up),
    ),
    Fault("no-positions", "takes no position", to_server=_no_positions),
    Fault(
        "positions-are-errors",
        "answers a bad position with an error",
        to_client=_positions_are_errors,
    ),
    Fault(
        "renumbers-replay", "gives replayed events new ids", to_client=in_events(_renumbers_replay)
    ),
    Fault(
        "old-head",
        "answers a resume with the position it was given",
        to_client=in_results([RESUME], _old_head),
    ),
    Fault(
        "replaced-are-gone",
        "does not know the ids of replaced events",
        to_server=_replaced_are_gone,
        to_client=in_events(_learns_replaced),
    ),
    Fault(
        "drops-large",
        "evicts the newest event if it is large",
        to_server=_learns_large,
        to_client=_drops_large,
    ),
    Fault("coalesces-messages", "coalesces log messages", to_client=_coalesces_messages),
    Fault(
        "live-before-replay", "sends live events before the replay", to_client=_live_before_replay
    ),
)
