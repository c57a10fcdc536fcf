"""The pages, as an application of ASGI.

A page is whole without JavaScript; with it, its main part is replaced as the sessions change.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mcp_sessions.core.ends import is_called
from mcp_sessions.dashboard import views
from mcp_sessions.dashboard.actions import Actions, cookie_of, field_of, set_cookie, token_of
from mcp_sessions.dashboard.snapshots import Snapshot, Snapshots
from mcp_sessions.errors import ConfigurationError, StoreUnavailable
from mcp_sessions.ids import digest

try:
    from jinja2 import Environment, PackageLoader, StrictUndefined
except ModuleNotFoundError:
    raise ConfigurationError(
        "the page needs Jinja2: pip install 'mcp-sessions[dashboard]'"
    ) from None

T = TypeVar("T")

MOST_STREAMS = 32
"""Pages that are kept up to date at once. The others are whole, and not live."""

STREAM_LASTS = 60.0
"""Seconds after which a page asks again to be kept up to date. Its credential may have ended."""

_TO_READ = 30.0
"""Seconds more, after which a reader that takes nothing is cut off."""

MOST_WAITING = 100
"""Pages that wait to be made. One more is refused."""

_HEARTBEAT = 15.0
"""Seconds after which a page that does not change hears that it is live."""

_DIGITS = re.compile(r"[0-9a-f]{4,12}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{12}", re.ASCII)
_KINDS = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_FILES: Mapping[str, Sequence[str]] = {
    "app.css": ["app.css"],
    "icon.svg": ["icon.svg"],
    "live.js": ["live.js"],
    # As one: htmx begins as soon as its script has run, and then needs its extension.
    "htmx.js": ["htmx.min.js", "hx-sse.min.js"],
}
"""What pages load → the files that it consists of."""

VIEWS = {
    "now": "Now",
    "sessions": "Sessions",
    "ended": "Ended",
    "replicas": "Replicas",
    "servers": "Servers",
    "tasks": "Tasks",
}


@dataclass(frozen=True, slots=True)
class Page:
    """A view that is ready to be shown."""

    template: str
    title: str
    values: Mapping[str, Any]
    status: int = 200
    query: str = ""
    """What its live part is asked with; nothing of it is unknown text."""


class Dashboard:
    """Serve the pages of one store.

    Args:
        snapshots: What they show.
        title: Names what they are about: the store, or the server.
        actions: Who sees the page may end a session, drain a replica and stop a process.
    """

    def __init__(self, snapshots: Snapshots, *, title: str, actions: bool = False) -> None:
        self._snapshots, self._title = snapshots, title
        self._actions = Actions(snapshots) if actions else None
        self._streams = 0
        self._turns, self._reads = Turns(1), Turns(4)
        self._templates = Environment(
            loader=PackageLoader("mcp_sessions.dashboard"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters["when"] = when
        self._templates.filters["ago"] = views.ago
        self._files = {name: _file(name) for name in _FILES}

    def app(self) -> ASGIApp:
        routes = [
            *(self._actions.routes() if self._actions is not None else ()),
            Route("/", self._now),
            Route("/now", self._redirected),
            Route("/find", self._find, methods=["POST"]),
            Route("/static/{name}", self._static),
            Route("/live/{view}", self._live),
            Route("/live/session/{name}", self._live),
            Route("/session/{name}", self._page),
            Route("/{view}", self._page),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _failed})

    # --- requests --------------------------------------------------------------------------------

    async def _now(self, request: Request) -> Response:
        return await self._answer(request, "now")

    async def _redirected(self, request: Request) -> Response:
        return RedirectResponse(f"{_root(request)}/", 308)

    async def _page(self, request: Request) -> Response:
        return await self._answer(request, request.path_params.get("view", "session"))

    async def _answer(self, request: Request, view: str) -> Response:
        page = await self._made(request, view)
        cookie, is_new = cookie_of(request)
        text = await self._turns.made(lambda: self._whole(request, view, page, cookie))
        answer = HTMLResponse(text, page.status)
        if self._actions is not None and is_new:
            set_cookie(request, answer, cookie)
        return answer

    async def _find(self, request: Request) -> Response:
        given = (await field_of(request, "name")).strip()
        snapshot = await self._snapshots.whole()
        # A name of a client is in the page anyway. All else may be an id, which is a credential:
        # only its digest goes on.
        where = await self._turns.made(lambda: _found(given, snapshot)) or digest(given)
        return RedirectResponse(f"{_root(request)}/session/{where}", 303)

    async def _static(self, request: Request) -> Response:
        found = self._files.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404, "there is no such file")
        content, kind, tag = found
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"etag": tag})
        return Response(content, media_type=kind, headers={"etag": tag})

    # --- views -----------------------------------------------------------------------------------

    async def _made(self, request: Request, view: str, snapshot: Snapshot | None = None) -> Page:
        snapshot = snapshot or await self._snapshots.now()
        query, asked = request.query_params, ""
        match view:
            case "now":
                values = await self._turns.made(lambda: views.now(snapshot))
            case "sessions":
                chosen = views.Filter.of(query, snapshot)
                values = await self._turns.made(lambda: views.sessions(snapshot, chosen))
                asked = f"?{chosen.query(page=chosen.page)}"
            case "ended":
                values = await self._turns.made(lambda: views.ends(snapshot, query))
                asked = f"?reason={values['reason']}&page={values['page']}"
            case "replicas":
                values = views.replicas(snapshot)
            case "servers":
                values = views.servers(snapshot)
            case "tasks":
                async with self._reads:
                    values = await views.tasks(snapshot, self._snapshots.store)
            case "session" if "name" in request.path_params:
                return await self._session(request, snapshot)
            case _:
                raise HTTPException(404, "there is no such view")
        values = {"snapshot": snapshot, **values}
        return Page(f"{view}.html", VIEWS[view], values, query=asked)

    async def _session(self, request: Request, snapshot: Snapshot) -> Page:
        name = request.path_params["name"]
        if name == "client":
            wanted = request.query_params.get("name", "")[:100]
            values = await self._turns.made(lambda: views.of_client(wanted, snapshot))
            if not values["rows"] and not values["ends"]:
                raise HTTPException(404, "no client is called so")
            values = {"snapshot": snapshot, **values}
            asked = f"?{views.urlencode({'name': wanted})}"
            return Page("client.html", f"Client {wanted}", values, query=asked)
        if not _DIGITS.fullmatch(name):
            raise HTTPException(404, "a session is named by the digits of its digest")
        title = f"Session {name}"
        if snapshot.is_begun and name not in snapshot.by_digest:
            snapshot = await self._snapshots.whole()
        row = snapshot.by_digest.get(name)
        session_id = row.session_id if row is not None else snapshot.expired.get(name)
        if session_id is not None:
            try:
                async with self._reads:
                    whole = await self._snapshots.store.whole(session_id)
                    latest = await self._snapshots.fleet.latest_method(session_id)
                # A snapshot of many sessions may be a minute old.
                snapshot = replace(snapshot, at=self._snapshots.clock())
                # Without a record it ended since.
                ends = snapshot.ends if whole is not None else await self._snapshots.newest_ends()
            except StoreUnavailable as failed:
                away = replace(snapshot, failure=str(failed) or "it is away")
                return Page("away.html", title, {"snapshot": away, "digest": name}, 503)
            if whole is not None and row is not None:
                values = views.live(
                    self._snapshots.newer(whole.record, row), whole, snapshot, latest
                )
                return Page("session.html", title, {"snapshot": snapshot, **values})
            if whole is not None:
                values = views.ended(self._snapshots.times.end_of_expired(whole.record), snapshot)
                return Page("session.html", title, {"snapshot": snapshot, **values})
            snapshot = replace(snapshot, ends=ends)
        return await self._turns.made(lambda: self._gone(name, title, snapshot))

    def _gone(self, name: str, title: str, snapshot: Snapshot) -> Page:
        for end in reversed(snapshot.ends):
            if end.session.startswith(name):
                return Page(
                    "session.html", title, {"snapshot": snapshot, **views.ended(end, snapshot)}
                )
        self._snapshots.want_ends()
        alike = [each for each in snapshot.by_digest if each.startswith(name) and each != name]
        values = {"snapshot": snapshot, "alike": alike[:20], **views.unknown(snapshot, name)}
        return Page("unknown.html", title, values, 404)

    def _whole(self, request: Request, view: str, page: Page, cookie: str) -> str:
        root = _root(request)
        values = self._values(request, view, page, cookie)
        path = f"session/{request.path_params['name']}" if view == "session" else view
        values["live"] = f"{root}/live/{path}{page.query}"
        return self._templates.get_template("page.html").render(values)

    def _values(self, request: Request, view: str, page: Page, cookie: str) -> dict[str, Any]:
        return {
            "root": _root(request),
            "view": view,
            "views": VIEWS,
            "about": self._title,
            "hint": self._snapshots.fleet.hint,
            "title": page.title,
            "template": page.template,
            "acts": self._actions is not None,
            "token": token_of(cookie),
            **page.values,
        }

    # --- live ------------------------------------------------------------------------------------

    async def _live(self, request: Request) -> Response:
        view = request.path_params.get("view", "session")
        if view not in VIEWS and view != "session":
            raise HTTPException(404, "there is no such view")
        if self._streams >= MOST_STREAMS:
            raise HTTPException(503, "too many pages are open")
        # Counted before the first wait: many may come at once.
        self._streams += 1
        try:
            # An error now is an answer of its own.
            await self._made(request, view)
        except BaseException:
            self._left()
            raise
        return Live(self._events(request, view), self._left)

    def _left(self) -> None:
        self._streams -= 1

    async def _events(self, request: Request, view: str) -> AsyncGenerator[str]:
        # The server reads one part, and the next one when the client has taken it.
        shown, loop = "", asyncio.get_running_loop()
        began_at = said_at = loop.time()
        async with aclosing(self._snapshots.changes(often=view == "session")) as snapshots:
            async for snapshot in snapshots:
                try:
                    text = await self._part(request, view, snapshot)
                except HTTPException:
                    # The page asks again, and is told why.
                    return
                if text != shown:
                    shown, said_at = text, loop.time()
                    yield "".join(f"data: {each}\n" for each in text.splitlines()) + "\n"
                elif loop.time() - said_at >= _HEARTBEAT:
                    said_at = loop.time()
                    yield ": live\n\n"
                if loop.time() - began_at >= STREAM_LASTS:
                    return

    async def _part(self, request: Request, view: str, snapshot: Snapshot) -> str:
        page = await self._made(request, view, snapshot)
        cookie, _ = cookie_of(request)
        template = self._templates.get_template("part.html")
        values = self._values(request, view, page, cookie)
        return await self._turns.made(lambda: template.render(values))


class Live(StreamingResponse):
    """The changes of a page.

    Args:
        left: Called when it has ended, in whatever way.
    """

    def __init__(self, events: AsyncGenerator[str], left: Callable[[], None]) -> None:
        super().__init__(
            events, media_type="text/event-stream", headers={"x-accel-buffering": "no"}
        )
        self._left = left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(STREAM_LASTS + _TO_READ):
                    await super().__call__(scope, receive, send)
        finally:
            self._left()


class Turns:
    """Let few pages be made at once, so that a flood of them leaves their time to calls.

    Args:
        at_once: Pages.
    """

    def __init__(self, at_once: int) -> None:
        self._free = asyncio.Semaphore(at_once)
        self._waiting = 0

    async def __aenter__(self) -> None:
        if self._waiting >= MOST_WAITING:
            raise HTTPException(503, "too many pages are asked for at once")
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1

    async def __aexit__(self, *_: object) -> None:
        self._free.release()

    async def made(self, make: Callable[[], T]) -> T:
        """Return what a step without waits makes. For as long as it took, others have their turn.

        Raises:
            HTTPException: 503, too many wait.
        """
        loop = asyncio.get_running_loop()
        async with self:
            began = loop.time()
            found = make()
            await asyncio.sleep(loop.time() - began)
            return found


def when(seconds: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%d %H:%M:%S")


def _root(request: Request) -> str:
    return request.scope.get("root_path", "").rstrip("/")


def _found(given: str, snapshot: Snapshot) -> str | None:
    """The rest of the path to what somebody looks for; None: no digest and no client is so."""
    if _DIGITS.fullmatch(given):
        known = {*snapshot.by_digest, *(end.session for end in snapshot.ends)}
        found = [each for each in known if each.startswith(given)]
        return found[0] if len(found) == 1 else given
    clients = {row.client for row in snapshot.rows} | {end.client for end in snapshot.ends}
    if any(is_called(given, each) for each in clients):
        return f"client?{views.urlencode({'name': given})}"
    return None


def _file(name: str) -> tuple[bytes, str, str]:
    folder = resources.files("mcp_sessions.dashboard") / "static"
    content = b"\n".join((folder / each).read_bytes() for each in _FILES[name])
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    return content, _KINDS[name.rpartition(".")[2]], tag


async def _failed(request: Request, failed: Exception) -> Response:
    status, text = 500, "Internal error"
    if isinstance(failed, HTTPException):
        status, text = failed.status_code, failed.detail
    return Response(f"{text}\n", status, media_type="text/plain")
