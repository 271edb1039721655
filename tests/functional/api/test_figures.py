"""Figures in seconds, and statistics, of real servers: in the long form only. Other tests hold the
same promises by counts and events.
"""

import hashlib
import hmac
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from fairlead_runtime.api.key_file import KeyRing
from fairlead_runtime.models import tiny
from support.serve_process import Process, hanging_device, serve, slow_device, stream_events

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save(tiny.build("llama"), tmp_path_factory.mktemp("llama")))


@contextmanager
def serving(model: str, *flags: str, **prepared: Any) -> Iterator[Process]:
    with serve(model, "--served-name=tiny", *flags, **prepared) as server:
        server.until_logged("serving")
        yield server


def test_a_hung_step_shows_in_the_probes_after_5_and_60_seconds(model: str) -> None:
    def until_refused(admin: httpx.Client, path: str) -> float:
        while admin.get(path).status_code == 200:
            time.sleep(0.02)
        return time.monotonic()

    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 90, "stream": True}
    with (
        serving(model, prepare=hanging_device) as server,
        server.client("admin") as admin,
        server.client() as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        events = stream_events(response)
        next(events)
        began = time.monotonic()
        # A state comes each second.
        assert 4 <= until_refused(admin, "/readyz") - began <= 6.5
        assert 58 <= until_refused(admin, "/healthz") - began <= 62


def test_readiness_ends_within_100_ms_of_sigterm_beside_100_streams(model: str) -> None:
    body = {
        "model": "tiny",
        "prompt": [1, 2, 3],
        "max_tokens": 900,
        "ignore_eos": True,
        "stream": True,
    }
    flags = ("--drain-grace=2", "--drain-timeout=60", "--num-blocks=8192")
    reached = threading.Semaphore(0)
    ends: list[Any] = []

    def read(server: Process) -> None:
        with (
            server.client() as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            events = stream_events(response)
            next(events)
            reached.release()
            *_, last = events
            ends.append(last)

    with serving(model, *flags, prepare=slow_device) as server, server.client("admin") as admin:
        readers = [threading.Thread(target=read, args=(server,)) for _ in range(100)]
        for reader in readers:
            reader.start()
        for _ in readers:
            reached.acquire()
        assert admin.get("/readyz").status_code == 200
        began = time.monotonic()
        server.terminate()
        while admin.get("/readyz").status_code == 200:
            pass
        assert time.monotonic() - began <= 0.1
        for reader in readers:
            reader.join()
        finished = time.monotonic()
        assert server.end() == 0
        assert time.monotonic() - max(finished, began + 2) <= 5, "seconds for the last bytes"
        assert ends == ["[DONE]"] * 100


def t_of(find: Callable[[bytes], Any], first: bytes, second: bytes, calls: int) -> float:
    """Welch's t of the times of ``find`` for two credentials, in random order; of each the slowest
    tenth is left out, as interruptions (Reparaz, Balasch and Verbauwhede: "dude, is my code
    constant time?", 2017).
    """
    rng, clock = random.Random(1), time.perf_counter_ns
    times: tuple[list[int], list[int]] = ([], [])
    for _ in range(calls):
        which = rng.getrandbits(1)
        credential = second if which else first
        began = clock()
        find(credential)
        times[which].append(clock() - began)
    means, errors = [], []
    for each in times:
        kept = sorted(each)[: len(each) * 9 // 10]
        mean = sum(kept) / len(kept)
        means.append(mean)
        errors.append(sum((value - mean) ** 2 for value in kept) / len(kept) ** 2)
    return (means[0] - means[1]) / math.sqrt(sum(errors))


def test_the_time_of_a_comparison_does_not_tell_how_close_a_key_is(tmp_path: Path) -> None:
    keys = [f"{number:02}" + "k" * 62 for number in range(16)]
    path = tmp_path / "keys"
    path.write_text("\n".join(keys))
    ring = KeyRing(str(path))
    far, close = b"x" * 64, keys[0][:-1].encode() + b"x"
    assert ring.find(far) is ring.find(close) is None
    assert abs(t_of(ring.find, far, close, 1_000_000)) < 4.5
    # The same statistic sees a search that ends at the first key that fits.
    digests = [key.digest for key in ring._keys]

    def ends_early(credential: bytes) -> bool:
        ring.refresh()
        digest = hashlib.sha256(credential).digest()
        return any(hmac.compare_digest(digest, each) for each in digests)

    assert abs(t_of(ends_early, keys[0].encode(), keys[-1].encode(), 20_000)) > 4.5
