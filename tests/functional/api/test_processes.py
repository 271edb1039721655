"""The HTTP process and the engine's process of `fairlead serve`: what ends one ends both, and what
one cannot say, the other can.
"""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from fairlead_runtime.front.limits import LARGE_BODY
from support import tiny
from support.full import LONG_FORM
from support.serve_process import (
    WITHIN,
    Process,
    hanging_device,
    never_loads,
    serve,
    slow_device,
    stream_events,
)

LONG = {"prompt": [1, 2, 3], "max_tokens": 900, "ignore_eos": True, "temperature": 0}
PROMPTS = [[1, 2, 3], [9, 8, 7, 6, 5], list(range(20, 60))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save(tiny.build("llama"), tmp_path_factory.mktemp("llama")))


def body(model: str, **changes: Any) -> dict[str, Any]:
    return LONG | {"model": model} | changes


@contextmanager
def running_stream(server: Process, model: str) -> Iterator[Iterator[dict[str, Any] | str]]:
    """The events of a stream whose first event has come."""
    with (
        server.client() as client,
        client.stream("POST", "/v1/completions", json=body(model, stream=True)) as response,
    ):
        events = stream_events(response)
        next(events)
        yield events


def ends_with_error(events: Iterator[dict[str, Any] | str]) -> dict[str, Any]:
    """The error object with which the stream ends."""
    *_, last = [event for event in events if isinstance(event, dict)]
    error: dict[str, Any] = last["error"]
    return error


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1200))


