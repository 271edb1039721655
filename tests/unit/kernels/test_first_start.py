"""The first start of an engine compiles the library of its processor, once, where none but this
user can write; the next ones load it.
"""

import errno
import fcntl
import functools
import grp
import logging
import os
import platform
import pwd
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from fairlead_kernels.cpu import compilation, first_start, library, user_cache
from fairlead_kernels.cpu.compilation import INSTRUCTION_SETS, PROBE, NotBuiltError
from fairlead_kernels.cpu.sources import hash_sources
from fairlead_kernels.interface.not_available import NotAvailableError
from support.copying_compiler import NATIVE, CopyingCompiler
from support.kernel_sets import SETS

pytestmark = pytest.mark.skipif(not SETS, reason="the C++ kernels are not built")
BEST = SETS[0] if SETS else ""


class Machine(NamedTuple):
    """Where nothing was installed. ``begun`` has an entry for each time that a start told it."""

    compiler: CopyingCompiler
    installed: Path
    begun: list[str]

    def start(self) -> None:
        first_start.compile_missing(self.installed, lambda: self.begun.append("kernels"), 2)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    compiler = CopyingCompiler(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))
    monkeypatch.setenv("CXX", str(compiler.path))
    monkeypatch.delenv(first_start.SETTING, raising=False)
    monkeypatch.setattr(library, "FOLDER", tmp_path / "installed")
    # What other tests of this process have loaded is not here.
    monkeypatch.setattr(library, "load", functools.cache(library.load.__wrapped__))
    monkeypatch.setitem(first_start._attempt, "failure", "")
    return Machine(compiler, tmp_path / "installed", [])


def test_the_first_start_compiles_what_the_processor_uses_and_the_second_nothing(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(NotAvailableError, match="no engine has started on a CPU"):
        library.supported()
    with caplog.at_level(logging.INFO):
        machine.start()
    assert machine.compiler.links() == ["machine.so", f"{BEST}.so"]
    assert len(machine.compiler.files()) == 1 + len(list(library.SOURCES.glob("*.cpp")))
    first, second = caplog.messages
    assert first.startswith(f"compiling the C++ kernels for this processor ({BEST}), once:")
    assert str(user_cache.folder()) in first
    assert second.startswith("compiled the C++ kernels in ")
    assert machine.begun
    names = library.supported()
    assert {name.partition("+")[0] for name in names} == {BEST}
    assert library.Library(names[0]).panel_width() in (8, 16, 32)
    machine.begun.clear()
    machine.start()
    assert len(machine.compiler.links()) == 2
    assert not machine.begun
    assert len(caplog.messages) == 2


def test_folders_that_it_makes_are_for_the_user_alone(machine: Machine) -> None:
    machine.start()
    place = user_cache.folder()
    for folder in (place, place.parent, place.parents[1], place.parents[2]):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in place.iterdir()) == sorted(
        ["lock", "machine.so", f"{BEST}.so"]
    )


def test_two_starts_at_once_compile_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    user_cache.provide([PROBE])
    waits_or_compiles = threading.Event()
    compiled: list[str] = []
    second = threading.Thread(target=user_cache.provide, args=([BEST],))
    compile_really, lock_really = compilation.compile_libraries, fcntl.flock

    def compile_libraries(out: Path, names: list[str], *, compilers: int | None) -> list[Path]:
        compiled.extend(names)
        if threading.current_thread() is second:
            waits_or_compiles.set()
        else:
            second.start()
            assert waits_or_compiles.wait(60)
        return compile_really(out, names, compilers=compilers)

    def flock(file: int, how: int) -> None:
        if threading.current_thread() is second and not how & fcntl.LOCK_NB:
            waits_or_compiles.set()
        lock_really(file, how)

    monkeypatch.setattr(user_cache, "compile_libraries", compile_libraries)
    monkeypatch.setattr(fcntl, "flock", flock)
    user_cache.provide([BEST])
    second.join(60)
    assert compiled == [BEST]
    assert user_cache.find(BEST)
    (waiting,) = caplog.messages
    assert waiting.startswith(f"waiting for process {os.getpid()} on {platform.node()}, which")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def of_other_sources(file: Path) -> None:
    sources = hash_sources(library.SOURCES).encode()
    file.write_bytes(file.read_bytes().rpartition(user_cache._SEAL)[0].replace(sources, b"0" * 16))
    user_cache._seal(file)


def open_to_all(file: Path) -> None:
    file.chmod(0o666)


def anothers(file: Path) -> None:
    if os.getuid():
        pytest.skip("needs root")
    os.chown(file, 12345, -1)


