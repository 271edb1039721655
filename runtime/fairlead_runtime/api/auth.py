"""API keys: who may call, and which tenant a caller is.

Owns the key file and the decision on ``scope["path"]``, made before anything of the request is
read. Every route of the public port needs a key but the probes, known or unknown. Keys are kept as
hashes and never logged.
"""

import hashlib
import hmac
import logging
import secrets
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from fairlead_runtime.api.errors import ApiError
from fairlead_runtime.config import ConfigError

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
TENANT = "fairlead.tenant"  # the scope's entry for the caller's tenant, absent without keys
MAX_KEY = 1024  # bytes; a longer credential is no key of ours

_log = logging.getLogger("fairlead.api")


class KeyRing:
    """The keys of a file, one a line, read again when the file changes.

    An emptied file revokes every key. A file that cannot be read keeps the last keys: a mounted
    secret is replaced in two steps. Raises ConfigError when the file holds no key at the start.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._stamp: tuple[int, int, int] | None = None
        self._hashes: tuple[bytes, ...] = ()
        self._unreadable = False
        try:
            self._read(self._stat())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                "api_key_file",
                f"{path}: {_reason(error)}",
                "name a file of one key a line, in UTF-8",
            ) from None
        if not self._hashes:
            raise ConfigError("api_key_file", f"{path}: holds no key", "put one key on each line")

    def tenant(self, credential: bytes) -> str | None:
        """The tenant of a key, a hash of it; None for no key of ours. Compares with every key,
        always.
        """
        self._refresh()
        presented = hashlib.sha256(credential).digest()
        found = False
        for known in self._hashes:
            found |= hmac.compare_digest(presented, known)
        return presented.hex()[:16] if found else None

    def _refresh(self) -> None:
        try:
            stamp = self._stat()
            if stamp != self._stamp:
                self._read(stamp)
            self._unreadable = False
        except (OSError, UnicodeDecodeError) as error:
            if not self._unreadable:
                _log.warning(
                    "the API key file cannot be read, the last keys stay: %s", _reason(error)
                )
            self._unreadable = True

    def _stat(self) -> tuple[int, int, int]:
        found = self._path.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self, stamp: tuple[int, int, int]) -> None:
        keys = [line.strip() for line in self._path.read_text("utf-8").split("\n")]
        self._hashes = tuple(hashlib.sha256(key.encode()).digest() for key in keys if key)
        self._stamp = stamp


def _reason(error: OSError | UnicodeDecodeError) -> str:
    """What is wrong with the file; nothing of what it holds."""
    return (
        (error.strerror or "cannot be read") if isinstance(error, OSError) else "is no UTF-8 text"
    )


class Authenticated:
    """Pure-ASGI gate in front of the public app. Without a key ring it lets everything pass."""

    def __init__(self, app: ASGIApp, keys: KeyRing | None) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keys is not None and scope["path"] not in OPEN_PATHS:
            tenant = _tenant(self._keys, scope)
            if tenant is None:
                await _refuse(scope, receive, send)
                return
            scope[TENANT] = tenant
        await self._app(scope, receive, send)


def _tenant(keys: KeyRing, scope: Scope) -> str | None:
    presented = [value for name, value in scope["headers"] if name == b"authorization"]
    scheme, _, credential = presented[0].partition(b" ") if len(presented) == 1 else (b"", b"", b"")
    wanted = credential.strip() if scheme.lower() == b"bearer" else b""
    # The ring is asked whatever was sent, so that a malformed header takes the time a wrong key
    # takes.
    tenant = keys.tenant(wanted[:MAX_KEY])
    return tenant if wanted and len(wanted) <= MAX_KEY else None


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    error = ApiError(
        401,
        "this server needs an API key: send it as 'Authorization: Bearer KEY'",
        headers={"www-authenticate": "Bearer"},
    )
    await error.response()(scope, receive, send)


class Salter:
    """Separates prefix caches: by key when keys are set, so that no tenant can probe another's
    prompts.

    Without keys only ``cache_salt`` separates, so that equal prompts share their blocks.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def salt(self, keyed_tenant: str | None, cache_salt: str | None) -> bytes:
        text = (cache_salt or "").encode()
        if keyed_tenant is None:
            return text
        # The tenant has a fixed length, so no two (tenant, salt) pairs make the same message.
        return hmac.digest(self._secret, keyed_tenant.encode() + text, "sha256")
