"""Download a hub model at one commit into the hub's cache, or find it there without a network.

Owns which files are downloaded, their order (settings first, so that a refused model costs no
download of weights) and what each failure of a hub means. Requests only safetensors, JSON,
tokenizer and template files. ``huggingface_hub.snapshot_download`` is not used because, after one
file fails, it finishes the running downloads and does not name the file that failed
(test_one_failed_file_stops_the_others).
"""

import errno
import logging
import os
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

from fairlead_runtime.hub.source import COMMIT
from fairlead_runtime.models import architecture, files
from fairlead_runtime.models.model_error import ModelError

WORKERS = 4
# They log every URL, and the URLs that a hub redirects to carry signatures.
_URL_LOGGERS = ("httpx", "httpx2")
Report = Callable[["Progress"], None]
_TRUE_WORDS = {"1", "ON", "YES", "TRUE"}


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a download. ``path`` is the snapshot's directory, set once the settings are
    in it and before the weights are.
    """

    done: int  # bytes
    total: int  # bytes
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The directory of a model in the cache, and its commit."""

    path: Path
    commit: str


@dataclass(frozen=True, slots=True)
class Hub:
    """One hub and one cache. ``endpoint`` has no trailing slash."""

    endpoint: str
    cache: Path
    offline: bool

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "Hub":
        """Reads the variables itself: huggingface_hub.constants reads them once, at import."""
        home = Path(
            environ.get("HF_HOME")
            or Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
        )
        cache = Path(environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
        offline = (
            environ.get("HF_HUB_OFFLINE") or environ.get("TRANSFORMERS_OFFLINE") or ""
        ).upper() in _TRUE_WORDS
        return cls((environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/"), cache, offline)

    def folder(self, repository: str) -> Path:
        return self.cache / ("models--" + repository.replace("/", "--"))


@dataclass(slots=True)
class _Meter:
    """Counts the bytes of all files and calls ``report`` at every change. Thread-safe."""

    report: Report
    total: int
    path: Path | None = None
    done: dict[str, int] = field(default_factory=dict)  # bytes by file name
    stopped: bool = False  # a file failed: the downloads of the others must stop
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, count: int) -> None:
        with self.lock:
            if self.stopped:
                raise InterruptedError(f"{name}: stopped because another file failed")
            self.done[name] = self.done.get(name, 0) + count
            self._send_report()

    def set(self, name: str, count: int) -> None:
        """The file holds ``count`` bytes now: found in the cache, resumed or complete."""
        with self.lock:
            self.done[name] = count
            self._send_report()

    def set_total(self, path: Path, total: int) -> None:
        """The settings are in ``path`` and name the weights, so the total is exact from now on."""
        with self.lock:
            self.path, self.total = path, total
            self._send_report()

    def _send_report(self) -> None:
        self.report(Progress(min(sum(self.done.values()), self.total), self.total, self.path))


def fetch(
    repository: str,
    *,
    revision: str = "",
    environ: Mapping[str, str] | None = None,
    report: Report | None = None,
    weights: bool = True,
) -> Snapshot:
    """Download a hub model, every file at the commit that ``revision`` (default: main) names now.
    Without ``weights`` the other files only, which a later start does not take for the model.

    Offline, or when the hub cannot be reached, returns what the cache holds for that revision. A
    commit that is complete in the cache needs no hub, as it never changes. Raises ModelError.
    """
    hub = Hub.from_environ(os.environ if environ is None else environ)
    revision = revision or constants.DEFAULT_REVISION
    if hub.offline or _is_complete(hub, repository, revision):
        return _cached_snapshot(hub, repository, revision)
    for name in _URL_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        return _download(hub, repository, revision, report or (lambda _: None), weights=weights)
    except ModelError as error:
        if error.code != "HubUnreachable":
            raise
        try:
            return _cached_snapshot(hub, repository, revision)
        except ModelError:
            raise error from error.__cause__


def _is_complete(hub: Hub, repository: str, revision: str) -> bool:
    """Whether ``revision`` is a commit that a reference names, and the snapshot that was complete
    then has lost no file since.
    """
    if not COMMIT.fullmatch(revision):
        return False
    folder = hub.folder(repository)
    references = (path for path in (folder / "refs").rglob("*") if path.is_file())
    if not any(path.read_text().strip() == revision for path in references):
        return False
    snapshot = folder / "snapshots" / revision
    sizes = {path.name: 0 for path in snapshot.glob("*") if path.exists()}
    try:
        return files.CONFIG in sizes and bool(_weight_files(snapshot, sizes))
    except ModelError:
        return False


def _cached_snapshot(hub: Hub, repository: str, revision: str) -> Snapshot:
    folder = hub.folder(repository)
    reference = folder / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    path = folder / "snapshots" / commit
    if not COMMIT.fullmatch(commit) or not path.is_dir():
        raise ModelError(
            "ModelNotFound",
            f"{repository}: revision {revision} is not in the cache {hub.cache}, "
            "and downloads are turned off",
            "fetch it first, or unset HF_HUB_OFFLINE",
        )
    return Snapshot(path, commit)


def _download(
    hub: Hub, repository: str, revision: str, report: Report, *, weights: bool = True
) -> Snapshot:
    commit, sizes = _list_files(hub, repository, revision)
    settings = {name: size for name, size in sizes.items() if not name.endswith(".safetensors")}
    if files.CONFIG not in settings:
        raise ModelError(
            "ModelNotFound", f"{repository}: has no {files.CONFIG}", "name a transformers model"
        )
    for name, size in settings.items():
        if size > files.LARGEST_JSON:
            raise ModelError("BadModelFiles", f"{name}: larger than {files.LARGEST_JSON >> 20} MiB")
    meter = _Meter(report, sum(sizes.values()))
    path = hub.folder(repository) / "snapshots" / commit
    _drop_dead_links(path)
    _download_files(hub, repository, commit, settings, meter)
    config = files.read_json(path, files.CONFIG)
    architecture.check(config, files.auto_maps(path))
    if not weights:
        return Snapshot(path, commit)
    weight_sizes = {name: sizes.get(name, 0) for name in _weight_files(path, sizes)}
    meter.set_total(path, sum(settings.values()) + sum(weight_sizes.values()))
    _check_space(hub, path, weight_sizes)
    _download_files(hub, repository, commit, weight_sizes, meter)
    # Written last: a reference means that the snapshot is complete.
    reference = hub.folder(repository) / "refs" / revision
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(commit)
    return Snapshot(path, commit)


def _drop_dead_links(snapshot: Path) -> None:
    """Remove links whose blob is gone, which ``files`` refuses: the download makes them again."""
    for link in snapshot.rglob("*"):
        if link.is_symlink() and not link.exists():
            link.unlink(missing_ok=True)


def _list_files(hub: Hub, repository: str, revision: str) -> tuple[str, dict[str, int]]:
    """The commit that ``revision`` names, and the bytes of each file that may be downloaded."""
    try:
        info = huggingface_hub.HfApi(endpoint=hub.endpoint).model_info(
            repository, revision=revision, files_metadata=True
        )
    except Exception as error:
        raise _model_error(error, hub, repository, revision) from error
    commit, siblings = info.sha or "", info.siblings or []
    if not COMMIT.fullmatch(commit):
        raise ModelError(
            "HubUnreachable", f"{hub.endpoint}: the answer names no commit", "check HF_ENDPOINT"
        )
    all_sizes = {file.rfilename: file.size or 0 for file in siblings}
    # Other folders hold other formats (onnx/, original/).
    allowed = {name: size for name, size in all_sizes.items() if files.is_read(name)}
    if not any(name in allowed for name in (files.WEIGHTS, files.INDEX)):
        pickles = sorted(name for name in all_sizes if name.endswith(files.PICKLES))[:5]
        pickles_text = f"; it has {', '.join(pickles)}, which are never opened" if pickles else ""
        raise ModelError(
            "NoSafetensors",
            f"{repository}: no {files.WEIGHTS} and no {files.INDEX} at {revision}{pickles_text}",
            "use a revision with safetensors",
        )
    return commit, allowed


def _weight_files(path: Path, sizes: Mapping[str, int]) -> Sequence[str]:
    """The weight files to load: repositories often hold the same weights twice."""
    if files.WEIGHTS in sizes:
        return [files.WEIGHTS]
    shards = files.read_index(path)
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


def _download_files(
    hub: Hub, repository: str, commit: str, sizes: Mapping[str, int], meter: _Meter
) -> None:
    """Download several files at once; the first failure stops the others and is raised."""
    with ThreadPoolExecutor(WORKERS) as pool:
        futures = [
            pool.submit(_download_file, hub, repository, commit, name, sizes[name], meter)
            for name in sizes
        ]
        try:
            for future in futures:
                future.result()
        except BaseException:
            meter.stopped = True
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _download_file(
    hub: Hub, repository: str, commit: str, name: str, size: int, meter: _Meter
) -> None:
    try:
        huggingface_hub.hf_hub_download(
            repository,
            name,
            revision=commit,
            cache_dir=hub.cache,
            endpoint=hub.endpoint,
            tqdm_class=_counting_bar(name, meter),
        )
    except Exception as error:
        raise _model_error(error, hub, repository, commit, name) from error
    meter.set(name, size)


def _counting_bar(name: str, meter: _Meter) -> Any:
    """A tqdm class that draws nothing: huggingface_hub reports a download's bytes to it."""

    class CountingBar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *_: Any, initial: int = 0, **__: Any) -> None:
            super().__init__(disable=True)
            meter.set(name, int(initial or 0))

        def update(self, n: float | None = 1) -> None:
            meter.add(name, int(n or 0))

    return CountingBar


def _model_error(
    error: Exception, hub: Hub, repository: str, revision: str, name: str = ""
) -> ModelError:
    """The refusal that an exception of huggingface_hub leads to."""
    subject = f"{repository}/{name}" if name else repository
    if isinstance(error, ModelError):
        return error
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError) or status in {401, 403}:
        return ModelError(
            "WeightsUnauthorized",
            f"{subject}: {hub.endpoint} refuses access ({status or 'gated'})",
            "accept the model's terms there and set HF_TOKEN, or check the name: "
            "a hub answers in the same way when the model does not exist",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelError(
            "ModelNotFound",
            f"{repository}: no revision {revision}",
            "use a commit, tag or branch of the repository",
        )
    if status == 404 or isinstance(
        error, errors.RepositoryNotFoundError | errors.EntryNotFoundError
    ):
        return ModelError(
            "ModelNotFound",
            f"{subject}: not found at {hub.endpoint}",
            "check the owner and the name",
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
        f"{subject}: {hub.endpoint} {detail}"[:400],
        "check the network and HF_ENDPOINT, then retry: the download resumes where it stopped",
    )