@pytest.mark.parametrize("damage", [cut, empty, flip, of_other_sources, open_to_all, anothers])
def test_a_library_that_is_not_what_was_compiled_is_compiled_again(
    damage: Callable[[Path], None], machine: Machine
) -> None:
    machine.start()
    file = user_cache.folder() / f"{BEST}.so"
    whole = file.read_bytes()
    damage(file)
    with pytest.raises(NotAvailableError, match="they are not built"):
        library.Library(BEST)
    with pytest.raises(NotAvailableError, match="they are not built"):
        library.supported()
    machine.start()
    assert machine.compiler.links() == ["machine.so", f"{BEST}.so", f"{BEST}.so"]
    assert file.read_bytes() == whole
    assert library.Library(BEST).instruction_set == BEST


def refused(machine: Machine, caplog: pytest.LogCaptureFixture) -> str:
    """Why a start that fails to compile has no kernels, as it logs it and as `--kernels cpu` says
    it.
    """
    machine.start()
    with pytest.raises(NotAvailableError) as error:
        library.load(BEST)
    reason = str(error.value).removeprefix("they are not built (").removesuffix(")")
    assert caplog.messages[-1].endswith(f"plain torch serves, slower: {reason}")
    return reason


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.compiler.path.write_text(
        "#!/bin/sh\necho 'ld: cannot find -lstdc++' >&2\necho 'x: note' >&2\nexit 1\n"
    )
    reason = refused(machine, caplog)
    assert reason == f"{machine.compiler.path} failed: ld: cannot find -lstdc++"
    assert [path.name for path in user_cache.folder().iterdir()] == ["lock"]
    CopyingCompiler(machine.installed.parent)
    machine.start()
    assert library.Library(BEST).instruction_set == BEST


