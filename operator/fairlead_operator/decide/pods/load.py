"""One pod's load, read from what its ``/metrics`` says: a number that can be trusted, or none.

Owns the parsing of series and the refusal of everything doubtful. A wrong zero scales a busy fleet
down, so a missing, negative, NaN or infinite value is no value. Fetches nothing; timestamps in the
text are ignored, because a pod's clock may be wrong: the scraper's own clock dates a sample.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from fairlead_runtime.metric_names import MODEL, RUNNING, WAITING

MAX_BODY = 1 << 20  # bytes; a runtime's metrics take about 30 KB
MAX_REQUESTS = 1_000_000  # more in one pod is no load, it is a fault
FRESH_SECONDS = 15.0
LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*$")
ESCAPED = re.compile(r"\\(.)")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


class LoadError(ValueError):
    """Why a text gives no load."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one pod: in a batch, and waiting for one."""

    running: float
    waiting: float

    @property
    def total(self) -> float:
        return self.running + self.waiting

    @property
    def sane(self) -> bool:
        return all(
            math.isfinite(v) and 0 <= v <= MAX_REQUESTS for v in (self.running, self.waiting)
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """A pod's last good load and when it was read, in seconds of the scraper's monotonic clock."""

    load: Load
    at: float

    def fresh(self, now: float) -> bool:
        """Younger than 15 s, and not from the future: a clock that went back makes nothing fresh."""
        return 0 <= now - self.at < FRESH_SECONDS


def parse(text: str, model: str = "") -> Load:
    """The load in a Prometheus exposition (text format 0.0.4), summed over the engines of one pod.

    ``model``: the served name its series must carry; "" takes any. An address may by now belong to
    another pod. Raises LoadError, and never guesses.
    """
    if len(text) > MAX_BODY:
        raise LoadError(f"the body is longer than {MAX_BODY} bytes")
    found: dict[str, list[float]] = {RUNNING: [], WAITING: []}
    for name, _, number in series(text, found, model):
        if math.isnan(number) or number < 0:  # infinity is refused with the sum
            raise LoadError(f"{name} is {number}")
        found[name].append(number)
    for name, values in found.items():
        if not values:
            raise LoadError(f"{name} is missing" + (f" for model {model!r}" if model else ""))
    load = Load(sum(found[RUNNING]), sum(found[WAITING]))
    if not load.sane:
        raise LoadError(
            f"running {load.running} and waiting {load.waiting} are no numbers of requests"
        )
    return load


def series(
    text: str, names: Collection[str], model: str = ""
) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Name, labels and value of the series of these names that ``model`` serves. Raises LoadError
    at a line that is none.
    """
    for line in text.splitlines():
        if not line.startswith(tuple(names)):
            continue
        match = LINE.match(line)
        if match is None:
            raise LoadError(f"a line is malformed: {line[:80]!r}")
        name, body, value = match.groups()
        if name not in names:
            continue
        labels = dict(LABEL.findall(body or ""))
        if (
            model
            and ESCAPED.sub(lambda m: "\n" if m[1] == "n" else m[1], labels.get(MODEL, "")) != model
        ):
            continue
        try:
            yield name, labels, float(value)
        except ValueError:
            raise LoadError(f"{name} is {value[:40]!r}") from None
