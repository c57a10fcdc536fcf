"""Read the file of ``serve --config`` again, and serve what it names now.

Rules, owned by ``tests/cli/test_reload_config.py``:

1. A new server is served. A removed one is drained, and its path is then no longer served.
2. A changed server gets new processes for new sessions. The sessions that it has keep theirs. If
   its kind, ``per`` or ``auth`` changed, it is drained, and served anew.
3. A server that did not change notices nothing.
4. A wrong file or store changes nothing.
5. A wrong certificate, such as one that expired, is not used. It keeps nothing else from being read
   again, and the log says what is wrong with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mcp_sessions.assembly import Assembly
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.external_server import ExternalServer
from mcp_sessions.serve.tls import Certificate
from mcp_sessions.serve.together import Part, Together
from mcp_sessions.server.upstream.external.changing import can_follow

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ServedFile:
    _read: Callable[[], Mapping[str, ExternalServer]]
    _make: Callable[[str, ExternalServer], Assembly]
    _part: Callable[[str, Assembly], Part]
    _together: Together
    _layers: dict[str, Assembly]
    _parts: dict[str, Part]
    _certificate: Certificate | None

    async def reload(self) -> str:
        """Serve what the file names now, and return what has changed.

        Raises:
            ConfigurationError: The file or a server is wrong.
            StoreUnavailable: The store of a new server is away.
        """
        layers, parts = dict[str, Assembly](), dict[str, Part]()
        new, changed, anew = list[str](), dict[str, ExternalServer](), list[str]()
        for path, server in self._read().items():
            layer = self._layers.get(path)
            before = _server_of(layer) if layer is not None else None
            failed = layer is not None and not self._together.holds(self._parts[path])
            if layer is None or before is None or failed or not can_follow(before, server):
                (new if layer is None else anew).append(path)
                layer = self._make(path, server)
                parts[path] = self._part(path, layer)
            else:
                parts[path] = self._parts[path]
                if vars(before) != vars(server):
                    changed[path] = server
            layers[path] = layer
        await self._together.serve(list(parts.values()))
        removed = [path for path in self._layers if path not in layers]
        self._layers, self._parts = layers, parts
        for path, server in changed.items():
            external = layers[path].external
            if external is not None:
                external.use(server)
        said = [
            f"{what} {', '.join(paths)}"
            for what, paths in (
                ("new", new),
                ("removed", removed),
                ("changed", [*changed, *anew]),
            )
            if paths
        ]
        if self._certificate is not None:
            try:
                said += ["the certificate"] if self._certificate.read_again() else []
            except ConfigurationError as failed:
                logger.error("the certificate was not reloaded, the one before is used: %s", failed)
        return "; ".join(said) or "nothing has changed"


def _server_of(layer: Assembly) -> ExternalServer | None:
    return layer.external.children.server if layer.external is not None else None
