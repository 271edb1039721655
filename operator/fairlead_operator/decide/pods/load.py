"""One pod's load, read from its ``/metrics``: a number that can be trusted, or none.

Owns the reading of series and the refusal of everything doubtful. A wrong zero scales a busy fleet
down, so a missing, negative, NaN or infinite value is refused. Fetches nothing. Ignores timestamps
in the text, because a pod's clock may be wrong: the scraper's own clock dates a sample.
"""

import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from fairlead_runtime.settings.metric_names import (
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
LENGTHS = tuple(
    f"{histogram}_{part}"
    for histogram in (REQUEST_PROMPT_TOKENS, REQUEST_GENERATION_TOKENS)
    for part in ("sum", "count")
)
SERIES = (RUNNING, WAITING, *LENGTHS)  # all that is read here


class LoadError(ValueError):
    """A text that holds no load; the message says why."""


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
class ServedRequests:
    """The requests that a pod has finished, and their prompt and output tokens."""

    requests: float = 0.0
    tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A pod's last good load and when it was read, in seconds of the scraper's monotonic clock."""

    load: Load
    at: float
    served: ServedRequests = ServedRequests()

    def fresh(self, now: float) -> bool:
        """Whether the sample is younger than 15 s, and not from the future: a clock that jumps back
        makes none fresh.
        """
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


def parse_served(text: str, model: str = "") -> ServedRequests:
    """The requests that the pod's histograms of lengths have seen; none where one is doubtful."""
    values = dict.fromkeys(LENGTHS, 0.0)
    try:
        for name, _, number in series(text, LENGTHS, model):
            values[name] += number
    except LoadError:
        return ServedRequests()
    prompt, prompts, output, outputs = values.values()
    if not all(0 <= number < math.inf for number in values.values()) or prompts != outputs:
        return ServedRequests()
    return ServedRequests(outputs, prompt + output)


def lines_of(text: str, names: Iterable[str]) -> str:
    """The lines of a text that begin with one of these names, in order. Nearly all lines of a body
    are of other series; a caller that reads it more than once keeps these.
    """
    starts = tuple(names)
    return "\n".join(line for line in text.split("\n") if line.startswith(starts))


def series(
    text: str, names: Collection[str], model: str = ""
) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Name, labels and value of the series of these names that ``model`` serves.

    Parses the lines of these names alone: a whole body takes the library 30 times as long. Raises
    LoadError if one is malformed, or if they are more than any runtime has.
    """
    lines = [line for line in lines_of(text, names).split("\n") if line]
    if len(lines) > MAX_LINES or any(len(line) > MAX_LINE for line in lines):
        raise LoadError(f"there are more than {MAX_LINES} series, or one of over {MAX_LINE} bytes")
    try:
        samples = [_sample(line) for line in lines]
    except (ValueError, IndexError, OverflowError):
        raise LoadError("a series is malformed") from None
    for name, labels, value in samples:
        if name in names and (not model or labels.get(MODEL) == model):
            yield name, labels, value


def _sample(line: str) -> tuple[str, Mapping[str, str], float]:
    """One line, parsed by the library. The text before the value is the same in each scrape and
    costs it most, so that its result is kept. Raises ValueError, IndexError or OverflowError.
    """
    head, _, value = line.rpartition(" ")
    if "_" not in value and (known := _parse_head(head)) is not None:
        return *known, float(value)
    (name, labels, number, _), *more_samples = _parse_line(line)
    if more_samples:
        raise ValueError(line)
    return name, labels, number


@functools.lru_cache(maxsize=10_000)  # eight heads for each model; at most 1,000 bytes each
def _parse_head(head: str) -> tuple[str, Mapping[str, str]] | None:
    """Name and labels, if a value alone may follow: None for a line that ends with a timestamp."""
    try:
        ((name, labels, number, timestamp),) = _parse_line(f"{head} 0")
    except (ValueError, IndexError, OverflowError):
        return None
    return (name, labels) if number == 0 and timestamp is None else None


def _parse_line(line: str) -> list[tuple[str, Mapping[str, str], float, object]]:
    # Here, because `fairlead backtest` reads no metrics and runs without this library.
    from prometheus_client.parser import text_string_to_metric_families

    families = text_string_to_metric_families(line)
    return [(s.name, s.labels, float(s.value), s.timestamp) for f in families for s in f.samples]
