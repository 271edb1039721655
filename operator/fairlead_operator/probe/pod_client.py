"""The only module that talks to pods: metrics, canary and configuration of the runtime's admin
port.

Requests only addresses that the API server reported for the operator's pods. Reads at most 1 MiB,
waits at most 2 s (12 s for a canary), follows no redirect, uses no proxy, sends no credential.
Every answer that is not good is an error.
"""

import functools
import ipaddress
from typing import Any, Self

from fairlead_operator.probe.http_client import ERRORS, HttpClient, TooLargeError
from fairlead_operator.resource.json_text import json_object
from fairlead_operator.resource.kinds import ADMIN_PORT

LIMIT = 1 << 20
# Requests at a time, and scrapes of pods that did not answer last. Those wait for a turn a moment:
# pods that answer again free it within milliseconds, pods that hang do not.
AT_ONCE, SILENT_AT_ONCE = 100, 50
PATIENCE = 1.0  # seconds
# The runtime answers within 10 s, behind its queue; its own answer says more than a time-out.
CANARY_SECONDS = 12.0


class ScrapeError(Exception):
    """The pod gave no good answer; the message says why, without its content."""


class Pods:
    """Requests to pods: a context manager, entered in a running event loop."""

    def __init__(
        self,
        seconds: float = 2.0,
        port: int = ADMIN_PORT,
        at_once: int = AT_ONCE,
        canary_seconds: float = CANARY_SECONDS,
    ) -> None:
        self._http = HttpClient(seconds, LIMIT, at_once)
        # Of their own, so that pods that hang take no turn of those that answer.
        self._unresponsive = HttpClient(seconds, LIMIT, SILENT_AT_ONCE, patience=PATIENCE)
        self._canaries = HttpClient(canary_seconds, LIMIT, at_once)
        self._port = port

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in (self._http, self._unresponsive, self._canaries):
            await client.close()

    async def metrics(self, address: str, *, unresponsive: bool = False) -> str:
        """The pod's metrics as text. ``unresponsive``: the pod did not answer last; it is not asked
        while too many such pods hang.
        """
        client = self._unresponsive if unresponsive else self._http
        return (await self._read("GET", address, "/metrics", client)).decode("utf-8", "replace")

    async def canary(self, address: str) -> None:
        """Make the pod generate one token. Raises ScrapeError unless it did."""
        answer = _json(await self._read("POST", address, "/canary", self._canaries))
        if not isinstance(answer.get("token"), int):
            raise ScrapeError("the canary's answer holds no token")

    async def model_config(self, address: str) -> dict[str, Any]:
        return _json(await self._read("GET", address, "/model/config.json"))

    async def progress(self, address: str) -> dict[str, Any]:
        """The progress of the pod's ``fetch``: how much of the weights it has downloaded."""
        return _json(await self._read("GET", address, "/progress"))

    async def memory(self, address: str) -> dict[str, Any]:
        return _json(await self._read("GET", address, "/debug/memory"))

    async def _read(
        self, method: str, address: str, path: str, client: HttpClient | None = None
    ) -> bytes:
        client = client or self._http
        url = f"http://{_host(address)}:{self._port}{path}"
        try:
            async with client.turn():
                response = await client.fetch(method, url)
        except TooLargeError:
            raise ScrapeError(f"{path}: more than {LIMIT} bytes") from None
        except ERRORS as error:
            raise ScrapeError(f"{path}: {type(error).__name__}") from None
        if response.status != 200:
            raise ScrapeError(f"{path}: status {response.status}")
        return response.body


@functools.lru_cache(maxsize=10_000)  # as many pods are asked again and again
def _host(address: str) -> str:
    """The host of a URL for an address. Raises ScrapeError for a text that is no address."""
    try:
        host = ipaddress.ip_address(address)
    except ValueError:
        raise ScrapeError("the pod has no address") from None
    return f"[{host}]" if host.version == 6 else str(host)


def _json(body: bytes) -> dict[str, Any]:
    try:
        return json_object(body)
    except ValueError:
        raise ScrapeError("the answer is not a JSON object") from None
