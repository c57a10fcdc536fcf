"""A reverse proxy that gives each request to the next replica, whoever it is from.

No load balancer is worse for a protocol with sessions: no request of a client reaches the replica
of the request before. It is made for the example and the tests; behind it, in earnest, stands
something like ``deploy/nginx.conf``. Run it::

    python round_robin.py 8080 http://127.0.0.1:8001 http://127.0.0.1:8002
"""

import itertools
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

HOP_BY_HOP = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
"""Headers of one connection, not of the message (RFC 9110, 7.6.1)."""

METHODS = ["GET", "POST", "DELETE", "PUT", "PATCH", "OPTIONS", "HEAD"]


class RoundRobin:
    def __init__(self, replicas: Sequence[str]) -> None:
        self.served = dict.fromkeys(replicas, 0)
        """How many requests each of them got."""

        self._turns = itertools.cycle(replicas)
        # A connection per request: a replica that was killed leaves none behind that looks
        # as if it could be used. And no end to how many: each open stream is one.
        self._http = httpx2.AsyncClient(
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
            timeout=httpx2.Timeout(None, connect=2),
            trust_env=False,
        )

    async def handle(self, request: Request) -> Response:
        """Give a request to the next replica that can be reached."""
        body = await request.body()
        headers = [(n, v) for n, v in request.headers.items() if n not in HOP_BY_HOP]
        for _ in self.served:
            replica = next(self._turns)
            sent = self._http.build_request(
                request.method, replica + str(request.url.path), headers=headers, content=body
            )
            try:
                answer = await self._http.send(sent, stream=True)
            except httpx2.ConnectError:
                # Nothing was sent: the next one may have it.
                continue
            except httpx2.TransportError:
                # It may have been served. Whether to ask again is for the client to say.
                return PlainTextResponse("the replica broke off", status_code=502)
            self.served[replica] += 1
            response = StreamingResponse(_body(answer), status_code=answer.status_code)
            response.raw_headers = [
                (n.lower(), v)
                for n, v in answer.headers.raw
                if n.lower().decode() not in HOP_BY_HOP
            ]
            return response
        return PlainTextResponse(
            "no replica answers", status_code=503, headers={"Retry-After": "1"}
        )

    async def close(self) -> None:
        await self._http.aclose()


async def _body(answer: httpx2.Response) -> AsyncGenerator[bytes]:
    try:
        async for chunk in answer.aiter_raw():
            yield chunk
    finally:
        await answer.aclose()


def proxy(robin: RoundRobin) -> Starlette:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        del app
        yield
        await robin.close()

    return Starlette(
        routes=[Route("/{path:path}", robin.handle, methods=METHODS)], lifespan=lifespan
    )


def main() -> None:
    port, *replicas = sys.argv[1:]
    # A stream whose replica was killed ends as broken as it is; that is no news.
    uvicorn.run(proxy(RoundRobin(replicas)), port=int(port), log_level="critical")


if __name__ == "__main__":
    main()
