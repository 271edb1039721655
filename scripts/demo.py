"""`make demo`: start the real server, ask it questions, show the answers as they stream in and what
the engine did.

Starts `fairlead serve demo:` as a user would, on free loopback ports, and uses openai-python as the
client. The figures about the engine come from the server's /metrics and from its recording.
"""

import argparse
import collections
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

STARTING = "starting: "  # before the name of a part, in the server's log
START_WITHIN = 300.0  # seconds; the first import of torch on a new machine is slow
SYSTEM = "You are the demo model of Fairlead. Answer in one or two short sentences."
FIRST = "What is continuous batching?"
SAME_PREFIX = "What is a paged cache?"
CONCURRENT = (
    "What is Fairlead?",
    "What is prefix caching?",
    "Who are you?",
    "What can you do?",
    "What is Kubernetes?",
    "Hello",
)


@dataclass(slots=True)
class Server:
    process: "subprocess.Popen[str]"
    ports: dict[str, str] = field(default_factory=dict)  # "public" and "admin" → http://host:port
    log: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=40))
    part: str = "imports"  # of its start

    def follow(self) -> None:
        """Keep the end of the log and read the ports, which the server chose, from it."""
        for line in self.process.stderr or ():
            self.log.append(line)
            message = _message(line)
            kind, _, address = message.partition(" port: ")
            if address:
                self.ports[kind] = address
            if kind.startswith(STARTING):
                self.part = kind.removeprefix(STARTING)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.ports["admin"] + path, timeout=10) as answer:
            text: str = answer.read().decode()
            return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="demo:")
    model = parser.parse_args().model
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "run.jsonl"
        with _server(model, record) as server:
            _wait_until_ready(server)
            client = OpenAI(base_url=server.ports["public"] + "/v1", api_key="none", max_retries=0)
            _conversation(client, model)
            _report(server, record)
            code = _stop(server)
        _print_busiest_step(record)
    print(f"\nThe server ended with exit code {code}.")
    print("Now yours: .venv/bin/fairlead serve demo:   and a browser at http://127.0.0.1:8000/")
    return code


@contextmanager
def _server(model: str, record: Path) -> Iterator[Server]:
    command = [
        sys.executable,
        "-m",
        "fairlead_runtime",
        "serve",
        model,
        "--port=0",
        "--admin-port=0",
    ]
    # Small limits, so that the demo shows chunked prefill and a cache in use.
    command += ["--num-blocks=512", "--max-batch-tokens=128", f"--record={record}"]
    print("$ " + " ".join(["fairlead", *command[3:-1]]))
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    )
    server = Server(process)
    reader = threading.Thread(target=server.follow, daemon=True)
    reader.start()
    try:
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join()


def _wait_until_ready(server: Server) -> None:
    began, part = time.monotonic(), ""
    while True:
        waited = time.monotonic() - began
        if server.process.poll() is not None or waited > START_WITHIN:
            sys.exit("the server did not become ready:\n" + "".join(server.log))
        if "admin" in server.ports and _ready(server):
            print(f"Ready in {waited:.0f} s: {server.ports['public']}\n")
            return
        if server.part != part:
            part = server.part
            print(f"  {part.replace('_', '-')} …", flush=True)
        time.sleep(0.1)


def _ready(server: Server) -> bool:
    try:
        server.get("/readyz")
    except (urllib.error.URLError, ConnectionError):
        return False
    return True


def _conversation(client: OpenAI, model: str) -> None:
    """One streamed answer, one to a prompt with the same prefix, then several at once."""
    for question in (FIRST, SAME_PREFIX):
        print(f"> {question}")
        for piece in _ask(client, model, question):
            print(piece, end="", flush=True)
        print("\n")
    print(f"{len(CONCURRENT)} at once:")
    with ThreadPoolExecutor(len(CONCURRENT)) as pool:
        answers = pool.map(lambda question: "".join(_ask(client, model, question)), CONCURRENT)
        for question, answer in zip(CONCURRENT, answers, strict=True):
            print(f"> {question}\n{answer}")


def _ask(client: OpenAI, model: str, question: str) -> Iterator[str]:
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
        max_tokens=200,
        temperature=0.0,
        stream=True,
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            yield chunk.choices[0].delta.content


def _report(server: Server, record: Path) -> None:
    """Print what the engine did: its metrics, and the batch sizes of the recording."""
    text = server.get("/metrics")
    value = {
        s.name: s.value
        for f in text_string_to_metric_families(text)
        for s in f.samples
        if "le" not in s.labels
    }
    steps = [line["plan"] for line in _lines(record) if "plan" in line]
    sizes = collections.Counter(len(plan["rows"]) for plan in steps if plan["rows"])
    mixed = sum(len({row[2] > 1 for row in plan["rows"]}) == 2 for plan in steps)
    batches = ", ".join(f"{_count(sizes[size], 'step')} of {size}" for size in sorted(sizes))
    live = json.loads(server.get("/debug/requests"))["requests"]
    queries, hits = value["vllm:prefix_cache_queries_total"], value["vllm:prefix_cache_hits_total"]
    seconds, count = value["fairlead_step_seconds_total"], value["fairlead_steps_total"]
    blocks, cached = value["fairlead_blocks"], value["fairlead_cached_blocks"]
    held = f"{value['vllm:kv_cache_usage_perc']:.0%} held by {len(live)} live requests"
    rows = (
        ("requests", f"{value['fairlead_arrivals_total']:.0f}"),
        ("prompt tokens", f"{value['vllm:prompt_tokens_total']:.0f}"),
        ("generated tokens", f"{value['vllm:generation_tokens_total']:.0f}"),
        ("steps", f"{count:.0f}, {1000 * seconds / max(1, count):.1f} ms each"),
        ("batch sizes", batches),
        ("prefill beside decode", f"in {_count(mixed, 'step')}"),
        ("prefix cache", f"{hits:.0f} of {queries:.0f} prompt tokens found"),
        ("blocks", f"{blocks:.0f}: {cached:.0f} cached, {held}"),
        ("preemptions", f"{value['vllm:num_preemptions_total']:.0f}"),
    )
    print("\nWhat the engine did")
    width = max(len(name) for name, _ in rows)
    for name, figure in rows:
        print(f"  {name:<{width}}  {figure}")


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def _stop(server: Server) -> int:
    server.process.send_signal(signal.SIGTERM)
    return server.process.wait(timeout=30)


def _print_busiest_step(record: Path) -> None:
    """Print the step with the most rows, as `fairlead trace` shows it."""
    shown = subprocess.run(
        [sys.executable, "-m", "fairlead_runtime", "trace", str(record)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    steps = ("step " + part for part in shown.split("\nstep ")[1:])
    busiest = max(steps, key=lambda step: sum(line.startswith("  [") for line in step.splitlines()))
    print("\nThe step with the most rows, as `fairlead trace` shows it")
    print(
        "\n".join("  " + line for line in busiest.splitlines() if line.startswith(("step", "  [")))
    )


def _lines(record: Path) -> Iterator[dict[str, dict[str, list[list[int]]]]]:
    with record.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def _message(line: str) -> str:
    try:
        message: str = json.loads(line).get("message", "")
    except ValueError:
        return ""
    return message


if __name__ == "__main__":
    sys.exit(main())
