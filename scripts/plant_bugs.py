"""Plant known bugs in a copy of scheduler and cache, one at a time; the whole-run property must
catch each.

    .venv/bin/python scripts/plant_bugs.py [--seeds 60] [--jobs 2] [--only NAME]

Exit code: 0 if all were caught, 1 if one was missed, 2 if the text of a bug does not occur exactly
once in its place or a run broke.
"""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from planted import anchor
from planted.hunting import Outcome, Runs, Verdict, end_on_sigterm, exit_code, hunt_all

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "runtime" / "fairlead_runtime"
SUPPORT = ROOT / "tests" / "support"
HARNESS = [SUPPORT / f"whole_run{part}.py" for part in ("", "_device", "_scenario")]

RUN = """
import sys, pathlib
import fairlead_runtime
from support import whole_run
here = pathlib.Path(sys.argv[1])
for module in (fairlead_runtime, whole_run):
    assert here in pathlib.Path(module.__file__).parents, module.__file__
for seed in range(int(sys.argv[2]), int(sys.argv[2]) + int(sys.argv[3])):
    error = whole_run.fails(whole_run.draw(seed))
    if error is not None:
        print(f"seed {seed}: {type(error).__name__}: {error}".splitlines()[0][:110])
        sys.exit(9)
"""
SECONDS = 300.0  # a run without a bug takes less than a tenth


class Bug(NamedTuple):
    """In place (``planted.anchor``) ``old`` becomes ``new``."""

    name: str
    place: str
    old: str
    new: str
    first: int = 0  # the first seed, for a bug that early seeds do not show


