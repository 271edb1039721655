"""`fairlead serve` as a user and a kubelet see it: exit codes, last words, signals."""

import functools
import json
import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from support import tiny
from support.full import LONG_FORM
from support.serve_process import (
    Process,
    broken_device,
    held_device,
    never_loads,
    serve,
    slow_device,
    stream_events,
)

LONG = {
    "prompt": [1, 2, 3],
    "max_tokens": 900,
    "ignore_eos": True,
    "stream": True,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save(tiny.build("llama"), tmp_path_factory.mktemp("llama")))


def body(model: str, **changes: Any) -> dict[str, Any]:
    return LONG | {"model": model} | changes


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--quantization=fp8", "--device=cpu"], "--quantization"),
        (["--max-requests=0"], "--max-requests"),
        (["--block-size=5"], "--block-size"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--port=8000", "--admin-port=8000"], "--admin-port"),
        (["--port=70000"], "--port"),
        (["--revision=main"], "--revision"),
        (["--record=/no/such/directory/run.jsonl"], "--record"),
        (["--api-key-file=/no/such/file"], "--api-key-file"),
        (["--api-key-file=/dev/null"], "--api-key-file"),
        (["--ssl-certfile=/dev/null"], "--ssl-keyfile"),
        (["--ssl-keyfile=/dev/null"], "--ssl-certfile"),
        (["--ssl-certfile=/dev/null", "--ssl-keyfile=/dev/null"], "--ssl-certfile"),
        (["--cors-origin=https://a.example/page"], "--cors-origin"),
        (["--host=192.0.2.1"], "--host"),
        (["--host="], "--host"),
    ],
)
def test_a_bad_configuration_ends_with_2_and_one_line_that_names_it(
    flags: list[str], named: str, tmp_path: Path
) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    with serve("demo:", *flags, environ={"FAIRLEAD_TERMINATION_LOG": str(log)}) as server:
        assert server.end() == 2
        words = server.last_log_line
        assert set(words) == {"code", "message", "hint"}
        assert words["code"] == "InvalidConfig"
        assert named in words["message"]
        assert words["hint"]
        assert not any(" port: " in line for line in server.lines), "it listened already"
        assert json.loads(log.read_text()) == words


@pytest.mark.parametrize(
    ("source", "code"),
    [("/no/such/directory", "ModelNotFound"), ("s3://bucket/model", "InvalidSource")],
)
def test_a_missing_model_ends_with_2_and_its_code(source: str, code: str) -> None:
    with serve(source) as server:
        assert server.end() == 2
        assert server.last_log_line["code"] == code


def test_a_port_in_use_ends_with_2_and_names_the_flag() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        serve("demo:", f"--port={taken.getsockname()[1]}") as server,
    ):
        assert server.end() == 2
        assert "--port" in server.last_log_line["message"]


def test_a_longer_sequence_than_the_models_ends_with_2(model: str) -> None:
    with serve(model, "--max-model-len=100000") as server:
        assert server.end() == 2
        assert "--max-model-len" in server.last_log_line["message"]


def test_a_model_that_fails_its_self_test_ends_with_3_and_was_never_ready(tmp_path: Path) -> None:
    """A checkpoint with a weight that is not a number loads well and computes nonsense."""
    broken = tiny.build("llama")
    with torch.no_grad():
        broken.get_parameter("model.layers.1.mlp.down_proj.weight")[0, 0] = torch.nan
    with serve(str(tiny.save(broken, tmp_path / "broken"))) as server:
        assert server.end() == 3
        assert server.last_log_line["code"] == "SelfTestFailed"
        assert "differ from plain transformers" in server.last_log_line["message"]
        assert not any('"serving"' in line for line in server.lines)
        assert not any("the engine has ended" in line for line in server.lines), "it was refused"


def test_the_admin_port_answers_before_the_weights_are_loaded_and_a_signal_ends_that_too(
    model: str,
) -> None:
    with serve(model, prepare=never_loads) as server:
        server.until_logged("admin port")
        with server.client("admin") as admin:
            assert admin.get("/healthz").status_code == 200
            assert admin.get("/readyz").status_code == 503
        server.terminate()
        assert server.end() == 0


def test_a_tokenizer_that_cannot_be_read_does_not_wait_for_the_weights(
    model: str, tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(model, tmp_path / "broken"))
    (broken / "tokenizer.json").write_text('{"model": {"type": "unknown"}}')
    with serve(str(broken), prepare=never_loads) as server:
        assert server.end() == 2
        assert "the tokenizer cannot be read" in server.last_log_line["message"]


