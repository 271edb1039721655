"""`fairlead serve --tensor-parallel 2`: two processes answer as one does, and end together."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from fairlead_runtime.models import tiny
from support.serve_process import Process, serve, stream_events

KILLED_WITHIN = 30.0  # seconds until the kernel has ended a process, on a busy machine too
FLAGS = ("--num-blocks=128", "--block-size=8", "--max-batch-tokens=64", "--max-requests=8")
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


def wait_for_end(pid: int) -> None:
    end = time.monotonic() + KILLED_WITHIN
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < end, f"process {pid} is left"
        time.sleep(0.01)


def test_a_stopped_rank_only_delays_and_a_killed_one_ends_the_pod_with_4(model: str) -> None:
    with serve(model, *FLAGS) as one:
        one.until_logged("serving")
        expected = text_of(one, model)
    with serve(model, *FLAGS, "--tensor-parallel=2") as server:
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
        assert time.monotonic() - killed <= 5, "seconds from its end to that of the pod"
        assert "rank 1 of 2 was ended by SIGKILL" in server.last_log_line["message"]


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
