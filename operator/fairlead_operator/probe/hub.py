"""A model's config.json before any pod exists: shipped for the demo, from the hub for public
models.

Fetches exactly one small JSON file of a repository, from the host in the operator's settings,
without a token and without following a redirect to another host. A resource can name the repository
and nothing else.
"""

import asyncio
import importlib.resources
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from fairlead_operator.probe.http_client import ERRORS, HttpClient, TooLargeError
from fairlead_operator.resource.json_text import json_object
from fairlead_operator.resource.spec import Source

LIMIT = 1 << 20
SECONDS = 5.0
KEEP_SECONDS = 3600.0  # a branch may move
RETRY_SECONDS = 60.0  # after which a failed fetch is tried again
REDIRECTS = 3
ANSWERS = 1000  # models remembered
AT_ONCE = 20  # fetches

LATER = "planned once a pod has it"


class HubError(Exception):
    """A config.json that the hub does not give. ``reason`` is the Planned condition's."""

    def __init__(self, message: str, reason: str = "ConfigUnavailable") -> None:
        super().__init__(message)
        self.reason = reason


class Hub:
    """A client of the hub that remembers answers and failures: a thousand resources of one model
    cost one fetch.

    Made in a running event loop.
    """

    def __init__(
        self,
        endpoint: str,
        clock: Callable[[], float] = time.monotonic,
        proxies: Mapping[str, str] | None = None,
    ) -> None:
        self._endpoint, self._clock = endpoint.rstrip("/"), clock
        # The hub may be reachable through a proxy alone.
        self._http = HttpClient(SECONDS, LIMIT, AT_ONCE, proxies=proxies or {})
        self._answers: dict[tuple[str, str], tuple[float, Mapping[str, Any] | HubError]] = {}
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}

    async def close(self) -> None:
        await self._http.close()

    async def config(self, source: Source, revision: str) -> Mapping[str, Any]:
        """The config.json of a model. Raises HubError where only a pod can provide it."""
        if source.kind == "demo":
            return demo_config()
        if source.kind != "hf":
            raise HubError(
                f"the config.json of a {source.kind}:// model is known once a pod has read it"
            )
        key = (source.path, revision or "main")
        async with self._locks.setdefault(key, asyncio.Lock()):
            at, answer = self._answers.get(key, (float("-inf"), HubError("")))
            keep = RETRY_SECONDS if isinstance(answer, HubError) else KEEP_SECONDS
            if self._clock() - at >= keep:
                answer = await self._answer(*key)
                self._answers[key] = (self._clock(), answer)
                self._evict()
        if isinstance(answer, HubError):
            raise answer
        return answer

    def _evict(self) -> None:
        """Forget the oldest answers beyond ``ANSWERS``; what a task fetches now stays."""
        for key in sorted(self._answers, key=lambda key: self._answers[key][0])[:-ANSWERS]:
            if not self._locks[key].locked():
                del self._answers[key], self._locks[key]

    async def _answer(self, repository: str, revision: str) -> Mapping[str, Any] | HubError:
        owner, _, name = repository.partition("/")
        path = "/".join(quote(part, safe="") for part in (owner, name))
        url = f"{self._endpoint}/{path}/resolve/{quote(revision, safe='')}/config.json"
        try:
            async with self._http.turn():
                body = await self._fetch(url)
        except HubError as error:
            return error
        except TooLargeError:
            return HubError(f"config.json is larger than {LIMIT} bytes")
        except (*ERRORS, ValueError) as error:
            return HubError(
                f"fetching config.json of {repository} from {self._endpoint} failed "
                f"({type(error).__name__}): check the chart's hub.endpoint and the operator's "
                f"network access; {LATER}"
            )
        try:
            return json_object(body)
        except ValueError:
            return HubError(
                f"config.json of {repository} from {self._endpoint} is not a JSON object: check "
                f"the chart's hub.endpoint; {LATER}"
            )

    async def _fetch(self, url: str) -> bytes:
        host = urlsplit(url).netloc
        for _ in range(REDIRECTS):
            response = await self._http.fetch("GET", url)
            if response.status == 200:
                return response.body
            if 300 <= response.status < 400:
                url = urljoin(url, response.location)
                if urlsplit(url).netloc != host:
                    raise HubError("the hub redirects config.json to another host: not followed")
                continue
            if response.status in {401, 403}:
                raise HubError(f"the model is gated or does not exist: check model.source; {LATER}")
            if response.status == 404:
                raise HubError(
                    "the hub has no such model or revision: check model.source and model.revision"
                )
            raise HubError(f"the hub answers {response.status} for config.json; {LATER}")
        raise HubError("the hub redirects config.json in circles")


def demo_config() -> Mapping[str, Any]:
    """The config.json that ships with the distribution; reading it imports nothing."""
    file = importlib.resources.files("fairlead_runtime") / "demo" / "config.json"
    try:
        return json_object(file.read_text("utf-8"))
    except OSError as error:
        raise HubError(f"this installation ships no demo model: {error}") from None