def until_ended(pid: int) -> None:
    """Wait for a process that is no child of this one."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended, _, _ = select.select([descriptor], [], [], WITHIN)
    os.close(descriptor)
    assert ended, "the process still runs"


def test_a_request_has_one_id_in_its_header_its_answer_the_log_and_the_debug_view(
    model: str,
) -> None:
    with serve(model, prepare=slow_device) as server:
        server.until_logged("serving")
        asked = body(model, prompt=[[1, 2], [3, 4]], n=2, stream=True)
        with (
            server.client() as client,
            server.client("admin") as admin,
            client.stream(
                "POST", "/v1/completions", json=asked, headers={"X-Request-Id": "of-the-gateway"}
            ) as response,
        ):
            events = stream_events(response)
            first = next(events)
            assert response.headers["x-request-id"] == "of-the-gateway"
            assert isinstance(first, dict)
            assert first["id"] == "cmpl-of-the-gateway"
            live = admin.get("/debug/requests").json()["requests"]
            assert sorted(view["id"] for view in live) == ["of-the-gateway-0", "of-the-gateway-1"]
            again = client.post(
                "/v1/chat/completions",
                json={"model": model, "messages": [{"role": "user", "content": "x"}]},
            )
        chosen = again.headers["x-request-id"]
        assert again.json()["id"] == f"chatcmpl-{chosen}"
        server.terminate()
        assert server.end() == 0
    logged = [json.loads(line) for line in server.lines]
    requests = [line for line in logged if line["message"] == "request"]
    generating = [line["request_id"] for line in requests if line["method"] == "POST"]
    assert sorted(generating) == sorted(["of-the-gateway", chosen])


# -- the engine's process ends


class Waiter(threading.Thread):
    """A request that waits in the queue; keeps its answer."""

    def __init__(self, server: Process, model: str) -> None:
        super().__init__()
        self.answer: httpx.Response | None = None
        self._server, self._model = server, model

    def run(self) -> None:
        with self._server.client() as client:
            self.answer = client.post("/v1/completions", json=body(self._model, max_tokens=8))


def test_a_killed_engine_ends_streams_with_an_error_the_queue_with_503_and_the_pod_with_4(
    model: str, tmp_path: Path
) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    environ = {"FAIRLEAD_TERMINATION_LOG": str(log)}
    with serve(model, "--max-requests=1", environ=environ, prepare=slow_device) as server:
        server.until_logged("serving")
        with running_stream(server, model) as events, server.client("admin") as admin:
            waiter = Waiter(server, model)
            waiter.start()
            while len(admin.get("/debug/requests").json()["requests"]) < 2:
                pass
            engine = server.engine_pid
            killed = time.monotonic()
            os.kill(engine, signal.SIGKILL)
            error = ends_with_error(events)
        waiter.join()
        assert server.end() == 4
        if LONG_FORM:
            assert time.monotonic() - killed <= 2, "seconds from its end to that of the pod"
        assert error["code"] == "engine_dead"
        assert "SIGKILL" in error["message"]
        assert waiter.answer is not None
        assert waiter.answer.status_code == 503
        assert int(waiter.answer.headers["retry-after"]) >= 1
        words = server.last_log_line
        assert words["code"] == "EngineDead"
        assert "SIGKILL" in words["message"]
        assert json.loads(log.read_text()) == words


def test_the_admin_port_shows_the_blocks_of_the_engine_and_the_load_of_the_http_process(
    model: str,
) -> None:
    with serve(model, "--max-queue=2000", prepare=slow_device, prepare_http=few_files) as server:
        server.until_logged("serving")
        warning = "the public port takes 708 connections of 2512: RLIMIT_NOFILE is 1200"
        assert any(warning in line for line in server.lines)
        with running_stream(server, model), server.client("admin") as admin:
            (request,) = admin.get("/debug/requests").json()["requests"]
            cache = admin.get("/debug/cache").json()
            assert cache["requests"] == [request["id"]]
            held = [run for run in cache["blocks"] if run["state"] == "held"]
            assert sum(run["count"] for run in held) == cache["held"] > 0
            assert sum(run["count"] for run in cache["blocks"]) == cache["end"]
            assert cache["sizing"] == admin.get("/debug/memory").json()
            bounds = cache["sizing"]["bounds"]
            assert bounds["requests"] == {
                "most": 2256,
                "reason": "--max-requests 256 + --max-queue 2000",
            }
            assert bounds["connections"] == {"most": 708, "reason": "RLIMIT_NOFILE is 1200"}
            assert bounds["openFiles"]["most"] == 1200
            reset = admin.post("/reset_prefix_cache").json()
            assert set(reset) == {"evicted", "held"}
            assert reset["held"] > 0
            lines = admin.get("/metrics").text.splitlines()
            series = dict(line.rsplit(" ", 1) for line in lines if line.startswith("fairlead_http"))
            assert float(one(series, "connections{", 'port="public"')) == 1
            assert float(one(series, "connections{", 'port="admin"')) == 1
            assert float(one(series, "resident_bytes")) > 2**20


def one(series: dict[str, str], *parts: str) -> str:
    """The value of the only series whose name has these parts."""
    (value,) = (value for name, value in series.items() if all(part in name for part in parts))
    return value


def test_an_engine_killed_while_it_loads_ends_the_pod_with_4(model: str) -> None:
    with serve(model, prepare=never_loads) as server:
        server.until_logged("admin port")
        with server.client("admin") as admin:
            assert admin.get("/readyz").status_code == 503
            assert admin.get("/model/config.json").status_code in {200, 503}
        os.kill(server.engine_pid, signal.SIGKILL)
        assert server.end() == 4
        assert "SIGKILL" in server.last_log_line["message"]


def test_an_engine_killed_during_the_drain_ends_the_pod_with_4(model: str) -> None:
    with serve(model, "--drain-timeout=3600", prepare=slow_device) as server:
        server.until_logged("serving")
        with running_stream(server, model) as events:
            server.terminate()
            server.until_logged("refused")
            os.kill(server.engine_pid, signal.SIGKILL)
            assert ends_with_error(events)["code"] == "engine_dead"
        assert server.end() == 4


# -- the HTTP process ends


@pytest.mark.parametrize("prepare", [slow_device, hanging_device])
def test_nothing_is_left_of_a_killed_server(model: str, prepare: Any, tmp_path: Path) -> None:
    """In the middle of a stream, also when the engine's step never ends."""
    with serve(model, environ={"TMPDIR": str(tmp_path)}, prepare=prepare) as server:
        server.until_logged("serving")
        with server.client() as client:
            large = json.dumps({"model": model, "prompt": "a"}).encode() + b" " * LARGE_BODY
            headers = {"content-type": "application/json"}
            # Where the machine leaves it no time the answer is 429.
            while client.post("/tokenize", content=large, headers=headers).status_code != 200:
                pass
        with running_stream(server, model):
            started = [
                int(pid)
                for children in Path(f"/proc/{server.pid}/task").glob("*/children")
                for pid in children.read_text().split()
            ]
            assert len(started) == 2, "the engine's and the one for large prompts"
            server.kill()
            for pid in started:
                until_ended(pid)
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_of_a_server_killed_while_it_loads(model: str) -> None:
    with serve(model, prepare=never_loads) as server:
        server.until_logged("admin port")
        engine = server.engine_pid
        server.kill()
        until_ended(engine)


