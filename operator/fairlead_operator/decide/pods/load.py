"""One pod's load, read from its ``/metrics``: a number that can be trusted, or none.

Owns the reading of series and the refusal of everything doubtful. A wrong zero scales a busy fleet
down, so a missing, negative, NaN or infinite value is refused. Fetches nothing. Ignores timestamps
in the text, because a pod's clock may be wrong: the scraper's own clock dates a sample.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from fairlead_runtime.metric_names import (
    MODEL,
    REQUEST_GENERATION_TOKENS,
    REQUEST_PROMPT_TOKENS,
    RUNNING,
    WAITING,
)

MAX_BODY = 1 << 20  # bytes; a runtime's metrics take about 30 KB
MAX_LINES, MAX_LINE = 40, 1000  # the parser's time grows with the square of a line
MAX_REQUESTS = 1_000_000  # more in one pod are a fault of its metrics
FRESH_SECONDS = 15.0


class LoadError(ValueError):
    """Why a text holds no load."""


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
class Served:
    """The requests that a pod has finished, and their prompt and output tokens."""

    requests: float = 0.0
    tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A pod's last good load and when it was read, in seconds of the scraper's monotonic clock."""

    load: Load
    at: float
    served: Served = Served()

    def fresh(self, now: float) -> bool:
        """Younger than 15 s, and not from the future: a clock that jumps back makes none fresh."""
        return 0 <= now - self.at < FRESH_SECONDS


def parse(text: str, model: str = "") -> Load:
    """The load in a Prometheus exposition (text format 0.0.4), summed over the engines of one pod.

    ``model``: the served name its series must carry, because an address may by now belong to
    another pod; "" takes any. Raises LoadError, and never guesses.
    """
    if len(text) > MAX_BODY:
        raise LoadError(f"the body is longer than {MAX_BODY} bytes")
    values_of: dict[str, list[float]] = {RUNNING: [], WAITING: []}
    for name, _, number in series(text, values_of, model):
        if math.isnan(number) or number < 0:  # infinity is refused with the sum
            raise LoadError(f"{name} is {number}")
        values_of[name].append(number)
    for name, values in values_of.items():
        if not values:
            raise LoadError(f"{name} is missing" + (f" for model {model!r}" if model else ""))
    load = Load(sum(values_of[RUNNING]), sum(values_of[WAITING]))
    if not load.sane:
        raise LoadError(
            f"running {load.running} and waiting {load.waiting} are not numbers of requests"
        )
    return load


def served(text: str, model: str = "") -> Served:
    """The requests that the pod's histograms of lengths have seen; none where one is doubtful."""
    names = [
        f"{histogram}_{part}"
        for histogram in (REQUEST_PROMPT_TOKENS, REQUEST_GENERATION_TOKENS)
        for part in ("sum", "count")
    ]
    values = dict.fromkeys(names, 0.0)
    try:
        for name, _, number in series(text, names, model):
            values[name] += number
    except LoadError:
        return Served()
    prompt, prompts, output, outputs = values.values()
    if not all(0 <= number < math.inf for number in values.values()) or prompts != outputs:
        return Served()
    return Served(outputs, prompt + output)


def series(
    text: str, names: Collection[str], model: str = ""
) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Name, labels and value of the series of these names that ``model`` serves.

    Parses the lines of these names alone: a whole body takes the library 30 times as long. Raises
    LoadError if one is malformed, or if they are more than any runtime has.
    """
    wanted = _lines(text, names)
    if len(wanted) > MAX_LINES or any(len(line) > MAX_LINE for line in wanted):
        raise LoadError(f"there are more than {MAX_LINES} series, or one of over {MAX_LINE} bytes")
    # Here, because `fairlead backtest` reads no metrics and runs without this library.
    from prometheus_client.parser import text_string_to_metric_families

    try:
        families = list(text_string_to_metric_families("\n".join(wanted)))
        samples = [(s.name, s.labels, float(s.value)) for one in families for s in one.samples]
    except (ValueError, IndexError, OverflowError):
        raise LoadError("a series is malformed") from None
    for name, labels, value in samples:
        if name in names and (not model or labels.get(MODEL) == model):
            yield name, labels, value


def _lines(text: str, names: Iterable[str]) -> list[str]:
    """The lines that begin with one of these names, in order. Searches for each name: nearly all
    lines are of other series, and to split them off takes most of a scrape's time.
    """
    text = f"\n{text}\n"
    starts: set[int] = set()
    for name in names:
        at = -1
        while (at := text.find(f"\n{name}", at + 1)) >= 0:
            starts.add(at + 1)
    return [text[at : text.index("\n", at)] for at in sorted(starts)]
