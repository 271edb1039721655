"""The only module that talks to pods: metrics, canary and configuration of the runtime's admin
port.

Asks only addresses that the API server reported for pods of ours; reads at most 1 MiB, waits at
most 2 s, follows no redirect, sends no credential. An answer that is not good is no answer.
"""

import asyncio
import ipaddress
import json
from typing import Any, Self

import httpx

from fairlead_operator.resource.kinds import ADMIN_PORT

LIMIT = 1 << 20


class ScrapeError(Exception):
    """The pod gave no good answer; the message says why, without its content."""


class Pods:
    """One pooled client; a context manager."""

    def __init__(self, seconds: float = 2.0, port: int = ADMIN_PORT) -> None:
        limits = httpx.Limits(max_connections=100, max_keepalive_connections=20)
        # trust_env: a proxy of the environment must never stand between the operator and a pod.
        self._http = httpx.AsyncClient(
            timeout=seconds,
            limits=limits,
            follow_redirects=False,
            trust_env=False,
            headers={"Accept-Encoding": "identity"},
        )
        self._seconds, self._port = seconds, port

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def metrics(self, address: str) -> str:
        return (await self._read("GET", address, "/metrics")).decode("utf-8", "replace")

    async def canary(self, address: str) -> None:
        """Have the pod make one token. Raises ScrapeError unless it did."""
        answer = _json(await self._read("POST", address, "/canary"))
        if not isinstance(answer.get("token"), int):
            raise ScrapeError("the canary's answer holds no token")

    async def model_config(self, address: str) -> dict[str, Any]:
        return _json(await self._read("GET", address, "/model/config.json"))

    async def progress(self, address: str) -> dict[str, Any]:
        """How far the pod's ``fetch`` is."""
        return _json(await self._read("GET", address, "/progress"))

    async def memory(self, address: str) -> dict[str, Any]:
        return _json(await self._read("GET", address, "/debug/memory"))

    async def _read(self, method: str, address: str, path: str) -> bytes:
        try:
            host = ipaddress.ip_address(address)
        except ValueError:
            raise ScrapeError("the pod has no address") from None
        url = f"http://{f'[{host}]' if host.version == 6 else host}:{self._port}{path}"
        body = bytearray()
        try:
            # The client's own limits are per read: a pod that trickles would hold us for ever.
            async with asyncio.timeout(self._seconds), self._http.stream(method, url) as answer:
                if answer.status_code != 200:
                    raise ScrapeError(f"{path}: status {answer.status_code}")
                async for part in answer.aiter_raw():
                    body += part
                    if len(body) > LIMIT:
                        raise ScrapeError(f"{path}: more than {LIMIT} bytes")
        except (httpx.HTTPError, OSError, TimeoutError) as error:
            raise ScrapeError(f"{path}: {type(error).__name__}") from None
        return bytes(body)


def _json(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError:
        raise ScrapeError("the answer is no JSON") from None
    if not isinstance(value, dict):
        raise ScrapeError("the answer is no JSON object")
    return value
