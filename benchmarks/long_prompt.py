"""A long prompt that arrives while others decode, over HTTP: how much it disturbs them.

`cpu_peers.py` runs it and says more. DECODES streams begin together, from SHORT tokens each; when
the slowest of them has had BEFORE texts, a request with a prompt of LONG tokens arrives. Measured
at the client: the seconds from the first request to the end of the last, the worst gap between two
texts of a decode after the arrival, and how long the long one waits for its first text.

The servers are those of `http_peers.py` that batch continuously, with their default settings, and a
small one around OpenVINO GenAI, whose package has none (`openvino_server.py`). llama.cpp is not
here: its Python package has a server that answers one request at a time.
"""

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import http_peers, peers
from benchmarks.http_peers import Server, spread
from benchmarks.turns import OURS, Terms, rounds_of, take_turns

DECODES, SHORT, EACH, BEFORE = 8, 16, 200, 20
LONG, ANSWER = 2048, 16
WARM = 40  # new tokens of each decode in the warm-up


def _openvino(model: str, port: int) -> list[str]:
    program = str(Path(__file__).with_name("openvino_server.py"))
    return [str(peers.OPENVINO.programs() / "python"), program, model, str(port)]


# By the names of their engines.
KINDS = {
    OURS: http_peers.KINDS[OURS],
    "transformers, continuous batching": http_peers.KINDS[
        "transformers serve, continuous batching"
    ],
    "OpenVINO GenAI": http_peers.Kind(peers.OPENVINO.versions, _openvino, {}, {}),
    "vLLM on CPU": http_peers.KINDS["vLLM on CPU"],
}


class Arrival(NamedTuple):
    """Seconds: from the first request to the end of all; the worst gap of a decode; to the first
    text of the long one.
    """

    total: float
    gap: float
    first: float


WHAT = {"total": "s in all", "gap": "s of the worst gap", "first": "s to the first text"}


class Times(list[float]):
    """When the texts of a decode came; ``enough`` is set when it has had BEFORE."""

    def __init__(self) -> None:
        super().__init__()
        self.enough = asyncio.Event()

    def append(self, time: float) -> None:
        super().append(time)
        if len(self) == BEFORE:
            self.enough.set()


async def _arrive(server: Server, draw: random.Random, tokens: int) -> Arrival:
    began = time.perf_counter()
    times = [Times() for _ in range(DECODES)]
    decodes = [
        asyncio.create_task(server.stream(http_peers.characters(draw, SHORT), tokens, one))
        for one in times
    ]
    decoding: asyncio.Future[Any] = asyncio.gather(*(one.enough.wait() for one in times))
    # A decode that ends first has failed: waiting for it, below, says how.
    ends: list[asyncio.Future[Any]] = [decoding, *decodes]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    arrived = time.perf_counter()
    long: list[float] = []
    await server.stream(http_peers.characters(draw, LONG), ANSWER, long)
    await asyncio.gather(*decodes)
    ended = time.perf_counter()
    gaps = [  # between events: a server may send several tokens in one
        after - before
        for one in times
        for before, after in itertools.pairwise(one)
        if after > arrived
    ]
    return Arrival(ended - began, max(gaps), long[0] - arrived)


def compare(model: Path, names: Sequence[str], terms: Terms) -> dict[str, dict[str, list[float]]]:
    """Print the table of the servers among ``names``, on the model in this folder. Returns the
    seconds by what was measured and server.
    """
    kinds = {name: kind for name, kind in KINDS.items() if name in names}
    draw = random.Random(0)
    with http_peers.started(str(model), model, kinds) as servers:
        if OURS not in servers:
            return {}

        def run(name: str, number: int) -> Arrival:
            return asyncio.run(_arrive(servers[name], draw, EACH if number else WARM))

        found = take_turns(list(servers), terms, "long prompt", run, attrgetter("total"))
    print(f"\n{LONG} tokens among {DECODES} decodes, over HTTP, {terms.rounds} rounds\n")
    print(f"| server | {' | / ours | '.join(WHAT.values())} | / ours |\n{7 * '|---'}|")
    print(*_rows(found), sep="\n", flush=True)
    return {
        f"long prompt, {title}": {
            name: [getattr(one, field) for one in taken] for name, taken in found.items()
        }
        for field, title in WHAT.items()
    }


def _rows(found: Mapping[str, Sequence[Arrival]]) -> Iterator[str]:
    ours = found[OURS]
    for name, taken in found.items():
        cells = [name + rounds_of(taken, ours)]
        for field in WHAT:
            values = [getattr(one, field) for one in taken]
            own = [getattr(one, field) for one in ours]
            ratios = [value / each for value, each in zip(values, own, strict=False)]
            cells += [spread(values, 2), f"{statistics.median(ratios):.2f}"]
        yield f"| {' | '.join(cells)} |"
