"""Download a hub model at one commit into the hub's cache, and find it there again without a
network.

Owns which files come, the order (settings first, so that a model that is not served costs no
weights) and what each failure of a hub means. Only safetensors, JSON, tokenizer and template files
are ever asked for.
"""

import errno
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants, errors
from tqdm import tqdm

from fairlead_runtime.models import architecture, files
from fairlead_runtime.models.model_error import ModelError

WORKERS = 4
# They log every address, and those a hub redirects to carry signatures.
_TALKATIVE = ("httpx", "httpx2")
Report = Callable[["Progress"], None]
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TRUE = {"1", "ON", "YES", "TRUE"}


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a download is. ``path`` is the snapshot's directory once the settings are there,
    before the weights.
    """

    done: int  # bytes
    total: int  # bytes
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class Fetched:
    path: Path
    commit: str


@dataclass(frozen=True, slots=True)
class Hub:
    """One hub and one cache. ``endpoint`` has no trailing slash."""

    endpoint: str
    cache: Path
    offline: bool

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "Hub":
        home = Path(
            environ.get("HF_HOME")
            or Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
        )
        cache = Path(environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
        offline = (
            environ.get("HF_HUB_OFFLINE") or environ.get("TRANSFORMERS_OFFLINE") or ""
        ).upper() in _TRUE
        return cls((environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/"), cache, offline)

    def folder(self, repository: str) -> Path:
        return self.cache / ("models--" + repository.replace("/", "--"))


@dataclass(slots=True)
class _Meter:
    """Bytes of all files together, told to ``report`` at every change. Safe for several threads."""

    report: Report
    total: int
    path: Path | None = None
    done: dict[str, int] = field(default_factory=dict)
    stopped: bool = False  # another file failed: none of the rest is of use
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, count: int) -> None:
        with self.lock:
            if self.stopped:
                raise InterruptedError(f"{name}: given up, another file failed")
            self.done[name] = self.done.get(name, 0) + count
            self._tell()

    def set(self, name: str, count: int) -> None:
        """The whole file is there, however it came: from the cache, resumed or fresh."""
        with self.lock:
            self.done[name] = count
            self._tell()

    def expect(self, path: Path, total: int) -> None:
        """The settings are in ``path``, and say how much comes in all."""
        with self.lock:
            self.path, self.total = path, total
            self._tell()

    def _tell(self) -> None:
        self.report(Progress(min(sum(self.done.values()), self.total), self.total, self.path))


def fetch(
    repository: str,
    *,
    revision: str = "",
    environ: Mapping[str, str] | None = None,
    report: Report | None = None,
) -> Fetched:
    """The directory of a hub model, every file at the one commit that ``revision`` (default: main)
    is now.

    Offline, or when the hub cannot be reached, what the cache holds for that revision. A commit
    that is whole in the cache needs no hub: it never moves. Raises ModelError.
    """
    hub = Hub.of(os.environ if environ is None else environ)
    wanted = revision or constants.DEFAULT_REVISION
    if hub.offline or _whole(hub, repository, wanted):
        return _cached(hub, repository, wanted)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        return _download(hub, repository, wanted, report or (lambda _: None))
    except ModelError as error:
        if error.code != "HubUnreachable":
            raise
        try:
            return _cached(hub, repository, wanted)
        except ModelError:
            raise error from error.__cause__


def _whole(hub: Hub, repository: str, revision: str) -> bool:
    """Whether the revision is a commit of which some reference says that all of it is there."""
    if not _COMMIT.fullmatch(revision):
        return False
    references = (path for path in (hub.folder(repository) / "refs").rglob("*") if path.is_file())
    return any(path.read_text().strip() == revision for path in references)


def _cached(hub: Hub, repository: str, revision: str) -> Fetched:
    folder = hub.folder(repository)
    reference = folder / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    path = folder / "snapshots" / commit
    if not _COMMIT.fullmatch(commit) or not path.is_dir():
        raise ModelError(
            "ModelNotFound",
            f"{repository}: revision {revision} is not in the cache {hub.cache}, and the hub is off limits",
            "fetch it first, or unset HF_HUB_OFFLINE",
        )
    return Fetched(path, commit)


def _download(hub: Hub, repository: str, revision: str, report: Report) -> Fetched:
    commit, sizes = _list(hub, repository, revision)
    settings = {name: size for name, size in sizes.items() if not name.endswith(".safetensors")}
    if files.CONFIG not in settings:
        raise ModelError(
            "ModelNotFound", f"{repository}: has no {files.CONFIG}", "name a transformers model"
        )
    for name, size in settings.items():
        if size > files.LARGEST_JSON:
            raise ModelError("BadModelFiles", f"{name}: larger than {files.LARGEST_JSON >> 20} MiB")
    meter = _Meter(report, sum(sizes.values()))
    path = _get_all(hub, repository, commit, settings, meter)
    config = files.read_json(path, files.CONFIG)
    architecture.check(config, files.auto_maps(path))
    weights = {name: sizes.get(name, 0) for name in _weights(path, sizes)}
    meter.expect(path, sum(settings.values()) + sum(weights.values()))
    _check_space(hub, path, weights)
    _get_all(hub, repository, commit, weights, meter)
    # Written last: a reference promises a snapshot that is whole.
    reference = hub.folder(repository) / "refs" / revision
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(commit)
    return Fetched(path, commit)


def _list(hub: Hub, repository: str, revision: str) -> tuple[str, dict[str, int]]:
    """The commit that ``revision`` is, and the bytes of every file there that may be downloaded."""
    try:
        info = huggingface_hub.HfApi(endpoint=hub.endpoint).model_info(
            repository, revision=revision, files_metadata=True
        )
    except Exception as error:
        raise _meaning(error, hub, repository, revision) from error
    commit, found = info.sha or "", info.siblings or []
    if not _COMMIT.fullmatch(commit):
        raise ModelError(
            "HubUnreachable", f"{hub.endpoint}: answered without a commit", "check HF_ENDPOINT"
        )
    names = {file.rfilename: file.size or 0 for file in found}
    # Directories hold other formats (onnx/, original/); transformers reads the top alone.
    allowed = {
        name: size
        for name, size in names.items()
        if "/" not in name and any(Path(name).match(pattern) for pattern in files.PATTERNS)
    }
    if not any(name in allowed for name in (files.WEIGHTS, files.INDEX)):
        others = sorted(name for name in names if name.endswith(files.PICKLES))[:5]
        found_text = f"; it has {', '.join(others)}, which are never opened" if others else ""
        raise ModelError(
            "NoSafetensors",
            f"{repository}: no {files.WEIGHTS} and no {files.INDEX} at {revision}{found_text}",
            "use a revision with safetensors",
        )
    return commit, allowed


def _weights(path: Path, sizes: Mapping[str, int]) -> Sequence[str]:
    """The weight files that will be read: repositories often hold the same weights twice."""
    if files.WEIGHTS in sizes:
        return [files.WEIGHTS]
    shards = files.indexed(path)
    for name in shards:
        if name not in sizes:
            raise ModelError("BadWeights", f"{files.INDEX}: {name} is not in the repository")
    return sorted(shards)


def _check_space(hub: Hub, path: Path, weights: Mapping[str, int]) -> None:
    missing = sum(size for name, size in weights.items() if not (path / name).exists())
    free = shutil.disk_usage(hub.cache).free
    if missing > free:
        raise ModelError(
            "NoSpace",
            f"{hub.cache}: {missing / 2**30:.1f} GiB to download, {free / 2**30:.1f} GiB free",
            "use a larger volume",
        )


def _get_all(
    hub: Hub, repository: str, commit: str, sizes: Mapping[str, int], meter: _Meter
) -> Path:
    """Download several files at once; the first failure stops the others and is raised."""
    with ThreadPoolExecutor(WORKERS) as pool:
        futures = [
            pool.submit(_get, hub, repository, commit, name, sizes[name], meter) for name in sizes
        ]
        try:
            paths = [future.result() for future in futures]
        except BaseException:
            meter.stopped = True
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return paths[0].parent


def _get(hub: Hub, repository: str, commit: str, name: str, size: int, meter: _Meter) -> Path:
    try:
        path = huggingface_hub.hf_hub_download(
            repository,
            name,
            revision=commit,
            cache_dir=hub.cache,
            endpoint=hub.endpoint,
            tqdm_class=_counting(name, meter),
        )
    except Exception as error:
        raise _meaning(error, hub, repository, commit, name) from error
    meter.set(name, size)
    return Path(path)


def _counting(name: str, meter: _Meter) -> Any:
    """A bar that shows nothing and counts: the hub's client reports its bytes to a class of bars."""

    class Counting(tqdm):  # type: ignore[type-arg]
        def __init__(self, *_: Any, initial: int = 0, **__: Any) -> None:
            super().__init__(disable=True)
            meter.set(name, int(initial or 0))

        def update(self, n: float | None = 1) -> None:
            meter.add(name, int(n or 0))

    return Counting


