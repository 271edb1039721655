"""Start a real engine on a tiny model in a pod of any memory, and take a token from it.

The pod's memory is a cgroup limit in a copy of the files that ``build/host.py`` reads; weights,
profiling run, cache and steps are real.
"""

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch

from fairlead_runtime.build import build_engine, checks, host
from fairlead_runtime.build.resolve import ResolvedConfig
from fairlead_runtime.llm import LLM
from fairlead_runtime.request.sequence import SamplingParams
from fairlead_runtime.settings.engine_config import EngineConfig
from fairlead_runtime.sizing.terms import GIB

# Threads do not speed up tiny matrices; on shared cores they slow them down a hundredfold.
torch.set_num_threads(1)

PROCESS_BYTES = GIB // 2  # of a pod; the process of a test run holds much more than an engine


def pod_root(folder: Path, memory: int) -> Path:
    """Files of a container with this limit in bytes, on a machine with more."""
    group = folder / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{memory}\n")
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text("0::/\n")
    (folder / "proc/meminfo").write_text(f"MemTotal: {memory // 512} kB\n")
    return folder


def start_engine(
    monkeypatch: pytest.MonkeyPatch,
    root: Path,
    model: Path,
    config: EngineConfig,
    process: int = PROCESS_BYTES,
) -> ResolvedConfig:
    """What the engine was built from, after it has computed one token. Raises as ``build`` does.

    One token of prompt and one of answer: with room for less, nothing is asked.
    """
    monkeypatch.setattr(checks, "memory_limit", partial(host.memory_limit, root))
    monkeypatch.setattr(build_engine, "resident_bytes", lambda: process)
    llm = LLM(str(model), **dataclasses.asdict(config))
    try:
        resolved = llm._built_engine.resolved  # type: ignore[union-attr]
        if resolved.capacity < 2:
            return resolved
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        (result,) = llm.generate([{"prompt_token_ids": [5]}], params, use_tqdm=False)
        assert len(result.outputs[0].token_ids) == 1
        return resolved
    finally:
        llm.shutdown()
