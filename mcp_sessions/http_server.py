from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit, urlunsplit

from mcp_sessions.argument_types import checked
from mcp_sessions.core.addresses import HTTP, wrong_address
from mcp_sessions.core.headers import sendable_headers
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.external_server import THE_SERVER, ExternalServer, Per
from mcp_sessions.principal import Principal

if TYPE_CHECKING:
    import httpx2

    Credential = httpx2.Auth | Mapping[str, str] | None
    Auth = httpx2.Auth | Callable[[Principal], Credential | Awaitable[Credential]]


class HTTPServer(ExternalServer):
    """A URL that speaks MCP over Streamable HTTP.

    Nothing that a client sends to authenticate itself is sent there.
    """

    kind = "session there"

    @checked("per")
    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        auth: Auth | None = None,
        per: Per = "session",
        max_children: int = 1_000,
        child_idle: float = 900,
        start_timeout: float = 30,
        silence: float = 300,
        title: str = THE_SERVER,
        scopes: Collection[str] = (),
        tool_scopes: Mapping[str, Collection[str]] | None = None,
        try_at_start: bool = False,
    ) -> None:
        """Name a URL; nothing is sent there before it is needed.

        Args:
            headers: Sent with each request, beside those that every request has.
            auth: How this layer authenticates itself there; or, for a principal, with what: an
                ``httpx2.Auth``, or headers. It is asked whenever a session there begins, and when
                a request is answered 401, which is then sent once more.
            per: Who shares a session there, see ``StdioServer``.
            max_children: Sessions there at the same time; who needs one more is refused.
            child_idle: Seconds after its last request in which a session there ends.
            start_timeout: Seconds that the server has to answer ``initialize``.
            silence: Seconds without a byte of its answer, or of a sign of life before that, after
                which a request is given up.
            title: What it is called in the log.
            scopes: Each credential of a client needs these.
            tool_scopes: Patterns of tools, as ``{"delete_*": ["write"]}``. A client whose
                credential lacks one of these scopes does not see such a tool.
            try_at_start: Begin one session there when the layer starts, and log why if that fails.
                No client waits for it. It is ended again, unless all clients share it.

        Raises:
            ConfigurationError: It is no http or https URL, or an argument is none.
        """
        self.url = url
        parts = _parsed(url)
        if parts.username is not None:
            raise ConfigurationError("the URL has credentials in it: give them as a header")
        self.name = urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))
        """Without its query, which may hold a secret."""

        super().__init__(
            identity=self.name,
            per=per,
            max_children=max_children,
            child_idle=child_idle,
            start_timeout=start_timeout,
            title=title,
            scopes=scopes,
            tool_scopes=tool_scopes,
            try_at_start=try_at_start,
        )
        self.check_seconds("silence", silence)
        # Behind a proxy there, the name may be another one than that of its address.
        sent = sendable_headers(headers, may_name_host=True)
        if auth is not None and not callable(auth) and not hasattr(auth, "auth_flow"):
            raise ConfigurationError("auth must be an httpx2.Auth, or a function of a principal")
        if per == "shared" and callable(auth):
            raise ConfigurationError(
                "auth as a function needs per='session' or 'principal': all share a session now"
            )
        self.headers: Mapping[str, str] = MappingProxyType(sent)
        self.auth = auth
        self.silence = silence


def _parsed(url: str) -> SplitResult:
    wrong = wrong_address(url, HTTP)
    if wrong is not None:
        raise ConfigurationError(wrong)
    if "#" in url:
        raise ConfigurationError(
            "the URL has a fragment, which is never sent: leave out '#' and the text after it"
        )
    return urlsplit(url)