BUGS = (
    Bug(
        "a freed block is forgotten",
        "fairlead_runtime.cache.blocks:BlockPool.release",
        "                    self.free.append(unit)\n",
        "                    pass\n",
    ),
    Bug(
        "a freed block goes back twice",
        "fairlead_runtime.cache.blocks:BlockPool.release",
        "                    self.free.append(unit)\n",
        "                    self.free += [unit, unit]\n",
    ),
    Bug(
        "an evicted block is forgotten",
        "fairlead_runtime.cache.blocks:BlockPool.forget",
        "            del self.cached[unit]\n            self.free.append(unit)\n",
        "            del self.cached[unit]\n",
    ),
    Bug(
        "a shared block is freed with its first owner",
        "fairlead_runtime.cache.blocks:BlockPool.release",
        "refs[unit] -= 1",
        "refs[unit] = 0",
    ),
    Bug(
        "a hit takes no reference",
        "fairlead_runtime.cache.blocks:BlockPool.share",
        "            refs[unit] += 1",
        "            pass",
    ),
    Bug(
        "a hit leaves the block evictable",
        "fairlead_runtime.cache.blocks:BlockPool.share",
        "                del cached[unit]\n            refs[unit] += 1\n",
        "            refs[unit] += 1\n",
    ),
    Bug(
        "an evicted block can still be found",
        "fairlead_runtime.cache.blocks:BlockPool.forget",
        "del self._index[self._group[unit]][digest]",
        "pass",
    ),
    Bug(
        "equal content overwrites the index",
        "fairlead_runtime.cache.blocks:BlockPool.register",
        " and digest not in self._index[group]",
        "",
    ),
    Bug(
        "the salt is left out of the hash",
        "fairlead_runtime.cache.prefix:root",
        "+ identity + salt",
        "+ identity",
    ),
    Bug(
        "the parent is left out of the hash",
        "fairlead_runtime.cache.prefix:extend_chain",
        "sha256(parent + packed[at",
        "sha256(packed[at",
    ),
    Bug(
        "a window hit ends one block too early",
        "fairlead_runtime.cache.prefix:_longest_window_hit",
        "at > group.first_block",
        "at - 1 > group.first_block",
        3,
    ),
    Bug(
        "the hit covers the whole prompt",
        "fairlead_runtime.cache.paged:PagedCache.hit",
        "until = len(sequence.tokens) - 1",
        "until = len(sequence.tokens)",
    ),
    Bug(
        "the window frees a block too early",
        "fairlead_runtime.sizing.groups:LayerGroup.first_block",
        "position - self.window + 1)",
        "position - self.window + 1 + block_size)",
    ),
    Bug(
        "the window frees a block too late",
        "fairlead_runtime.sizing.groups:LayerGroup.first_block",
        "position - self.window + 1)",
        "position - self.window + 1 - block_size)",
    ),
    Bug(
        "a block is one token short",
        "fairlead_runtime.cache.paged:PagedCache.blocks",
        "return -(-tokens // self.block_size)",
        "return tokens // self.block_size + 1",
    ),
    Bug(
        "a block is shareable before its forward pass",
        "fairlead_runtime.scheduling.scheduler:Scheduler.commit",
        "                cache.grow(sequence, start + count)\n",
        (
            "                cache.grow(sequence, start + count)\n"
            "                sequence.computed = start + count\n"
            "                cache.finish_forward(sequence)\n"
            "                sequence.computed = start\n"
        ),
        3,
    ),
    Bug(
        "partial blocks are registered",
        "fairlead_runtime.cache.paged:PagedCache.finish_forward",
        "full = min(computed, self._shared_end(sequence)) // self.block_size",
        "full = self.blocks(min(computed, self._shared_end(sequence)))",
    ),
    Bug(
        "a fork copies another block as its tail",
        "fairlead_runtime.cache.paged:PagedCache.copy_tail",
        "(source[full], target[full])",
        "(source[0], target[full])",
    ),
    Bug(
        "a fork's tail is not copied",
        "fairlead_runtime.scheduling.scheduler:Scheduler._add_copies",
        "work.copies += self",
        "_ = self",
    ),
    Bug(
        "a fork takes no references",
        "fairlead_runtime.cache.paged:PagedCache.fork",
        "            self.pool.share(table[first:full])",
        "            pass",
    ),
    Bug(
        "a fork begins before its sibling has the prompt",
        "fairlead_runtime.cache.paged:PagedCache.can_fork",
        "if sibling.computed < tokens or",
        "if",
    ),
    Bug(
        "host units are not given back",
        "fairlead_runtime.cache.paged:PagedCache.restore",
        "        self.host.release(host)\n",
        "",
        15,
    ),
    Bug(
        "an aborted offload keeps its host units",
        "fairlead_runtime.cache.paged:PagedCache.release",
        "        self.host.release(list(_units_of(sequence.host)))\n",
        "",
        17,
    ),
    Bug(
        "a restore leaves out its last block",
        "fairlead_runtime.cache.paged:PagedCache.restore",
        "sequence.registered = 0\n        return pairs",
        "sequence.registered = 0\n        return pairs[:-1]",
        15,
    ),
    Bug(
        "an offload is copied after its blocks are taken",
        "fairlead_runtime.scheduling.scheduler:Scheduler._preempt",
        "work.offload += self",
        "work.copies += self",
        15,
    ),
    Bug(
        "an offload forgets how far it was",
        "fairlead_runtime.cache.paged:PagedCache.restore",
        "        sequence.registered = 0\n        return pairs",
        "        sequence.registered = sequence.computed = 0\n        return pairs",
        15,
    ),
    Bug(
        "a soft reset drops a generated token",
        "fairlead_runtime.scheduling.scheduler:Scheduler._preempt",
        "            self.state.cache.release(sequence)\n",
        (
            "            self.state.cache.release(sequence)\n"
            "            sequence.tokens[sequence.prompt_len + 1 :] = []\n"
        ),
    ),
    Bug(
        "a soft reset keeps its count of computed tokens",
        "fairlead_runtime.cache.paged:PagedCache.release",
        "sequence.computed = sequence.registered = 0",
        "sequence.registered = 0",
    ),
    Bug(
        "the oldest is the victim",
        "fairlead_runtime.scheduling.planner:_Draft._preempt_youngest",
        "victim = max(",
        "victim = min(",
        3,
    ),
    Bug(
        "a victim's row stays in the step",
        "fairlead_runtime.scheduling.planner:_Draft._preempt_youngest",
        "self.rows.pop(victim.id, None)",
        "self.rows.get(victim.id)",
    ),
    Bug(
        "a step that preempted admits too",
        "fairlead_runtime.scheduling.planner:_Draft.admit",
        "if self.preempted or not self.tokens:",
        "if not self.tokens:",
    ),
    Bug(
        "admission looks at the first chunk only",
        "fairlead_runtime.scheduling.planner:_Draft._candidate",
        "need = start_units + self.cache.growth(sequence, admission.start)",
        (
            "first = admission.start\n"
            "        chunk = min(self.tokens, len(sequence.tokens) - first)\n"
            "        need = start_units + self.cache.units(first, first + chunk)"
        ),
    ),
    Bug(
        "a claimed cached block counts as free",
        "fairlead_runtime.scheduling.planner:_Draft._candidate",
        "start_units = len(claimed)",
        "start_units = 0",
    ),
    Bug(
        "a copied tail is not counted",
        "fairlead_runtime.scheduling.planner:_Draft._candidate",
        "len(self.cache.groups) if shared % self.cache.block_size else 0",
        "0",
    ),
    Bug(
        "one request more than allowed runs",
        "fairlead_runtime.scheduling.planner:_Draft._ends_admission",
        "or places <= 0",
        "or self.slots < 0",
    ),
    Bug(
        "the token budget is not charged for prompts",
        "fairlead_runtime.scheduling.planner:_Draft._start",
        "        self.tokens -= count\n        self.free -= candidate",
        "        self.free -= candidate",
    ),
    Bug(
        "nothing waits for the victim",
        "fairlead_runtime.scheduling.reservations:Reservations.add",
        "ACCRUAL_STEPS if sequence.preemptions else ",
        "",
        10_000,
    ),
    Bug(
        "a sequence that lacks blocks starts",
        "fairlead_runtime.scheduling.planner:_Draft._may_start",
        "        if candidate.need > self._room:\n            return False\n",
        "",
    ),
    Bug(
        "nobody gets a reservation",
        "fairlead_runtime.scheduling.reservations:Reservations.takes",
        "self._preempted == len(self.sequences)",
        "False",
        3,
    ),
    Bug(
        "a preempted sequence behind a head gets no reservation",
        "fairlead_runtime.scheduling.reservations:Reservations.takes",
        "return sequence.preemptions > 0 or",
        "return",
        10_000,
    ),
    Bug(
        "every blocked sequence is a head",
        "fairlead_runtime.scheduling.reservations:Reservations.takes",
        "self._preempted == len(self.sequences)",
        "len(self.sequences) < RESERVATIONS",
        10_000,
    ),
    Bug(
        "a reservation never grows",
        "fairlead_runtime.scheduling.reservations:Reservations.add",
        "claim.need * waited //",
        "0 * waited //",
        10_000,
    ),
    Bug(
        "a reservation is whole at once",
        "fairlead_runtime.scheduling.reservations:Reservations.add",
        "claim.need * waited // ACCRUAL_STEPS",
        "claim.need",
        10_000,
    ),
    Bug(
        "a reservation starts again in every step",
        "fairlead_runtime.scheduling.scheduler:Scheduler.commit",
        "if sequence.blocked_since is None:",
        "if True:",
        10_000,
    ),
    Bug(
        "nothing ends before an entry starts",
        "fairlead_runtime.scheduling.reservations:Reservations.leave",
        "if claim.steps > steps and claim.most > spare:",
        "if claim.most > spare:",
        10_000,
    ),
    Bug(
        "everything ends before an entry starts",
        "fairlead_runtime.scheduling.reservations:Reservations.leave",
        "if claim.steps > steps and claim.most > spare:",
        "if False:",
        10_000,
    ),
    Bug(
        "nothing fits beside an entry that starts",
        "fairlead_runtime.scheduling.reservations:Reservations.leave",
        "if claim.steps > steps and claim.most > spare:",
        "if claim.steps > steps:",
        10_000,
    ),
    Bug(
        "an entry that waits is no obstacle to later ones",
        "fairlead_runtime.scheduling.reservations:Reservations._latest_start",
        "sum(most for start, end, most in older if start <= moment < end)",
        "0",
        10_000,
    ),
    Bug(
        "behind a preempted sequence nobody is a head",
        "fairlead_runtime.scheduling.reservations:Reservations.takes",
        "self._preempted == len(self.sequences)",
        "not self.sequences",
        10_000,
    ),
    Bug(
        "an entry starts before an older one that it delays",
        "fairlead_runtime.scheduling.reservations:Reservations._latest_start",
        "if spare >= 0 and self._is_early(claim, moment):",
        "if spare >= 0:",
        10_000,
    ),
    Bug(
        "a prompt's chunks take no steps",
        "fairlead_runtime.scheduling.planner:_Draft._claim",
        "self._prompt_steps(rest) if rest > 0 else 0",
        "0",
        10_000,
    ),
    Bug(
        "a running prompt's chunks take no steps",
        "fairlead_runtime.scheduling.planner:_Draft._holders",
        "prompts if s in self.cut else 0",
        "0",
        10_000,
    ),
    Bug(
        "what running prompts lack is free",
        "fairlead_runtime.scheduling.planner:_Draft._room",
        "self.free - self.lacking - ",
        "self.free - ",
        10_000,
    ),
    Bug(
        "the spare beside an entry is given twice",
        "fairlead_runtime.scheduling.reservations:Reservations.start",
        "self._starts[at] = steps, spare - claim.most",
        "pass",
        10_000,
    ),
    Bug(
        "an entry's start ignores the margin",
        "fairlead_runtime.scheduling.planner:_Draft.__init__",
        "state.cache.pool.units - state.margin, self._holders",
        "state.cache.pool.units, self._holders",
        10_000,
    ),
    Bug(
        "an entry's start stays when one that delays it has started",
        "fairlead_runtime.scheduling.reservations:Reservations.start",
        "self._starts.clear()",
        "pass",
        10_000,
    ),
    Bug(
        "a shared block is computed by all",
        "fairlead_runtime.scheduling.planner:_Draft._waits_for_block",
        "if not self._leaders or",
        "if True or",
    ),
    Bug(
        "a block is computed twice in the step that starts it",
        "fairlead_runtime.scheduling.planner:_Draft._start",
        "            self._lead(sequence, start)\n",
        "            pass\n",
        6,
    ),
    Bug(
        "a prefix waits for decodes too",
        "fairlead_runtime.scheduling.planner:_prefills",
        "return sequence.status is Status.PREFILLING",
        "return sequence.id >= 0",
        252,
    ),
    Bug(
        "a prefix waits for its own last block",
        "fairlead_runtime.scheduling.planner:_Draft._shares_block",
        "start, keep=1)",
        "start)",
        3,
    ),
    Bug(
        "a choice does not wait for its sibling",
        "fairlead_runtime.scheduling.planner:_Draft._waits_for_sibling",
        "return starting or any(s.computed < shared for s in running)",
        "return False",
    ),
    Bug(
        "a choice ends the admissions",
        "fairlead_runtime.scheduling.planner:_Draft.admit",
        "                continue\n            elif not",
        "                return\n            elif not",
    ),
    Bug(
        "choices share their tokens while they run",
        "fairlead_runtime.scheduling.scheduler:Scheduler._start",
        "            sequence.tokens = sequence.tokens[:]\n",
        "            pass\n",
    ),
    Bug(
        "choices share their digests while they run",
        "fairlead_runtime.scheduling.scheduler:Scheduler._start",
        "            sequence.hashes = sequence.hashes[:]\n",
        "",
    ),
    Bug(
        "the safety margin is ignored",
        "fairlead_runtime.scheduling.planner:State.margin",
        "self.limits.safety_margin * self",
        "0 * self",
        15,
    ),
    Bug(
        "the margin applies when nothing runs",
        "fairlead_runtime.scheduling.planner:_Draft._room",
        "self.state.margin if runs else 0",
        "self.state.margin",
        6,
    ),
    Bug(
        "decodes wait for prefills",
        "fairlead_runtime.scheduling.planner:_drafted",
        "if state.policy.prefills_first:",
        "if not state.policy.prefills_first:",
    ),
    Bug(
        "the bound on prompts holds without decodes",
        "fairlead_runtime.scheduling.planner:_Draft.bound_prefills",
        "decodes, bound = len(self.rows), ",
        "decodes, bound = max(1, len(self.rows)), ",
        16,
    ),
    Bug(
        "the youngest waits at the front",
        "fairlead_runtime.scheduling.policies:Fifo.place",
        "return (sequence.id,)",
        "return (-sequence.id,)",
    ),
    Bug(
        "priority is upside down",
        "fairlead_runtime.scheduling.policies:Priority.place",
        "(sequence.request.priority, sequence.id)",
        "(-sequence.request.priority, sequence.id)",
    ),
    Bug(
        "a finished sequence keeps its blocks",
        "fairlead_runtime.scheduling.scheduler:Scheduler._end",
        "        else:\n            self._release(sequence)\n        del self._live[sequence.id]\n",
        "        del self._live[sequence.id]\n",
    ),
    Bug(
        "an aborted waiting one stays queued",
        "fairlead_runtime.scheduling.scheduler:Scheduler._end",
        (
            "        if sequence.status is Status.PENDING:\n"
            "            self.state.policy.remove(sequence)\n"
        ),
        "        if sequence.status is Status.PENDING:\n            pass\n",
    ),
    Bug(
        "the output is one token too long",
        "fairlead_runtime.scheduling.scheduler:Scheduler._append",
        "len(tokens) >= sequence.limit",
        "len(tokens) > sequence.limit",
    ),
    Bug(
        "min_tokens is one short",
        "fairlead_runtime.scheduling.scheduler:Scheduler._append",
        "index + 1 >= request",
        "index + 2 >= request",
    ),
    Bug(
        "ignore_eos is ignored",
        "fairlead_runtime.scheduling.scheduler:Scheduler.add",
        "not params.ignore_eos or",
        "True or",
    ),
    Bug(
        "sampling one token early",
        "fairlead_runtime.scheduling.planner:_Draft._start",
        (
            "append(admission)\n"
            "        self.starts.append(Row(sequence, start, count, count == missing))"
        ),
        (
            "append(admission)\n"
            "        self.starts.append(Row(sequence, start, count, count >= missing - 1))"
        ),
    ),
    Bug(
        "an abort within a step is overlooked",
        "fairlead_runtime.scheduling.scheduler:Scheduler.update",
        "            if sequence.status in FINAL:\n",
        "            if False:\n",
        5,
    ),
    Bug(
        "a sequence is found in two queues",
        "fairlead_runtime.scheduling.scheduler:Scheduler._preempt",
        "        self._leave_running(sequence)\n        if offload:",
        "        if offload:",
    ),
    Bug(
        "a failed result is taken as a token",
        "fairlead_runtime.scheduling.scheduler:Scheduler.update",
        "(failure := result.failure) is not None:",
        "False:",
    ),
)


