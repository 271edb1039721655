"""The server that a chat talks to: its own, or any with OpenAI's API.

Owns the start of the own one and the streaming of one answer. Uses the standard library alone, so
`fairlead chat --url` needs no extra.
"""

import contextlib
import http.client
import json
import os
import subprocess
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self
from urllib.parse import quote, urlsplit

from fairlead_runtime.child.process import command_of

CONNECT_SECONDS = 10.0
READ_SECONDS = 600.0  # a long prompt on a slow machine is silent until its first token
END_SECONDS = 5.0
_PORTS = {"http": 80, "https": 443}
_PATH = "/%:@!$&'()*+,;=~"  # what a path has as it is
MOST_BYTES = 1 << 20  # of an error's body, or of a line of a stream


class ChatError(Exception):
    """The server cannot be used, or refuses. ``hint``: the fix, if one is known."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class Piece(NamedTuple):
    """What a stream adds to the answer."""

    text: str = ""
    reasoning: str = ""
    finish: str = ""  # the finish reason, in the last one


class _SameServer(urllib.request.HTTPRedirectHandler):
    """Follows no redirect to another server, which would get the key and the conversation."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if _origin(newurl) != _origin(req.full_url):
            raise ChatError("the server redirects to another one", "give that one's URL")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _origin(url: str) -> tuple[str, str | None, int | None]:
    """Raises ValueError for what is no URL."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)


class Endpoint:
    """OpenAI's API at ``url``, with or without its ``/v1``. Raises ChatError for what is no URL or
    no key, which may hold secrets: it does not repeat them.
    """

    def __init__(self, url: str, key: str = "", *, local: bool = False) -> None:
        url = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(url)
            scheme, host, _ = _origin(url)
            (host or "").encode("idna")
        except ValueError:
            scheme, host = "", None
        if scheme not in _PORTS or not host or not url.isprintable() or " " in url:
            raise ChatError("the address is not the URL of a server", "use http://HOST:PORT/v1")
        if "@" in parts.netloc:
            raise ChatError(
                "the URL has a user or a password", "leave them out; set FAIRLEAD_API_KEY to a key"
            )
        if not (key.isascii() and key.isprintable()):
            raise ChatError(
                "the key has a character that no key has", "set FAIRLEAD_API_KEY to a key in ASCII"
            )
        path = quote(parts.path, safe=_PATH).rstrip("/").removesuffix("/chat/completions")
        self.base = f"{scheme}://{parts.netloc}{path.removesuffix('/v1')}/v1"
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        # A proxy of the environment does not reach a server of this process.
        proxies = [urllib.request.ProxyHandler({})] if local else []
        self._opener = urllib.request.build_opener(*proxies, _SameServer)

    def model(self) -> str:
        """The name of the first model that is served. Raises ChatError."""
        with self._open("/models", None, CONNECT_SECONDS) as response, _unbroken():
            body = _json(response.read(MOST_BYTES))
        models = body.get("data") if isinstance(body, Mapping) else None
        first = models[0] if isinstance(models, list) and models else None
        if not isinstance(first, Mapping) or not isinstance(first.get("id"), str):
            raise ChatError(f"{self.base}/models names no model", "name it with --model")
        return str(first["id"])

    def stream(self, body: Mapping[str, Any]) -> Generator[Piece]:
        """The pieces of one answer, as they come; closing it early ends the request. Raises
        ChatError.
        """
        sent = {**body, "stream": True}
        with self._open("/chat/completions", sent, READ_SECONDS) as response, _unbroken():
            for line in iter(lambda: response.readline(MOST_BYTES), b""):
                if (event := _event(line)) is not None:
                    yield event

    def _open(
        self, path: str, body: Mapping[str, Any] | None, seconds: float
    ) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, self._headers)  # noqa: S310 - http(s), checked
        try:
            response: http.client.HTTPResponse = self._opener.open(request, timeout=seconds)
        except urllib.error.HTTPError as error:
            with error, _unbroken():
                raise _refused(error.code, error.read(MOST_BYTES)) from None
        except urllib.error.URLError as error:
            reason = getattr(error.reason, "strerror", None) or error.reason
            fix = "check the address, and that the server runs"
            raise ChatError(f"{self.base} cannot be reached: {reason}", fix) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ChatError(f"{self.base} does not answer: {error}") from None
        return response


@contextlib.contextmanager
def _unbroken() -> Iterator[None]:
    """Raises ChatError for a connection that breaks while it is read."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        raise ChatError(f"the connection broke: {error}") from None


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _refused(status: int, text: bytes) -> ChatError:
    body = _json(text)
    error = body.get("error") if isinstance(body, Mapping) else None
    message = error.get("message") if isinstance(error, Mapping) else None
    hint = "set FAIRLEAD_API_KEY to a key of this server" if status == 401 else ""
    return ChatError(f"{message or 'the server refuses'} (HTTP {status})", hint)


def _event(line: bytes) -> Piece | None:
    """A line of a stream of server-sent events; None for one that adds nothing. Raises ChatError
    for an error event.
    """
    if not line.startswith(b"data:"):
        return None
    body = _json(line.removeprefix(b"data:").strip())
    if not isinstance(body, Mapping):
        return None  # [DONE]
    if isinstance(error := body.get("error"), Mapping):
        raise ChatError(str(error.get("message") or "the server ended the answer"))
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, Mapping):
        return None
    delta = choice.get("delta")
    delta = delta if isinstance(delta, Mapping) else {}
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
    finish = choice.get("finish_reason") or ""
    return Piece(str(delta.get("content") or ""), str(reasoning), str(finish))


class OwnServer:
    """`fairlead serve MODEL` on free ports of this machine, for the life of this context."""

    def __init__(self, model: str, flags: Sequence[str]) -> None:
        ports = ("--port=0", "--admin-port=0", "--log-format=json", "--host=127.0.0.1")
        command = command_of("fairlead_runtime.commands.serve_for", os.getpid(), model, *ports)
        # A group of its own: the terminal's Ctrl-C stops an answer, not the server.
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter and our own module
            [*command, *flags],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            process_group=0,
            env={**os.environ, "FAIRLEAD_TERMINATION_LOG": os.devnull},
        )
        self._last: deque[str] = deque(maxlen=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # nobody else uses it, and its engine ends with it
        self._process.wait(END_SECONDS)

    def lines(self) -> Iterator[str]:
        """The messages of its log until it serves; the last one is its address. Raises ChatError
        with its refusal.
        """
        url = ""
        stderr = self._process.stderr
        for line in stderr or ():
            self._last.append(line)
            body = _json(line.encode())
            message = str(body.get("message", "")) if isinstance(body, Mapping) else ""
            if message.startswith("public port: "):
                url = message.removeprefix("public port: ")
            elif message == "serving":
                threading.Thread(target=self._drain, daemon=True).start()
                yield url
                return
            elif message and isinstance(body, Mapping) and "level" in body:
                yield message
        raise self.ended()

    def ended(self) -> ChatError:
        """Why the process has ended."""
        code = self._process.wait()
        body = _json("".join(self._last).encode())
        if isinstance(body, Mapping) and "code" in body:
            return ChatError(str(body.get("message")), str(body.get("hint") or ""))
        return ChatError(f"the server ended with exit code {code}")

    def _drain(self) -> None:
        """Read on, so that it can write."""
        with contextlib.suppress(OSError, ValueError):
            for line in self._process.stderr or ():
                self._last.append(line)
