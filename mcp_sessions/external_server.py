"""A wrapped server outside of this process, a command or a URL: who shares a child of it, how long
that lives, and what it is given.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final, Literal
from urllib.parse import SplitResult, urlsplit, urlunsplit

from mcp_sessions.argument_types import checked
from mcp_sessions.core.addresses import HTTP, wrong_address
from mcp_sessions.core.headers import sendable_headers
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.policy import TaskPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.protocol_versions import Eras

if TYPE_CHECKING:
    import httpx2

    Credential = httpx2.Auth | Mapping[str, str] | None
    Auth = httpx2.Auth | Callable[[Principal], Credential | Awaitable[Credential]]

logger = logging.getLogger(__name__)

THE_SERVER = "the server"

Per = Literal["session", "principal", "shared"]


_SCOPE = re.compile(r"[\x21\x23-\x5b\x5d-\x7e]+")


class ExternalServer:
    """The options that all external servers share.

    Args:
        identity: The server's name in sealed tokens. A token for one server opens at no other.
        per: The scope in which clients share a child.
        max_children: At the same time.
        child_idle: Seconds after its last request in which a child ends.
        start_timeout: Seconds that one has to answer ``initialize``.
        title: The server's name in the log.
        scopes: Each credential needs these.
        tool_scopes: Patterns of tools → the scopes that a credential needs to see and call them.
        try_at_start: Start one child when the layer starts, and log why if that fails.

    Raises:
        ConfigurationError: An argument is invalid.
    """

    kind: ClassVar[str]
    """The word for a child."""

    names_sessions: bool = False
    """A child is started in the name of its session, and can be no other's."""

    def __init__(
        self,
        *,
        identity: str,
        per: Per,
        max_children: int,
        child_idle: float,
        start_timeout: float,
        title: str,
        scopes: Collection[str],
        tool_scopes: Mapping[str, Collection[str]] | None,
        try_at_start: bool,
    ) -> None:
        if per not in ("session", "principal", "shared"):
            raise ConfigurationError(f"per must be 'session', 'principal' or 'shared', not {per!r}")
        if max_children < 1:
            raise ConfigurationError(f"max_children must be at least 1, not {max_children}")
        self.check_seconds("child_idle", child_idle)
        self.check_seconds("start_timeout", start_timeout)
        self.identity = identity
        self.per: Per = per
        self.max_children = max_children
        self.child_idle = child_idle
        self.start_timeout = start_timeout
        self.title = title
        self.scopes = _checked("scopes", scopes)
        self.tool_scopes: Mapping[str, tuple[str, ...]] = {
            pattern: _checked("tool_scopes", needed)
            for pattern, needed in (tool_scopes or {}).items()
        }
        self.try_at_start = try_at_start
        self.tasks: TaskPolicy | None = None
        """Which calls become tasks, as a file of several servers says it."""

        self.eras: Eras = "both"
        """The eras that are spoken, as a file of several servers says it."""

        self.request_keys: Sequence[str] = ()
        """The places of request keys that hosts send, as a file of several servers says it."""

    @property
    def asks_for_scopes(self) -> bool:
        return bool(self.scopes or self.tool_scopes)

    @staticmethod
    def check_seconds(name: str, seconds: float) -> None:
        if not (seconds > 0 and math.isfinite(seconds)):
            raise ConfigurationError(f"{name} must be a number of seconds, not {seconds}")


def _checked(name: str, scopes: Collection[str]) -> tuple[str, ...]:
    """Return the scopes.

    Raises:
        ConfigurationError: One is none, by RFC 6749, 3.3.
    """
    given: object = scopes
    if isinstance(given, str) or not all(
        isinstance(each, str) and _SCOPE.fullmatch(each)  # pyright: ignore[reportUnnecessaryIsInstance]
        for each in scopes
    ):
        raise ConfigurationError(f"{name}: must be a list of scopes, without spaces and quotes")
    return tuple(scopes)


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


_PERSONAL: Final = frozenset({
    "HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER",
})  # fmt: skip

