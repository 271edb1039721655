"""The file of API keys: one key a line, with a name and limits, read again when it changes.

Owns the form of a line, the keys that are valid now and what each of them uses. Keeps keys as
hashes; no error and no log line quotes the file.
"""

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fairlead_runtime.front.key_limits import PRIORITIES, USUAL_PRIORITIES, KeyLimits, KeyUsage
from fairlead_runtime.front.watched_files import Stamp, stamp_of
from fairlead_runtime.settings.engine_config import ConfigError
from fairlead_runtime.settings.preflight import KEY_VARIABLE

MAX_KEY = 1024  # bytes; a longer credential is not a valid key
MAX_KEYS = 1000  # every request is compared with each
MAX_FILE = 2 * 1024 * 1024  # bytes
MAX_PER_MINUTE = 60_000  # the times of so many requests are kept
MAX_CONCURRENT = 100_000
_SETTINGS = frozenset({"name", "requests_per_minute", "concurrent_requests", "priority"})
_FORM = (
    "write KEY, then if wanted name=NAME requests_per_minute=N concurrent_requests=N "
    "priority=LOWEST..HIGHEST"
)
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_RANGE = re.compile(r"(-?[0-9]{1,10})\.\.(-?[0-9]{1,10})")
_SALT = b"fairlead prefix cache\0"

_log = logging.getLogger("fairlead.api")


class KeyFileError(ValueError):
    """The file is not one of keys. The message names the line and the fix and quotes nothing."""


@dataclass(frozen=True, slots=True)
class Key:
    """``digest``: sha256 of the key. ``tenant``: its name, else a part of the digest."""

    digest: bytes = field(repr=False)
    tenant: str
    limits: KeyLimits
    usage: KeyUsage

    def salt(self, text: bytes) -> bytes:
        """Separates the key's prefix cache from those of others, and by ``text``. Made of the key
        alone: pods with the same file salt alike, and a change of the file's other lines changes
        nothing. Nobody who lacks the key can tell it.
        """
        return hmac.digest(self.digest, _SALT + text, "sha256")


def api_keys(path: str, environ: Mapping[str, str]) -> "KeyRing | None":
    """The keys of the file, or the one key of ``environ``; None without either. Raises ConfigError,
    which quotes no key.
    """
    key = environ.get(KEY_VARIABLE, "")
    if not key:
        return KeyRing(path) if path else None
    if path:
        raise ConfigError("api_key_file", f"{KEY_VARIABLE} is set, too", "set one of the two")
    return KeyRing(key=key)


