"""The variables that a command inherits: who runs it, and how it reaches the network.

The layer's own keys and passwords are not among them. Neither is a value that has a credential in
it, such as a proxy's URL with a password. The log names such a variable.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection
from typing import Final

logger = logging.getLogger(__name__)

_PERSONAL: Final = frozenset({
    "HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER",
})  # fmt: skip

_NETWORK: Final = frozenset({
    # Proxies.
    "ALL_PROXY", "FTP_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "NODE_USE_ENV_PROXY", "NO_PROXY",
    "NPM_CONFIG_HTTPS_PROXY", "NPM_CONFIG_NOPROXY", "NPM_CONFIG_PROXY", "PIP_PROXY",
    # Certificates that are trusted.
    "AWS_CA_BUNDLE", "CURL_CA_BUNDLE", "DENO_CERT", "DENO_TLS_CA_STORE", "GIT_SSL_CAINFO",
    "GIT_SSL_CAPATH", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", "NIX_SSL_CERT_FILE",
    "NODE_EXTRA_CA_CERTS", "NODE_USE_SYSTEM_CA", "NPM_CONFIG_CAFILE", "PIP_CERT",
    "REQUESTS_CA_BUNDLE", "SSL_CERT_DIR", "SSL_CERT_FILE", "UV_NATIVE_TLS", "UV_SYSTEM_CERTS",
    # Where a daemon or a cluster is.
    "CONTAINER_HOST", "DOCKER_CERT_PATH", "DOCKER_CONFIG", "DOCKER_CONTEXT", "DOCKER_HOST",
    "DOCKER_TLS_VERIFY", "KUBECONFIG",
    # Where packages come from, and where they are kept.
    "BUN_INSTALL_CACHE_DIR", "DENO_DIR", "NPM_CONFIG_CACHE", "NPM_CONFIG_GLOBALCONFIG",
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

_USER_OF_SSH: Final = re.compile(r"ssh://[^:@/]+@[^@?]*")


def inherited(title: str, given: Collection[str] = ()) -> dict[str, str]:
    """Return what a command inherits from this process.

    Args:
        title: The server's name in the log.
        given: Names that it gets anyway, with a value of its own.
    """
    found: dict[str, str] = {}
    for name, value in os.environ.items():
        if name in given or not (name in _PERSONAL or name.upper() in _NETWORK):
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
