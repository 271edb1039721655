"""What clients meet before any model is there: both ports, the keys and the certificate.

Owns their opening, which comes before all that takes time.
"""

import os
import socket
from typing import TYPE_CHECKING, NamedTuple, Self

from fairlead_runtime.settings import preflight
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig

if TYPE_CHECKING:
    from fairlead_runtime.front.key_file import KeyRing
    from fairlead_runtime.front.tls import Certificates

BACKLOG = 2048
_EVERY = ("::", "0.0.0.0")  # noqa: S104 - addresses to show, not to bind


class Listeners(NamedTuple):
    public: socket.socket
    admin: socket.socket


def listen(host: str, port: int, admin_port: int) -> Listeners:
    """Bind both ports; port 0 takes a free one.

    Raises ConfigError, which names the flag of the port that cannot be bound.
    """
    public = preflight.listen("port", host, port, BACKLOG)
    try:
        return Listeners(public, preflight.listen("admin_port", host, admin_port, BACKLOG))
    except ConfigError:
        public.close()
        raise


class Doors(NamedTuple):
    """Keys and certificates are those of the public port; None: it has none."""

    listeners: Listeners
    keys: "KeyRing | None"
    certificates: "Certificates | None"

    @classmethod
    def open(cls, config: EngineConfig, host: str, port: int, admin_port: int) -> Self:
        """Raises ConfigError."""
        # What they import takes part of a second, in which a port that is taken is refused.
        keys = certificates = None
        if config.api_key_file or os.environ.get(preflight.KEY_VARIABLE):
            from fairlead_runtime.front import key_file

            keys = key_file.api_keys(config.api_key_file, os.environ)
        if config.ssl_certfile:
            from fairlead_runtime.front import tls

            certificates = tls.Certificates(config.ssl_certfile, config.ssl_keyfile)
        return cls(listen(host, port, admin_port), keys, certificates)

    def urls(self, *, local: bool = False) -> dict[str, str]:
        """The address of each port, as it is bound, or as a browser on this machine opens it."""
        return {
            name: f"{self._scheme(name)}://{_host(listener, local)}:{listener.getsockname()[1]}"
            for name, listener in self.listeners._asdict().items()
        }

    def _scheme(self, name: str) -> str:
        return "https" if self.certificates is not None and name == "public" else "http"


def _host(listener: socket.socket, local: bool) -> str:
    address = str(listener.getsockname()[0])
    if local and address in _EVERY:
        return "127.0.0.1"
    return f"[{address}]" if ":" in address else address