_NETWORK: Final = frozenset({
    # Programs that connect.
    "GIT_PROXY_COMMAND", "GIT_SSH", "GIT_SSH_COMMAND", "NPM_CONFIG_NOPROXY",
    # Certificates that are trusted.
    "DENO_CERT", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", "NODE_USE_SYSTEM_CA", "PIP_CERT",
    "UV_NATIVE_TLS", "UV_SYSTEM_CERTS",
    # Where a daemon or a cluster is.
    "CONTAINER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT", "DOCKER_HOST", "DOCKER_TLS_VERIFY",
    "KUBECONFIG",
    # Where packages come from, and where they are kept.
    "BUN_INSTALL_CACHE_DIR", "CARGO_HOME", "COREPACK_NPM_REGISTRY", "DENO_DIR", "GEM_HOME",
    "GOCACHE", "GOINSECURE", "GOMODCACHE", "GONOPROXY", "GONOSUMDB", "GOPATH", "GOPRIVATE",
    "GOPROXY", "GOSUMDB", "NPM_CONFIG_CACHE", "NPM_CONFIG_GLOBALCONFIG",
    "NPM_CONFIG_OFFLINE", "NPM_CONFIG_PREFER_OFFLINE", "NPM_CONFIG_PREFIX", "NPM_CONFIG_REGISTRY",
    "NPM_CONFIG_USERCONFIG", "PIPX_BIN_DIR", "PIPX_HOME", "PIP_CACHE_DIR", "PIP_CONFIG_FILE",
    "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_NO_INDEX", "PIP_TRUSTED_HOST",
    "UV_CACHE_DIR", "UV_CONFIG_FILE", "UV_DEFAULT_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS",
    "UV_INDEX", "UV_INDEX_URL", "UV_INSECURE_HOST", "UV_OFFLINE", "UV_PYPY_INSTALL_MIRROR",
    "UV_PYTHON", "UV_PYTHON_INSTALL_DIR", "UV_PYTHON_INSTALL_MIRROR", "UV_TOOL_BIN_DIR",
    "UV_TOOL_DIR",
    "XDG_CACHE_HOME", "XDG_CONFIG_DIRS", "XDG_CONFIG_HOME", "XDG_DATA_DIRS", "XDG_DATA_HOME",
    "XDG_RUNTIME_DIR", "XDG_STATE_HOME",
})  # fmt: skip
"""Also in small letters, as curl and npm read them."""

_NETWORK_ENDS: Final = re.compile(
    r"(?!.*(?:KEY|TOKEN|SECRET|PASS)).+"
    r"(?:_PROXY|_CERT_(?:FILE|DIR|PATH)"
    r"|_CA(?:_?(?:BUNDLE|CERT|CERTIFICATE|CERTS|DIR|FILE|INFO|PATH|STORE))?(?:_(?:DIR|FILE|PATH))?)"
    r"|KUBERNETES_SERVICE_.+"
)
"""Each program has names of its own for its proxy and for the certificates that it trusts. They end
so. All of Kubernetes' begin so.
"""

_AGENTS: Final = frozenset({"KRB5CCNAME", "SSH_AGENT_PID", "SSH_AUTH_SOCK"})
"""By these a command could use the credentials of the user, so that it gets none of them."""

_USER_OF_SSH: Final = re.compile(r"ssh://[^:@/]+@[^@?]*")


def inherited(title: str, given: Collection[str] = ()) -> dict[str, str]:
    """Return the variables that a command inherits: who runs it, and how it reaches the network.

    The layer's own keys and passwords are not among them. Neither is a value that has a credential
    in it, such as a proxy's URL with a password. The log names such a variable.

    Args:
        title: The server's name in the log.
        given: Names that it gets anyway, with a value of its own.
    """
    found: dict[str, str] = {}
    for name, value in os.environ.items():
        if name in given:
            continue
        if name in _AGENTS:
            logger.info(
                "%s does not get %s, by which it could use your keys: pass it on with --env %s",
                title,
                name,
                name,
            )
        upper = name.upper()
        if not (name in _PERSONAL or upper in _NETWORK or _NETWORK_ENDS.fullmatch(upper)):
            continue
        if name not in _PERSONAL and _has_credential(value):
            logger.warning(
                "%s does not get %s, whose value has a credential: pass it on with --env %s",
                title,
                name,
                name,
            )
        else:
            found[name] = value
    return found


