"""Checks at start-up of what a flag names outside the process: a file to write, an address to
listen on.

Owns these checks, which run before anything else starts, and their messages, which name the flag
and the fix. Changes nothing except that ``listen`` opens a socket.
"""

import errno
import os
import socket
import stat
from pathlib import Path

from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig, flag_of
from fairlead_runtime.settings.listening import listen_on_every_address

# Errors that the host causes; any other error is the port's.
_HOST_ERRORS = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL})
_HOST_FIX = (
    "use an address of this machine without brackets: 127.0.0.1, ::1, 0.0.0.0 for all of IPv4, "
    ":: for all of IPv4 and IPv6"
)
EVERY_ADDRESS = "::"
KEY_VARIABLE = "FAIRLEAD_API_KEY"  # of the environment: an API key without a file of keys


def check_record(config: EngineConfig) -> None:
    """Raise ConfigError when ``record`` is set and cannot be written. An existing recording stays
    unchanged.
    """
    if not config.record:
        return
    path = Path(config.record)
    for name in ("api_key_file", "ssl_certfile", "ssl_keyfile"):
        server_file = getattr(config, name)
        if server_file and path.exists() and path.samefile(server_file):
            raise ConfigError("record", f"{path} is the file of {flag_of(name)}", "name another")
    try:
        _try_writing(path)
    except OSError as error:
        raise ConfigError("record", f"{path}: {error.strerror}", "name a writable file") from None


def check_chat_template(config: EngineConfig) -> None:
    """Raise ConfigError when ``chat_template`` is set and cannot be read. What is in it is judged
    with the tokenizer.
    """
    if not config.chat_template:
        return
    try:
        with Path(config.chat_template).open("rb"):
            pass
    except OSError as error:
        reason = f"{config.chat_template}: {error.strerror}"
        raise ConfigError("chat_template", reason, "name a readable file") from None


def _try_writing(path: Path) -> None:
    """Open for writing and close again: only an open is reliable on every file system and for
    every user.
    """
    existed = path.exists()
    if existed and stat.S_ISFIFO(path.stat().st_mode):
        return  # closing it would end the file for its reader
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    if not existed:
        path.unlink()


def listen(flag: str, host: str, port: int, backlog: int) -> socket.socket:
    """Open a listening TCP socket; port 0 means any free port, host ``::`` every address of both
    families. ``flag``: the port's setting.

    Raises ConfigError with the host's or the port's setting, whichever causes the error.
    """
    if not host:
        raise ConfigError("host", "is empty", _HOST_FIX)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        address = socket.getaddrinfo(host, None, family=family, type=socket.SOCK_STREAM)[0][4][0]
    except (socket.gaierror, UnicodeError):
        raise ConfigError(
            "host", f"{host[:100]!r} is neither an address nor a known name", _HOST_FIX
        ) from None
    try:
        if host == EVERY_ADDRESS:
            return listen_on_every_address(port, backlog)
        return socket.create_server((address, port), family=family, backlog=backlog)
    except OverflowError:
        raise ConfigError(
            flag, f"{port} is not a port", "use 1 to 65535, or 0 for any free port"
        ) from None
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        if error.errno in _HOST_ERRORS:
            raise ConfigError("host", f"cannot listen on {host}: {reason}", _HOST_FIX) from None
        fix = "choose a port above 1023" if error.errno == errno.EACCES else "choose another port"
        raise ConfigError(flag, f"cannot listen on {host} port {port}: {reason}", fix) from None
