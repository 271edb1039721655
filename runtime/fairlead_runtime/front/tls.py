"""TLS of the public port: a certificate that is renewed without a restart, and the handshakes.

Owns the context of new connections and the limits on handshakes, which uvicorn does not bound. A
connection keeps the certificate with which it began.
"""

import asyncio
import errno
import logging
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from pathlib import Path

from fairlead_runtime.front.access_log import describe
from fairlead_runtime.front.watched_files import Stamp, stamp_of
from fairlead_runtime.settings.engine_config import ConfigError

HANDSHAKE_SECONDS = 10.0
CLOSE_SECONDS = 2.0  # for the peer's part of the end of TLS
# Of the buffer that asyncio keeps for each connection of TLS, 256 KiB by itself. A record has 16.
# The plan counts on it (`sizing/traffic.py`).
if not hasattr(SSLProtocol, "max_size"):
    raise RuntimeError("asyncio bounds TLS's buffer by another name: use the Python of the images")
SSLProtocol.max_size = 32 * 1024
_OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
RETRY_SECONDS = 0.2  # until the next try to accept without free files

_log = logging.getLogger("fairlead.api")


class Certificates:
    """The certificate chain and key of two PEM files, read again when one of them changes.

    While they are missing, wrong or do not belong together, the last pair stays in use. Raises
    ConfigError when they cannot be used at the start.
    """

    def __init__(self, certfile: str, keyfile: str) -> None:
        self._paths = (Path(certfile), Path(keyfile))
        self._stamp: Stamp | None = None
        self._fault = ""  # why the files as they are now cannot be used
        try:
            self._stamp = stamp_of(self._paths)
            self._current = self._read()
        except (OSError, ValueError) as error:
            field, hint = "ssl_certfile", "name a PEM file with the certificate and its chain"
            if _usable_alone(self._paths[0]):
                field, hint = "ssl_keyfile", "name the PEM file with its private key, not encrypted"
            path = certfile if field == "ssl_certfile" else keyfile
            raise ConfigError(field, f"{path}: {_reason(error)}", hint) from None
        # The listener's own context: each handshake gets the current one.
        self.context = self._read()
        self.context.sni_callback = self._choose

    @property
    def broken(self) -> bool:
        """Whether the files as they are now cannot be used."""
        return bool(self._fault)

    def refresh(self) -> None:
        """Read the files again if one has changed."""
        try:
            stamp = stamp_of(self._paths)
            if stamp != self._stamp:
                self._stamp = stamp  # also of wrong files: they are read once
                self._current = self._read()
                self._fault = ""
                _log.info("the TLS certificate was read again")
        except (OSError, ValueError) as error:
            if not isinstance(error, ssl.SSLError) and isinstance(error, OSError):
                self._stamp = None
            if self._fault != (fault := _reason(error)):
                self._fault = fault
                _log.warning(
                    "the TLS certificate cannot be used, the last one stays in use: %s", fault
                )

    def _choose(
        self, connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _of: ssl.SSLContext
    ) -> None:
        """OpenSSL calls it in every handshake, also of clients that send no name."""
        self.refresh()
        connection.context = self._current

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        # The password of an encrypted key would be asked for on the terminal.
        context.load_cert_chain(*self._paths, password=lambda: "")
        return context


def _usable_alone(certificate: Path) -> bool:
    """Whether the first file is not the faulty one."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(certificate)
    except (OSError, ValueError):
        return False
    return True


def _reason(error: OSError | ValueError) -> str:
    """Why the files cannot be used, without their content."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or "is not a PEM file of the right kind").lower().replace("_", " ")
    if isinstance(error, OSError):
        return error.strerror or "cannot be read"
    return "is not a PEM file of the right kind"


async def accept_forever(
    listener: socket.socket,
    certificates: Certificates,
    new_protocol: Callable[[], asyncio.BaseProtocol],
    most: int,
) -> None:
    """Accept connections and give each a protocol once its handshake is complete. Cancel it to
    end; handshakes then end too.

    Closes a connection without a handshake within HANDSHAKE_SECONDS, or beyond ``most`` of
    them at a time.
    """
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    handshakes: set[asyncio.Task[None]] = set()
    try:
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                # Else the peer has gone already.
                if error.errno in _OUT_OF_FILES:
                    await asyncio.sleep(RETRY_SECONDS)
                continue
            if len(handshakes) >= most:
                connection.close()
                continue
            task = loop.create_task(_handshake(connection, certificates, new_protocol))
            handshakes.add(task)
            task.add_done_callback(handshakes.discard)
    finally:
        for task in handshakes:
            task.cancel()
        await asyncio.gather(*handshakes, return_exceptions=True)


async def _handshake(
    connection: socket.socket,
    certificates: Certificates,
    new_protocol: Callable[[], asyncio.BaseProtocol],
) -> None:
    try:
        await asyncio.get_running_loop().connect_accepted_socket(
            new_protocol,
            connection,
            ssl=certificates.context,
            ssl_handshake_timeout=HANDSHAKE_SECONDS,
            ssl_shutdown_timeout=CLOSE_SECONDS,
        )
    except OSError:
        pass  # a mistake or a time-out of the peer; the connection is closed
    except Exception as error:  # noqa: BLE001 - the next handshakes must not end with this one
        _log.error("a TLS handshake failed: %s", describe(error))