def plant(bug: Bug, folder: Path) -> None:
    """Copy the package and the harness to ``folder``, and put the bug in. Byte code comes along:
    Python takes it where the source has the time and the size that it had.
    """
    copy = folder / "fairlead_runtime"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("demo"))
    (folder / "support").mkdir()
    for module in HARNESS:
        shutil.copy2(module, folder / "support")
    planted = anchor.plant(bug.place, bug.old, bug.new)
    (copy / (ROOT / planted.file).relative_to(PACKAGE)).write_text(planted.text)


def hunt(bug: Bug, seeds: int, runs: Runs) -> Verdict:
    """Run the property on a copy with the bug until it fails."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        where = Path(name).resolve()
        plant(bug, where)
        command = [sys.executable, "-c", RUN, str(where), str(bug.first), str(seeds)]
        code, output = runs.run(command, where, {"PYTHONPATH": str(where)}, SECONDS)
    outcome, how = {
        0: (Outcome.MISSED, f"{seeds} seeds passed"),
        9: (Outcome.CAUGHT, output.strip()),
        None: (Outcome.CAUGHT, f"no end within {SECONDS:.0f} s"),
    }.get(code, (Outcome.BROKE, output[-500:]))
    room = bug.place.split(".")[1]
    return Verdict(bug.name, room, outcome, how, time.monotonic() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant bugs; all must be caught.")
    parser.add_argument(
        "--seeds", type=int, default=60, help="seeds of the property run for each bug"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="bugs whose name contains this")
    options = parser.parse_args()
    bugs = [bug for bug in BUGS if options.only in bug.name]
    if errors := anchor.mismatches(BUGS):
        print("\n".join(errors), file=sys.stderr)
        return 2
    end_on_sigterm()
    runs = Runs()
    verdicts = hunt_all(bugs, lambda bug: hunt(bug, options.seeds, runs), options.jobs, runs.end)
    return exit_code(verdicts)


if __name__ == "__main__":
    sys.exit(main())
