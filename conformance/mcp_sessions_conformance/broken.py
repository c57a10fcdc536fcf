"""Which fault each vector is caught by: the proof that every vector can fail.

``VECTOR: FAULT`` or ``VECTOR: FAULT at WAY``; without a way, on the first one that the vector is
for, in the order of `WAYS`. The tests of the runner play this table; a vector that is not in
it fails them.
"""

WAYS = (
    "websocket/handshake",
    "websocket/modern",
    "http/handshake",
    "http/modern",
    "stdio/handshake",
)

_TABLE = """
start-answers-with-an-id: id-not-ascii
start-ids-are-unguessable: one-id-for-all
start-answers-with-the-head: start-without-expiry
start-ignores-params: picky-start
start-head-is-a-position: head-is-garbage
caller-id-is-not-adopted: adopts-ids
unknown-methods-are-method-not-found: knows-all-methods
resume-answers-what-happened: resume-says-little
resume-of-an-unknown-session-fails: knows-every-session
resume-params-have-types: not-found-for-everything
resume-in-place-displaces-nobody: tells-who-resumes
resume-answers-before-it-replays: answers-after-replay
resume-keeps-subscriptions: forgets-subscriptions
resume-on-a-new-connection-moves-the-session: everyone-hears
drop-then-resume: loses-replay
end-answers-with-nothing: end-names-session
end-again-is-not-found: knows-every-session
nothing-after-the-end: talks-after-end
an-ended-session-stays-ended: knows-every-session
end-answers-running-requests: forgets-waiting
a-request-that-began-says-so: hides-what-began
end-fails-open-questions: forgets-waiting
end-releases-what-runs: lies-about-cancels
the-server-may-end-a-session: knows-every-session
both-families-share-one-namespace: families-apart
sessions-need-no-initialize: needs-initialize
sessions-are-optional: sessions-for-all
rule-1-the-named-session: ignores-metadata
rule-2-the-current-session: forgets-current
rule-2-is-not-for-the-modern-era: always-current
null-names-no-session: ignores-metadata
create-sets-no-current-session: always-current
malformed-metadata-is-an-error: tolerates-malformed
named-elsewhere-is-not-named: takes-misplaced
named-elsewhere-is-not-named-2: takes-misplaced
results-carry-the-metadata: no-metadata
list-results-carry-the-metadata: no-metadata-on-lists
results-carry-the-newest-state: oldest-state
rule-2-results-are-as-they-are: sessions-for-all
one-connection-many-sessions: mixes-sessions
ended-here-is-no-longer-current: remembers-the-ended
ended-elsewhere-is-an-error: forgets-current
revoked-is-an-error-too: forgets-current
a-lone-post-is-not-a-connection: never-no-stream
updates-reach-who-subscribed: in-every-session
list-changes-reach-every-session: no-list-changes
a-handlers-message-is-an-event-of-its-session: in-every-session
progress-is-no-event: numbers-progress
events-carry-an-id: one-event-id
events-name-their-session: tells-state
a-change-is-heard-once-per-session: bare-copies
a-change-precedes-its-answer: forgets-own-changes
a-bare-connection-hears-plain-messages: decorates-plain
unsubscribing-ends-it: keeps-subscribed
start-attaches: deaf-until-resumed
create-attaches: deaf-until-resumed
a-named-request-attaches-without-replay: deaf-until-resumed
live-events-come-one-by-one: coalesces-live
events-come-in-order-and-once: swaps-events
replay-begins-after-the-position: replays-from-the-beginning
nothing-missed-is-a-success: replays-from-the-beginning
resuming-twice-replays-twice: loses-replay
an-evicted-position-replays-nothing: always-catches-up
no-position-replays-nothing: always-catches-up
an-unknown-position-replays-nothing: positions-are-errors
a-position-ahead-replays-nothing: always-catches-up
a-position-of-another-log-replays-nothing: always-catches-up
after-a-refusal-the-head-is-the-position: no-positions
the-head-of-a-resume-is-its-end: old-head
a-replaced-event-is-a-position: replaced-are-gone
a-replayed-event-is-the-stored-one: renumbers-replay
the-newest-event-is-kept: drops-large
resume-then-live: live-before-replay
updates-of-one-resource-become-one: replays-twice
updates-of-other-resources-stay: loses-replay
the-survivor-is-the-newest: renumbers-replay
list-changes-become-one-per-list: replays-twice
other-messages-all-stay: coalesces-messages
every-position-leads-to-the-same-state: replaced-are-gone
what-waits-is-coalesced: stutters
data-layer-vector-session-creation: create-wants-params
data-layer-vector-session-usage: no-metadata
data-layer-vector-session-not-found: knows-every-session
create-answers-in-strings: extra-member
create-refuses-session-metadata: create-ignores-metadata
create-takes-params-without-metadata: picky-create
create-says-where-the-log-begins: create-head-is-garbage
delete-answers-with-nothing: end-names-session
delete-takes-the-session-from-meta: delete-takes-params
delete-takes-no-current-session: delete-takes-current
nothing-after-the-delete: talks-after-end
end-takes-the-session-from-params: end-takes-metadata
the-stored-state-is-the-state: believes-tokens
a-token-changes-with-the-state-only: new-token-always
a-spoilt-state-is-refused-flip: any-state
a-spoilt-state-is-refused-truncate: any-state
a-spoilt-state-is-refused-extend: any-state
a-spoilt-state-is-refused-oversize: any-state
bad-states-have-one-error: talkative-errors
a-state-is-bound-to-its-session: any-state
an-unknown-session-is-not-found-whatever-its-state: state-first
the-last-writer-wins: first-writer-wins
a-failed-request-changes-no-state: failing-writes
a-state-hides-what-it-holds: plain-state
the-displaced-hears-nothing-more: everyone-hears
the-displaced-gets-its-answers: loses-answers
the-displaced-is-told: silent-takeover
the-displaced-hears-who-has-it: hides-who-has-it
who-did-not-ask-is-not-told: tells-who-resumes
the-displaced-cannot-go-on: serves-displaced
what-the-displaced-may-ask: locks-out-displaced
the-displaced-may-resume: locks-out-displaced
the-later-resume-wins: everyone-hears
two-resumes-at-once-leave-one: everyone-hears
a-late-end-harms-nobody: late-end-kills
ids-mean-nothing-beyond-their-connection: crosses-ids
an-open-id-is-not-used-twice: allows-duplicates
an-open-id-is-not-used-twice-on-one-wire: allows-duplicates
a-cut-request-frees-its-id: remembers-ids
a-broken-connection-cancels-nothing: cancels-the-cut
a-cut-response-cancels-in-the-modern-era: ignores-cuts
a-key-outside-of-a-session-keeps-nothing: ignores-cuts
a-keyed-request-survives-its-response: ignores-keys
a-cancel-cancels: no-cancel
a-cancel-by-key-cancels: no-cancel
a-cancel-by-key-needs-its-session: cancels-by-key-alone
a-known-key-never-runs-again: ignores-keys
another-key-runs: one-key-for-all
keys-belong-to-their-session: keys-of-all-sessions
a-kept-answer-has-the-new-metadata: kept-without-metadata
a-running-key-is-joined: ignores-keys
two-sendings-at-once-run-once: ignores-keys
progress-follows-the-newest-sending: progress-to-the-first
a-key-works-on-any-connection: ignores-keys
a-key-with-other-content-is-refused: any-content
metadata-is-not-content: strict-content
errors-are-answers-too: ignores-keys
a-dropped-answer-is-outcome-unknown: ignores-keys
a-full-key-store-refuses-new-keys: no-limit
a-key-outside-of-a-session-is-ignored: keys-of-all-sessions
a-malformed-key-is-an-error: odd-keys
question-ids-are-random-strings: counted-questions
an-open-question-is-asked-again: asks-once
the-first-answer-counts: last-answer-counts
who-cannot-be-asked-is-not-asked: asks-anyone
sessions-is-declared-in-initialize: no-capability
sessions-is-declared-in-discover: no-capability
settings-are-advertised-in-initialize: no-settings
settings-are-advertised-in-discover: no-settings
the-window-is-advertised: no-window
the-bounds-of-keys-are-advertised: no-key-lifetime
a-client-need-not-declare: wants-declared
a-client-may-declare: refuses-declared
gated-tools-need-a-session: no-gate
limits-have-a-name: no-limit
mode-conflict-leaves-the-session-alone: no-modes
metadata-naming-a-transport-session-is-refused: no-modes
resume-with-transport-headers-is-refused: no-transport-headers
errors-do-not-tell-what-exists: talkative-errors
initialize-gives-a-connection-id: keeps-connection-id
the-connection-outlives-its-stream: forgets-current
events-wait-for-the-stream: deaf
last-event-id-continues-the-stream: forgets-on-drop
an-sse-id-is-no-position: always-catches-up
a-stream-yields-only-its-own: in-every-stream
a-session-that-leaves-takes-its-entries: everyone-hears
a-get-without-position-detaches: replays-on-get
a-newer-get-ends-the-older: one-get-only
a-lost-position-says-what-to-read: no-list-changes
a-response-stream-can-be-resumed: forgets-on-drop
a-forgotten-response-stream-is-answered: forgets-on-drop
streams-begin-with-a-priming-event: no-priming
an-unknown-connection-is-404: 404-is-200
get-and-delete-on-a-protocol-session-are-400: 400-is-404
a-post-on-a-protocol-session-is-400: 400-is-404
another-connection-id-is-no-conflict: ignores-metadata
delete-detaches-protocol-sessions: no-delete
a-request-without-a-connection-is-400: 400-is-404
a-mirror-is-accepted: mirror-is-unknown
one-endpoint-both-eras: one-era
a-foreign-origin-is-refused: no-origin-check
events-wait-for-a-listen: only-live
what-follows-create-waits: only-live
a-listen-without-a-session-hears-no-events: decorates-plain
the-acknowledgement-comes-first: late-acknowledgement
messages-carry-the-subscription-id: no-subscription-id
the-replay-waits-for-the-listen: loses-replay
after-a-refusal-a-listen-starts-at-the-head: always-resumes
what-follows-a-refusal-waits-for-the-listen: only-live
a-listen-after-a-cut-one-starts-at-the-head: always-resumes
the-filter-becomes-the-subscriptions: keeps-subscribed
the-filter-outlives-its-stream: loses-replay
a-newer-listen-ends-the-older: old-listen-goes-on
the-end-of-a-session-ends-its-listen: old-listen-goes-on
another-session-in-the-header-is-refused: mismatch-is-served
a-header-without-metadata-is-ignored: header-is-session
a-modern-mirror-is-accepted: header-is-session
session-results-have-a-result-type: no-result-type
a-cancel-by-key-is-202: 202-is-200
the-subprotocol-is-selected: wrong-subprotocol
no-other-subprotocol-is-selected: wrong-subprotocol
messages-are-text-frames: binary-frames
a-binary-frame-closes-1003: closes-1011
a-huge-message-closes-1009: closes-1011
a-foreign-origin-gets-no-websocket: no-origin-check
compression-is-not-negotiated: compresses
malformed-frames-are-answered: drops-malformed
both-eras-on-one-websocket: one-era-per-connection
a-modern-websocket-stays-modern: serves-bare
events-need-no-listen: events-need-a-listen
a-listen-adds-its-id: no-subscription-id
answers-and-events-keep-their-order: talks-after-end
a-bearer-subprotocol-is-a-credential: wrong-subprotocol
a-bad-credential-gets-no-websocket: 401-is-200
two-credentials-are-refused: 400-is-404
malformed-lines-are-answered: drops-malformed at stdio/handshake
an-oversized-line-is-answered: drops-huge at stdio/handshake
a-pipe-is-one-connection: forgets-current at stdio/handshake
a-modern-pipe-is-pushed-to: events-need-a-listen at stdio/modern
a-foreign-session-is-not-found: one-principal
a-foreign-attempt-has-no-effect: one-principal
a-foreign-state-is-no-use: one-principal
a-foreign-cancel-cancels-nothing: one-principal
a-foreign-connection-is-404: one-principal
a-foreign-protocol-id-in-the-header-is-404: one-principal
answers-count-from-the-asked-only: one-principal
a-session-moves-to-another-transport: loses-replay
and-moves-back: everyone-hears
state-is-one-on-all-transports: state-here-only
a-key-is-known-on-all-transports: ignores-keys
a-running-key-is-joined-from-another-transport: ignores-keys
an-end-reaches-every-transport: knows-every-session
a-detached-session-is-served: detached-is-displaced
a-resume-that-attaches-nowhere-displaces: serves-displaced
a-lost-position-detaches: silent-eviction
after-a-lost-position-the-stream-goes-on: sends-what-waited
what-waited-too-long-is-a-lost-position: silent-eviction
a-cancelled-key-does-not-run-again: cancelled-runs-again
a-cancelled-listen-is-answered: cancelled-listen-is-silent
a-listen-that-is-replaced-is-answered: old-listen-goes-on
a-listen-whose-session-leaves-is-answered: old-listen-goes-on
a-listen-is-no-running-request: listen-had-begun
a-listen-occupies-its-id: listens-have-no-id
resume-with-its-own-header-is-a-conflict: 404-is-200
a-modern-resume-with-its-own-header-is-a-conflict: resume-refusal-is-served
a-newer-listen-is-no-takeover: tells-who-listens
a-displaced-listen-is-told: silent-takeover
a-displaced-listen-that-did-not-ask-is-not-told: tells-who-listens
a-hole-before-the-listen-ends-it: sends-what-is-left
a-forgotten-response-keeps-the-id-of-its-request: ids-become-strings
what-is-replaced-is-a-place-all-the-same: forgets-on-drop
the-error-of-a-handler-is-200: handler-error-is-500
before-a-handshake-little-is-served: needs-initialize
a-continued-response-ends-no-stream: forgets-on-drop
a-refused-request-leaves-its-key-unused: refused-is-recorded
a-key-on-session-methods-is-ignored: keys-on-session-methods
every-sender-is-answered: newest-is-answered
a-cancel-by-key-comes-from-anywhere: cancels-from-its-own
a-cancel-of-what-finished-has-no-effect: cancels-the-finished
a-cancel-by-id-stays-on-its-connection: cancels-wherever
a-broken-response-cancels-nothing: cancels-with-the-response
what-is-named-is-not-taken: takes-what-is-named
rule-2-attaches-nothing: takes-by-rule-2
null-is-a-way-out: null-is-for-once
odd-strings-name-no-session: odd-ids-are-invalid
a-bad-state-deletes-nothing: delete-ignores-state
what-coalesces-stays-in-its-session: coalesces-across-sessions
delete-ends-what-has-no-session: no-delete
errors-have-the-status-of-their-era: invalid-has-its-eras-mixed-up
the-stream-of-another-connection-yields-nothing: in-every-stream
two-sessions-on-one-connection: forgets-on-drop
another-token-of-the-principal-is-as-good: tokens-are-owners at http/handshake
fewer-scopes-do-not-resume: one-principal
fewer-scopes-do-not-listen: one-principal
fewer-scopes-get-no-stream: one-principal
fewer-scopes-get-no-response: one-principal
a-kept-answer-is-not-for-fewer-scopes: one-principal
a-cancelled-question-is-taken-back: not-taken-back
a-cancelled-question-is-not-asked-again: asks-again
a-client-that-takes-nothing-delays-nobody: waits-for-the-slow
a-list-change-is-heard-once: bare-list-copies
an-end-says-nothing-else: end-says-more
a-key-has-1-to-256-characters: any-length-of-keys
an-answer-comes-on-any-connection: answers-on-their-connection
an-ended-session-takes-its-entries: ends-nothing
two-bearer-subprotocols-are-refused: 400-is-404
"""


def caught_by() -> dict[str, tuple[str, str | None]]:
    """Vector → the fault that it is caught by, and the way if it is not the first."""
    table: dict[str, tuple[str, str | None]] = {}
    for line in _TABLE.strip().splitlines():
        vector, _, rest = line.partition(": ")
        fault, _, way = rest.partition(" at ")
        table[vector] = (fault, way or None)
    return table
