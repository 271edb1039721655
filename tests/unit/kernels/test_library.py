"""Which library is loaded, what is refused, and the threads that it runs on."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fairlead_kernels.cpu import library
from fairlead_kernels.cpu.sources import hash_sources
from fairlead_kernels.interface.not_available import NotAvailableError
from support.kernel_sets import every_set, widest_set

FORKED = """
import os, sys, torch
from fairlead_kernels.cpu import library
functions = library.load(sys.argv[1])
torch.set_num_threads(2)
assert functions.team_size(2) == 2, functions.team_size(2)
child = os.fork()
if child == 0:
    os._exit(functions.team_size(2))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
assert functions.team_size(2) == 2
"""


@every_set
def test_the_kernels_run_on_as_many_of_torchs_threads_as_asked(instruction_set: str) -> None:
    functions = library.load(instruction_set)
    assert [functions.team_size(threads) for threads in (1, 2, 3, 7)] == [1, 2, 3, 7]


@widest_set
def test_the_threads_are_those_that_torch_has_started(instruction_set: str) -> None:
    program = """
import os, sys, torch
from fairlead_kernels.cpu import library
functions = library.load(sys.argv[1])
torch.set_num_threads(3)
torch.ones(1 << 20).add_(1)
before = set(os.listdir("/proc/self/task"))
assert len(before) >= 3 and functions.team_size(3) == 3
assert set(os.listdir("/proc/self/task")) == before
"""
    subprocess.run([sys.executable, "-c", program, instruction_set], check=True)


@widest_set
def test_a_forked_child_computes_on_its_only_thread(instruction_set: str) -> None:
    """OpenMP's threads do not exist there, and waiting for them would not end."""
    subprocess.run([sys.executable, "-c", FORKED, instruction_set], check=True, timeout=300)


@widest_set
def test_one_processor_for_several_threads_is_enough(instruction_set: str) -> None:
    program = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import torch
from fairlead_kernels.cpu import cpu_operations as cpu
torch.set_num_threads(4)
operations = cpu.load(sys.argv[1])
x, weight = torch.randn(9, 64), torch.randn(640, 64)
packed = operations.pack([weight])
for _ in range(50):
    torch.testing.assert_close(operations.linear(x, packed), x @ weight.t(), atol=1e-4, rtol=1e-4)
"""
    subprocess.run([sys.executable, "-c", program, instruction_set], check=True, timeout=300)


@widest_set
def test_a_thread_that_dies_leaves_no_helper_behind(instruction_set: str) -> None:
    """Each thread that computes has helpers of its own, which OpenMP ends with it."""
    program = """
import os, sys, threading
import torch
from fairlead_kernels.cpu import cpu_operations as cpu
operations = cpu.load(sys.argv[1])
x, weight = torch.randn(9, 64), torch.randn(640, 64)
packed, done = operations.pack([weight]), []
def compute():
    torch.set_num_threads(2)
    assert operations.library.team_size(2) == 2
    torch.testing.assert_close(operations.linear(x, packed), x @ weight.t(), atol=1e-4, rtol=1e-4)
    done.append(1)
for _ in range(20):
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    compute()
assert len(done) == 40, len(done)
left = len(os.listdir("/proc/self/task"))
assert left < 15, left
"""
    subprocess.run([sys.executable, "-c", program, instruction_set], check=True, timeout=300)


def test_an_instruction_set_that_does_not_exist_is_refused() -> None:
    with pytest.raises(NotAvailableError, match=r"'avx1024'|are not built"):
        library.load("avx1024")


def test_without_the_libraries_the_error_says_that_they_are_not_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(NotAvailableError, match="not built"):
        library.Library("baseline")


def test_on_another_architecture_the_error_says_for_which_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr("sysconfig.get_platform", lambda: "linux-aarch64")
    with pytest.raises(NotAvailableError, match="for Linux on x86-64, not linux-aarch64"):
        library.Library("baseline")


def test_a_library_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "baseline.so").write_text(f"no ELF, {hash_sources(library.SOURCES)}")
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    with pytest.raises(NotAvailableError, match="cannot be loaded"):
        library.Library("baseline")


@every_set
def test_a_library_of_other_sources_is_refused(
    instruction_set: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a pull, an editable install has new structures in Python and old ones in C."""
    shutil.copytree(library.SOURCES, tmp_path / "csrc")
    monkeypatch.setattr(library, "SOURCES", tmp_path / "csrc")
    library.Library(instruction_set)
    with (tmp_path / "csrc" / "team.h").open("a") as changed:
        changed.write("\n")
    with pytest.raises(NotAvailableError, match=r"other sources.*make setup"):
        library.Library(instruction_set)


@every_set
def test_the_fastest_instruction_set_is_taken(instruction_set: str) -> None:
    best = library.supported()[0]
    assert library.load().instruction_set == best
    flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0].split()
    library_name, _, more = best.partition("+")
    assert (library_name == "avx512") == ("avx512f" in flags and "avx512vl" in flags)
    assert (more != "") == ("avx512_vnni" in flags and library_name == "avx512")
    assert more != "amx" or "amx_int8" in flags
