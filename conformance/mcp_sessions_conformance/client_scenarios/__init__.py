"""Check a client's duties: for each duty a scenario, which is a script for a `ScriptedServer`.

A script returns when the client did it, and raises `Failure` when it did not. The words for
people (what is proved, and what a failure costs) are in ``vectors/client-duties.json``.
"""

from mcp_sessions_conformance.client_scenarios import calls, modern, resuming, state
from mcp_sessions_conformance.client_scenarios.shared_steps import Scenario
from mcp_sessions_conformance.scripted import DATA_LAYER

SCENARIOS: dict[str, Scenario] = {
    "state-is-echoed-exactly": Scenario(state.echoes_state, DATA_LAYER),
    "state-is-kept-when-a-result-has-none": Scenario(state.keeps_state, DATA_LAYER),
    "create-carries-no-session": Scenario(state.no_metadata_on_create, DATA_LAYER),
    "metadata-of-another-session-is-ignored": Scenario(state.ignores_foreign_metadata, DATA_LAYER),
    "a-lost-session-is-dropped": Scenario(state.drops_a_lost_session),
    "resume-names-the-last-event": Scenario(resuming.resumes_from_the_last_event),
    "resume-names-the-head-before-any-event": Scenario(resuming.resumes_from_the_head),
    "seen-events-go-nowhere": Scenario(resuming.gets_events_once),
    "the-head-of-a-refusal-is-the-position": Scenario(resuming.takes_the_head_after_a_refusal),
    "events-may-overtake-the-result": Scenario(resuming.accepts_early_events),
    "no-call-is-sent-twice": Scenario(calls.sends_no_call_twice, has_keys=False),
    "a-call-is-repeated-under-its-key": Scenario(calls.repeats_with_the_same_key),
    "a-forgotten-key-is-not-used": Scenario(calls.uses_no_forgotten_key, key_lifetime=1),
    "reconnects-back-off": Scenario(calls.backs_off),
    "a-repeated-question-is-asked-once": Scenario(calls.asks_once),
    "two-calls-have-two-keys": Scenario(calls.keeps_keys_apart),
    "what-began-is-not-moved": Scenario(calls.moves_nothing_that_began),
    "no-session-is-offered-to-others": Scenario(calls.offers_nothing_to_others, DATA_LAYER),
    "the-displaced-stays-away": Scenario(calls.stays_away, may_fail=True),
    "an-unneeded-session-is-ended": Scenario(calls.takes_leave),
    "no-stream-keeps-the-position": Scenario(resuming.keeps_its_position_without_a_stream),
    "event-ids-are-opaque": Scenario(resuming.looks_into_no_event_id),
    "places-are-not-mixed-up": Scenario(resuming.mixes_no_positions),
    "an-unknown-outcome-is-not-repeated": Scenario(calls.repeats_nothing_of_unknown_outcome),
    "resume-comes-before-the-next-listen": Scenario(
        modern.resumes_before_it_listens, is_modern=True
    ),
    "state-goes-with-every-request": Scenario(modern.sends_state_with_everything, is_modern=True),
    "the-header-mirrors-the-session": Scenario(modern.mirrors_the_session, is_modern=True),
    "session-methods-carry-no-session-header": Scenario(
        modern.mirrors_nothing_with_session_methods, is_modern=True
    ),
    "session-methods-keep-the-rules-of-their-era": Scenario(
        modern.keeps_the_rules_of_the_era, is_modern=True
    ),
}
"""Duty → its scenario."""
