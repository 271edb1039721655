"""The C++ libraries in the user's cache, ``~/.cache/fairlead/kernels-HASH``: compiled once for all
starts of this user and all clones.

Owns where they are, that each is whole, and that nobody else can write to what this process loads.
Used where a package is built, too, when torch may be absent.
"""

import fcntl
import grp
import hashlib
import logging
import os
import platform
import pwd
import shlex
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fairlead_kernels.cpu import compilation
from fairlead_kernels.cpu.compilation import NotBuiltError, compile_libraries
from fairlead_kernels.cpu.sources import hash_sources

log = logging.getLogger("fairlead.kernels")

_SEAL = b"\nfairlead sha256 "  # then the digest of all before it; a loader reads no such end
_ELSEWHERE = "or set XDG_CACHE_HOME to another folder"


class UnusableCacheError(NotBuiltError):
    """Nothing can be compiled into the cache; the message says why, and what to do."""


def folder() -> Path:
    """Where the libraries of these sources are, for machines with this C library: by a path without
    links, since whoever owns a folder with a link may let it lead elsewhere, once that is checked.
    Raises UnusableCacheError for a user without a home.
    """
    digest = hashlib.sha256(Path(compilation.__file__).read_bytes())
    digest.update(f"{hash_sources(compilation.SOURCES)} {platform.machine()}".encode())
    digest.update(" ".join(platform.libc_ver()).encode())
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute()
    except RuntimeError as error:
        raise UnusableCacheError("this user has no home: set XDG_CACHE_HOME") from error
    return Path(os.path.realpath(base / "fairlead" / f"kernels-{digest.hexdigest()[:16]}"))


def find(name: str) -> Path | None:
    """The library of this name, whole and of these sources; None where there is none. Raises
    UnusableCacheError where others may write to the folder.
    """
    library = folder() / f"{name}.so"
    try:
        if not _is_whole(library):
            return None
        _refuse_if_shared(library.parent)
    except OSError:
        return None
    return library


def provide(names: Sequence[str], compilers: int | None = None) -> list[Path]:
    """The libraries of these names, those that are not there compiled first, with ``compilers`` as
    compile_libraries takes it. One process at a time compiles, the others wait for what it makes.
    Raises NotBuiltError.
    """
    place = folder()
    try:
        _refuse_if_shared(place)  # before anything of it is made, which its user could not remove
        _make(place)
        _refuse_if_shared(place)
        with _locked(place):
            for left_over in place.glob("partial-*"):  # of a process that was killed
                shutil.rmtree(left_over, ignore_errors=True)
            if missing := [name for name in names if find(name) is None]:
                with tempfile.TemporaryDirectory(dir=place, prefix="partial-") as work:
                    for library in compile_libraries(Path(work), missing, compilers=compilers):
                        _seal(library)
                        library.replace(place / library.name)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UnusableCacheError(f"{place}: {reason}: mend that, {_ELSEWHERE}") from error
    return [place / f"{name}.so" for name in names]


def _seal(library: Path) -> None:
    """End the file with the digest of its content: a machine that loses its power may keep a part
    of it, under its name, and to load that ends the process.
    """
    content = library.read_bytes()
    library.write_bytes(content + _SEAL + hashlib.sha256(content).hexdigest().encode())
    library.chmod(0o600)


def _is_whole(library: Path) -> bool:
    with library.open("rb") as file:
        facts = os.fstat(file.fileno())
        content, _, digest = file.read().rpartition(_SEAL)
    return (
        facts.st_uid in _trusted()
        and not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        and hashlib.sha256(content).hexdigest().encode() == digest
        and hash_sources(compilation.SOURCES).encode() in content
    )


def _make(place: Path) -> None:
    """Make a folder and those that it is in, for this user alone."""
    if not place.is_dir():
        _make(place.parent)
        place.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Hold the folder's lock, once whoever has it has let go of it: at the latest when it ends."""
    with (place / "lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            log.warning(
                "waiting for %s, which compiles the C++ kernels, a minute or more; if it is "
                "stopped there, let it go on (kill -CONT) or end it",
                lock.read() or "another process",
            )
            fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {platform.node()}")
        lock.flush()
        yield


def _trusted() -> set[int]:
    """Users who may write to what this one loads: itself and the system's."""
    return {os.getuid(), 0}


def _refuse_if_shared(place: Path) -> None:
    """Raise UnusableCacheError where another user may put a file into the folder, or another folder
    into its place, as OpenSSH asks of its keys' folder, by its path without links. Group
    permissions of a user's own group, which some systems give everything that is made, say nothing.
    """
    for level in (place, *place.parents):
        if not level.exists():
            continue
        facts = level.stat()
        # The owner of / owns the system, also where a container knows root by another number.
        if facts.st_uid not in _trusted() | {Path("/").stat().st_uid}:
            raise UnusableCacheError(f"{level} is another user's: {_ELSEWHERE[3:]}")
        # What lies in a sticky folder only its owner may replace.
        sticky = facts.st_mode & stat.S_ISVTX and level != place
        writable = facts.st_mode & stat.S_IWOTH
        if not sticky and (writable or (facts.st_mode & stat.S_IWGRP and _is_shared(facts.st_gid))):
            raise UnusableCacheError(
                f"others may write to {level}: chmod go-w {shlex.quote(str(level))}, {_ELSEWHERE}"
            )


def _is_shared(group: int) -> bool:
    """Whether a group may have other members than this user and the system's."""
    try:
        entry, user = grp.getgrgid(group), pwd.getpwuid(os.getuid())
    except KeyError:
        return group != 0
    return group != 0 and (entry.gr_name != user.pw_name or bool({*entry.gr_mem} - {user.pw_name}))
