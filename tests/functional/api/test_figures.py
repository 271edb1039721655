"""Figures that are statistics or take long: in the long form only. Other tests hold the same
promises by counts and events.
"""

import hashlib
import hmac
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fairlead_runtime.api.key_file import KeyRing

pytestmark = pytest.mark.full


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
