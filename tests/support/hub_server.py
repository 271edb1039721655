"""A fake model hub: the HTTP routes that huggingface_hub uses, and the failures of a real hub.

with Hub({"tiny/llama": Repository({"config.json": b"{}"})}) as hub:
    fetch("tiny/llama", environ=hub.environ(tmp_path))
"""

import hashlib
import http.server
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

MAIN, OTHER = COMMITS = ("a" * 40, "b" * 40)


@dataclass
class Repository:
    """Files by name at each commit; ``refs`` name commits. Files of at least ``lfs_from`` bytes
    are served by a redirect to another host.
    """

    files: dict[str, bytes]
    refs: dict[str, str] = field(default_factory=lambda: {"main": MAIN})
    gated: bool = False
    token: str = ""  # the token that a gated repository accepts
    truncate: str = ""  # this file's body ends early
    vanish: str = ""  # this file is listed but its download gives 404
    lfs_from: int = 2000
    on_get: Callable[[str], None] = lambda _: None  # called before a body is sent

    @classmethod
    def of(cls, directory: Path, **traits: object) -> Self:
        files = {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
        return cls(files, **traits)  # type: ignore[arg-type]


class Hub:
    """Serves repositories on a free port of an address within the context; ``requests`` are
    (method, path). Only clients on this machine can follow a redirect.
    """

    def __init__(self, repositories: dict[str, Repository], address: str = "127.0.0.1") -> None:
        self.repositories = repositories
        self.requests: list[tuple[str, str]] = []
        self.status = 0  # if set, the status of every answer
        hub = self

        class Handler(_Handler):
            owner = hub

        self.server = http.server.ThreadingHTTPServer((address, 0), Handler)
        self.server.daemon_threads = True
        self.port: int = self.server.server_address[1]
        self.endpoint = f"http://{address}:{self.port}"
        self.thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.02}
        )

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def environ(self, home: Path, **more: str) -> dict[str, str]:
        return {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), **more}

    def downloaded(self) -> list[str]:
        """Names of the files whose bodies were requested."""
        return [
            path.rsplit("/", 1)[-1]
            for method, path in self.requests
            if method == "GET" and not path.startswith("/api")
        ]


def sharded(directory: Path, count: int) -> dict[str, bytes]:
    """The files of a model, its weight file split into ``count`` shards of similar size with an
    index.
    """
    from safetensors.torch import load_file, save

    files = {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
    del files["model.safetensors"]
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors, key=lambda name: tensors[name].nbytes, reverse=True)
    where, sizes = {}, [0] * count
    for name in names:
        where[name] = sizes.index(min(sizes))
        sizes[where[name]] += tensors[name].nbytes
    for number in range(count):
        file = f"model-{number + 1:05}-of-{count:05}.safetensors"
        files[file] = save(
            {n: tensors[n] for n in names if where[n] == number}, metadata={"format": "pt"}
        )
    weights = {name: f"model-{at + 1:05}-of-{count:05}.safetensors" for name, at in where.items()}
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weights}
    return {**files, "model.safetensors.index.json": json.dumps(index).encode()}


class _Handler(http.server.BaseHTTPRequestHandler):
    owner: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Log nothing: failing requests are part of the tests."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.owner.requests.append((self.command, path))
        if self.owner.status:
            return self._send(self.owner.status, b"{}")
        parts = path.strip("/").split("/")
        if parts[0] == "blobs":
            return self._blob("/".join(parts[1:3]), parts[3], parts[4])
        api = parts[:2] == ["api", "models"]
        if len(parts) < 4:
            return self._send(404, b"{}")  # the client asks for more than models
        owner, name, kind, revision, *rest = parts[2:] if api else parts
        repository = self.owner.repositories.get(f"{owner}/{name}")
        if repository is None:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        commit = repository.refs.get(revision, revision if revision in COMMITS else "")
        if not commit:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if api and kind == "revision":
            return self._info(f"{owner}/{name}", repository, commit)
        return self._resolve(f"{owner}/{name}", repository, commit, "/".join(rest))

    def _info(self, repo: str, repository: Repository, commit: str) -> None:
        siblings = [{"rfilename": n, "size": len(b)} for n, b in repository.files.items()]
        self._send(200, json.dumps({"id": repo, "sha": commit, "siblings": siblings}).encode())

    def _resolve(self, repo: str, repository: Repository, commit: str, name: str) -> None:
        if repository.gated and self.headers.get("Authorization") != f"Bearer {repository.token}":
            status = 403 if self.headers.get("Authorization") else 401
            return self._send(status, b"{}", {"X-Error-Code": "GatedRepo"})
        body = repository.files.get(name)
        if body is None or name == repository.vanish:
            return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        etag = hashlib.sha256(body).hexdigest()
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if len(body) >= repository.lfs_from:
            headers |= {
                "X-Linked-Etag": f'"{etag}"',
                "X-Linked-Size": str(len(body)),
                "Location": f"http://localhost:{self.owner.port}/blobs/{repo}/{commit}/{name}",
            }
            return self._send(302, b"", headers)
        return self._body(repository, name, body, headers | {"ETag": f'"{etag}"'})

    def _blob(self, repo: str, commit: str, name: str) -> None:
        repository = self.owner.repositories[repo]
        self._body(repository, name, repository.files[name], {"Accept-Ranges": "bytes"})

    def _body(
        self, repository: Repository, name: str, body: bytes, headers: dict[str, str]
    ) -> None:
        status = 200
        if "Range" in self.headers:
            start = int(self.headers["Range"].removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            status, body = 206, body[start:]
        if self.command == "GET":
            repository.on_get(name)
        sent = body[: len(body) // 2] if name == repository.truncate else body
        self._send(status, sent, headers, length=len(body))
        if len(sent) < len(body):
            self.close_connection = True

    def _send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        *,
        length: int | None = None,
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
