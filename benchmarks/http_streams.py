"""Many streams at once on the real HTTP process: how many it refuses, and what each takes.

    .venv/bin/python benchmarks/http_streams.py [--streams 4096] [--against DIR] [--tls]

The engine has no model (http_noop.py): every stream gets a token each 2 seconds, so at the look at
the memory none is being written. All streams are open before the first one ends. ``--against``:
another checkout, measured after this one. Client, HTTP process and engine share the machine.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import resource
import ssl
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from tokenizers import Tokenizer

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "tests"))

from benchmarks.http_peers import free_port
from benchmarks.http_server import environment

from support.certificates import make_pair

PACE, TOKENS = 2.0, 40  # seconds between two tokens; of a stream
AT_ONCE = 512  # streams that are being opened


class Server:
    """A server of ``checkout`` for so many streams."""

    def __init__(self, folder: Path, checkout: Path, streams: int, flags: tuple[str, ...]) -> None:
        from fairlead_runtime.hub import source

        tokenizer = Tokenizer.from_file(str(source.resolve("demo:").path / "tokenizer.json"))
        sizes = (tokenizer.token_to_id("a"), tokenizer.get_vocab_size())
        arguments = [str(PACE), *map(str, sizes), str(folder / f"{checkout.name}.jsonl")]
        benchmarks = str(checkout / "benchmarks")
        code = (
            f"import sys; sys.path.append({benchmarks!r}); import http_noop; "
            f"http_noop.replace_engine(*{arguments!r}); "
            "from fairlead_runtime.cli import main; sys.exit(main(sys.argv[1:]))"
        )
        self.port, self._admin = free_port(), free_port()
        ports = (f"--port={self.port}", f"--admin-port={self._admin}", "--drain-grace=0")
        more = (*ports, f"--max-requests={streams}", "--max-batch-tokens=65536", *flags)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, "serve", "demo:", "--log-level=warning", *more],
            env=environment(checkout),
        )
        self._wait()

    def _wait(self) -> None:
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{self._admin}/readyz").status_code == 200:
                    return
            except httpx.ConnectError:
                assert self._process.poll() is None, "the server ended"
            time.sleep(0.5)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def resident(self) -> float:
        """MiB of the HTTP process."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 2**20

    async def look(self, streams: int, context: ssl.SSLContext | None) -> str:
        """Open the streams, look at the memory, read them to their ends."""
        body = {"prompt": [10, 11], "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
        request = f"{head}content-type: application/json\r\n\r\n".encode() + content
        statuses: collections.Counter[str] = collections.Counter()
        ends: collections.Counter[bool] = collections.Counter()
        opening = asyncio.Semaphore(AT_ONCE)
        everyone = asyncio.Barrier(streams + 1)

        async def stream() -> None:
            async with opening:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=context)
                writer.write(request)
                statuses[(await reader.readline()).split()[1].decode()] += 1
            await reader.readuntil(b"\r\n\r\n")
            await everyone.wait()
            with contextlib.suppress(ConnectionResetError):  # of those that are refused
                ends[b"[DONE]" in await reader.read()] += 1
            writer.close()

        before, began = self.resident(), time.perf_counter()
        running = [asyncio.create_task(stream()) for _ in range(streams)]
        await everyone.wait()
        seconds, after = time.perf_counter() - began, self.resident()
        each = (after - before) * 1024 / max(1, statuses["200"])
        await asyncio.gather(*running)
        return (
            f"{dict(statuses)} in {seconds:.1f} s, {ends[True]} whole; {before:.0f} MiB before, "
            f"{after:.0f} with all: {each:.1f} KiB a stream"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=4096)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--tls", action="store_true")
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    here = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        flags: tuple[str, ...] = ()
        context = None
        if options.tls:
            pair = make_pair(Path(folder), "a")
            flags = (f"--ssl-certfile={pair.certificate}", f"--ssl-keyfile={pair.key}")
            context = ssl.create_default_context(cafile=str(pair.certificate))
            context.check_hostname = False
        for checkout in filter(None, (here, options.against)):
            server = Server(Path(folder), checkout, options.streams, flags)
            try:
                print(checkout.name, asyncio.run(server.look(options.streams, context)))
            finally:
                server.close()


if __name__ == "__main__":
    main()