class Reader(threading.Thread):
    """Reads one stream to its end and releases ``reached`` after ``far`` tokens; an event may have
    several.
    """

    def __init__(
        self, server: Process, request: dict[str, Any], far: int, reached: threading.Semaphore
    ) -> None:
        super().__init__()
        self.count, self.done = 0, False
        self.reason: str | None = None
        self._server, self._far, self._reached = server, far, reached
        usage = {"include_usage": True, "continuous_usage_stats": True}
        self._request = request | {"stream_options": usage}

    def run(self) -> None:
        with (
            self._server.client() as client,
            client.stream("POST", "/v1/completions", json=self._request) as response,
        ):
            for event in stream_events(response):
                if isinstance(event, str):
                    self.done = True
                    continue
                before, self.count = self.count, event["usage"]["completion_tokens"]
                for choice in event["choices"]:
                    self.reason = choice["finish_reason"] or self.reason
                if before < self._far <= self.count:
                    self._reached.release()


@pytest.mark.parametrize("offset", range(1, 501, 10) if LONG_FORM else (1, 40, 200))
def test_sigterm_lets_live_streams_finish_refuses_new_ones_and_ends_with_0(
    model: str, offset: int, tmp_path: Path
) -> None:
    """The signal comes once every stream has ``offset`` tokens, and the device waits then until a
    new request was refused; all streams finish.
    """
    held, streams = tmp_path / "held", 100 if LONG_FORM else 12
    # A few more than a reader waits for: text that ends within a character is held back.
    prepare = functools.partial(held_device, held, streams, offset + 16)
    with serve(model, "--num-blocks=8192", prepare=prepare) as server:
        server.until_logged("serving")
        held.touch()  # not before: the self-test has steps too
        reached = threading.Semaphore(0)
        requests = [body(model, prompt=[i, 7], max_tokens=600) for i in range(streams)]
        readers = [Reader(server, request, offset, reached) for request in requests]
        for reader in readers:
            reader.start()
        for _ in readers:
            reached.acquire()
        server.terminate()
        server.until_logged("refused")
        with server.client("admin") as admin, server.client() as client:
            assert admin.get("/readyz").status_code == 503
            assert admin.get("/healthz").status_code == 200
            refused = client.post("/v1/completions", json=body(model, stream=False))
            assert refused.status_code == 503
            assert "retry-after" in refused.headers
        assert all(reader.is_alive() for reader in readers)
        held.unlink()
        for reader in readers:
            reader.join()
        assert [(reader.reason, reader.done) for reader in readers] == [("length", True)] * len(
            readers
        )
        assert server.end() == 0


class Caller(threading.Thread):
    """Sends short requests, each on a new connection, until one is refused; keeps the other
    statuses.
    """

    def __init__(self, server: Process, request: dict[str, Any]) -> None:
        super().__init__()
        self.statuses: list[int] = []
        self.refusal: httpx.Response | None = None
        self.answered = threading.Event()
        self._server, self._request = server, request

    def run(self) -> None:
        while self.refusal is None:
            with self._server.client() as client:
                answer = client.post("/v1/completions", json=self._request)
            if answer.status_code == 503:
                self.refusal = answer
            else:
                self.statuses.append(answer.status_code)
            self.answered.set()


def test_after_sigterm_new_requests_are_served_for_the_grace_then_refused_and_no_stream_is_cut(
    model: str,
) -> None:
    """Steps are slow, so that the streams are longer than the grace."""
    with serve(model, "--drain-grace=1", prepare=slow_device) as server:
        server.until_logged("serving")
        reached = threading.Semaphore(0)
        readers = [Reader(server, body(model, prompt=[i, 7]), 1, reached) for i in range(4)]
        short = body(model, prompt=[9, 9], stream=False, max_tokens=1)
        callers = [Caller(server, short) for _ in range(4)]
        for thread in (*readers, *callers):
            thread.start()
        for _ in readers:
            reached.acquire()
        for caller in callers:
            caller.answered.wait()
            caller.answered.clear()
        server.terminate()
        server.until_logged("not ready")
        with server.client("admin") as admin:
            assert admin.get("/readyz").status_code == 503
            assert admin.get("/healthz").status_code == 200
        for thread in (*callers, *readers):
            thread.join()
        for caller in callers:
            assert set(caller.statuses) == {200}
            assert caller.refusal is not None
            assert "retry-after" in caller.refusal.headers
        assert [(reader.reason, reader.done) for reader in readers] == [("length", True)] * 4
        assert server.end() == 0
        log = "".join(server.lines)
        assert log.index("new requests are served") < log.index("new requests are refused")


