"""The application's listen streams over the session's one."""

from typing import Any

from mcp_sessions.client.application import Listens
from mcp_sessions.client.messages import SUBSCRIPTION_ID
from mcp_sessions.client.requests import PendingRequest

ACK = "notifications/subscriptions/acknowledged"
UPDATED = "notifications/resources/updated"
TOOLS = "notifications/tools/list_changed"


def opened(app_id: str, **wanted: Any) -> PendingRequest:
    params = {"notifications": wanted, "_meta": {"kept": True}}
    message = {"id": app_id, "method": "subscriptions/listen", "params": params}
    return PendingRequest(app_id, message, {"mcp-method": "subscriptions/listen"}, 0.0)


def acknowledge(listens: Listens) -> list[Any]:
    """Send the request and have it acknowledged in full."""
    request = listens.next_request()
    return listens.acknowledged(request["params"])


def notified(parts: list[Any]) -> list[tuple[str, str]]:
    return [(p["params"]["_meta"][SUBSCRIPTION_ID], p["method"]) for p in parts]


def update(uri: str) -> dict[str, Any]:
    return {"method": UPDATED, "params": {"uri": uri, "sessionEventId": "1"}}


def test_what_continues_the_wire_asks_for_all() -> None:
    listens = Listens()
    listens.add(opened("a", toolsListChanged=True, resourceSubscriptions=["note://1"]))
    listens.add(opened("b", resourceSubscriptions=["note://2", "note://1"]))

    request = listens.next_request()

    assert request["id"] == listens.wire_id
    assert request["params"]["notifications"] == {
        "toolsListChanged": True,
        "resourceSubscriptions": ["note://1", "note://2"],
    }
    assert request["params"]["_meta"] == {"kept": True}


def test_each_stream_is_acknowledged_for_itself_and_once() -> None:
    listens = Listens()
    listens.add(opened("a", toolsListChanged=True))
    listens.add(opened("b", resourceSubscriptions=["note://2"]))

    acknowledged = acknowledge(listens)

    assert notified(acknowledged) == [("a", ACK), ("b", ACK)]
    assert acknowledged[0]["params"]["notifications"] == {"toolsListChanged": True}
    # The next one on the wire is not the application's business.
    assert acknowledge(listens) == []


def test_a_stream_that_asks_for_nothing_new_needs_no_request() -> None:
    listens = Listens()
    listens.add(opened("a", resourceSubscriptions=["note://1", "note://2"]))
    acknowledge(listens)
    listens.add(opened("b", resourceSubscriptions=["note://2"]))

    assert listens.is_covered()
    assert notified(listens.not_yet_acknowledged()) == [("b", ACK)]
    listens.add(opened("c", promptsListChanged=True))
    assert not listens.is_covered()
    assert listens.not_yet_acknowledged() == []


def test_an_event_goes_to_each_stream_that_asked_for_it() -> None:
    listens = Listens()
    listens.add(opened("a", toolsListChanged=True, resourceSubscriptions=["note://1"]))
    listens.add(opened("b", resourceSubscriptions=["note://1", "note://2"]))
    acknowledge(listens)

    assert notified(listens.parts(update("note://1"))) == [("a", UPDATED), ("b", UPDATED)]
    assert notified(listens.parts(update("note://2"))) == [("b", UPDATED)]
    assert notified(listens.parts({"method": TOOLS})) == [("a", TOOLS)]
    # A resource below one that somebody subscribed to: whose, only the server knows.
    assert notified(listens.parts(update("note://1/x"))) == [("a", UPDATED), ("b", UPDATED)]


def test_after_a_gap_everybody_is_notified_of_all_he_listens_to() -> None:
    """CLI4."""
    listens = Listens()
    listens.add(opened("a", toolsListChanged=True, resourceSubscriptions=["note://1"]))
    acknowledge(listens)
    listens.add(opened("b", promptsListChanged=True))

    assert notified(listens.everything()) == [("a", TOOLS), ("a", UPDATED)]


def test_a_closed_stream_gets_nothing() -> None:
    listens = Listens()
    listens.add(opened("a", toolsListChanged=True))
    acknowledge(listens)

    assert listens.remove("a")
    assert not listens.remove("a")
    assert not listens
    assert listens.parts({"method": TOOLS}) == []
