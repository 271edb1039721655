"""`fairlead chat` on a terminal and in a pipe, with a server of another kind and with its own; and
`LLM.chat`, which gives the tokens of transformers.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from fairlead_runtime import LLM, SamplingParams
from fairlead_runtime.commands import chat
from fairlead_runtime.commands.chat_client import ChatError, Endpoint, Piece
from fairlead_runtime.hub.source import demo_directory
from fairlead_runtime.request.sequence import RequestError
from fairlead_runtime.settings import terminal
from support.pseudo_terminal import on_a_terminal

MAIN = "import sys; from fairlead_runtime.commands.chat import main; sys.exit(main(sys.argv[1:]))"
CHAT = (sys.executable, "-c", MAIN)
KEY = "a-key"
STEERING = "\x1b]0;title\x07 a\tb\r\u202e \u65e5\u3000\u672c"
PROMPT = "> "  # until it is there, Ctrl-D is no key of the line that is read


class OtherServer(BaseHTTPRequestHandler):
    """OpenAI's API by hand: it thinks, then says back the last message. ``slow`` never ends,
    ``break`` ends with an error event.
    """

    bodies: ClassVar[list[dict[str, Any]]] = []
    stopped: ClassVar[threading.Event] = threading.Event()

    def do_GET(self) -> None:
        self._head(200, "application/json")
        self.wfile.write(b'{"data": [{"id": "parrot"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.bodies.append(body)
        if self.headers["authorization"] != f"Bearer {KEY}":
            self._head(401, "application/json")
            self.wfile.write(b'{"error": {"message": "no such key"}}')
            return
        self._head(200, "text/event-stream")
        text = body["messages"][-1]["content"]
        self._send({"reasoning_content": "hm"})
        if text == "slow":
            try:
                while not self.stopped.wait(0.02):
                    self._send({"content": "la "})
            except OSError:
                self.stopped.set()
            return
        if text == "steer":
            self._send({"reasoning_content": "\x1b[5mthink", "content": STEERING})
            return
        if text == "break":
            self.wfile.write(b'data: {"error": {"message": "the engine is gone"}}\n\n')
            return
        self._send({"content": f"you said {text}"})
        self.wfile.write(b"data: [DONE]\n\n")

    def _head(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.end_headers()

    def _send(self, delta: dict[str, str]) -> None:
        event = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def log_message(self, *_: object) -> None:
        """Be silent."""


@pytest.fixture
def url() -> Iterator[str]:
    OtherServer.bodies.clear()
    OtherServer.stopped.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), OtherServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        OtherServer.stopped.set()
        server.shutdown()


def test_a_conversation_on_a_terminal(url: str) -> None:
    exchanges = [
        ("one\n", "you said one"),
        ("two\n", "you said two"),
        ("/help\n", "/reset"),
        ("/rest\n", "/rest is not a command"),
        ("/reset\n", "a new conversation"),
        ("three\n", "you said three"),
    ]
    with on_a_terminal(*CHAT, "--url", url, "--system", "be brief", FAIRLEAD_API_KEY=KEY) as chat:
        chat.until("Chat with parrot")
        for keys, answer in exchanges:
            chat.until(PROMPT)
            chat.type(keys)
            chat.until(answer)
        assert "\x1b[2mhm\x1b[0m" in chat.text, "reasoning is dimmed"
        chat.until(PROMPT)
        chat.type("\x04")
        assert chat.end() == 0
    roles = [[m["role"] for m in body["messages"]] for body in OtherServer.bodies]
    pair = ["user", "assistant"]
    assert roles == [["system", "user"], ["system", *pair, "user"], ["system", "user"]]
    assert OtherServer.bodies[1]["messages"][2]["content"] == "you said one", "without reasoning"
    assert all(body["stream"] and body["model"] == "parrot" for body in OtherServer.bodies)


def test_an_interrupt_stops_the_answer_and_the_chat_goes_on(url: str) -> None:
    with on_a_terminal(*CHAT, "--url", f"{url}/v1/", FAIRLEAD_API_KEY=KEY) as chat:
        chat.until(PROMPT)
        chat.type("slow\n")
        chat.until("la la")
        chat.type("\x03")
        chat.until("(stopped)")
        assert OtherServer.stopped.wait(60), "the server goes on"
        chat.until(PROMPT)
        chat.type("break\n")
        chat.until("the engine is gone")
        chat.until(PROMPT)
        chat.type("more\n")
        chat.until("you said more")
        chat.until(PROMPT)
        chat.type("/quit\n")
        assert chat.end() == 0
    *_, last = OtherServer.bodies
    said = [m["content"] for m in last["messages"]]
    assert said[0] == "slow"
    assert said[1].startswith("la la")
    assert said[2:] == ["more"], "what failed is no part of the conversation"


class Parrot(Endpoint):
    """Answers with these texts."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts

    def stream(self, _body: Any) -> Generator[Piece, None, None]:
        yield from map(Piece, self._texts)


