"""Sides of a comparison that take turns, so that a machine whose speed changes is fair to all."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from tqdm import tqdm

OURS = "Fairlead"
Result = TypeVar("Result")


class Terms(NamedTuple):
    """``patience``: a side that takes more than that many times as long as ours in the first round
    does not run in the others. ``rest``: called before each turn.
    """

    rounds: int
    patience: float
    rest: Callable[[], None] = lambda: None


def take_turns(
    names: Sequence[str],
    terms: Terms,
    title: str,
    run: Callable[[str, int], Result],
    seconds: Callable[[Result], float],
) -> dict[str, list[Result]]:
    """What ``run`` returns for each side and round from 1 on; round 0 warms up. The order changes
    from round to round; in the first ours is the first. ``seconds``: those of a result. A side
    whose ``run`` raises RuntimeError or OSError is left out of this comparison.
    """
    found: dict[str, list[Result]] = {name: [] for name in names}
    slow: set[str] = set()
    turns = [(at, name) for at in range(terms.rounds + 1) for name in names[:: 1 if at % 2 else -1]]
    for number, name in tqdm(turns, desc=title, leave=False, disable=None):
        if name not in found or name in slow:
            continue
        terms.rest()
        try:
            result = run(name, number)
        except (RuntimeError, OSError) as error:
            print(f"{name}: left out of {title}, {type(error).__name__}: {error}", flush=True)
            del found[name]
            continue
        if number:
            found[name].append(result)
        if number == 1 and seconds(result) > terms.patience * seconds(found[OURS][0]):
            slow.add(name)
    return found


def rounds_of(taken: Sequence[object], ours: Sequence[object]) -> str:
    """What a table says of a side that did not run in all rounds."""
    return ", one round" if len(taken) < len(ours) else ""
