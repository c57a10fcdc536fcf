"""Load the target of ``serve TARGET``: ``package.module:attr`` or ``file.py[:attr]``.

Loading a target runs its code, as ``python file.py`` would, but not under the name ``__main__``: a
guarded ``mcp.run()`` stays unrun. Every error of a target is a ``ConfigurationError`` of one line,
which names the target and what to do.

Code of a target cannot serve while it is loaded; ``serve`` serves it afterwards. A file may call
``mcp.run()`` unguarded. It would then be served without sessions, with its own arguments, and the
command that loads it would wait for ever. Every ``run`` of a server, by any name and any way, ends
in one of three places: uvicorn, standard input, or `SessionLayer.run`. These are blocked until the
target is loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NoReturn, TextIO, cast

from mcp_sessions.cli.arguments import WrongOption, one_line
from mcp_sessions.core.addresses import HTTP, lacks_scheme, wrong_address
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.unopened import no_such_file

_BANNER = "FASTMCP_SHOW_SERVER_BANNER"


class RunGuard:
    def __init__(self) -> None:
        self.tried = False
        """Whether code of the target tried to serve, even if it caught the error."""

    def refuse(self) -> NoReturn:
        self.tried = True
        raise ConfigurationError("nothing is served while it is loaded")


@contextmanager
def nothing_runs() -> Generator[RunGuard]:
    import uvicorn

    from mcp_sessions.serve.uvicorn_server import RUN_IS_REFUSED

    runs = RunGuard()

    async def serve(self: uvicorn.Server, sockets: object = None) -> None:
        runs.refuse()

    # No code between `mcp.run()` and uvicorn asks whether to serve, so this is the only place. It
    # is restored below.
    kept_serve, kept_stdin, kept_banner = uvicorn.Server.serve, sys.stdin, os.environ.get(_BANNER)
    uvicorn.Server.serve = serve
    if sys.stdin is not None:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stdin = cast("TextIO", _NotForProtocol(sys.stdin, runs))
    # FastMCP prints a banner before it serves. This command prints lines of its own.
    os.environ[_BANNER] = "false"
    refused = RUN_IS_REFUSED.set(runs.refuse)
    try:
        yield runs
    finally:
        RUN_IS_REFUSED.reset(refused)
        if kept_banner is None:
            del os.environ[_BANNER]
        else:
            os.environ[_BANNER] = kept_banner
        sys.stdin = kept_stdin
        uvicorn.Server.serve = kept_serve


class _NotForProtocol:
    """Stand in for standard input, and refuse its bytes. Other questions, such as whether it is a
    terminal, go to the real one.
    """

    def __init__(self, stdin: TextIO, runs: RunGuard) -> None:
        self._stdin = stdin
        self._runs = runs

    @property
    def buffer(self) -> BinaryIO:
        self._runs.refuse()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stdin, name)


SHAPE = "package.module:attr or file.py[:attr]"
SERVABLE = "an MCP server (MCPServer, lowlevel Server, FastMCP) or a SessionLayer"

_log = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[1]

Kind = Callable[[object], bool]
"""Test of whether an object can be served."""


def load_target(target: str, *, kinds: Sequence[Kind], what: str = SERVABLE) -> object:
    """Load the server or ``SessionLayer`` that ``target`` names.

    Without ``:attr`` it is the only one of its kind in the file. One object under two names counts
    once. Names with a leading underscore do not count.

    Args:
        target: The text that the user typed.
        kinds: Tests of kinds that can be served, the preferred kind first. A file with a layer has
            the server in it as well, and means the layer. They run only after the target's code, so
            they may import the SDK.
        what: These kinds in words.

    Raises:
        ConfigurationError: The file, module or attribute does not exist. The code failed, or serves
            by itself. The file has nothing to serve, or more than one thing.
    """
    source, attribute = split_target(target)
    module = _loaded(source)
    if attribute is None:
        return _only_one(module, source, kinds, what)
    found = _attribute(module, source, attribute, kinds)
    if not any(is_kind(found) for is_kind in kinds):
        raise ConfigurationError(f"{target} is a {type(found).__name__}, not {what}")
    return found


def split_target(target: str) -> tuple[str, str | None]:
    """Split a target into the file or module, and the attribute if there is one.

    Raises:
        ConfigurationError: The text does not have the form of a target.
    """
    # This comes first, since the colon of "C:\app.py" separates nothing.
    if target.endswith(".py"):
        return target, None
    source, _, attribute = target.rpartition(":")
    if _is_dotted_name(attribute) and (source.endswith(".py") or _is_dotted_name(source)):
        return source, attribute
    if lacks_scheme(target):
        # The error leaves out the address: it may hold a secret.
        raise ConfigurationError(f"TARGET must be {SHAPE} or a URL: {wrong_address(target, HTTP)}")
    hint = f"; a file of servers is --config {target}" if target.endswith(".json") else ""
    if target.endswith((".js", ".mjs", ".cjs", ".ts", ".sh")) or target.startswith("@"):
        hint = "; a server in another language is a command: -- COMMAND [ARG ...]"
    if len(target.split()) > 1:
        hint = f"; write a command after --, without quotes: -- {target.split()[0]} ..."
    if os.path.isfile(f"{target}.py"):
        hint = f"; did you mean {target}.py?"
    raise ConfigurationError(f"TARGET must be {SHAPE}, not {target!r}{hint}")


def program_of(target: str) -> str | None:
    if os.path.exists(target) or not target.strip():
        return None
    program = target.split()[0]
    return None if program.endswith(".py") or shutil.which(program) is None else program


def _loaded(source: str) -> ModuleType:
    is_file = source.endswith(".py")
    if is_file and not Path(source).is_file():
        raise no_such_file(source)
    with nothing_runs() as runs:
        try:
            module = _import_file(source) if is_file else _import_module(source)
        except ConfigurationError as error:
            if runs.tried:
                raise _runs_itself(source, error) from error
            raise
    if runs.tried:
        # The code ignored the error.
        raise _runs_itself(source, None)
    return module


def _runs_itself(source: str, error: BaseException | None) -> ConfigurationError:
    frames = _frames(error.__cause__) if error is not None and error.__cause__ is not None else []
    where = f" ({frames[0].filename}, line {frames[0].lineno})" if frames else ""
    return ConfigurationError(
        f"{source} runs a server when it is imported{where}: "
        "put that under if __name__ == '__main__', and serve will run it with sessions"
    )


def _is_dotted_name(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _import_file(source: str) -> ModuleType:
    path = Path(source).resolve()
    # As `python file.py` does, so that the file can import its neighbours.
    _search_first(str(path.parent))
    # The module gets the file's own name if it is free. A neighbour that imports it then gets this
    # module, not a second copy with a second server.
    name = path.stem
    if not name.isidentifier() or name in sys.modules:
        name = f"mcp_sessions_target_{abs(hash(path))}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise AssertionError("importlib has a loader for every name that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    # This is the boundary to foreign code, which may raise anything. SystemExit too: the file may
    # end the program when it is imported.
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _import_failed(source, error) from error
    return module


def _import_module(source: str) -> ModuleType:
    # The script of an installed command does not look in the current directory.
    _search_first(os.getcwd())
    try:
        return importlib.import_module(source)
    # The same boundary as above.
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{source}.".startswith(f"{error.name}."):
            raise ConfigurationError(
                f"no module named {error.name!r} here or among the installed packages"
            ) from error
        raise _import_failed(source, error) from error


def _search_first(directory: str) -> None:
    if directory in sys.path:
        sys.path.remove(directory)
    sys.path.insert(0, directory)


def _import_failed(source: str, error: BaseException) -> ConfigurationError:
    _log.debug("importing %s failed", source, exc_info=error)
    if isinstance(error, SystemExit):
        return ConfigurationError(
            f"{source} ended the program while it was imported; "
            "put what it runs under: if __name__ == '__main__'"
        )
    if isinstance(error, WrongOption):
        return error
    if isinstance(error, ConfigurationError):
        # It says all by itself, but for the place.
        return ConfigurationError(one_line(error) + _where(error))
    return ConfigurationError(
        f"{source} cannot be imported: {type(error).__name__}: {one_line(error)}{_where(error)}"
        f"{_other_environment(source, error)}"
    )


def _other_environment(source: str, error: BaseException) -> str:
    if isinstance(error, ImportError):
        package = (error.name or "").partition(".")[0]
        is_older = package == "mcp"
    elif isinstance(error, AttributeError):
        package = str(getattr(error.obj, "__module__", "")).partition(".")[0]
        is_older = package == "mcp"
        if not is_older:
            return ""
    else:
        return ""
    why = "it was written for mcp<2" if is_older else "another environment has what it needs"
    code = source if source.endswith(".py") else f"-m {source}"
    return (
        f"; if {why}, serve it as a command, with the Python of that environment: "
        f"mcp-sessions serve -- other-venv/bin/python {code}"
    )


def _where(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return ""  # its text names the place
    frames = _frames(error)
    if isinstance(error, (ConfigurationError, TypeError)):
        # The line to change is the user's. The layer's own lines only looked at the setting.
        frames = [each for each in frames if not Path(each.filename).is_relative_to(_PACKAGE)]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in (__file__, importlib.__file__)
        and not frame.filename.startswith("<")
    ]


def _attribute(module: ModuleType, source: str, attribute: str, kinds: Sequence[Kind]) -> object:
    found: object = module
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            names = [name for is_kind in kinds for name in _names_of(module, is_kind)]
            raise ConfigurationError(
                f"{source} has no attribute {attribute!r}; "
                f"what it has to serve: {', '.join(names) or 'nothing'}"
            ) from error
    return found


def _only_one(module: ModuleType, source: str, kinds: Sequence[Kind], what: str) -> object:
    for is_kind in kinds:
        match _names_of(module, is_kind):
            case []:
                continue
            case [name]:
                return getattr(module, name)
            case names:
                choices = ", ".join(f"{source}:{name}" for name in names)
                raise ConfigurationError(f"{source} has several servers; name one: {choices}")
    raise ConfigurationError(f"{source} has nothing to serve: it needs {what}")


def _names_of(module: ModuleType, is_kind: Kind) -> list[str]:
    seen: dict[int, str] = {}
    for name, value in vars(module).items():
        if not name.startswith("_") and is_kind(value):
            seen.setdefault(id(value), name)
    return list(seen.values())
