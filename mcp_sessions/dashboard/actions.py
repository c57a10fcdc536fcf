"""What an operator may do on the page, if it was started so.

A page of another origin could send a form with the credentials of the operator's browser. So each
form has a token that only our pages know: it belongs to a cookie that no other site's request
brings. The browser's own word on where the request comes from has to fit as well.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from mcp_sessions.dashboard.snapshots import Snapshots
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.server.cluster.replica_messages import Instruct

COOKIE = "mcp_sessions_page"
_LONGEST = 2_000
"""Bytes of a form."""


class Actions:
    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots

    def routes(self) -> list[Route]:
        return [
            Route("/session/{name}/end", self._end, methods=["POST"]),
            Route("/replicas/{process}/drain", self._drain, methods=["POST"]),
            Route("/servers/{process}/{pid:int}/stop", self._stop, methods=["POST"]),
        ]

    async def _end(self, request: Request) -> Response:
        await _check(request)
        name = request.path_params["name"]
        row = (await self._snapshots.whole()).by_digest.get(name)
        if row is None:
            raise HTTPException(404, "no such session is there")
        try:
            await self._snapshots.store.end(row.session_id)
        except StoreUnavailable as failed:
            raise HTTPException(503, f"the store does not answer: {failed}") from failed
        return _back(request, f"session/{name}")

    async def _drain(self, request: Request) -> Response:
        await self._instruct(request, Instruct(what="drain", pid=0))
        return _back(request, "replicas")

    async def _stop(self, request: Request) -> Response:
        await self._instruct(request, Instruct(what="stop", pid=request.path_params["pid"]))
        return _back(request, "servers")

    async def _instruct(self, request: Request, message: Instruct) -> None:
        await _check(request)
        process = request.path_params["process"]
        if not any(each["process"] == process for each in (await self._snapshots.whole()).replicas):
            raise HTTPException(404, "no such replica answered")
        try:
            if not await self._snapshots.fleet.instruct(process, message):
                raise HTTPException(503, "the replica is gone")
        except StoreUnavailable as failed:
            raise HTTPException(503, f"the store does not answer: {failed}") from failed


def _back(request: Request, path: str) -> Response:
    root = request.scope.get("root_path", "").rstrip("/")
    return RedirectResponse(f"{root}/{path}", 303)


def token_of(cookie: str) -> str:
    """Return the token of the forms in pages that a browser with this cookie gets."""
    return hashlib.sha256(f"form {cookie}".encode()).hexdigest()


def cookie_of(request: Request) -> tuple[str, bool]:
    """Return the cookie of a browser, and whether it is new."""
    known = request.cookies.get(COOKIE, "")
    return (known, False) if 20 <= len(known) <= 100 else (secrets.token_urlsafe(24), True)


def set_cookie(request: Request, response: Response, cookie: str) -> None:
    path = request.scope.get("root_path", "").rstrip("/") or "/"
    response.set_cookie(
        COOKIE,
        cookie,
        path=path,
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )


async def _check(request: Request) -> None:
    """Refuse a form that is not of our pages.

    Raises:
        HTTPException: 403; or 413, it is too long.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    host = request.headers.get("host", "")
    fits = site == "same-origin" if site is not None else _is_of(origin, host)
    if not fits or (origin is not None and not _is_of(origin, host)):
        raise HTTPException(403, "this form is of another page")
    given = await field_of(request, "token")
    cookie = request.cookies.get(COOKIE, "")
    if not cookie or not hmac.compare_digest(given.encode(), token_of(cookie).encode()):
        raise HTTPException(403, "this form is too old: load the page again")


async def field_of(request: Request, name: str) -> str:
    """Return a field of a form. Empty: it is not there.

    Raises:
        HTTPException: 413, the form is too long.
    """
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _LONGEST:
            raise HTTPException(413, "that is no form of this page")
    return parse_qs(body.decode("utf-8", "replace")).get(name, [""])[0]


def _is_of(origin: str | None, host: str) -> bool:
    # A proxy that ends TLS passes http on: the scheme says nothing.
    return origin is not None and origin.partition("://")[2] == host
