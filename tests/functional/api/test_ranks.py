"""`fairlead serve --tensor-parallel 2`: two processes answer as one does, and end together."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.warmup import profiling
from fairlead_runtime.llm import LLM
from fairlead_runtime.settings.engine_config import ConfigError
from support import tiny
from support.full import LONG_FORM
from support.serve_process import Process, fork_children, forks, serve, stream_events

KILLED_WITHIN = 30.0  # seconds until the kernel has ended a process, on a busy machine too
UNITS = 128
FLAGS = (f"--num-blocks={UNITS}", "--block-size=8", "--max-batch-tokens=64", "--max-requests=8")
BODY = {"prompt": [5, 9, 77, 30] * 6, "max_tokens": 40, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save(tiny.build("llama"), tmp_path_factory.mktemp("llama")))


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted({int(child) for file in text for child in file.read_text().split()})


def rank_of(server: Process) -> int:
    (rank,) = children(server.engine_pid)
    return rank


def text_of(server: Process, model: str) -> Any:
    with server.client() as client:
        answer = client.post("/v1/completions", json=BODY | {"model": model})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]


def text_in(event: dict[str, Any] | str) -> str:
    return "" if isinstance(event, str) else str(event["choices"][0]["text"])


def no_memory_for_the_largest_step() -> None:
    """On the second rank alone, while the first waits for it in a sum of the same step."""
    real = profiling.profile

    def profile(*given: Any, **more: Any) -> Any:
        if dist.get_rank() == 1:
            raise torch.OutOfMemoryError
        return real(*given, **more)

    profiling.profile = profile


def no_memory_for_the_cache() -> None:
    """On the second rank alone, while the first allocates its own."""
    real = CacheStorage.__init__

    def allocate(self: CacheStorage, *given: Any, units: int, **more: Any) -> None:
        if dist.get_rank() == 1 and units == UNITS:
            raise torch.OutOfMemoryError
        real(self, *given, units=units, **more)

    CacheStorage.__init__ = allocate  # type: ignore[method-assign]


def wait_for_end(pid: int) -> None:
    end = time.monotonic() + KILLED_WITHIN
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < end, f"process {pid} is left"
        time.sleep(0.01)


def test_a_stopped_rank_only_delays_and_a_killed_one_ends_the_pod_with_4(
    model: str, tmp_path: Path
) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    environ = {"FAIRLEAD_TERMINATION_LOG": str(log)}
    with serve(model, *FLAGS) as one:
        one.until_logged("serving")
        expected = text_of(one, model)
    with serve(model, *FLAGS, "--tensor-parallel=2", environ=environ) as server:
        server.until_logged("serving")
        assert text_of(server, model) == expected
        with server.client("admin") as admin:
            terms = {t["name"]: t for t in admin.get("/debug/memory").json()["terms"]}
        assert abs(terms["weights"]["driftPercent"]) <= 2
        assert terms["kv"]["driftPercent"] == 0
        rank = rank_of(server)
        with (
            server.client() as client,
            client.stream(
                "POST", "/v1/completions", json=BODY | {"model": model, "stream": True}
            ) as response,
        ):
            events = stream_events(response)
            text = text_in(next(events))
            os.kill(rank, signal.SIGSTOP)
            with server.client("admin") as admin:
                assert admin.get("/healthz").status_code == 200
            os.kill(rank, signal.SIGCONT)
            assert text + "".join(map(text_in, events)) == expected
        killed = time.monotonic()
        os.kill(rank, signal.SIGKILL)
        assert server.end() == 4
        if LONG_FORM:
            assert time.monotonic() - killed <= 5, "seconds from its end to that of the pod"
        assert "rank 1 of 2 was ended by SIGKILL" in server.last_log_line["message"]
        assert json.loads(log.read_text()) == server.last_log_line


@pytest.mark.parametrize("count", [4, pytest.param(8, marks=pytest.mark.full)])
def test_more_ranks_than_key_value_heads_answer_as_one_and_end_with_any_of_them(
    count: int, tmp_path: Path
) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
    model = str(tiny.save(tiny.build("llama", **heads), tmp_path))
    with serve(model, *FLAGS) as one:
        one.until_logged("serving")
        expected = text_of(one, model)
    with serve(model, *FLAGS, f"--tensor-parallel={count}") as server:
        server.until_logged("serving")
        assert text_of(server, model) == expected
        ranks_there = children(server.engine_pid)
        assert len(ranks_there) == count - 1
        os.kill(ranks_there[-1], signal.SIGKILL)
        assert server.end() == 4
        words = server.last_log_line["message"]
        assert re.search(rf"rank \d of {count} was ended by SIGKILL", words)
        for rank in ranks_there:
            wait_for_end(rank)


@pytest.mark.parametrize("victim", ["server", "engine"])
def test_no_rank_is_left_when_its_leader_is_killed(model: str, victim: str) -> None:
    with serve(model, *FLAGS, "--tensor-parallel=2") as server:
        server.until_logged("serving")
        assert text_of(server, model)
        rank = rank_of(server)
        os.kill(rank, signal.SIGSTOP)  # it cannot see the end of its socket
        os.kill(server.pid if victim == "server" else server.engine_pid, signal.SIGKILL)
        wait_for_end(rank)


def test_a_drained_server_leaves_no_rank(model: str) -> None:
    with serve(model, *FLAGS, "--tensor-parallel=2") as server:
        server.until_logged("serving")
        assert text_of(server, model)
        rank = rank_of(server)
        server.terminate()
        assert server.end() == 0
        wait_for_end(rank)


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (no_memory_for_the_largest_step, "--max-batch-tokens: a step of 64 tokens does not fit"),
        (no_memory_for_the_cache, "--num-blocks: 128 blocks could not be allocated"),
    ],
)
def test_what_one_rank_refuses_is_the_answer_of_the_start(
    model: str, prepare: Callable[[], None], reason: str, tmp_path: Path
) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    environ = {"FAIRLEAD_TERMINATION_LOG": str(log)}
    with serve(model, *FLAGS, "--tensor-parallel=2", environ=environ, prepare=prepare) as server:
        assert server.end() == 2
        assert server.last_log_line["code"] == "InvalidConfig"
        assert reason in server.last_log_line["message"]
        assert json.loads(log.read_text()) == server.last_log_line


def answer_of_llm(model: str, channel: Connection) -> None:
    """What creating an LLM whose second rank refuses raises; it has no thread that ends it all."""
    os.environ["OMP_NUM_THREADS"] = "1"
    fork_children()
    no_memory_for_the_largest_step()
    try:
        LLM(model, num_blocks=UNITS, max_batch_tokens=64, max_requests=8, tensor_parallel=2)
    except ConfigError as error:
        channel.send((error.field, error.message))
    channel.close()


def test_what_one_rank_refuses_is_what_an_llm_raises(model: str) -> None:
    reading, writing = forks.Pipe(duplex=False)
    process = forks.Process(target=answer_of_llm, args=(model, writing))
    process.start()
    writing.close()
    field, message = reading.recv()
    assert field == "max_batch_tokens"
    assert message == "a step of 64 tokens does not fit in memory with the weights"
    process.join(KILLED_WITHIN)
    assert process.exitcode == 0, "a rank is left"
