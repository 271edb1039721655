"""MODEL: the forms in which a user may name a model, and the directory that each form means.

Owns the accepted forms and the place of the demo model. ``hub.fetch`` downloads; ``models.files``
checks the content.
"""

import importlib.resources
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import unquote, urlsplit

from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.settings.engine_config import ConfigError

if TYPE_CHECKING:
    from fairlead_runtime.hub.fetch import Report

ACCEPTED = "use demo:, hf://owner/name, owner/name, file:///path or a path"
DEMO = "demo:"
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"
_REPOSITORY = re.compile(rf"{_PART}/{_PART}")
COMMIT = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")

log = logging.getLogger("fairlead.fetch")


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed MODEL. ``name``: owner/name of a hub model, path of a directory, empty for the
    demo.
    """

    kind: Literal["demo", "hub", "path"]
    name: str = ""

    def __str__(self) -> str:
        return {"demo": DEMO, "hub": f"hf://{self.name}", "path": self.name}[self.kind]


@dataclass(frozen=True, slots=True)
class LocalModel:
    """The directory of a model on this machine and, for a hub model, its commit."""

    source: Source
    path: Path
    revision: str = ""


def parse(text: str) -> Source:
    """Parse one of the accepted forms; ``owner/name`` is a directory if that directory exists.

    Raises ModelError("InvalidSource"), which quotes ``text`` and names the accepted forms.
    """
    if text == DEMO:
        return Source("demo")
    if text.startswith("hf://"):
        return Source("hub", _repository(text, text.removeprefix("hf://").rstrip("/")))
    if text.startswith("file:"):
        return Source("path", _file_path(text))
    if text.startswith("pvc://"):
        raise _invalid(
            text, "pvc:// is for the custom resource; inside a pod use the path of the mount"
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
    report: "Report | None" = None,
    weights: bool = True,
) -> LocalModel:
    """Find the directory of MODEL; a hub model is downloaded, with its ``weights`` or without.
    Raises ModelError or ConfigError.

    ``environ`` (default: this process's) holds HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE; the download
    calls ``report`` with its progress.
    """
    source = parse(text)
    check_revision(source, revision)
    if source.kind == "hub":
        # A path is refused, or found, without the seconds that the hub's client takes to import.
        from fairlead_runtime.hub.fetch import fetch

        environ = os.environ if environ is None else environ
        snapshot = fetch(
            source.name, revision=revision, environ=environ, report=report, weights=weights
        )
        return LocalModel(source, snapshot.path, snapshot.commit)
    path = demo_directory() if source.kind == "demo" else Path(source.name).absolute()
    if not path.is_dir():
        raise ModelError(
            "ModelNotFound",
            f"{text[:500]}: no such directory",
            "check the path, and that its volume is mounted",
        )
    return LocalModel(source, path)


def warn_of_moving_revision(local: LocalModel, revision: str) -> None:
    """Log where a hub model was asked for by no commit: the next start may get other files."""
    if local.source.kind == "hub" and not COMMIT.fullmatch(revision):
        log.warning(
            "revision %s of %s is no commit: a later start may load other files than this one; "
            "to stay with these, set revision to %s",
            revision or "main",
            local.source,
            local.revision,
        )


def demo_directory() -> Path:
    """The directory of the model that ships with the project."""
    return Path(str(importlib.resources.files("fairlead_runtime") / "demo"))


def check_revision(source: Source, revision: str) -> None:
    """Raise ConfigError for a revision of a source that has none, or one that no hub accepts."""
    if not revision:
        return
    if source.kind != "hub":
        raise ConfigError(
            "revision", f"{source} has no revisions", "leave it out, or name a hub model"
        )
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise ConfigError("revision", f"{revision[:200]!r} is not a commit, tag or branch")


def _repository(text: str, name: str) -> str:
    if not _REPOSITORY.fullmatch(name) or ".." in name or "--" in name or name.endswith(".git"):
        raise _invalid(text)
    return name


def _file_path(text: str) -> str:
    url = urlsplit(text)
    path = unquote(url.path)
    if url.netloc not in {"", "localhost"} or not path.startswith("/") or url.query or url.fragment:
        raise _invalid(text, "a file address has three slashes: file:///models/mine")
    return path


def _invalid(text: str, hint: str = ACCEPTED) -> ModelError:
    return ModelError("InvalidSource", f"{text[:200]!r} is not a model", hint)
