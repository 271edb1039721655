"""The HTTP client of both kinds of probes: a bounded number of requests at a time, each with a
deadline and a bounded body.

A request waits for its turn before its deadline starts, so a burst of requests times out no more
often than single ones do. A connection serves one request: there is no pool to lose when a request
is cancelled.
"""

import asyncio
import contextlib
import urllib.request
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp

ERRORS = (aiohttp.ClientError, OSError, TimeoutError)  # how a request fails


class TooLargeError(Exception):
    """The body is larger than the limit."""


class Response(NamedTuple):
    """An answer of a server. ``body`` is read of status 200 alone."""

    status: int
    location: str
    body: bytes


class HttpClient:
    """A client, made in a running event loop. It follows no redirect, keeps no cookie, sends no
    credential.
    """

    def __init__(
        self,
        seconds: float,
        limit: int,
        at_once: int,
        *,
        patience: float | None = None,
        proxies: Mapping[str, str] | None = None,
    ) -> None:
        """Open a session. ``limit``: bytes of a body. ``patience``: seconds that a request waits
        for its turn, None for as long as it takes. ``proxies``: by scheme, with ``no`` as the
        exceptions; empty: the environment's.
        """
        self._seconds, self._limit, self._proxies = seconds, limit, proxies
        self._patience = patience
        self._turns = asyncio.Semaphore(at_once)
        self._session = aiohttp.ClientSession(
            # limit=0: none of the connector's own, the semaphore is the bound.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
            trust_env=False,  # it would also send credentials of ~/.netrc
        )

    async def close(self) -> None:
        await self._session.close()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn; the requests of the block share one deadline (TimeoutError)."""
        async with asyncio.timeout(self._patience):
            await self._turns.acquire()
        try:
            async with asyncio.timeout(self._seconds):
                yield
        finally:
            self._turns.release()

    async def fetch(self, method: str, url: str) -> Response:
        """One request, within a turn. Raises TooLargeError or one of ``ERRORS``."""
        proxy = None if self._proxies is None else _proxy(url, self._proxies)
        async with self._session.request(
            method, url, allow_redirects=False, proxy=proxy
        ) as response:
            body = bytearray()
            if response.status == 200:
                async for part in response.content.iter_any():
                    body += part
                    if len(body) > self._limit:
                        raise TooLargeError
            return Response(response.status, response.headers.get("Location", ""), bytes(body))


def _proxy(url: str, explicit: Mapping[str, str]) -> str | None:
    parts = urlsplit(url)
    proxies = dict(explicit) or urllib.request.getproxies_environment()
    if _excepted(parts.netloc, proxies):
        return None
    return proxies.get(parts.scheme) or proxies.get("all")


def _excepted(host: str, proxies: dict[str, str]) -> bool:
    """Whether NO_PROXY names the host; typeshed lacks the function."""
    bypass = getattr(urllib.request, "proxy_bypass_environment")  # noqa: B009 - see above
    return bool(bypass(host, proxies))
