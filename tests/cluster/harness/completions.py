"""Clients of the pods' public port: one completion, one stream, or clients that send requests
until they are stopped and record every failure.
"""

import json
import threading
import urllib.request
from typing import Any, Self

from cluster.harness.apiclient import Object


def complete(address: str, tokens: int = 4, model: str = "chat") -> Object:
    """The answer to one request for ``tokens`` tokens; raises on any failure."""
    with _ask(address, tokens, model) as response:
        body: Object = json.load(response)
    return body


def stream(address: str, tokens: int, model: str = "chat") -> int:
    """The number of tokens of a stream that ended properly; raises on any failure."""
    received = 0
    with _ask(
        address, tokens, model, stream=True, stream_options={"include_usage": True}
    ) as answer:
        for line in answer:
            text = line.decode().strip().removeprefix("data: ")
            if text == "[DONE]":
                return received
            if text:
                received = (json.loads(text).get("usage") or {}).get("completion_tokens", received)
    raise ConnectionError(f"the stream ended after {received} tokens, without its end")


class Clients:
    """``with Clients(address, 2) as clients``: two that complete and two that stream, until the
    block ends.

    ``done`` counts the answers with all requested tokens, ``failures`` describes each other one.
    """

    def __init__(self, address: str, each: int, tokens: int = 64) -> None:
        self._address, self._tokens = address, tokens
        self._stop = threading.Event()
        senders = [self._complete, stream] * each
        self._threads = [
            threading.Thread(target=self._run, args=(send,), daemon=True) for send in senders
        ]
        self.failures: list[str] = []
        self._answered: list[int] = []

    @property
    def done(self) -> int:
        return len(self._answered)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for running requests: they would fail if they were cut off."""
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
        if any(thread.is_alive() for thread in self._threads):
            self.failures.append("a request hangs")

    def _run(self, send: Any) -> None:
        while not self._stop.is_set():
            try:
                received = send(self._address, self._tokens)
            except (OSError, ValueError) as error:
                self.failures.append(repr(error))
                continue
            if received == self._tokens:
                self._answered.append(received)
            else:
                self.failures.append(f"{received} of {self._tokens} tokens")

    @staticmethod
    def _complete(address: str, tokens: int) -> int:
        return int(complete(address, tokens)["usage"]["completion_tokens"])


def _ask(address: str, tokens: int, model: str, **more: Any) -> Any:
    body = {"model": model, "prompt": "Once", "max_tokens": tokens, "ignore_eos": True, **more}
    request = urllib.request.Request(
        f"http://{address}:8000/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    return urllib.request.urlopen(request, timeout=120)