def _has_credential(value: str) -> bool:
    # A password may have any character, so a URL is not taken apart.
    return any(
        ("@" in piece and not piece.startswith("/") and not _USER_OF_SSH.fullmatch(piece))
        or ("://" in piece and "?" in piece)
        for piece in value.split()
    )


_PLACEHOLDER: Final = re.compile(r"(?<!\$)\{(principal|session)\}")

_QUIET = {"FASTMCP_SHOW_SERVER_BANNER": "false"}
"""Settings by which a framework leaves out the banner that it prints at each start."""


class StdioServer(ExternalServer):
    """A command that speaks MCP on its standard input and output.

    Its processes are started without a shell, each in a process group of its own, and none of them
    outlives the layer.
    """

    kind = "process"

    @checked("per")
    def __init__(
        self,
        command: str,
        *args: str,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        per: Per = "session",
        max_children: int = 64,
        child_idle: float = 900,
        start_timeout: float = 30,
        warm: int = 0,
        title: str = THE_SERVER,
        scopes: Collection[str] = (),
        tool_scopes: Mapping[str, Collection[str]] | None = None,
        try_at_start: bool = False,
    ) -> None:
        """Name a command. No process starts before it is needed.

        Args:
            command: Looked for as a shell would, on ``PATH``.
            args: Its arguments, as they are.
            env: Added to the inherited variables, such as ``PATH`` and ``HTTPS_PROXY``. In its
                values ``{principal}`` and ``{session}`` stand for 32 hexadecimal digits. They name
                the principal or session of a process, and are always the same. If the process
                writes such a value on stderr, the log and its clients' errors have ``$NAME``
                instead.
            cwd: The working directory; None: the directory of this process. A name with
                ``{principal}`` or ``{session}`` is made when it is needed. A directory that names a
                session is deleted, with its contents, when the session ends; the directory of a
                process outside of any session, when the process exits.
            per: The scope of a process. ``session``: each session, each conversation, and each
                connection without a session has its own. ``principal``: all requests of one
                principal share one. ``shared``: all clients share one. The last two are for servers
                that keep nothing of a client: they learn of no client and cannot ask one anything.
            max_children: Processes at the same time; a request that needs one more is refused.
            child_idle: Seconds after its last request in which a process exits.
            start_timeout: Seconds that a process has to answer ``initialize``.
            warm: Processes that start before they are needed, so that a session need not wait for
                one. They count as ``max_children`` do. They exit if no session needed one for
                ``child_idle``, and start again when one does. Not with ``{principal}`` or
                ``{session}``.
            title: The name in the log, also for the lines that its processes write on stderr.
            scopes: Each credential of a client needs these.
            tool_scopes: Patterns of tools, as ``{"delete_*": ["write"]}``. A client whose
                credential lacks one of these scopes does not see such a tool.
            try_at_start: Start one process when the layer starts, and log why if that fails. No
                client waits for it. It is stopped again, unless all clients share it.

        Raises:
            ConfigurationError: The command does not exist or is not executable, or an argument is
                invalid.
        """
        if os.name != "posix":
            raise ConfigurationError("a StdioServer runs on Linux and macOS")
        identity = " ".join((os.path.basename(command), *args))
        super().__init__(
            identity=identity,
            per=per,
            max_children=max_children,
            child_idle=child_idle,
            start_timeout=start_timeout,
            title=title,
            scopes=scopes,
            tool_scopes=tool_scopes,
            try_at_start=try_at_start,
        )
        self.command = command
        self.args = args
        self.given: Mapping[str, str] = MappingProxyType(dict(env or {}))
        """The ``env`` as it was given. Its values are neither logged nor sent."""

        given = self.given
        self.env: Mapping[str, str] = MappingProxyType(
            {**_QUIET, **inherited(title, given), **given}
        )
        self.cwd = os.fspath(cwd) if cwd is not None else None
        self._templates = frozenset(name for name in given if self._is_template(given[name]))
        self.has_cwd_template = self.cwd is not None and self._is_template(self.cwd)
        """Its directory is made when it is needed."""

        templates = [value for value in (*given.values(), self.cwd or "")]
        self.names_principals = "principal" in _PLACEHOLDER.findall(self.cwd or "")
        """Its directory is named by its principal as well."""

        self.names_sessions = any("session" in _PLACEHOLDER.findall(each) for each in templates)
        if not 0 <= warm <= max_children:
            raise ConfigurationError(f"warm: from 0 to max_children ({max_children}), not {warm}")
        if warm and self.has_template:
            raise ConfigurationError("warm: a process for a {principal} or {session} cannot wait")
        self.warm = warm
        if "\0" in "".join((command, *args, *self.env, *self.env.values())):
            raise ConfigurationError("a command, its arguments and its env have no NUL in them")
        if any("=" in name or not name for name in self.env):
            raise ConfigurationError("the name of an environment variable has no '=' in it")
        self._base = self.cwd
        if self.cwd is not None and self.has_cwd_template:
            self._base = os.path.dirname(_PLACEHOLDER.split(self.cwd)[0]) or os.curdir
        if self._base is not None and not os.path.isdir(self._base):
            raise ConfigurationError(f"cwd: no such directory: {self._base}")
        self.program = self._found()
        """The path of the command."""

    @property
    def has_template(self) -> bool:
        """Whether a process is for one principal or session from its start."""
        return bool(self._templates) or self.has_cwd_template

    def env_and_cwd(self, principal: str, session: str) -> tuple[dict[str, str], str | None]:
        """The environment and the directory of a process.

        Args:
            principal: Names whom it is for; without a character that means anything in a path.
            session: The same.
        """

        def filled(text: str) -> str:
            named = {"principal": principal, "session": session}
            return _PLACEHOLDER.sub(lambda found: named[found[1]], text)

        env = {
            name: filled(value) if name in self._templates else value
            for name, value in self.env.items()
        }
        return env, filled(self.cwd) if self.cwd is not None and self.has_cwd_template else self.cwd

    def directory_of(self, principal: str, session: str) -> str | None:
        """The directory that is made for a session, in or below which its process runs; None: none
        is. See :meth:`env_and_cwd`.
        """
        if self.cwd is None or "session" not in _PLACEHOLDER.findall(self.cwd):
            return None
        parts = self.cwd.split(os.sep)
        named = [at for at, part in enumerate(parts) if "session" in _PLACEHOLDER.findall(part)]
        named_by = {"principal": principal, "session": session}
        path = os.sep.join(parts[: named[0] + 1])
        return _PLACEHOLDER.sub(lambda found: named_by[found[1]], path)

    def _is_template(self, text: str) -> bool:
        found: list[str] = _PLACEHOLDER.findall(text)
        for name in found:
            if self.per == "shared" or (name == "session" and self.per != "session"):
                raise ConfigurationError(f"{{{name}}}: with per={self.per!r} there is none")
        return bool(found)

    def _found(self) -> str:
        # A path is one from where the command runs.
        has_path = os.sep in self.command
        asked = os.path.join(self._base or "", self.command) if has_path else self.command
        found = shutil.which(asked, path=self.env.get("PATH", os.defpath))
        if found is not None:
            return os.path.abspath(found)
        if has_path and os.path.exists(asked):
            raise ConfigurationError(f"not an executable file: {self.command}")
        hint = ""
        if not self.args and len(self.command.split()) > 1:
            hint = f"; its arguments stand by themselves: {self.command.split()[0]!r}, ..."
        raise ConfigurationError(f"command not found: {self.command}{hint}")
