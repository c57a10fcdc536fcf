"""Map each vector to the fault that it catches: the proof that every vector can fail.

A vector that proves a clause is in ``proven.py``. The other ones are here.

``VECTOR: FAULT`` or ``VECTOR: FAULT at WAY``; without a way, on the first one that the vector is
for, in the order of `WAYS`. The tests of the runner play this table; a vector that is in neither
fails them.
"""

from mcp_sessions_conformance.proven import proofs

WAYS = (
    "websocket/handshake",
    "websocket/modern",
    "http/handshake",
    "http/modern",
    "stdio/handshake",
)

_TABLE = """
an-ended-session-is-not-deleted: knows-every-session
end-releases-what-runs: lies-about-cancels
named-in-the-wrong-member-is-not-named-2: takes-misplaced
one-connection-many-states: mixes-sessions
deleted-here-is-no-longer-current: remembers-the-ended
revoked-is-an-error-too: forgets-current
subscribing-twice-is-subscribing: stutters
nothing-missed-is-a-success: replays-from-the-beginning
resuming-twice-replays-twice: loses-replay
an-evicted-position-replays-nothing: always-catches-up
a-position-of-another-log-replays-nothing: always-catches-up
after-a-refusal-the-head-is-the-position: no-positions
updates-of-one-resource-become-one: replays-twice
updates-of-other-resources-stay: loses-replay
the-survivor-is-the-newest: renumbers-replay
list-changes-become-one-per-list: replays-twice
what-waits-is-coalesced: stutters
data-layer-vector-session-usage: no-metadata
data-layer-vector-session-not-found: knows-every-session
delete-answers-with-nothing: end-names-session
end-takes-the-session-from-params: end-takes-metadata
a-token-changes-with-the-state-only: new-token-always
a-spoilt-state-is-refused-flip: any-state
a-spoilt-state-is-refused-extend: any-state
a-spoilt-state-is-refused-oversize: any-state
a-true-state-opens-no-unknown-session: state-first
a-state-hides-what-it-holds: plain-state
the-displaced-learns-who-has-it: hides-who-has-it
the-displaced-may-resume: locks-out-displaced
two-resumes-at-once-leave-one: everyone-receives
requests-with-one-id-are-each-answered: remembers-ids
a-cancel-by-key-cancels: no-cancel
a-known-key-never-runs-again: ignores-keys
a-running-key-is-joined: ignores-keys
two-sendings-at-once-run-once: ignores-keys
progress-before-a-repetition-is-repeated: forgets-progress
a-key-works-on-any-connection: ignores-keys
errors-are-answers-too: ignores-keys
sessions-is-declared-in-initialize: no-capability
settings-are-advertised-in-discover: no-settings
a-delete-of-a-transport-session-is-refused: no-modes
a-forgotten-response-stream-is-answered: forgets-on-drop
a-foreign-origin-is-refused-in-the-modern-era: no-origin-check
list-changes-wait-for-a-listen: only-live
a-listen-without-a-session-hears-a-change-once: decorates-plain
the-filter-outlives-its-stream: loses-replay
the-end-of-a-session-ends-its-listen: old-listen-continues
create-and-delete-have-a-result-type: no-result-type
a-bearer-subprotocol-is-a-credential: wrong-subprotocol
a-foreign-session-is-not-deleted: one-principal
a-foreign-attempt-records-no-key: absent-is-recorded
a-foreign-state-is-no-use: one-principal
a-foreign-cancel-cancels-nothing: one-principal
a-foreign-connection-is-404: one-principal
a-foreign-protocol-id-in-the-header-is-404: one-principal
and-moves-back: everyone-receives
state-is-one-on-all-transports: state-here-only
a-key-is-known-on-all-transports: ignores-keys
a-running-key-is-joined-from-another-transport: ignores-keys
an-end-reaches-every-transport: knows-every-session
a-listen-whose-session-leaves-is-answered: old-listen-continues
resume-with-its-own-header-is-a-conflict: 404-is-200
what-is-replaced-is-a-position-all-the-same: forgets-on-drop
the-error-of-a-handler-is-200: handler-error-is-500
before-a-handshake-little-is-served: needs-initialize
a-continued-response-ends-no-stream: forgets-on-drop
errors-have-the-status-of-their-era: invalid-has-its-eras-mixed-up
two-sessions-on-one-connection: forgets-on-drop
a-cancelled-question-is-taken-back: not-taken-back
two-bearer-subprotocols-are-refused: 400-is-404
a-foreign-connection-id-is-not-deleted: one-principal
a-modern-request-takes-nothing-from-its-connection: always-current
a-kept-answer-has-the-newest-state: oldest-state
what-is-made-is-attached-at-once: deaf-until-resumed
what-is-created-is-attached-at-once: deaf-until-resumed
what-is-created-on-one-wire-is-attached-at-once: deaf-until-resumed
a-resume-takes-back-what-waited: stutters
a-continued-response-begins-after-its-position: forgets-on-drop
a-lost-position-reports-each-list: no-list-changes
a-listen-after-a-cut-one-brings-nothing-old: always-resumes
the-displaced-may-create-and-delete: locks-out-displaced
the-displaced-may-initialize: locks-out-displaced
a-cancel-is-for-all-senders: cancelled-in-silence
a-malformed-bearer-subprotocol-is-refused: 400-is-404
a-position-of-another-connection-is-lost: forgets-on-drop
a-get-without-position-keeps-the-connections-own: no-plain-messages
a-callers-words-are-no-part-of-an-id: adopts-ids
a-callers-words-are-no-part-of-a-created-id: adopts-ids
a-refused-resume-moves-nothing: no-transport-headers
an-end-answers-on-every-connection: forgets-waiting
an-end-answers-a-keyed-request: forgets-waiting
a-delete-answers-running-requests: forgets-waiting
what-ran-does-not-bring-a-session-back: knows-every-session
a-key-does-not-bring-a-session-back: knows-every-session
leaving-ends-no-session: loses-replay
a-cancel-passes-though-the-session-is-gone: no-cancel
rule-2-is-as-good-as-rule-1: forgets-current
a-running-key-is-not-joined-with-fewer-scopes: one-principal
a-stream-needs-the-scopes-of-its-sessions: 404-is-200
list-changes-wait: no-list-changes
naming-displaces-nobody: everyone-receives-who-names
naming-attaches-what-is-attached-nowhere: deaf-until-resumed
naming-attaches-in-the-modern-era-too: deaf-until-resumed
progress-comes-on-the-response: progress-at-another at http/handshake
each-takeover-is-reported: notifies-once
the-other-spelling-is-a-declaration-too: silent-takeover
a-modern-resume-displaces: silent-takeover
who-loses-a-session-to-a-listen-is-notified: silent-takeover
ids-never-collide-on-lone-posts: remembers-ids
a-cancel-means-the-newest-of-an-id: no-cancel
a-broken-websocket-cancels-nothing: cancels-with-the-response
a-cut-response-cancels-in-a-session-too: ignores-cuts
a-modern-cancel-cancels: no-cancel
other-content-is-other-content: any-content
answers-go-oldest-first: newest-goes-first
a-malformed-key-on-a-listen-is-ignored: keys-on-listens
a-key-is-one-in-both-eras: ignores-keys
what-a-modern-client-did-not-declare-is-not-asked: asks-anyone
a-call-that-asks-is-continued-by-its-own-request: continues-for-anyone
a-listen-has-limits: no-limit
a-modern-request-on-a-connections-id-is-a-conflict: conflict-has-no-reason
a-modern-delete-on-a-connections-id-is-a-conflict: no-modes
a-position-is-good-twice: forgets-on-drop
a-priming-event-is-a-position: no-priming
a-position-of-no-shape-is-lost: silent-eviction
a-place-beyond-the-last-is-lost: no-list-changes
a-connections-subscriptions-outlive-its-stream: no-plain-messages
a-subscription-id-has-its-type: one-subscription-id
the-list-filter-outlives-its-stream: unfiltered-lists
an-empty-filter-forgets-all: unfiltered-lists
a-delete-ends-the-listen: listen-ends-in-order
another-session-in-the-header-of-a-listen-is-refused: mismatch-is-another-code
a-header-on-a-session-method-is-ignored: header-is-session
a-listen-ends-with-its-session: listen-ends-in-order
a-change-reaches-every-principal: deaf
a-key-is-one-over-http-in-both-eras: ignores-keys
an-end-leaves-no-trace-in-errors: not-found-otherwise
a-foreign-connection-has-one-answer: 404-is-200
a-foreign-session-has-one-answer: one-principal
an-error-names-nobody-else: talkative-errors
a-refused-subscription-has-no-effect: no-limit
changes-are-events-of-a-detached-session: loses-replay
a-subscription-is-for-one-uri: deaf
every-message-of-a-handler-is-an-event: stutters
every-event-names-its-session: tells-state
no-message-of-a-connection-names-a-session: decorates-plain
what-was-sent-is-kept: stored-late
two-sessions-hear-a-list-change-twice: bare-list-copies
a-connection-hears-its-own-subscription: deaf-with-a-session
every-change-precedes-its-answer: forgets-own-changes
subscriptions-outlive-an-ordered-end: forgets-subscriptions
subscriptions-hold-after-every-resume: forgets-subscriptions
unsubscribing-is-the-sessions-too: keeps-subscribed
start-attaches-before-a-stream: deaf-until-resumed
an-ordered-end-ends-no-session: loses-replay
every-string-is-a-position: positions-are-errors
one-event-too-few-replays-none: replays-what-is-left
a-changed-position-is-none: always-catches-up
a-replayed-message-is-the-same: renumbers-replay
a-huge-event-is-replayed: drops-large
a-displaced-request-by-rule-2-is-answered: loses-answers
a-takeover-counts-however-it-came: serves-displaced
the-displaced-may-use-every-way-out: locks-out-displaced
the-displaced-may-initialize-again: locks-out-displaced
a-cancel-stays-on-its-connection-in-one-session: cancels-wherever
a-cancel-spares-what-was-cut: remembers-ids
a-cancel-means-the-newest-of-what-was-cut: no-cancel
events-stay-with-their-session: in-every-session
a-connection-needs-no-session: decorates-plain
ids-hold-enough-that-is-random: short-ids
a-stranger-changes-nothing: one-principal
every-expires-at-is-utc: odd-expiry
an-ended-session-is-gone-for-every-method: knows-every-session
a-session-is-named-in-one-place-only: takes-misplaced
a-notification-for-no-session-has-no-effect: tolerates-malformed
an-empty-string-is-a-string: odd-ids-are-invalid
an-error-carries-no-metadata: no-metadata
a-connection-carries-three-sessions: mixes-sessions
a-lost-current-session-stays-lost: no-ping
a-lost-session-lets-cancellations-pass: no-cancel
each-start-is-a-new-session: one-id-for-all
every-answer-to-a-resume-is-whole: resume-says-little
what-comes-around-a-resume-comes-once: live-before-replay
a-resume-in-place-replays-exactly: names-who-resumes
each-header-that-contradicts-a-resume-is-refused: no-transport-headers
no-header-continues-a-session: 400-is-404
a-session-is-taken-from-params-only: end-takes-metadata
nothing-of-an-ended-session-comes-late: talks-after-end
an-end-has-an-empty-answer: end-says-more
an-end-cancels-all-that-runs: forgets-waiting
sessions-are-declared-to-everybody: no-capability
what-is-no-feature-is-no-method: wants-declared
a-level-has-its-features: odd-level
a-declaration-changes-nothing-but-notices: wants-declared
every-refusal-has-the-status-of-its-era: not-found-is-404
initialize-is-checked-like-any-post: 404-is-200
a-connection-keeps-all-over-its-streams: forgets-on-drop
every-message-waits-for-the-first-stream: stutters
one-message-too-many-loses-the-place: sends-what-waited
each-later-get-detaches-every-session: replays-on-get
a-continued-stream-ends-the-older: one-get-only
every-lost-position-opens-alike: sends-what-waited
each-stream-is-primed: no-priming
every-unknown-connection-is-404: 404-is-200
ones-own-session-is-no-connection: 400-is-404
a-connection-serves-sessions-of-others: ignores-metadata
a-delete-ends-the-connection-alone: no-delete
no-request-is-without-a-connection: 400-is-404
a-place-is-no-position: always-catches-up
a-stalled-client-delays-no-change: waits-for-the-slow
hosts-have-no-case: no-host-check
rule-2-is-for-every-request: forgets-current
connections-share-nothing: shares-subscriptions
the-last-one-is-current: forgets-current
a-draining-server-says-that-it-did-not-begin: draining-is-a-failure
a-draining-server-refuses-new-requests: fails-meanwhile
a-draining-server-takes-answers: takes-no-answers
a-draining-server-says-when-to-come-back: drains-in-silence
"""


def caught_by() -> dict[str, tuple[str, str | None]]:
    """Vector → the fault that it catches, and the way if it is not the first."""
    table: dict[str, tuple[str, str | None]] = {}
    for proof in proofs():
        table.setdefault(proof.vector, (proof.fault, proof.way))
    for line in _TABLE.strip().splitlines():
        vector, _, rest = line.partition(": ")
        fault, _, way = rest.partition(" at ")
        table[vector] = (fault, way or None)
    return table
