"""A history: what clients did and saw, and what the wrapped server ran, as JSON lines.

Each line is one record. Its members ``t`` (seconds, one clock for all) and ``what`` are always
there. The order of the lines is the order in which things happened. A *call* is named by its
*mark*, which its client makes and the server gives back in everything that the call causes:
``c1.3`` is the third call of client ``c1``. Its messages are numbered from 1, each kind by itself;
its questions are ``c1.3?1``, ``c1.3?2``.

Of clients:

==============  ===================================================================================
``connects``    ``client`` begins. ``can_be_asked``: it declared that it answers questions.
                ``is_told``: it declared that it wants to know who takes its session
                ``answers``: it answers what it is asked outside of its calls.
                ``gives_up``: it may say by itself that an outcome is unknown.
                ``stays``: it has one replica, if that lives
``owns``        ``client`` was told that it has ``session``. ``session`` is a name of the history's
``gone``        ``session`` ended with its connection, or its client cares for it no more
``sends``       ``client`` sends ``call``, once more if it was sent before. ``keyed``: under a
                request key. ``within``: seconds in which it must be answered. ``survives``: it
                goes on without its connection. ``logs``: its client gets log messages about it.
                ``again``: a second sending, whose messages come ``on`` ``again``
``answered``    ``client`` has the answer to ``call``: ``result`` true, or ``code`` of its error.
                ``started`` false: the error says that it did not start. ``whole``: the client
                read the response from its first byte to its last, over as many connections as
                that took. ``again``: it is that of a second sending
``refused``     ``client`` was told that ``call`` cannot be served now. ``started`` false: it did
                not start
``silent``      ``client`` got no word about ``call`` for long, and breaks the connection to the
                replica ``at``, which counts on beyond the last one
``round``       ``client`` has the ``answer`` to round ``n`` of ``call``: its kind, or the code of
                its error. A round that was sent twice has two
``lost``        the connection of ``call`` broke, and nothing promises an answer
``tells``       ``client`` is about to send a notification of its own, the ``n``th about ``call``
``is_told``     it was accepted
``hears``       ``client`` receives message ``n`` of ``call``, of ``kind`` ``progress``, ``log`` or
                ``event``. ``on``: the call on whose response it came, else ``events``, or ``again``
                for a call that was sent twice. ``id``: the event's id, where it has one
``asked``       ``client`` receives ``question`` on ``on``, as a request with ``id``
``replies``     ``client`` sent its answer ``value`` to ``question``. ``accepted``: the layer said
                that it has it (over HTTP it does)
``takes``       ``client`` is about to take ``session``, which ``of`` has. ``was_connected``: that
                one could be told
``breaks``      the connection of ``client`` on which events come ends, whoever ended it; or its
                request for one was refused: ``served`` is false
``displaced``   ``client`` is told that its session went elsewhere, for ``reason``
``gap``         ``client`` is told that it may have missed events (of all its sessions)
``subscribed``  ``client`` was told that ``session`` is subscribed to ``uri``
``unsubscribed``  ``client`` is about to end the subscription of ``session`` to ``uri``
``listens``     ``client`` was told that its listen to ``session`` began. From then on its
                ``uris`` are the session's subscriptions, in place of those before (HTM8)
``updated``     ``client`` hears that ``uri`` changed
``forgotten``   ``client`` was told that its session does not exist
``task``        ``client`` was told that ``call`` became ``task``, a name of the history's
``shown``       it was shown the task of ``call``: its ``status``, and the ``code`` of its error.
                ``unknown``: it was told that there is none
``cancels``     it asks ``call``, or its task, to end
``cancelled``   the server said that it has that
``spied``       ``client`` sent ``method`` about the task of ``call``, which is another client's,
                and got the error ``code``, or none
``idle``        ``client`` has taken all of its steps, and listens until the end. ``stuck``: it has
                not, within its patience
==============  ===================================================================================

Of the wrapped server:

==============  ===================================================================================
``ran``         the handler of ``call`` began. ``process``: the number of that process of a command
``hears_of``    the server has the ``n``th notification of the client about ``call``
``says``        message ``n`` of ``call`` of ``kind`` is about to be sent
``said``        its sending returned without an error. ``sure``: it names its call, and must arrive
``asks``        the handler of ``call`` puts ``question``
``told``        it has the answer: ``value``; or ``value`` is absent: the question failed
``ended``       the handler of ``call`` is over. ``how``: ``done``, ``failed`` or ``cancelled``
``changes``     ``uri`` is about to change, because of ``call``
``changed``     the change was announced. ``own``: to the session of the call only. ``kept``: the
                store was away, and the process that serves sends it later
``edits``       ``call`` begins to add its mark to the list in ``data`` of its session
``data``        it did: ``log`` is the list after it, or null: it did not
==============  ===================================================================================

Of the world:

==============  ===================================================================================
``begins``      the first line. ``replicas``: how many. ``has_room``: the store drops no event and
                no answer for want of space. ``passes_on``: a replica may have a call served by
                another one
``fault``       something goes wrong: ``kind``, ``host``
``stored``      the store has event ``n`` of ``call``
``stays``       at the end, ``session`` is attached to a connection of a process that lives, whose
                client has left long ago
``heals``       no fault lasts beyond this line, and every process is there
``defect``      the layer itself logged work that died: ``text``
``end``         the last line
==============  ===================================================================================

A ``bystander`` in ``sends`` marks calls that must not wait for the load of others: ``seconds`` is
what they take alone.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class History:
    """The records of one run, in order.

    Args:
        now: The clock of the run.
    """

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        self.records: list[Record] = []
        self._now = now
        self._awaited: list[tuple[str, int, asyncio.Event]] = []

    async def comes(self, what: str, nth: int = 1) -> None:
        """Wait for that record, so many from now."""
        there = asyncio.Event()
        self._awaited.append((what, nth, there))
        await there.wait()

    def add(self, what: str, **members: Any) -> None:
        t = round(self._now(), 6) if self._now is not None else float(len(self.records))
        self.records.append({"t": t, "what": what, **members})
        if self._awaited:
            self._awaited = [
                (each, nth - (each == what), there)
                for each, nth, there in self._awaited
                if each != what or nth > 1 or there.set()
            ]

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def of(self, *whats: str) -> Iterator[Record]:
        return (record for record in self.records if record["what"] in whats)

    def lines(self) -> str:
        return "".join(json.dumps(each, sort_keys=True) + "\n" for each in self.records)

    def write(self, path: Path) -> None:
        path.write_text(self.lines())

    @staticmethod
    def read(lines: Iterable[str]) -> "History":
        history = History()
        history.records = [json.loads(line) for line in lines if line.strip()]
        return history
