"""Whether what a flag names outside the process can be had: a file to write, an address to listen
on.

Owns these questions, which are asked before anything else starts, and their refusals by flag and
fix. Leaves the world as it was, but for the socket that was asked for.
"""

import errno
import os
import socket
import stat
from pathlib import Path

from fairlead_runtime.config import ConfigError, EngineConfig

# What is wrong with the name or the address; anything else that fails is the port's fault.
_HOST_ERRORS = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL})
_HOST_FIX = "name an address of this machine without brackets: 127.0.0.1, ::1, 0.0.0.0 for all"


def check_record(config: EngineConfig) -> None:
    """Raises ConfigError when ``record`` is set and cannot be written. An earlier recording stays
    as it is.
    """
    if not config.record:
        return
    path = Path(config.record)
    if config.api_key_file and path.exists() and path.samefile(config.api_key_file):
        raise ConfigError("record", f"{path} is the file of API keys", "name another file")
    try:
        _try_writing(path)
    except OSError as error:
        raise ConfigError(
            "record", f"{path}: {error.strerror}", "name a file that can be written"
        ) from None


def _try_writing(path: Path) -> None:
    """Open for writing and close again; only the open itself tells on every file system and for
    every user.
    """
    existed = path.exists()
    if existed and stat.S_ISFIFO(path.stat().st_mode):
        return  # its reader would see the end of the file
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    if not existed:
        path.unlink()


def listen(flag: str, host: str, port: int, backlog: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. ``flag``: the setting that names the port.

    Raises ConfigError naming the host's flag or the port's, whichever is at fault.
    """
    if not host:
        raise ConfigError("host", "is empty", _HOST_FIX)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        address = socket.getaddrinfo(host, None, family=family, type=socket.SOCK_STREAM)[0][4][0]
    except (socket.gaierror, UnicodeError):
        raise ConfigError(
            "host", f"{host[:100]!r} is no address and no known name", _HOST_FIX
        ) from None
    try:
        return socket.create_server((address, port), family=family, backlog=backlog)
    except OverflowError:
        raise ConfigError(flag, f"{port} is no port", "use 0 (any free one) to 65535") from None
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        if error.errno in _HOST_ERRORS:
            raise ConfigError("host", f"cannot listen on {host}: {reason}", _HOST_FIX) from None
        fix = "choose one above 1023" if error.errno == errno.EACCES else "choose another"
        raise ConfigError(flag, f"cannot listen on {host} port {port}: {reason}", fix) from None
