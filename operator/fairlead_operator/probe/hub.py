"""A model's config.json before any pod exists: shipped for the demo, from the hub for public
models.

The only fetch the operator does: exactly one small JSON file of a repository, from the host in its
own settings, without a token and without following a redirect to another host. A CR can name the
repository and nothing else.
"""

import asyncio
import importlib.resources
import json
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

import httpx

from fairlead_operator.resource.spec import Source

LIMIT = 1 << 20
SECONDS = 5.0
KEEP_SECONDS = 3600.0  # a branch may move
FORGIVE_SECONDS = 60.0  # after which a failed fetch is tried again
REDIRECTS = 3


LATER = "planned once a pod has it"


class HubError(Exception):
    """No config. ``reason`` is the Planned condition's."""

    def __init__(self, message: str, reason: str = "ConfigUnavailable") -> None:
        super().__init__(message)
        self.reason = reason


class Hub:
    """Remembers answers and failures, so that a thousand resources of one model ask once."""

    def __init__(self, endpoint: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._endpoint, self._clock = endpoint.rstrip("/"), clock
        self._http = httpx.AsyncClient(
            timeout=SECONDS, follow_redirects=False, headers={"Accept-Encoding": "identity"}
        )
        self._answers: dict[tuple[str, str], tuple[float, Mapping[str, Any] | HubError]] = {}
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}

    async def close(self) -> None:
        await self._http.aclose()

    async def config(self, source: Source, revision: str) -> Mapping[str, Any]:
        """Raises HubError where there is none to be had without a pod."""
        if source.kind == "demo":
            return demo_config()
        if source.kind != "hf":
            raise HubError(
                f"the config.json of a {source.kind}:// model is known once a pod has read it"
            )
        key = (source.path, revision or "main")
        async with self._locks.setdefault(key, asyncio.Lock()):
            at, answer = self._answers.get(key, (float("-inf"), HubError("")))
            keep = FORGIVE_SECONDS if isinstance(answer, HubError) else KEEP_SECONDS
            if self._clock() - at >= keep:
                answer = await self._ask(*key)
                self._answers[key] = (self._clock(), answer)
        if isinstance(answer, HubError):
            raise answer
        return answer

    async def _ask(self, repository: str, revision: str) -> Mapping[str, Any] | HubError:
        owner, _, name = repository.partition("/")
        path = "/".join(quote(part, safe="") for part in (owner, name))
        url = f"{self._endpoint}/{path}/resolve/{quote(revision, safe='')}/config.json"
        try:
            async with asyncio.timeout(SECONDS):
                body = await self._fetch(url)
            value = json.loads(body)
        except HubError as error:
            return error
        except (httpx.HTTPError, OSError, ValueError) as error:
            what = f"config.json of {repository} does not come from {self._endpoint} ({type(error).__name__})"
            return HubError(
                f"{what}: check the chart's hub.endpoint and the operator's way out; {LATER}"
            )
        return (
            value
            if isinstance(value, dict)
            else HubError(f"config.json of {repository} is no JSON object")
        )

    async def _fetch(self, url: str) -> bytes:
        host = urlsplit(url).netloc
        for _ in range(REDIRECTS):
            async with self._http.stream("GET", url) as answer:
                if answer.is_redirect:
                    url = urljoin(url, answer.headers.get("location", ""))
                    if urlsplit(url).netloc != host:
                        raise HubError(
                            "the hub redirects config.json to another host: not followed"
                        )
                    continue
                if answer.status_code in {401, 403}:
                    raise HubError(
                        f"the model is gated or does not exist: check model.source; {LATER}"
                    )
                if answer.status_code == 404:
                    raise HubError(
                        "the hub has no such model or revision: check model.source and model.revision"
                    )
                if answer.status_code != 200:
                    raise HubError(f"the hub answers {answer.status_code} for config.json; {LATER}")
                body = bytearray()
                async for part in answer.aiter_raw():
                    body += part
                    if len(body) > LIMIT:
                        raise HubError(f"config.json is larger than {LIMIT} bytes")
                return bytes(body)
        raise HubError("the hub redirects config.json in circles")


def demo_config() -> Mapping[str, Any]:
    """The config.json that ships with the distribution; reading it imports nothing."""
    file = importlib.resources.files("fairlead_runtime") / "demo" / "config.json"
    try:
        value: Mapping[str, Any] = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise HubError(f"this installation ships no demo model: {error}") from None
    return value