def allows_core_files() -> None:
    """Let the process write core files as large as the machine lets it, as many hosts do."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))


def test_no_process_writes_a_core_file_which_would_hold_prompts(model: str) -> None:
    with serve(model, prepare=never_loads, prepare_http=allows_core_files) as server:
        server.until_logged("admin port")
        for pid in (server.pid, server.engine_pid):
            limits = Path(f"/proc/{pid}/limits").read_text()
            (line,) = [line for line in limits.splitlines() if "core file" in line]
            assert line.split()[4:6] == ["0", "0"]


# -- an engine that hangs


def impatient() -> None:
    """Judge a step after a fraction of a second instead of 5 s and 60 s."""
    from fairlead_runtime.serving import remote_engine, service

    vars(service).update(READY_STEP_SECONDS=0.2, ALIVE_STEP_SECONDS=0.4)
    remote_engine.QUIET_SECONDS = 0.2
    remote_engine.REPORT_SECONDS = 0.2


def test_a_step_that_never_ends_shows_in_both_probes_and_sigterm_still_ends_the_pod(
    model: str,
) -> None:
    flags = ["--drain-timeout=0.1"]
    with serve(model, *flags, prepare=hanging_device, prepare_http=impatient) as server:
        server.until_logged("serving")
        with running_stream(server, model) as events, server.client("admin") as admin:
            while (answer := admin.get("/healthz")).status_code == 200:
                pass
            assert "no step for" in answer.json()["error"]["message"]
            assert admin.get("/readyz").status_code == 503
            assert admin.get("/metrics").status_code == 200
            server.terminate()
            assert ends_with_error(events)["code"] == "draining"
        assert server.end() == 0


def test_a_process_that_stands_still_is_seen_without_any_work(model: str) -> None:
    with serve(model, prepare_http=impatient) as server:
        server.until_logged("serving")
        with server.client("admin") as admin:
            while admin.get("/metrics").status_code != 200:
                pass
            os.kill(server.engine_pid, signal.SIGSTOP)
            while admin.get("/healthz").status_code == 200:
                pass
            assert admin.get("/metrics").status_code == 200, "the last report"
            assert admin.get("/debug/requests").status_code == 503
            os.kill(server.engine_pid, signal.SIGCONT)
            while admin.get("/readyz").status_code == 503:
                pass


# -- what is no message


def writes_nonsense() -> None:
    """Make the engine's process send bytes that are no message instead of the first events."""
    from fairlead_runtime.child.frames import Channel
    from fairlead_runtime.serving import wire

    send = Channel.send

    def nonsense(self: Channel[Any, Any], message: Any) -> None:
        if isinstance(message, wire.Events):
            self.connection.sendall(b"\x00\x00\x00\x04nope")
        else:
            send(self, message)

    Channel.send = nonsense  # type: ignore[method-assign]


def announces_too_much() -> None:
    """Make the engine's process announce a frame beyond the limit."""
    from fairlead_runtime.child.frames import Channel
    from fairlead_runtime.serving import wire

    send = Channel.send

    def too_much(self: Channel[Any, Any], message: Any) -> None:
        if isinstance(message, wire.Events):
            self.connection.sendall(b"\xff\xff\xff\xff")
        else:
            send(self, message)

    Channel.send = too_much  # type: ignore[method-assign]


@pytest.mark.parametrize("prepare", [writes_nonsense, announces_too_much])
def test_an_engine_that_sends_no_message_ends_the_pod_with_4(model: str, prepare: Any) -> None:
    with serve(model, prepare=prepare) as server:
        server.until_logged("serving")
        with server.client() as client:
            answer = client.post("/v1/completions", json=body(model))
        assert answer.status_code == 503
        assert server.end() == 4
        assert "no message" in server.last_log_line["message"]


