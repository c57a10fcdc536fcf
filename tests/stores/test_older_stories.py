"""What older releases wrote has no story, and is read all the same."""

from mcp_sessions.core.ends import EndReason, SessionEnd
from mcp_sessions.core.life import Life
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import SessionId
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.stores.records import SessionRecord
from mcp_sessions.stores.redis.record_codec import KnownSessions, record_of
from mcp_sessions.stores.whole_sessions import WholeSession, from_json, to_json


def test_a_dump_without_stories_is_loaded() -> None:
    record = SessionRecord(SessionId("s" * 43), Mode.PROTOCOL, ANONYMOUS, Life(1.0, 2.0, 3.0))
    kept = to_json(WholeSession(record))
    del kept["story"]
    assert from_json(kept).record == record
    assert from_json(kept).record.story == ""


def test_an_end_without_names_and_story_is_read() -> None:
    kept = {"session": "0123456789ab", "reason": "idle", "at": 5.0, "mode": "protocol"}
    end = SessionEnd.from_json(kept)
    assert end == SessionEnd("0123456789ab", EndReason.IDLE, 5.0, Mode.PROTOCOL)
    assert end is not None
    assert (end.client, end.principal, end.story) == (None, None, "")
    assert end.to_json() == kept


def test_a_record_of_a_script_without_a_story_is_read() -> None:
    """During a deploy the scripts of the release before may end a session."""
    fields = [b"s" * 43, b"protocol", b"[null,null,null]", b"[[],null]", b"1.0", b"2.0", b"3.0"]
    fields += [None, b"0", *[None] * 8]  # pyright: ignore[reportArgumentType]
    record = record_of([fields, [], [], []], KnownSessions())
    assert record.session_id == "s" * 43 and record.story == ""
