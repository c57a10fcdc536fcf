"""Map each clause to a fault that breaks it, and to the vector that catches the fault.

The fault breaks as little else as can be. This is the proof that an implementation which breaks one
clause does not pass.

``CLAUSE: FAULT by VECTOR [at WAY]``; a clause may have several. Every MUST of a server that has a
vector is in it; the tests of the runner play it, as they play ``broken.py``, which asks the same of
each vector. A MUST that has no vector says why in ``spec/coverage.json``.

A run has proven a clause if the vectors that catch its faults passed: then passing says something.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mcp_sessions_conformance.faults.shutdown import PROVES
from mcp_sessions_conformance.loader import Vector
from mcp_sessions_conformance.runner import Run

_TABLE = """
ERR1: not-found-otherwise by data-layer-vector-session-not-found
ERR1: not-found-is-another-code by resume-of-an-unknown-session-fails
ERR1: not-found-without-session by the-server-may-end-a-session
ERR1: knows-every-session by the-server-may-end-a-session
ERR2: talkative-errors by errors-do-not-tell-what-exists
HTP2: not-found-is-404 by resume-of-an-unknown-session-fails at http/handshake
HTP2: not-found-is-404 by data-layer-vector-session-not-found at http/modern
GAT2: gate-is-another-code by gated-tools-need-a-session
TKO5: displaced-is-another-code by the-displaced-cannot-go-on
ERR6: limit-is-another-code by limits-have-a-name
ERR6: limit-has-no-name by a-full-key-store-refuses-new-keys
ERR7: unknown-is-another-code by a-dropped-answer-is-outcome-unknown
ASC10: invalid-is-another-code by malformed-metadata-is-an-error
STT8: state-has-no-reason by a-spoilt-state-is-refused-flip
SES11: conflict-is-another-code by mode-conflict-leaves-the-session-alone
SES11: conflict-has-no-reason by metadata-naming-a-transport-session-is-refused
KEY8: reused-has-no-reason by a-key-with-other-content-is-refused
REQ2: duplicate-has-no-reason by an-open-id-is-not-used-twice-on-one-wire
HTM11: mismatch-is-another-code by another-session-in-the-header-is-refused
END6: hides-what-began by a-request-that-began-says-so
END6: always-started by a-request-that-began-says-so
ERR14: names-a-stranger by a-foreign-session-is-not-found at http/handshake
ERR14: lists-connections by a-foreign-connection-has-one-answer
EVT1: first-session-only by a-change-is-received-once-per-session
EVT1: in-every-session by updates-reach-who-subscribed
EVT1: no-list-changes by list-changes-reach-every-session
EVT1: unfiltered-lists by the-filter-becomes-the-subscriptions
EVT4: subscribed-only by a-handlers-message-is-an-event-of-its-session
EVT5: numbers-progress by progress-is-no-event
EVT5: numbers-progress by progress-comes-on-the-response
EVT5: progress-to-all by progress-stays-where-it-was-asked
EVT6: unnumbered-events by events-carry-an-id
EVT7: one-event-id by events-carry-an-id
EVT7: swaps-events by events-come-in-order-and-once
EVT6: tells-state by events-name-their-session
EVT6: names-more by events-name-their-session
EVT10: stored-late by replay-begins-after-the-position
EVT11: bare-copies by a-change-is-received-once-per-session
EVT11: bare-list-copies by a-list-change-is-received-once
EVT12: forgets-own-changes by a-change-precedes-its-answer
EVT13: forgets-subscriptions by resume-keeps-subscriptions
EVT13: keeps-subscribed by unsubscribing-ends-it
EVT6: decorates-plain by a-bare-connection-gets-plain-messages
RES3: everyone-receives by resume-on-a-new-connection-moves-the-session
ATT2: deaf-until-resumed by start-attaches
ATT2: deaf-until-resumed by create-attaches
ATT3: deaf-until-resumed by a-named-request-attaches-without-replay
ATT3: replays-on-attach by a-named-request-attaches-without-replay
ATT3: takes-what-is-named by what-is-named-is-not-taken
ATT3: takes-by-rule-2 by rule-2-attaches-nothing
ATT4: coalesces-live by live-events-come-one-by-one
EVT10: loses-replay by drop-then-resume
ATT6: swaps-events by events-come-in-order-and-once
ATT6: live-before-replay by resume-then-live
ATT6: stutters by events-come-in-order-and-once
ATT8: waits-for-the-slow by a-client-that-takes-nothing-delays-nobody
ATT9: ends-with-its-connection by drop-then-resume
ATT9: no-delete by delete-detaches-protocol-sessions
ATT10: sends-what-is-left by a-hole-before-the-listen-ends-it
CUP3: replays-from-the-beginning by replay-begins-after-the-position
CUP3: skips-one by replay-begins-after-the-position
CUP3: loses-replay by drop-then-resume
CUP3: nothing-is-a-gap by nothing-missed-is-a-success
CUP5: always-catches-up by no-position-replays-nothing
CUP5: replays-what-is-left by no-position-replays-nothing
CUP5: replays-what-is-left by an-evicted-position-replays-nothing
CUP5: positions-are-errors by an-unknown-position-replays-nothing
CUP8: no-position-is-called-otherwise by no-position-replays-nothing
CUP8: unknown-position-is-called-otherwise by an-unknown-position-replays-nothing
CUP8: ahead-is-called-otherwise by a-position-ahead-replays-nothing
CUP8: always-catches-up by a-position-ahead-replays-nothing
CUP8: evicted-is-called-otherwise by an-evicted-position-replays-nothing
CUP8: log-replaced-is-called-otherwise by a-position-of-another-log-replays-nothing
CUP16: replaced-are-gone by a-replaced-event-is-a-position
CUP17: renumbers-replay by a-replayed-event-is-the-stored-one
CUP18: drops-large by the-newest-event-is-kept
COA2: one-update-for-all by updates-of-other-resources-stay
COA2: coalesces-across-sessions by what-coalesces-stays-in-its-session
COA4: coalesces-messages by other-messages-all-stay
COA5: old-id-survives by the-survivor-is-the-newest
COA4: half-of-progress by progress-is-no-event
COA5: replaced-are-gone by every-position-leads-to-the-same-state
TKO1: everyone-receives by the-displaced-gets-nothing-more
TKO2: loses-answers by the-displaced-gets-its-answers
TKO3: silent-takeover by the-displaced-is-notified
TKO3: names-who-resumes by who-did-not-ask-is-not-notified
TKO3: silent-takeover by a-displaced-listen-is-notified
TKO3: notifies-who-listens by a-displaced-listen-that-did-not-ask-is-not-notified
TKO3: silent-eviction by a-lost-position-detaches
TKO3: numbers-notices by the-displaced-is-notified
TKO5: serves-displaced by the-displaced-cannot-go-on
TKO5: serves-displaced by a-resume-that-attaches-nowhere-displaces
TKO5: serves-displaced by a-lost-position-detaches
TKO6: locks-out-displaced by what-the-displaced-may-ask
RES3: everyone-receives by the-later-resume-wins
TKO9: late-end-kills by a-late-end-harms-nobody
HTM9: notifies-who-listens by a-newer-listen-is-no-takeover
REQ1: crosses-ids by ids-mean-nothing-beyond-their-connection
REQ1: cancels-wherever by a-cancel-by-id-stays-on-its-connection
REQ2: allows-duplicates by an-open-id-is-not-used-twice-on-one-wire
REQ2: listens-have-no-id by a-listen-occupies-its-id
REQ3: remembers-ids by a-cut-request-frees-its-id
REQ4: cancels-the-cut by a-broken-connection-cancels-nothing
REQ4: cancels-with-the-response by a-broken-response-cancels-nothing
REQ5: ignores-cuts by a-cut-response-cancels-in-the-modern-era
REQ6: no-cancel by a-cancel-cancels
REQ6: cancelled-in-silence by a-cancelled-key-does-not-run-again
REQ7: cancels-need-their-id by a-cancel-by-key-cancels
REQ7: cancels-from-its-own by a-cancel-by-key-comes-from-anywhere
REQ7: cancels-by-key-alone by a-cancel-by-key-needs-its-session
REQ7: cancels-the-finished by a-cancel-of-what-finished-has-no-effect
KEY2: recorded-late by a-running-key-is-joined
KEY3: finished-runs-again by a-known-key-never-runs-again
KEY3: one-key-for-all by another-key-runs
KEY3: keys-of-all-sessions by keys-belong-to-their-session
KEY4: kept-without-metadata by a-kept-answer-has-the-new-metadata
KEY4: kept-answer-has-the-first-id by a-kept-answer-has-the-new-metadata
KEY5: running-is-refused by a-running-key-is-joined
KEY5: newest-is-answered by every-sender-is-answered
KEY6: progress-to-the-first by progress-follows-the-newest-sending
KEY6: asks-once by an-open-question-is-asked-again
KEY3: keys-of-connections by a-key-works-on-any-connection
KEY8: any-content by a-key-with-other-content-is-refused
KEY8: strict-content by metadata-is-not-content
KEY10: errors-are-forgotten by errors-are-answers-too
KEY10: refused-is-recorded by a-refused-request-leaves-its-key-unused
KEY11: ignores-keys by a-dropped-answer-is-outcome-unknown
KEY12: no-key-lifetime by the-bounds-of-keys-are-advertised
KEY13: no-limit by a-full-key-store-refuses-new-keys
KEY14: keys-of-all-sessions by a-key-outside-of-a-session-is-ignored
KEY14: ignores-cuts by a-key-outside-of-a-session-keeps-nothing
KEY14: keys-on-session-methods by a-key-on-session-methods-is-ignored
KEY15: odd-keys by a-malformed-key-is-an-error
KEY15: any-length-of-keys by a-key-has-1-to-256-characters
KEY18: one-principal by a-kept-answer-is-not-for-fewer-scopes
KEY10: cancelled-runs-again by a-cancelled-key-does-not-run-again
ASK1: counted-questions by question-ids-are-random-strings
ASK2: asks-once by an-open-question-is-asked-again
SEC10: last-answer-counts by the-first-answer-counts
SEC10: answers-on-their-connection by an-answer-comes-on-any-connection
ASK4: asks-anyone by who-cannot-be-asked-is-not-asked
ASK6: asks-again by a-cancelled-question-is-not-asked-again
SEC3: one-principal by fewer-scopes-do-not-resume
SEC3: one-principal by fewer-scopes-do-not-listen
SEC3: one-principal by fewer-scopes-get-no-stream
SEC7: mixes-sessions by one-connection-many-sessions
SEC7: in-every-session by a-handlers-message-is-an-event-of-its-session
SEC7: in-every-stream by the-stream-of-another-connection-yields-nothing
ERR6: no-limit by limits-have-a-name
SEC9: no-origin-check by a-foreign-origin-is-refused
SEC10: one-principal by answers-count-from-the-asked-only
SEC3: one-principal by fewer-scopes-get-no-response
SES1: no-modes by mode-conflict-leaves-the-session-alone
SES3: sessions-for-all by sessions-are-optional
SES4: one-id-for-all by start-ids-are-unguessable
SES4: short-ids by start-ids-are-unguessable
SES4: id-not-ascii by start-answers-with-an-id
SES4: adopts-ids by caller-id-is-not-adopted
SES7: families-apart by both-families-share-one-namespace
SES8: one-principal by a-foreign-session-is-not-found
SES8: tokens-are-owners by another-token-of-the-principal-is-as-good at http/handshake
SES8: one-principal by a-foreign-attempt-has-no-effect
SES11: no-modes by mode-conflict-leaves-the-session-alone
SES11: no-modes by metadata-naming-a-transport-session-is-refused
SES16: odd-expiry by start-answers-with-the-head
SES18: knows-every-session by an-ended-session-stays-ended
ASC1: ignores-metadata by rule-1-the-named-session
ASC2: forgets-current by rule-2-the-current-session
ASC2: always-current by rule-2-is-not-for-the-modern-era
ASC4: ignores-metadata by null-names-no-session
ASC4: null-is-for-once by null-is-a-way-out
ASC5: forgets-current by rule-2-the-current-session
ASC5: always-current by create-sets-no-current-session
ASC7: forgets-current by the-connection-outlives-its-stream
ASC7: never-no-stream by a-lone-post-is-not-a-connection
ASC9: needs-initialize by sessions-need-no-initialize
ASC10: tolerates-malformed by malformed-metadata-is-an-error
ASC10: odd-ids-are-invalid by odd-strings-name-no-session
ASC10: strict-metadata by odd-strings-name-no-session
ASC1: takes-misplaced by named-in-the-wrong-member-is-not-named
ASC12: no-metadata by results-carry-the-metadata
ASC12: no-metadata-on-lists by list-results-carry-the-metadata
ASC12: rotates-ids by results-carry-the-metadata
ASC14: oldest-state by results-carry-the-newest-state
ASC12: sessions-for-all by rule-2-results-are-as-they-are
ASC16: mixes-sessions by one-connection-many-sessions
ASC17: remembers-the-ended by ended-here-is-no-longer-current
ASC17: forgets-current by ended-by-another-is-an-error
ASC17: no-ping by ended-by-another-is-an-error
TKO5: detached-is-displaced by a-detached-session-is-served
STA3: id-not-ascii by start-answers-with-an-id
STA3: start-without-expiry by start-answers-with-the-head
STA3: head-is-garbage by start-head-is-a-position
STA5: picky-start by start-ignores-params
STA6: knows-all-methods by unknown-methods-are-method-not-found
ERR1: knows-every-session by resume-of-an-unknown-session-fails
RES4: resume-says-little by resume-answers-what-happened
RES4: reason-always by resume-answers-what-happened
RES5: old-head by the-head-of-a-resume-is-its-end
RES5: live-before-replay by resume-then-live
RES6: answers-after-replay by resume-answers-before-it-replays
RES8: names-who-resumes by resume-in-place-displaces-nobody
RES9: loses-replay by a-session-moves-to-another-transport
RES10: no-transport-headers by resume-with-transport-headers-is-refused
RES10: resume-refusal-is-served by a-modern-resume-with-its-own-header-is-a-conflict
RES11: 400-is-404 by get-and-delete-on-a-protocol-session-are-400
RES12: never-no-stream by a-lone-post-is-not-a-connection
RES12: no-stream-is-called-otherwise by a-lone-post-is-not-a-connection
RES13: not-found-for-everything by resume-params-have-types
RES14: forgets-subscriptions by resume-keeps-subscriptions
END3: talks-after-end by nothing-after-the-end
END4: end-names-session by end-answers-with-nothing
END4: end-says-more by an-end-says-nothing-else
END4: talks-after-end by answers-and-events-keep-their-order
SES18: knows-every-session by end-again-is-not-found
END6: forgets-waiting by end-answers-running-requests
ASK6: forgets-waiting by end-fails-open-questions
CRE1: extra-member by create-answers-in-strings
CRE3: create-ignores-metadata by create-refuses-session-metadata
CRE4: create-wants-params by data-layer-vector-session-creation
CRE4: picky-create by create-takes-params-without-metadata
CRE1: no-first-state by data-layer-vector-session-creation
CRE6: no-create-head by create-says-where-the-log-begins
CRE6: create-head-is-garbage by create-says-where-the-log-begins
DEL2: delete-takes-params by delete-takes-the-session-from-meta
DEL2: delete-takes-current by delete-takes-no-current-session
DEL3: talks-after-end by nothing-after-the-delete
CAP1: capability-is-true by sessions-is-declared-in-initialize
CAP1: no-capability by sessions-is-declared-in-discover
CAP3: no-settings by settings-are-advertised-in-initialize
CAP3: no-window by the-window-is-advertised
CAP5: odd-level by the-level-is-one-of-four
CAP4: wants-declared by a-client-need-not-declare
CAP4: refuses-declared by a-client-may-declare
GAT2: no-gate by gated-tools-need-a-session
STT6: any-state by a-state-is-bound-to-its-session
STT7: believes-tokens by the-stored-state-is-the-state
STT8: any-state by a-spoilt-state-is-refused-truncate
STT8: talkative-errors by bad-states-have-one-error
STT8: delete-ignores-state by a-bad-state-deletes-nothing
ERR2: state-first by an-unknown-session-is-not-found-whatever-its-state
STT10: state-is-required by the-stored-state-is-the-state
STT12: first-writer-wins by the-last-writer-wins
STT13: failing-writes by a-failed-request-changes-no-state
HTP1: one-era by one-endpoint-both-eras
HTP2: invalid-has-its-eras-mixed-up by errors-have-the-status-of-their-era at http/handshake
HTP2: invalid-has-its-eras-mixed-up by errors-have-the-status-of-their-era at http/modern
HTP2: gated-is-403 by errors-have-the-status-of-their-era at http/modern
HTP2: displaced-is-409 by the-displaced-cannot-go-on at http/handshake
HTP3: mirror-is-unknown by a-mirror-is-accepted
HTP3: header-is-session by a-modern-mirror-is-accepted
HTL1: keeps-connection-id by initialize-gives-a-connection-id
HTL2: forgets-current by the-connection-outlives-its-stream
HTL3: deaf by events-wait-for-the-stream
HTL4: forgets-on-drop by last-event-id-continues-the-stream
HTL4: in-every-stream by a-stream-yields-only-its-own
TKO1: everyone-receives by a-session-that-leaves-takes-its-entries
TKO1: ends-nothing by an-ended-session-takes-its-entries
HTL3: serves-displaced by what-waited-too-long-is-a-lost-position
HTL7: replays-on-get by a-get-without-position-detaches
HTL8: one-get-only by a-newer-get-ends-the-older
HTL9: no-list-changes by a-lost-position-says-what-to-read
HTL9: silent-eviction by a-lost-position-detaches
HTL10: forgets-on-drop by a-response-stream-can-be-resumed
HTL11: unknown-is-another-code by a-forgotten-response-stream-is-answered
HTL11: ids-become-strings by a-forgotten-response-keeps-the-id-of-its-request
HTL12: no-priming by streams-begin-with-a-priming-event
HTL13: 404-is-200 by an-unknown-connection-is-404
HTL14: 400-is-404 by get-and-delete-on-a-protocol-session-are-400
HTL14: 400-is-404 by a-post-on-a-protocol-session-is-400
HTL16: ignores-metadata by another-connection-id-is-no-conflict
HTL17: no-delete by delete-detaches-protocol-sessions
HTL17: no-delete by delete-ends-what-has-no-session
HTL18: 400-is-404 by a-request-without-a-connection-is-400
HTL19: always-catches-up by an-sse-id-is-no-position
HTL9: sends-what-waited by after-a-lost-position-the-stream-continues
HTM1: decorates-plain by a-listen-without-a-session-gets-no-events
HTM1: only-live by events-wait-for-a-listen
HTM2: late-acknowledgement by the-acknowledgement-comes-first
HTM2: live-before-replay by the-replay-waits-for-the-listen
HTM4: no-subscription-id by messages-carry-the-subscription-id
HTM4: one-subscription-id by messages-carry-the-subscription-id
HTM1: only-live by what-follows-create-waits
HTM6: loses-replay by the-replay-waits-for-the-listen
HTM6: always-resumes by after-a-refusal-a-listen-starts-at-the-head
HTM6: only-live by what-follows-a-refusal-waits-for-the-listen
HTM7: always-resumes by a-listen-after-a-cut-one-starts-at-the-head
HTM8: keeps-subscribed by the-filter-becomes-the-subscriptions
HTM8: unfiltered-lists by the-filter-becomes-the-subscriptions
HTM9: old-listen-continues by a-newer-listen-ends-the-older
HTM9: old-listen-fails by a-newer-listen-ends-the-older
HTM10: listen-ends-in-order by the-end-of-a-session-ends-its-listen
HTM11: mismatch-is-served by another-session-in-the-header-is-refused
HTM11: header-is-session by a-header-without-metadata-is-ignored
HTM13: no-result-type by session-results-have-a-result-type
REQ5: ignores-keys by a-keyed-request-survives-its-response
REQ7: 202-is-200 by a-cancel-by-key-is-202
HTM16: old-listen-continues by a-newer-listen-ends-the-older
HTM17: sends-what-is-left by a-hole-before-the-listen-ends-it
HTM18: listen-had-begun by a-listen-is-no-running-request
HTM18: listens-have-no-id by a-listen-occupies-its-id
WSS1: wrong-subprotocol by the-subprotocol-is-selected
WSS2: wrong-subprotocol by no-other-subprotocol-is-selected
WSS3: binary-frames by messages-are-text-frames
WSS3: closes-1011 by a-binary-frame-closes-1003
WSS5: closes-1011 by a-huge-message-closes-1009
WSS5: drops-more-than-64-kib by a-large-message-is-served
SEC9: no-origin-check by a-foreign-origin-gets-no-websocket
WSS7: 401-is-200 by a-bad-credential-gets-no-websocket
WSS7: 400-is-404 by two-credentials-are-refused
WSS9: compresses by compression-is-not-negotiated
WSS10: one-era-per-connection by both-eras-on-one-websocket
WSS10: serves-bare by a-modern-websocket-stays-modern
WSS11: events-need-a-listen by events-need-no-listen
WSS12: no-subscription-id by a-listen-adds-its-id
WSS13: answers-after-replay by resume-answers-before-it-replays
WSS14: drops-malformed by malformed-frames-are-answered
WSS15: closes-1011 by a-binary-frame-closes-1003
WSS18: 401-is-200 by a-bad-credential-gets-no-websocket
WSS18: no-host-check by a-foreign-host-gets-no-websocket
WSS18: no-origin-check by a-foreign-origin-gets-no-websocket
WSS19: cancelled-listen-is-silent by a-cancelled-listen-is-answered
WSS19: old-listen-continues by a-listen-that-is-replaced-is-answered
WSS19: old-listen-fails by a-listen-whose-session-leaves-is-answered
STD1: drops-malformed by malformed-lines-are-answered at stdio/handshake
STD2: forgets-current by a-pipe-is-one-connection at stdio/handshake
STD3: drops-huge by an-oversized-line-is-answered at stdio/handshake
WSS11: events-need-a-listen by a-modern-pipe-is-pushed-to at stdio/modern
EVT8: ids-are-numbers by event-ids-are-strings
END4: answers-the-ended-late by an-end-is-the-last-word
EVT11: deaf-with-a-session by a-connection-gets-its-own-subscriptions
EVT13: subscribes-the-connection by rule-2-subscribes-the-session
ATT10: skips-holes by a-hole-is-never-skipped
HTP7: any-version by an-unknown-version-is-refused-for-session-methods
HTP1: wants-a-version by a-request-without-a-version-is-of-the-handshake-era
HTL1: initialize-ends-the-connection by another-initialize-leaves-the-connection
REQ2: ids-have-no-type by ids-have-a-type
REQ7: cancels-by-id-despite-a-key by a-cancel-by-key-ignores-the-id
WSS13: events-come-late by events-come-before-the-answer-behind-them
SEC9: no-host-check by a-foreign-host-is-refused
SEC9: no-host-check by a-foreign-host-gets-no-websocket
TKO9: late-end-kills by a-late-end-detaches-nobody
ATT2: deaf-until-resumed by what-is-made-on-one-wire-is-attached-at-once
HTM6: only-live by after-a-refusal-nothing-later-is-lost
HTM9: old-listen-continues by a-resume-ends-the-listen
SES8: one-principal by a-foreign-connection-id-is-not-found
SEC3: one-principal by fewer-scopes-attach-nothing
ASC1: ignores-metadata by rule-1-is-for-every-method
ASC9: needs-initialize by what-needs-no-initialize
TKO6: locks-out-displaced by what-the-displaced-may-ask-at-once
REQ6: no-cancel by a-cancel-by-id-cancels-a-keyed-request
HTL12: no-priming by a-response-stream-has-ids
HTM16: everyone-receives by a-listen-takes-the-session-from-another-transport
WSS12: everyone-receives by a-listen-attaches
CUP3: the-floor-is-evicted by each-position-around-the-floor-gets-its-answer
CUP5: the-one-before-the-floor-is-good by each-position-around-the-floor-gets-its-answer
CUP8: the-one-before-the-floor-is-good by each-position-around-the-floor-gets-its-answer
HTL4: the-oldest-place-is-lost by each-place-around-the-floor-gets-its-answer
HTL9: the-place-before-the-floor-is-good by each-place-around-the-floor-gets-its-answer
HTL13: a-place-opens by a-place-opens-nothing
HTL13: a-place-is-a-credential by a-foreign-place-opens-nothing
HTM17: skips-a-hole-of-one by each-hole-before-a-listen-counts
RES14: resume-forgets-the-filter by a-resume-keeps-the-list-filter
SEC3: a-place-is-a-credential by fewer-scopes-continue-no-stream
EVT12: others-hear-later by a-change-precedes-its-answer-for-every-principal at http/handshake
KEY10: duplicates-are-recorded by a-duplicate-id-leaves-its-key-unused
KEY10: absent-is-recorded by an-absent-session-leaves-its-key-unused
KEY10: malformed-is-recorded by malformed-metadata-leaves-its-key-unused
KEY10: displaced-is-recorded by the-displaced-leaves-its-key-unused
ASC12: no-metadata-on-resources-read by every-methods-result-carries-the-metadata
ASC12: no-metadata-on-resources-templates-list by every-methods-result-carries-the-metadata
ASC12: no-metadata-on-prompts-get by every-methods-result-carries-the-metadata
ASC12: no-metadata-on-completion-complete by every-methods-result-carries-the-metadata
ASC12: no-metadata-on-resources-subscribe by every-methods-result-carries-the-metadata
ASC12: no-metadata-on-resources-unsubscribe by every-methods-result-carries-the-metadata
ASC12: no-metadata-on-ping by every-methods-result-carries-the-metadata
SES3: newest-session-for-all by what-has-no-session-concerns-none
RES3: resumes-where-no-session-is by a-session-is-resumed-on-any-connection
RES8: in-place-replays-nothing by resume-in-place-replays-what-follows
EVT1: subscribes-to-what-begins-alike by an-update-is-for-its-uri-alone
EVT13: keeps-subscribed by subscribing-twice-is-subscribing
EVT4: talks-where-it-was-asked by a-handlers-message-goes-where-its-session-is
EVT10: talks-where-it-was-asked by what-a-handler-says-waits
CUP17: marks-the-replay by every-kind-of-event-is-replayed-as-stored
CUP18: drops-larger by a-large-event-drops-only-what-is-older
REQ3: cancels-the-first-of-an-id by a-cancel-reaches-every-open-request-of-an-id
ATT8: one-stalls-all-events by a-client-that-takes-nothing-delays-no-event
HTL7: goes-on-after-a-get by after-a-get-without-position-nothing-comes
ASC10: tolerates-malformed-notifications by a-notification-with-malformed-metadata-has-no-effect
HTL13: serves-what-it-ended by a-connection-that-ends-during-a-body-is-404
"""


@dataclass(frozen=True)
class Proof:
    clause: str
    fault: str
    vector: str
    """It fails on a server with that fault."""

    way: str | None = None
    """The way; None: the first one that the vector is for."""


def proofs() -> list[Proof]:
    found: list[Proof] = []
    for line in (_TABLE + PROVES).strip().splitlines():
        clause, _, rest = line.partition(": ")
        fault, _, rest = rest.partition(" by ")
        vector, _, way = rest.partition(" at ")
        found.append(Proof(clause, fault, vector, way or None))
    return found


@dataclass(frozen=True)
class Musts:
    proven: list[str]
    """Each vector that catches one of its violations passed, wherever it was played, and at least
    one was played."""

    failed: list[str]
    """A step that checks it failed."""

    not_played: list[str]
    """None of the vectors that catch its violations was played, or one failed for another
    clause."""

    @property
    def total(self) -> int:
        return len(self.proven) + len(self.failed) + len(self.not_played)


def musts_of(run: Run) -> Musts:
    catching: dict[str, set[str]] = {}
    for proof in proofs():
        catching.setdefault(proof.clause, set()).add(proof.vector)
    played = {outcome.vector.id for outcome in run.outcomes}
    wrong = {c for o in run.outcomes if o.verdict == "failure" for c in o.clauses}
    broken = {o.vector.id for o in run.outcomes if o.verdict == "failure"}
    left_out = [entry.vector for entry in (*run.not_selected, *run.not_played)]
    about = _clauses([*(o.vector for o in run.outcomes), *left_out])
    found = Musts([], [], [])
    for clause, vectors in catching.items():
        if clause not in about:
            continue
        if clause in wrong:
            found.failed.append(clause)
        elif vectors & played and not vectors & broken:
            found.proven.append(clause)
        else:
            found.not_played.append(clause)
    return found


def _clauses(vectors: Iterable[Vector]) -> set[str]:
    return {clause for vector in vectors for clause in vector.clauses}