def test_what_was_shown_before_an_interrupt_is_part_of_the_conversation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conversation = chat._Chat(Parrot("la ", "lo "), {"model": "parrot"}, None)
    conversation._person = True

    def write(text: str) -> None:
        if text == "lo ":
            raise KeyboardInterrupt

    monkeypatch.setattr(conversation, "_write", write)
    conversation._exchange("sing")
    assert conversation._messages[1]["content"] == "la lo "


def test_a_terminal_is_not_steered_by_a_model(url: str) -> None:
    with on_a_terminal(
        *CHAT, "--url", url, "--model", "a\x1b[7mname", FAIRLEAD_API_KEY=KEY
    ) as chat:
        chat.until(PROMPT)
        chat.type("steer\n")
        chat.until("\u672c")
        chat.until(PROMPT)
        chat.type("\x04")
        assert chat.end() == 0
    for shown in (r"a\x1b[7mname", r"\x1b[5mthink", r"\x1b]0;title\x07 a", "\u65e5\u3000\u672c"):
        assert shown in chat.text
    for raw in ("\x1b[7m", "\x1b[5m", "\x1b]0", "\x07", "\u202e"):
        assert raw not in chat.text
    assert terminal.harmless(STEERING) == STEERING, "a file or a pipe gets all of it"