def _meaning(
    error: Exception, hub: Hub, repository: str, revision: str, name: str = ""
) -> ModelError:
    """What an exception of the hub's client means for the user."""
    what = f"{repository}/{name}" if name else repository
    if isinstance(error, ModelError):
        return error
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError) or status in {401, 403}:
        return ModelError(
            "WeightsUnauthorized",
            f"{what}: {hub.endpoint} refuses access ({status or 'gated'})",
            "accept the model's terms there and set HF_TOKEN; a wrong name is answered in the same way",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelError(
            "ModelNotFound",
            f"{repository}: no revision {revision}",
            "use a commit, tag or branch of it",
        )
    if status == 404 or isinstance(
        error, errors.RepositoryNotFoundError | errors.EntryNotFoundError
    ):
        return ModelError(
            "ModelNotFound", f"{what}: not found at {hub.endpoint}", "check the owner and the name"
        )
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return ModelError("NoSpace", f"{hub.cache}: no space left", "use a larger volume")
    if isinstance(error, PermissionError) or (
        isinstance(error, OSError) and error.errno == errno.EROFS
    ):
        return ModelError("NoSpace", f"{hub.cache}: cannot be written", "mount HF_HOME writable")
    detail = f"answered {status}" if status else f"{type(error).__name__}: {error}".splitlines()[0]
    return ModelError(
        "HubUnreachable",
        f"{what}: {hub.endpoint} {detail}"[:400],
        "check the network and HF_ENDPOINT; what has arrived is kept, so a retry goes on from there",
    )
