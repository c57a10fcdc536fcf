"""A layer under OpenTelemetry's SDK, in a process of its own: providers are set once for all.

Prints one JSON object: the spans, the counters and the durations of what it did. With ``bare``
nothing is set up, and it prints which of OpenTelemetry's instruments were made real. With
``failing`` it does something else: work of the library's own fails, that nobody awaits. With
``conversation`` the requests are of a host's conversation, and the audit is on. With ``open`` it
prints the gauges while things are open. With ``invented`` a client invents names.
"""

import asyncio
import json
import logging
import sys
from collections.abc import Sequence
from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    Gauge,
    HistogramDataPoint,
    InMemoryMetricReader,
    NumberDataPoint,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mcp_sessions import Conversations
from mcp_sessions.ids import digest
from mcp_sessions.stores.memory import MemoryStore
from mcp_sessions.stores.records import SessionRecord
from tests.support.children import child
from tests.support.modern import ModernClient
from tests.support.raw import in_session
from tests.support.virtual_time import VirtualTimeLoop
from tests.support.world import world

UPDATED = "notifications/resources/updated"


reader = InMemoryMetricReader()

audited: list[list[Any]] = []
"""Of each line of the audit: its session, and its trace."""


class Kept(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        members = vars(record)
        if members.get("mcp.method.name") == "tools/call":
            audited.append([members["mcp_sessions.session"], members["trace_id"]])


async def story() -> dict[str, Any]:
    """One session's life; the digests by which it is known."""
    async with world(max_events=2) as w:
        client = await w.connected()
        await client.text("echo", text="before any session")
        session_id = (await client.start())["sessionId"]
        for uri in ("a:1", "a:1", "a:2", "a:3", "a:4"):
            await client.text("tell", method=UPDATED, params={"uri": uri})
        rival = await w.connected()
        await rival.resume(session_id, (await client.start())["sessionEventId"])
        await rival.text("echo", text="named", meta=in_session(session_id))
        await rival.end(session_id)
        begun = await client.start()
        idle = begun["sessionId"]
        await client.text("tell", method=UPDATED, params={"uri": "b:1"})
        await rival.resume(idle, begun["sessionEventId"])
        w.clock.advance(86_400 * 8)
        await w.expire()
        return {
            "transport": digest(str(client.session_id)),
            "session": digest(session_id),
            "ids": [session_id, idle, client.session_id, rival.session_id],
        }


async def failing() -> dict[str, Any]:
    """Two rounds over expired sessions raise; a session that expires then ends all the same."""
    store, raised = MemoryStore(), list[str]()
    real = store.expire

    async def expire(**arguments: Any) -> Sequence[SessionRecord]:
        if len(raised) < 2:
            raised.append("a session's id")
            raise KeyError(raised[-1])
        return await real(**arguments)

    store.expire = expire
    async with world(store=store) as w:
        client = await w.connected()
        await client.start()
        w.clock.advance(86_400 * 8)
        await asyncio.sleep(60)
        return {"raised": raised}


async def conversation() -> dict[str, Any]:
    """Two calls of a conversation, one in each era, and one in a session that is named."""
    async with world(conversations=Conversations()) as w:
        meta = {"openai/session": "the host's own id"}
        await (await w.connected()).text("echo", meta=meta, text="x")
        modern = ModernClient(w.carrier)
        trace_of = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
        await modern.text("echo", {"text": "x"}, meta={**meta, **trace_of})
        named = (await modern.create())["sessionId"]
        await modern.text("echo", {"text": "x"}, meta={**meta, **in_session(named)})
        found = await w.layer.sessions.list()
        [unnamed] = [each.id for each in found if each.mode == "conversation"]
        return {"conversation": digest(unnamed), "named": digest(named), "audit": audited}


async def command() -> dict[str, Any]:
    """Calls of a command, in both eras, one of which its process does not survive."""
    async with world(server=child()) as w:
        client = await w.connected()
        session_id = (await client.start())["sessionId"]
        await client.text("echo", text="x")
        await client.error("no/method")
        await client.call("die").error()
        modern = ModernClient(w.carrier)
        trace_of = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
        await modern.text("echo", {"text": "x"}, meta=trace_of)
        return {"session": digest(session_id), "id": session_id}


async def open_things() -> dict[str, Any]:
    """A call runs, a stream is open, a session is attached to it, and a client reads nothing."""
    async with world(store=MemoryStore()) as w:
        client = await w.connected()
        stream = await client.get().started()
        await client.start()
        sent = await w.waits(client.call("wait", gate="g"), "g")
        w.clock.advance(40)
        await w.inside.lifecycle.measure()
        found = read_by(reader)["gauges"]
        w.box.gate("g").go.set()
        await sent.result()
        stream.leave()
        return {"gauges": found}


async def invented() -> dict[str, Any]:
    """Methods and tools of which a client says that there are some."""
    async with world() as w:
        client = await w.connected()
        for number in range(3):
            await client.error(f"invented/{number}")
            await client.error("tools/call", {"name": f"invented {number}"})
        return {}


Points = list[list[Any]]


def read_by(reader: InMemoryMetricReader) -> dict[str, Points]:
    """The counters, the gauges and the durations: of each its name, attributes and value; of a
    duration the number of values.
    """
    found: dict[str, Points] = {"points": [], "gauges": [], "durations": []}
    read = reader.get_metrics_data()
    for resource in read.resource_metrics if read is not None else ():
        for scope in resource.scope_metrics:
            if scope.scope.name != "mcp_sessions":
                continue
            for metric in scope.metrics:
                for point in metric.data.data_points:
                    kind = "gauges" if isinstance(metric.data, Gauge) else "points"
                    said: list[Any] = [metric.name, dict(point.attributes or {})]
                    if isinstance(point, HistogramDataPoint):
                        found["durations"].append([*said, point.count])
                    elif isinstance(point, NumberDataPoint):
                        found[kind].append([*said, point.value])
    return found


def main() -> None:
    bare = sys.argv[1:] == ["bare"]
    stories = {
        "failing": failing,
        "conversation": conversation,
        "command": command,
        "invented": invented,
        "open": open_things,
    }
    notify = stories.get(" ".join(sys.argv[1:]), story)
    audit = logging.getLogger("mcp_sessions.audit")
    audit.addHandler(Kept())
    if notify is conversation:
        audit.setLevel(logging.INFO)
    spans = InMemorySpanExporter()
    if not bare:
        tracing = TracerProvider()
        tracing.add_span_processor(SimpleSpanProcessor(spans))
        trace.set_tracer_provider(tracing)
        metrics.set_meter_provider(MeterProvider(metric_readers=[reader]))
    # Other processes know no time but the real one.
    loop = None if notify is command else VirtualTimeLoop
    with asyncio.Runner(loop_factory=loop) as runner:
        names = runner.run(notify())
    finished = spans.get_finished_spans()
    seen = [[span.name, dict(span.attributes or {})] for span in finished]
    traces = [f"{span.context.trace_id:032x}" for span in finished if span.context is not None]
    sys.stdout.write(json.dumps({**read_by(reader), **names, "spans": seen, "traces": traces}))


if __name__ == "__main__":
    main()
