"""MODEL: what a user may write for a model, and the directory it stands for.

Owns the accepted forms and where the demo model lies. Checks no content; ``fetch`` downloads,
``files`` judges.
"""

import importlib.resources
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from fairlead_runtime.config import ConfigError
from fairlead_runtime.hub.fetch import Report, fetch
from fairlead_runtime.models.model_error import ModelError

ACCEPTED = "use demo:, hf://owner/name, owner/name, file:///path or a path"
DEMO = "demo:"
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"
_REPOSITORY = re.compile(rf"{_PART}/{_PART}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed MODEL. ``name`` is owner/name for a hub model, the path for a directory, empty for
    the demo.
    """

    kind: Literal["demo", "hub", "path"]
    name: str = ""

    def __str__(self) -> str:
        return {"demo": DEMO, "hub": f"hf://{self.name}", "path": self.name}[self.kind]


@dataclass(frozen=True, slots=True)
class Resolved:
    """A model that lies on this machine: its directory and, for a hub model, the commit it is."""

    source: Source
    path: Path
    revision: str = ""


def parse(text: str) -> Source:
    """Read one of the accepted forms; ``owner/name`` is a directory when one of that name exists.

    Raises ModelError("InvalidSource") that names what was given and what is accepted.
    """
    if text == DEMO:
        return Source("demo")
    if text.startswith("hf://"):
        return Source("hub", _repository(text, text.removeprefix("hf://").rstrip("/")))
    if text.startswith("file:"):
        return Source("path", _file_path(text))
    if text.startswith("pvc://"):
        raise _invalid(
            text, "pvc:// is for the custom resource; inside a pod give the path it is mounted at"
        )
    scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", text)
    if scheme or not text.strip() or "\0" in text:
        raise _invalid(text)
    expanded = Path(text).expanduser()
    if text.startswith(("/", ".", "~")) or expanded.is_dir():
        return Source("path", str(expanded))
    return Source("hub", _repository(text, text.rstrip("/")))


def resolve(
    text: str,
    *,
    revision: str = "",
    environ: Mapping[str, str] | None = None,
    report: Report | None = None,
) -> Resolved:
    """The directory of MODEL, downloaded first when it is on the hub. Raises ModelError or
    ConfigError.

    ``environ`` (default: this process's) gives HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE; ``report``
    hears progress.
    """
    source = parse(text)
    check_revision(source, revision)
    if source.kind == "hub":
        environ = os.environ if environ is None else environ
        fetched = fetch(source.name, revision=revision, environ=environ, report=report)
        return Resolved(source, fetched.path, fetched.commit)
    path = demo_directory() if source.kind == "demo" else Path(source.name)
    if not path.is_dir():
        raise ModelError(
            "ModelNotFound",
            f"{path}: no such directory",
            "check the path, or that its volume is mounted",
        )
    return Resolved(source, path)


def demo_directory() -> Path:
    """Where the model that ships with the project lies."""
    return Path(str(importlib.resources.files("fairlead_runtime") / "demo"))


def check_revision(source: Source, revision: str) -> None:
    """Raise ConfigError for a revision where there are none, and for what no hub revision can be."""
    if not revision:
        return
    if source.kind != "hub":
        raise ConfigError(
            "revision", f"{source} has no revisions", "leave it out, or name a hub model"
        )
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise ConfigError("revision", f"{revision[:200]!r} is no commit, tag or branch")


def _repository(text: str, name: str) -> str:
    if not _REPOSITORY.fullmatch(name) or ".." in name or "--" in name or name.endswith(".git"):
        raise _invalid(text)
    return name


def _file_path(text: str) -> str:
    parts = urlsplit(text)
    path = unquote(parts.path)
    if (
        parts.netloc not in {"", "localhost"}
        or not path.startswith("/")
        or parts.query
        or parts.fragment
    ):
        raise _invalid(text, "a file address has three slashes: file:///models/mine")
    return path


def _invalid(text: str, hint: str = ACCEPTED) -> ModelError:
    return ModelError("InvalidSource", f"{text[:200]!r} names no model", hint)
