"""A fake device whose cache slots hold stamps of what was written; every read checks them."""

from fairlead_runtime.request.logprobs import TokenLogprobs
from fairlead_runtime.request.sequence import Sequence
from fairlead_runtime.scheduling import Result, Row, Work
from fairlead_runtime.sizing.groups import NULL, LayerGroup
from support.whole_run_scenario import mix, next_token, start_stamp


class RunError(AssertionError):
    """The run went wrong; the message says where."""


def scores(sequence: Sequence, start: int, end: int) -> tuple[TokenLogprobs, ...]:
    """What a row scores of its prompt: the tokens after those at start..end-1 that are not scored
    yet. The rank stands for the position.
    """
    if not sequence.scores_prompt:
        return ()
    places = range(max(start, sequence.scored) + 1, min(end + 1, sequence.prompt_len))
    return tuple(TokenLogprobs(sequence.tokens[at], 0.0, at, (), ()) for at in places)


class Device:
    """A cache whose slots hold stamps of (salt, all tokens up to the position, group). A row must
    read its own stamps.

    With ``states`` a unit of a state is filled with the stamp of (salt, all tokens that it has
    seen, its place in the state). Rows write theirs before any row reads, so whatever is read may
    not be what this step writes.
    """

    def __init__(self, groups: tuple[LayerGroup, ...], size: int, *, states: bool = False) -> None:
        self.groups, self.size, self.states = groups, size, states
        self.units: dict[int, list[int]] = {}
        self.host: dict[int, list[int]] = {}
        self._stamps: dict[int, list[int]] = {}

    def stamps(self, sequence: Sequence) -> list[int]:
        """The stamps of all tokens of a sequence, by position."""
        stamps = self._stamps.setdefault(sequence.id, [])
        state = stamps[-1] if stamps else start_stamp(sequence.request)
        for token in sequence.tokens[len(stamps) :]:
            state = mix(state, token)
            stamps.append(state)
        return stamps

    def copy(self, work: Work) -> None:
        for device, host in work.offload:
            self.host[host] = list(self._unit(device))
        for host, device in work.restore:
            self.units[device] = list(self.host.pop(host))
        for source, target in work.copies:
            self.units[target] = list(self._unit(source))

    def forward(self, rows: list[Row], *, launched: bool = False) -> dict[int, Result]:
        """Of a launched step the device keeps the tokens: the next one may come before the host has
        them.
        """
        for row in rows:
            self._write(row)
        for row in rows:
            self._read(row)
            if self.states and row.start:
                self._read_state(row)
        results = {}
        for sequence, start, count, samples in rows:
            token, prompt = -1, scores(sequence, start, start + count)
            if samples:
                stamps = self.stamps(sequence)
                stamp = stamps[start + count - 1]
                token = next_token(stamp, sequence.request, sequence.choice, start + count)
                if launched:
                    stamps.append(mix(stamp, token))
            if samples or sequence.scores_prompt:
                results[sequence.id] = Result(token, prompt=prompt)
        return results

    def _unit(self, unit: int) -> list[int]:
        return self.units.setdefault(unit, [0] * self.size)

    def _write(self, row: Row) -> None:
        stamps = self.stamps(row.sequence)
        for group, table in zip(self.groups, row.sequence.tables, strict=True):
            for position in range(row.start, row.start + row.count):
                block, offset = divmod(position, self.size)
                self._unit(table[block])[offset] = stamps[position] ^ group.index
        if self.states:
            for place, unit in enumerate(row.sequence.state_target()):
                self.units[unit] = self._state(row, row.start + row.count, place)

    def _state(self, row: Row, tokens: int, place: int) -> list[int]:
        return [mix(self.stamps(row.sequence)[tokens - 1], -1 - place)] * self.size

    def _read_state(self, row: Row) -> None:
        for place, unit in enumerate(row.sequence.state_source()):
            if self.units.get(unit) != self._state(row, row.start, place):
                raise RunError(
                    f"sequence {row.sequence.id} reads another state at {row.start}, unit {place}"
                )

    def _read(self, row: Row) -> None:
        end = row.start + row.count
        stamps = self.stamps(row.sequence)
        for group, table in zip(self.groups, row.sequence.tables, strict=True):
            oldest = 0 if group.window is None else max(0, row.start - group.window + 1)
            for block in range(oldest // self.size, -(-end // self.size)):
                first, last = max(oldest, block * self.size), min(end, (block + 1) * self.size)
                if table[block] == NULL:
                    raise RunError(
                        f"sequence {row.sequence.id} reads block {block} that its window freed"
                    )
                stored = self._unit(table[block])[
                    first % self.size : first % self.size + last - first
                ]
                if stored != [stamp ^ group.index for stamp in stamps[first:last]]:
                    raise RunError(
                        f"sequence {row.sequence.id} reads other keys at {first}..{last - 1}"
                    )