def submits_nonsense() -> None:
    """Make the HTTP process send bytes that are no message instead of a request."""
    from fairlead_runtime.serving.remote_engine import RemoteEngine

    def nonsense(self: RemoteEngine, request: Any, *, bounded: bool) -> None:
        assert self._writer is not None
        self._writer.write(b"\x00\x00\x00\x04nope")

    RemoteEngine.submit = nonsense  # type: ignore[method-assign]


def test_an_http_process_that_sends_no_message_ends_the_pod_with_4(model: str) -> None:
    with serve(model, prepare_http=submits_nonsense) as server:
        server.until_logged("serving")
        with server.client() as client:
            assert client.post("/v1/completions", json=body(model)).status_code == 503
        assert server.end() == 4
        assert any("sent what is no message" in line for line in server.lines)


# -- requests across the socket


def test_a_client_that_leaves_frees_its_blocks_and_a_full_queue_is_429(model: str) -> None:
    flags = ["--max-requests=1", "--max-queue=1"]
    with serve(model, *flags, prepare=slow_device) as server:
        server.until_logged("serving")
        with server.client("admin") as admin:
            with running_stream(server, model):
                waiter = Waiter(server, model)
                waiter.start()
                while len(admin.get("/debug/requests").json()["requests"]) < 2:
                    pass
                with server.client() as client:
                    refused = client.post("/v1/completions", json=body(model))
                assert refused.status_code == 429
                assert refused.json()["error"]["code"] == "queue_full"
                assert int(refused.headers["retry-after"]) >= 1
            while len(admin.get("/debug/requests").json()["requests"]) > 1:
                pass
            server.terminate()
        waiter.join()
        assert waiter.answer is not None
        assert waiter.answer.status_code == 200
        assert server.end() == 0


def test_every_line_of_the_log_is_json_those_of_transformers_too(model: str) -> None:
    with serve(model) as server:
        server.until_logged("serving")
        with server.client() as client:
            long = body(model, prompt="a b " * 4000)  # transformers warns of it
            assert client.post("/v1/completions", json=long).status_code == 400
        server.until_logged("request")
        server.terminate()
        assert server.end() == 0
    loggers = {json.loads(line)["logger"].partition(".")[0] for line in server.lines}
    assert "transformers" in loggers


# -- as a user starts it


@pytest.fixture
def started(model: str) -> Iterator[subprocess.Popen[str]]:
    """`fairlead serve`, executed, in a process group of its own, like a shell's job."""
    command = [sys.executable, "-m", "fairlead_runtime", "serve", model]
    process = subprocess.Popen(
        [*command, "--port=0", "--admin-port=0", "--drain-grace=0"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.read()  # ends when no process is left that could write to it


def test_the_command_gives_the_tokens_of_transformers_without_torch_in_front(
    model: str, started: subprocess.Popen[str]
) -> None:
    """An interrupt of the whole group, as from a terminal, lets the stream finish."""
    url = ""
    assert started.stderr is not None
    for line in started.stderr:
        message = json.loads(line)["message"]
        if message.startswith("public port: "):
            url = message.removeprefix("public port: ")
        if message == "serving":
            break
    reference, tokenizer = tiny.build("llama").eval(), tiny.tokenizer()
    with httpx.Client(base_url=url, timeout=WITHIN) as client:
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            out = reference.generate(
                ids, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            answer = client.post(
                "/v1/completions", json=body(model, prompt=prompt, max_tokens=24)
            ).json()
            wanted = tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True)
            assert answer["choices"][0]["text"] == wanted
        http_pid = started.pid
        (engine,) = Path(f"/proc/{http_pid}/task/{http_pid}/children").read_text().split()
        assert "libtorch" not in Path(f"/proc/{http_pid}/maps").read_text()
        assert "libtorch" in Path(f"/proc/{engine}/maps").read_text()
        stream = body(model, stream=True, max_tokens=300)
        with client.stream("POST", "/v1/completions", json=stream) as response:
            events = stream_events(response)
            next(events)
            os.killpg(started.pid, signal.SIGINT)
            *_, last = list(events)
    assert last == "[DONE]"
    assert started.wait(WITHIN) == 0
