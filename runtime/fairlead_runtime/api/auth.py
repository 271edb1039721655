"""API keys: which requests are allowed, and which tenant sent them.

Owns the key file and the decision on ``scope["path"]``, made before the body is read. Every path of
the public port, existing or not, needs a key, except the probes. Keys are kept as hashes and never
logged.
"""

import hashlib
import hmac
import logging
import secrets
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from fairlead_runtime.api.errors import ApiError
from fairlead_runtime.config import ConfigError

# /readyz and its names on other servers, for load balancers that are configured for those.
READINESS = ("/readyz", "/health", "/ping")
OPEN_PATHS = frozenset({"/healthz", *READINESS})
TENANT = "fairlead.tenant"  # the scope's entry for the caller's tenant; absent without keys
MAX_KEY = 1024  # bytes; a longer credential is not a valid key

_log = logging.getLogger("fairlead.api")


class KeyRing:
    """The keys of a file, one per line, read again when the file changes.

    An empty file revokes every key. While the file cannot be read, the last keys stay valid: a
    mounted Secret is replaced in two steps. Raises ConfigError when the file has no key at the
    start.
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
                "name a UTF-8 file with one key per line",
            ) from None
        if not self._hashes:
            raise ConfigError("api_key_file", f"{path}: has no key", "put one key on each line")

    def tenant(self, credential: bytes) -> str | None:
        """The tenant of a valid key, a part of the key's hash; None for any other credential.
        Always compares with every key.
        """
        self._refresh()
        digest = hashlib.sha256(credential).digest()
        valid = False
        for key_hash in self._hashes:
            valid |= hmac.compare_digest(digest, key_hash)
        return digest.hex()[:16] if valid else None

    def _refresh(self) -> None:
        try:
            stamp = self._stat()
            if stamp != self._stamp:
                self._read(stamp)
            self._unreadable = False
        except (OSError, UnicodeDecodeError) as error:
            if not self._unreadable:
                _log.warning(
                    "the API key file cannot be read, the last keys stay valid: %s", _reason(error)
                )
            self._unreadable = True

    def _stat(self) -> tuple[int, int, int]:
        stat = self._path.stat()
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _read(self, stamp: tuple[int, int, int]) -> None:
        keys = [line.strip() for line in self._path.read_text("utf-8").split("\n")]
        self._hashes = tuple(hashlib.sha256(key.encode()).digest() for key in keys if key)
        self._stamp = stamp


def _reason(error: OSError | UnicodeDecodeError) -> str:
    """Why the file cannot be read, without its content."""
    if isinstance(error, OSError):
        return error.strerror or "cannot be read"
    return "is not UTF-8 text"


class AuthMiddleware:
    """Pure ASGI: refuses requests to the public app without a valid key. Without a key ring it
    refuses none.
    """

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
    headers = [value for name, value in scope["headers"] if name == b"authorization"]
    scheme, _, credential = headers[0].partition(b" ") if len(headers) == 1 else (b"", b"", b"")
    key = credential.strip() if scheme.lower() == b"bearer" else b""
    # Always compare, so that a malformed header takes as long as a wrong key.
    tenant = keys.tenant(key[:MAX_KEY])
    return tenant if key and len(key) <= MAX_KEY else None


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    error = ApiError(
        401,
        "this server needs an API key: send it as 'Authorization: Bearer KEY'",
        headers={"www-authenticate": "Bearer"},
    )
    await error.response()(scope, receive, send)


class Salter:
    """Separates prefix caches by key, so that no tenant can probe another tenant's prompts.

    Without keys only ``cache_salt`` separates them, so that equal prompts share blocks.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def salt(self, keyed_tenant: str | None, cache_salt: str | None) -> bytes:
        text = (cache_salt or "").encode()
        if keyed_tenant is None:
            return text
        # The tenant has a fixed length, so no two (tenant, salt) pairs make the same message.
        return hmac.digest(self._secret, keyed_tenant.encode() + text, "sha256")