class KeyRing:
    """The keys of a file, which it looks at with each request and each scrape, or one ``key``.

    An empty file revokes every key. While the file is missing or wrong, the last keys stay valid: a
    mounted Secret is replaced in two steps. A key that stays keeps its usage. Raises ConfigError
    when the file has no key at the start.
    """

    def __init__(
        self, path: str = "", now: Callable[[], float] = time.monotonic, *, key: str = ""
    ) -> None:
        self._path = Path(path) if path else None
        self._now = now
        self._stamp: Stamp | None = None
        self._keys: tuple[Key, ...] = ()
        self._fault = ""  # why the file as it is now cannot be used
        self.unauthorized = 0  # requests without a valid key
        self.limited = 0  # requests beyond the limits of their key
        if self._path is None:
            self._keys = _only_key(key, now)
            return
        try:
            self._stamp = stamp_of([self._path])
            self._keys = self._read(self._path)
        except (OSError, ValueError) as error:
            raise ConfigError(
                "api_key_file", f"{path}: {_reason(error)}", "name a UTF-8 file of keys: " + _FORM
            ) from None
        if not self._keys:
            raise ConfigError("api_key_file", f"{path}: has no key", "put one key on each line")

    @property
    def broken(self) -> bool:
        """Whether the file as it is now cannot be used."""
        return bool(self._fault)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that the file gives to keys, in its order."""
        return tuple(key.tenant for key in self._keys if key.tenant != _nameless(key.digest))

    def find(self, credential: bytes) -> Key | None:
        """The valid key that ``credential`` is, or None. Always compares with every key."""
        self.refresh()
        digest = hashlib.sha256(credential).digest()
        match = None
        for key in self._keys:
            if hmac.compare_digest(digest, key.digest):
                match = key
        return match

    def refresh(self) -> None:
        """Read the file again if it has changed."""
        if self._path is None:
            return
        try:
            stamp = stamp_of([self._path])
            if stamp != self._stamp:
                self._stamp = stamp  # also of a wrong file: it is read once
                self._keys = self._read(self._path)
                self._fault = ""
                _log.info("the API key file was read again: %d keys", len(self._keys))
        except (OSError, ValueError) as error:
            if isinstance(error, OSError):
                self._stamp = None
            if self._fault != (fault := _reason(error)):
                self._fault = fault
                _log.warning("the API key file cannot be used, the last keys stay valid: %s", fault)

    def _read(self, path: Path) -> tuple[Key, ...]:
        with path.open("rb") as file:
            content = file.read(MAX_FILE + 1)
        if len(content) > MAX_FILE:
            raise KeyFileError(f"has more than {MAX_FILE} bytes")
        usages = {key.digest: key.usage for key in self._keys}
        return tuple(
            Key(digest, tenant, limits, usages.get(digest) or KeyUsage(self._now))
            for digest, tenant, limits in parse(content.decode("utf-8"))
        )


def _only_key(key: str, now: Callable[[], float]) -> tuple[Key, ...]:
    key = key.strip()
    word = key.isprintable() and len(key.split()) == 1 and not key.startswith("#")
    if not word or len(key.encode()) > MAX_KEY:
        fix = f"use one word of at most {MAX_KEY} bytes that does not begin with #"
        raise ConfigError("api_key_file", f"{KEY_VARIABLE} is no key", fix)
    ((digest, tenant, limits),) = parse(key)
    return (Key(digest, tenant, limits, KeyUsage(now)),)


def parse(text: str) -> list[tuple[bytes, str, KeyLimits]]:
    """Digest, tenant and limits of each key. Raises KeyFileError."""
    keys: list[tuple[bytes, str, KeyLimits]] = []
    digests, tenants = set(), set()
    for number, line in enumerate(text.split("\n"), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        digest, tenant, limits = _parsed(words, f"line {number}: ")
        if digest in digests or tenant in tenants:
            raise KeyFileError(f"line {number}: an earlier line has this key or name: change it")
        digests.add(digest)
        tenants.add(tenant)
        keys.append((digest, tenant, limits))
        if len(keys) > MAX_KEYS:
            raise KeyFileError(f"has more than {MAX_KEYS} keys")
    return keys


def _parsed(words: list[str], where: str) -> tuple[bytes, str, KeyLimits]:
    key = words[0].encode()
    if len(key) > MAX_KEY:
        raise KeyFileError(f"{where}the key is longer than {MAX_KEY} bytes: shorten it")
    settings: dict[str, str] = {}
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if not equals or name not in _SETTINGS:
            raise KeyFileError(f"{where}has a word that is no setting: {_FORM}")
        if name in settings:
            raise KeyFileError(f"{where}{name} is set twice: remove one")
        settings[name] = value
    digest = hashlib.sha256(key).digest()
    tenant = settings.get("name", _nameless(digest))
    if not _NAME.fullmatch(tenant):
        raise KeyFileError(f"{where}name: use 1 to 64 of A-Z a-z 0-9 . _ -")
    limits = KeyLimits(
        _count(settings, "requests_per_minute", MAX_PER_MINUTE, where),
        _count(settings, "concurrent_requests", MAX_CONCURRENT, where),
        _priorities(settings, where),
    )
    return digest, tenant, limits


def _nameless(digest: bytes) -> str:
    """The tenant of a key without a name."""
    return digest.hex()[:16]


def _count(settings: dict[str, str], name: str, maximum: int, where: str) -> int | None:
    text = settings.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= maximum):
        raise KeyFileError(f"{where}{name}: use a whole number from 1 to {maximum}")
    return int(text)


def _priorities(settings: dict[str, str], where: str) -> range:
    if "priority" not in settings:
        return USUAL_PRIORITIES
    match = _RANGE.fullmatch(settings["priority"])
    low, high = map(int, match.groups()) if match else (1, 0)
    if not PRIORITIES[0] <= low <= high <= PRIORITIES[-1]:
        raise KeyFileError(
            f"{where}priority: use LOWEST..HIGHEST, whole numbers from {PRIORITIES[0]} to "
            f"{PRIORITIES[-1]}"
        )
    return range(low, high + 1)


def _reason(error: OSError | ValueError) -> str:
    """Why the file cannot be used, without its content."""
    if isinstance(error, OSError):
        return error.strerror or "cannot be read"
    return str(error) if isinstance(error, KeyFileError) else "is not UTF-8 text"