def test_an_idle_server_serves_for_its_grace_after_sigterm_and_ends_with_0(model: str) -> None:
    with serve(model, "--drain-grace=1") as server:
        server.until_logged("serving")
        server.terminate()
        server.until_logged("not ready")
        with server.client() as client:
            answer = client.post("/v1/completions", json=body(model, stream=False, max_tokens=1))
            assert answer.status_code == 200
        assert server.end() == 0


def test_streams_that_outlive_the_drain_end_with_an_error_event_and_the_server_with_0(
    model: str, tmp_path: Path
) -> None:
    """The termination log of Kubernetes says how many finished and how many were aborted."""
    log = tmp_path / "termination-log"
    log.touch()
    environ = {"FAIRLEAD_TERMINATION_LOG": str(log)}
    with serve(model, "--drain-timeout=0.2", environ=environ, prepare=slow_device) as server:
        server.until_logged("serving")
        with (
            server.client() as client,
            client.stream("POST", "/v1/completions", json=body(model)) as response,
        ):
            events = stream_events(response)
            next(events)
            server.terminate()
            last = list(events)
        assert any(isinstance(event, dict) and "error" in event for event in last)
        assert server.end() == 0
    words = "0 running requests finished, 1 were cut off"
    expected = {"code": "Drained", "message": words, "hint": "", "finished": 0, "aborted": 1}
    assert json.loads(log.read_text()) == expected


def test_a_second_sigterm_ends_the_drain(model: str) -> None:
    with serve(model, "--drain-timeout=3600", prepare=slow_device) as server:
        server.until_logged("serving")
        with (
            server.client() as client,
            client.stream("POST", "/v1/completions", json=body(model)) as response,
        ):
            events = stream_events(response)
            next(events)
            server.terminate()
            server.until_logged("refused")
            server.terminate()
            rest = list(events)
        assert any(isinstance(event, dict) and "error" in event for event in rest)
        assert server.end() == 0


def test_an_engine_that_gives_up_ends_the_process_with_4_and_one_line_that_says_why(
    model: str, tmp_path: Path
) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    with serve(
        model, environ={"FAIRLEAD_TERMINATION_LOG": str(log)}, prepare=broken_device
    ) as server:
        server.until_logged("serving")
        with server.client() as client:
            answer = client.post(
                "/v1/completions",
                json=body(model, stream=False),
                headers={"X-Request-Id": "unlucky"},
            )
        assert answer.status_code == 500
        assert server.end() == 4
        named = [line for line in map(json.loads, server.lines) if "request_id" in line]
        mine = [line["logger"] for line in named if line["request_id"] == "unlucky"]
        assert set(mine) == {"fairlead.engine", "fairlead.api"}, "the lines of both processes"
        words = server.last_log_line
        assert set(words) == {"code", "message", "hint"}
        assert words["code"] == "EngineDead"
        assert "canaries in a row failed" in words["message"]
        assert json.loads(log.read_text()) == words


def test_a_key_of_the_environment_and_a_template_of_the_command_line_count(
    model: str, tmp_path: Path
) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}!{% endfor %}")
    key = {"FAIRLEAD_API_KEY": "a-key-of-the-environment"}
    flags = (f"--chat-template={template}", "--public-metrics")
    with serve(model, *flags, environ=key) as server:
        server.until_logged("serving")
        with server.client() as client:
            assert client.get("/v1/models").status_code == 401
            assert client.get("/metrics").status_code == 401
            client.headers["authorization"] = f"Bearer {key['FAIRLEAD_API_KEY']}"
            assert client.get("/metrics").text.startswith("#")
            info = client.get("/tokenizer_info").json()
            assert info["chat_template"] == template.read_text()
            chat = {"messages": [{"role": "user", "content": "ab"}]}
            plain = {"prompt": "ab!", "add_special_tokens": False}
            tokens = [
                client.post("/tokenize", json=each).json()["tokens"] for each in (chat, plain)
            ]
            assert tokens[0] == tokens[1]