class Elsewhere(BaseHTTPRequestHandler):
    """Redirects what it is asked for to ``target``."""

    target = ""

    def do_GET(self) -> None:
        self.send_response(302)
        self.send_header("location", self.target + self.path)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Be silent."""


def test_no_key_goes_to_another_server_that_the_first_one_names() -> None:
    asked: list[Any] = []

    class Thief(OtherServer):
        def do_GET(self) -> None:
            asked.append(self.headers["authorization"])
            super().do_GET()

    servers = [ThreadingHTTPServer(("127.0.0.1", 0), each) for each in (Elsewhere, Thief)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        first, second = (f"http://127.0.0.1:{each.server_port}" for each in servers)
        Elsewhere.target = second
        with pytest.raises(ChatError, match="redirects to another"):
            Endpoint(first, KEY).model()
        Elsewhere.target = "http://a:b"  # no port
        with pytest.raises(ChatError):
            Endpoint(first, KEY).model()
        assert not asked
        Elsewhere.target = ""
        with pytest.raises(ChatError, match="HTTP 302"):  # its own, which is followed
            Endpoint(first, KEY).model()
        assert Endpoint(second, KEY).model() == "parrot"
        assert asked == [f"Bearer {KEY}"]
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


@pytest.mark.parametrize(
    ("address", "key"),
    [
        ("http://[", ""),
        ("http://a:b", ""),
        ("http://a:99999", ""),
        ("http://" + "a" * 70, ""),
        ("http://a..b", ""),
        ("http://a b", ""),
        ("http://a\x01", ""),
        ("http://me:secret@a", ""),
        ("me:secret@a", ""),
        ("ftp://me:secret@a", ""),
        ("http://a", "secr\u00e9t-secret"),
        ("http://a", "secret\n"),
        ("http://a", "\u65e5secret"),
    ],
)
def test_an_address_or_a_key_that_is_none_is_not_repeated(address: str, key: str) -> None:
    with pytest.raises(ChatError) as error:
        Endpoint(address, key)
    assert error.value.hint
    assert "secret" not in f"{error.value}{error.value.hint}"


def test_a_path_of_other_letters_is_escaped() -> None:
    assert Endpoint("http://a/\u00fc%20/v1/").base == "http://a/%C3%BC%20/v1"


def test_a_pipe_gets_the_answers_alone(url: str) -> None:
    def piped(key: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*CHAT, "--url", url, "--max-tokens=9", "--temperature=0"],
            input="one\n\ntwo\n",
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "FAIRLEAD_API_KEY": key},
        )

    done = piped(KEY)
    assert (done.returncode, done.stdout) == (0, "you said one\nyou said two\n"), done.stderr
    assert OtherServer.bodies[0]["max_tokens"] == 9
    assert OtherServer.bodies[0]["temperature"] == 0
    refused = piped("another")
    assert refused.returncode == 2
    words = json.loads(refused.stderr)
    assert words["message"] == "no such key (HTTP 401)"
    assert "FAIRLEAD_API_KEY" in words["hint"]


@pytest.mark.parametrize(
    ("address", "message"),
    [("ftp://a", "is not the URL"), ("http://127.0.0.1:9", "cannot be reached")],
)
def test_an_address_that_is_wrong_is_named(address: str, message: str) -> None:
    with pytest.raises(ChatError, match=message) as error:
        Endpoint(address).model()
    assert error.value.hint


def test_its_own_server_answers_and_ends_with_it(tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ bos_token }}<|user|>What is Fairlead?<|end|><|assistant|>")
    done = subprocess.run(
        [*CHAT, "demo:", "--temperature=0", f"--chat-template={template}"],
        input="Hello\n",
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "FAIRLEAD_API_KEY": f" {KEY}\n"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Fairlead serves language models on Kubernetes.")
    refused = subprocess.run(
        [*CHAT, "/no/such/model"], input="", capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert json.loads(refused.stderr)["message"] == "/no/such/model: no such directory"


# -- in Python


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo:", num_blocks=256, dtype="float32") as instance:
        yield instance


def test_chat_gives_the_tokens_of_transformers_and_the_rendered_prompt(llm: LLM) -> None:
    path = str(demo_directory())
    tokenizer = AutoTokenizer.from_pretrained(path)
    reference = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    conversations = [
        [{"role": "user", "content": "What is Fairlead?"}],
        [
            {"role": "user", "content": "What is a KV cache?"},
            {"role": "assistant", "content": "A cache."},
            {"role": "user", "content": "What is Fairlead?"},
        ],
    ]
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    results = llm.chat(conversations, greedy, use_tqdm=False)
    for conversation, result in zip(conversations, results, strict=True):
        text = tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        out = reference.generate(
            ids, max_new_tokens=16, min_new_tokens=16, do_sample=False, eos_token_id=None
        )
        assert result.prompt == text
        assert torch.equal(torch.tensor(result.outputs[0].token_ids), out[0, ids.shape[1] :])
    (alone,) = llm.chat(conversations[0], greedy, use_tqdm=False)
    assert alone.outputs[0].token_ids == results[0].outputs[0].token_ids


def test_what_cannot_be_asked_is_refused_with_its_place(llm: LLM) -> None:
    good = [{"role": "user", "content": "a"}]
    with pytest.raises(RequestError, match=r"messages\[1\]"):
        llm.chat([good, []])
    with pytest.raises(RequestError, match="at least one message"):
        llm.chat([[]])


def test_an_llm_shows_what_it_runs_and_gives_its_tokenizer() -> None:
    llm = LLM("demo:", num_blocks=64, dtype="float32", device="cpu")
    assert isinstance(llm.get_tokenizer(), PreTrainedTokenizerBase)
    shown = "LLM('demo:', device='cpu', dtype='float32', max_model_len=2048, num_blocks=64)"
    assert repr(llm) == shown
    llm.shutdown()
    assert repr(llm) == "LLM('demo:', shut down)"