def test_without_a_compiler_the_reason_says_what_to_install(
    machine: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", str(machine.installed))
    assert refused(machine, caplog).endswith("install g++")


@pytest.mark.parametrize("home", ["/proc/none", "{installed}/file"])
def test_a_cache_that_cannot_be_written_to_is_named_with_the_way_out(
    home: str, machine: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.installed.mkdir()
    (machine.installed / "file").touch()
    home = home.format(installed=machine.installed)
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    reason = refused(machine, caplog)
    assert reason.startswith(f"{home}/fairlead/kernels-")
    assert reason.endswith("or set XDG_CACHE_HOME to another folder")
    assert machine.compiler.links() == []


def test_a_full_disk_is_named(
    machine: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seal(_library: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(user_cache, "_seal", seal)
    assert "No space left on device" in refused(machine, caplog)
    assert [path.name for path in user_cache.folder().iterdir()] == ["lock"]


def test_a_user_without_a_home_is_told_which_variable_helps(
    machine: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(_uid: int) -> None:
        raise KeyError

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert refused(machine, caplog) == "this user has no home: set XDG_CACHE_HOME"


def test_a_folder_that_holds_no_programs_is_noticed_before_the_long_compilation(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    user_cache.provide([PROBE])
    probe = user_cache.folder() / f"{PROBE}.so"
    probe.write_bytes(f"no ELF, {hash_sources(library.SOURCES)}".encode())
    user_cache._seal(probe)
    machine.start()
    assert caplog.messages[-1].endswith("set XDG_CACHE_HOME to a folder that may hold programs")
    assert machine.compiler.links() == ["machine.so"]


@pytest.mark.parametrize("up", [0, 1, 2])
def test_a_folder_that_others_may_write_to_is_refused(
    up: int, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.start()
    place = [user_cache.folder(), *user_cache.folder().parents][up]
    for mode in (0o777, 0o1777)[: 2 if not up else 1]:
        place.chmod(mode)
        with pytest.raises(NotAvailableError, match="others may write to") as error:
            library.load(BEST)
        assert f"chmod go-w {place}, or set XDG_CACHE_HOME" in str(error.value)
        machine.start()
        assert "others may write to" in caplog.messages[-1]
    place.chmod(0o755)
    assert library.Library(BEST).instruction_set == BEST
    if up:  # there only its owner replaces what is in it, as in /tmp
        place.chmod(0o1777)
        assert library.Library(BEST).instruction_set == BEST


def test_a_link_that_others_may_replace_leads_nowhere_once_the_folder_is_checked(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies in the middle: neither in a folder that the path names nor in one that it ends in."""
    (tmp_path / "home").mkdir()
    others = tmp_path / "others"
    others.mkdir()
    others.chmod(0o777)
    (others / "link").symlink_to(tmp_path / "home", target_is_directory=True)
    (tmp_path / "link").symlink_to(others / "link", target_is_directory=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "link" / "cache"))
    machine.start()
    checked = user_cache.find(BEST)
    assert checked is not None
    content = checked.read_bytes()
    (others / "link").unlink()
    (others / "link").symlink_to(others, target_is_directory=True)
    assert checked.read_bytes() == content
    assert user_cache.find(BEST) is None
    with pytest.raises(NotBuiltError, match=f"others may write to {others}"):
        user_cache.provide([BEST])


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_nothing_is_made_in_another_users_home(machine: Machine, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 12345, -1)
    machine.start()
    with pytest.raises(NotAvailableError, match="is another user's"):
        library.load(BEST)
    assert not list(home.iterdir())


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_another_users_folder_is_refused(machine: Machine) -> None:
    machine.start()
    os.chown(user_cache.folder(), 12345, -1)
    with pytest.raises(NotAvailableError, match="is another user's: set XDG_CACHE_HOME"):
        library.load(BEST)


@pytest.mark.parametrize(
    ("group", "shared"), [(("me", []), False), (("me", ["me", "you"]), True), (("all", []), True)]
)
def test_only_a_users_own_group_may_write(
    group: tuple[str, list[str]], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, members = group
    entry = SimpleNamespace(gr_name=name, gr_mem=members)
    monkeypatch.setattr(grp, "getgrgid", lambda _gid: entry)
    monkeypatch.setattr(pwd, "getpwuid", lambda _uid: SimpleNamespace(pw_name="me"))
    assert user_cache._is_shared(1000) == shared


def test_nothing_is_compiled_where_the_setting_forbids_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(first_start.SETTING, "0")
    machine.start()
    assert machine.compiler.links() == []
    assert not machine.begun
    with pytest.raises(NotAvailableError, match="FAIRLEAD_BUILD_KERNELS is 0"):
        library.load(BEST)
    monkeypatch.delenv(first_start.SETTING)
    machine.start()
    monkeypatch.setenv(first_start.SETTING, "0")
    assert library.Library(BEST).instruction_set == BEST, "what was compiled serves"


def test_nothing_is_compiled_where_libraries_were_installed(machine: Machine) -> None:
    machine.installed.mkdir()
    shutil.copy(NATIVE / "baseline.so", machine.installed)
    machine.start()
    assert machine.compiler.links() == []
    assert library.Library("baseline").instruction_set == "baseline"


def test_installed_libraries_of_other_sources_are_compiled_as_if_there_were_none(
    machine: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a pull without `make setup`."""
    machine.installed.mkdir()
    sources = hash_sources(library.SOURCES).encode()
    old = (NATIVE / "baseline.so").read_bytes().replace(sources, b"0" * 16)
    (machine.installed / "baseline.so").write_bytes(old)
    monkeypatch.setenv(first_start.SETTING, "0")
    machine.start()
    with pytest.raises(NotAvailableError, match=r"other sources \(run `make setup`.*_KERNELS is 0"):
        library.load(BEST)
    monkeypatch.delenv(first_start.SETTING)
    with pytest.raises(NotAvailableError, match=r"other sources .*no engine has started on a CPU"):
        library.load(BEST)
    machine.start()
    assert machine.compiler.links() == ["machine.so", f"{BEST}.so"]
    assert "compiling the C++ kernels for this processor" in caplog.text
    assert library.load(BEST).instruction_set == BEST


def test_what_a_killed_start_has_left_is_removed(machine: Machine) -> None:
    place = user_cache.folder()
    (place / "partial-of-a-killed-start").mkdir(parents=True)
    machine.start()
    assert not list(place.glob("partial-*"))


def test_other_sources_and_another_c_library_have_folders_of_their_own(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {user_cache.folder()}
    with monkeypatch.context() as patch:
        patch.setattr("platform.libc_ver", lambda: ("glibc", "1.0"))
        folders.add(user_cache.folder())
    shutil.copytree(library.SOURCES, tmp_path / "csrc")
    with (tmp_path / "csrc" / "team.h").open("a") as changed:
        changed.write("\n")
    monkeypatch.setattr(compilation, "SOURCES", tmp_path / "csrc")
    folders.add(user_cache.folder())
    assert len(folders) == 3


def test_after_a_failure_no_other_file_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, log = tmp_path / "c++", tmp_path / "log"
    broken.write_text(f"#!/bin/sh\necho x >> {log}\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(NotBuiltError, match="it gave no reason"):
        compilation.compile_libraries(tmp_path / "out", compilers=1)
    files = len(list(library.SOURCES.glob("*.cpp"))) * len(INSTRUCTION_SETS)
    assert len(log.read_text().split()) < files
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_the_probe_that_a_compiler_really_makes_says_what_the_baseline_says(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX")
    user_cache.provide([PROBE])
    names = [*library.INSTRUCTION_SETS, "avx1024"]
    probe, baseline = (first_start._supports(folder) for folder in (machine.installed, NATIVE))
    assert [probe(name.encode()) for name in names] == [baseline(name.encode()) for name in names]
