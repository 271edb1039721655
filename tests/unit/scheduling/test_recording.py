"""A recorded run replays to the same plans and is shown as text and as trace events."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fairlead_runtime.commands import replay as replay_command
from fairlead_runtime.commands import trace as trace_command
from fairlead_runtime.recording.record import RecordedScheduler, RecordError, Recording
from fairlead_runtime.recording.replay import replay
from fairlead_runtime.recording.trace import LEGEND, as_events, as_text, steps
from fairlead_runtime.request.sequence import (
    Failure,
    FailureKind,
    Request,
    SamplingParams,
    Sequence,
)
from fairlead_runtime.scheduling import Event, Finished, Limits, Plan, Result, Scheduler, Work
from fairlead_runtime.sizing.groups import group_layers
from support import whole_run
from support.full import LONG_FORM


def record(
    seed: int,
    path: Path,
    *,
    ahead: bool = False,
    kind: type[RecordedScheduler] = RecordedScheduler,
    draw: Callable[[int, int], whole_run.Scenario] = whole_run.draw,
) -> whole_run.Outcome:
    opened: list[RecordedScheduler] = []

    def make(*args: object) -> Scheduler:
        opened.append(kind(*args, path=path))  # type: ignore[arg-type]
        return opened[-1]

    try:
        return whole_run.run(draw(seed, 12), make, ahead=ahead)
    finally:
        opened[0].close()


@pytest.mark.parametrize("seed", range(3000, 3012, 1 if LONG_FORM else 3))
def test_a_recorded_run_replays_to_identical_plans(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    outcome = record(seed, path)
    assert replay_command.main([str(path)]) == 0
    assert capsys.readouterr().out == f"identical: {outcome.steps} steps\n"


@pytest.mark.parametrize("seed", range(3000, 3012, 1 if LONG_FORM else 3))
def test_a_run_with_launched_steps_replays_and_shows_each_of_them(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    outcome = record(seed, path, ahead=True)
    assert outcome.ahead
    assert replay_command.main([str(path)]) == 0
    assert capsys.readouterr().out == f"identical: {outcome.steps} steps\n"
    assert [view.step for view in steps(Recording(path))] == list(range(outcome.steps))
    shown = {name: ids for view in steps(Recording(path)) for name, ids in view.ended}
    for (name, choice), tokens in outcome.delivered.items():
        if outcome.finishes[name, choice] in ("stop", "length"):
            assert shown.get(f"{name}/{choice}", shown.get(name)) == list(tokens)


class ResetScheduler(RecordedScheduler):
    """Its prefix cache is reset after every third step, launched ones in flight or not."""

    evicted = 0

    def update(self, work: Work, results: Mapping[int, Result]) -> list[Event]:
        events = super().update(work, results)
        if work.step % 3 == 2:
            type(self).evicted += self.reset_cache()
        return events


@pytest.mark.parametrize("ahead", [False, True])
def test_a_run_whose_cache_was_reset_replays_to_identical_plans(
    ahead: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evicted = ResetScheduler.evicted
    for seed in range(3000, 3006):
        path = tmp_path / f"{seed}.jsonl"
        outcome = record(seed, path, ahead=ahead, kind=ResetScheduler)
        assert replay_command.main([str(path)]) == 0
        assert capsys.readouterr().out == f"identical: {outcome.steps} steps\n"
        assert len(list(steps(Recording(path)))) == outcome.steps
    assert ResetScheduler.evicted > evicted


def test_a_recorded_reset_that_the_replay_does_not_make_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(3000, path, kind=ResetScheduler)
    lines = path.read_text().splitlines()
    place = next(place for place, line in enumerate(lines) if line.startswith('{"reset"'))
    lines[place] = '{"reset":1234567}'
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(RecordError, match="were evicted, not 1234567"):
        replay(Recording(path))


@pytest.mark.parametrize("seed", range(3000, 3006, 1 if LONG_FORM else 3))
@pytest.mark.parametrize("ahead", [False, True])
def test_the_trace_has_no_more_slots_than_requests_may_run(
    seed: int, ahead: bool, tmp_path: Path
) -> None:
    """A launched successor has the slot of the one whose last token is in flight."""
    path = tmp_path / "run.jsonl"
    record(seed, path, ahead=ahead)
    recording = Recording(path)
    views = list(steps(recording))
    slots = {row.slot for view in views for row in view.rows}
    assert slots <= set(range(recording.limits.max_requests))
    for view in views:
        assert len({row.slot for row in view.rows}) == len(view.rows)


def test_steps_that_were_in_flight_follow_each_other_in_the_trace(tmp_path: Path) -> None:
    """A launched step is planned before the last one has ended."""
    ticks = iter(range(100))
    path = tmp_path / "run.jsonl"
    scheduler = RecordedScheduler(
        Limits("fifo", 8, 2, 0.0, 4, 8, 32),
        group_layers([None]),
        path=path,
        clock=lambda: float(next(ticks)),
    )
    scheduler.add(Request("r", (1, 2), SamplingParams(), 4))
    work = scheduler.commit(scheduler.plan())
    scheduler.update(work, {0: Result(5)})
    flying: list[Work] = []
    while plan := scheduler.plan_ahead() if flying else scheduler.plan():
        flying.append(scheduler.commit(plan))
        scheduler.launch(flying[-1])
    while flying:
        scheduler.update(flying.pop(0), {0: Result(6)})
    scheduler.close()
    times = [(view.begin, view.end) for view in steps(Recording(path))]
    assert times == [(0.0, 1.0), (2.0, 5.0), (5.0, 6.0), (6.0, 7.0)]
    assert replay_command.main([str(path)]) == 0


def test_a_run_whose_launched_steps_were_computed_again_replays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One request left while both steps were in flight: they run again without its dead rows."""
    path = tmp_path / "run.jsonl"
    limits = Limits("fifo", 16, 4, 0.0, 4, 8, 64)
    scheduler = RecordedScheduler(limits, group_layers([None]), path=path)
    for i, name in enumerate(("stays", "leaves")):
        scheduler.add(Request(name, tuple(range(i, i + 5)), SamplingParams(), 4))
    flying = [scheduler.commit(scheduler.plan())]
    scheduler.launch(flying[0])
    ahead = scheduler.plan_ahead()
    assert ahead is not None
    flying.append(scheduler.commit(ahead))
    scheduler.launch(flying[1])
    scheduler.abort("leaves")
    scheduler.recall()
    for work in flying:
        scheduler.update(work.living(), {0: Result(6)})
    # It needs the blocks of the one that left.
    scheduler.add(Request("next", tuple(range(20)), SamplingParams(), 4))
    while scheduler.has_work:
        work = scheduler.commit(scheduler.plan())
        scheduler.update(work, {row.sequence.id: Result(6) for row in work.rows if row.samples})
    scheduler.close()
    assert replay_command.main([str(path)]) == 0
    assert capsys.readouterr().out.startswith("identical: ")
    lines = path.read_text().splitlines()
    assert lines.count('{"recall":2}') == 1
    lines.remove('{"recall":2}')
    path.write_text("\n".join(lines) + "\n")
    assert replay_command.main([str(path)]) == 1, "nothing in the run depends on the recall"


def test_two_runs_of_one_workload_write_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        record(3001, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_different_decision_is_shown_with_its_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    record(3002, path)
    lines = path.read_text().splitlines()
    at = [i for i, line in enumerate(lines) if line.startswith('{"plan"')][5]
    plan = json.loads(lines[at])
    plan["plan"]["rows"][0][2] += 1
    lines[at] = json.dumps(plan)
    path.write_text("\n".join(lines) + "\n")
    assert replay_command.main([str(path)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "step 5 differs"
    assert out[1].startswith('recorded {"step":5')
    assert out[2].startswith('replayed {"step":5')
    assert out[1][9:] != out[2][9:]


@pytest.mark.parametrize(
    "content", ["", "no json\n", "[]\n", '{"fairlead_record":99}\n', '{"fairlead_record":1}\n']
)
def test_a_file_that_is_no_recording_ends_both_commands_with_2(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(content)
    for command in (replay_command, trace_command):
        assert command.main([str(path)]) == 2
        assert str(path) in capsys.readouterr().err
        assert command.main([str(tmp_path / "missing")]) == 2


def test_a_recording_of_another_format_says_what_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    record(3003, path)
    path.write_text(path.read_text().replace('{"fairlead_record":2', '{"fairlead_record":1', 1))
    for command in (replay_command, trace_command):
        assert command.main([str(path)]) == 2
        error = capsys.readouterr().err
        assert "format 1; this version reads format 2: read it with the version" in error


def test_what_a_step_writes_does_not_grow_with_the_queue(tmp_path: Path) -> None:
    lines = []
    for waiting in (1, 300):
        path = tmp_path / f"{waiting}.jsonl"
        scheduler = RecordedScheduler(
            Limits("fifo", 8, 1, 0.0, 4, 8, 32), group_layers([None]), path=path
        )
        for i in range(1 + waiting):
            scheduler.add(Request(f"r{i}", (1, 2), SamplingParams(), 4))
        work = scheduler.commit(scheduler.plan())
        scheduler.update(work, {0: Result(5)})
        scheduler.close()
        lines.append(path.read_text().splitlines()[-2:])
    assert lines[0] == lines[1]


@pytest.mark.parametrize("seed", range(3000, 3012, 1 if LONG_FORM else 2))
@pytest.mark.parametrize("ahead", [False, True])
def test_the_trace_knows_who_waits_and_what_each_row_holds(
    seed: int, ahead: bool, tmp_path: Path
) -> None:
    """A step writes neither."""
    shown: list[tuple[set[str], list[int]]] = []

    class Watched(RecordedScheduler):
        def commit(self, plan: Plan) -> Work:
            work = super().commit(plan)
            waiting = {_label(sequence) for sequence in self.waiting}
            units = [self.state.cache.units_held(row.sequence) for row in plan.rows]
            shown.append((waiting, units))
            return work

    path = tmp_path / "run.jsonl"
    record(seed, path, ahead=ahead, kind=Watched)
    views = list(steps(Recording(path)))
    assert [({*view.waiting}, [row.units for row in view.rows]) for view in views] == shown


def _label(sequence: Sequence) -> str:
    request = sequence.request
    return request.id if request.params.n == 1 else f"{request.id}/{sequence.choice}"


def test_damage_in_the_middle_is_unreadable_and_names_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    record(3003, path)
    lines = path.read_text().splitlines()
    lines[7] = lines[7][:-5]
    path.write_text("\n".join(lines) + "\n")
    for command in (replay_command, trace_command):
        assert command.main([str(path)]) == 2
        assert "line 8 is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        '{"update":0,"tokens":[]}',
        '{"plan":{}}',
        '{"add":{"id":"x"},"sequences":[1]}',
        (
            '{"add":{"id":"r0","prompt":[],"params":{},"max_tokens":4,"salt":"","eos_ids":[]},'
            '"sequences":[0]}'
        ),
        '{"unknown":1}',
    ],
)
def test_lines_that_do_not_fit_the_run_end_the_replay_with_2_or_show_a_difference(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    record(3005, path)
    head = path.read_text().splitlines()[0]
    path.write_text(f"{head}\n{line}\n")
    code = replay_command.main([str(path)])
    output = capsys.readouterr()
    assert (code, "differs" in output.out, str(path) in output.err) == (
        (1, True, False) if "plan" in line else (2, False, True)
    )


def test_a_file_cut_within_a_line_still_reads_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    record(3004, path)
    path.write_bytes(path.read_bytes()[:-20])
    assert replay_command.main([str(path)]) == 0
    assert "is incomplete" in capsys.readouterr().err
    assert trace_command.main([str(path)]) == 0
    assert "is incomplete" in capsys.readouterr().err


def test_every_line_is_on_disk_while_the_run_goes_on_and_only_the_owner_may_read(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.jsonl"
    scheduler = RecordedScheduler(
        Limits("fifo", 8, 2, 0.0, 4, 8, 32), group_layers([None]), path=path
    )
    scheduler.add(Request("r", (1, 2), SamplingParams(), 4))
    work = scheduler.commit(scheduler.plan())
    assert [next(iter(json.loads(line))) for line in path.read_text().splitlines()] == [
        "fairlead_record",
        "add",
        "plan",
    ]
    assert path.stat().st_mode & 0o077 == 0
    scheduler.update(work, {0: Result(5)})
    scheduler.close()
    assert path.read_text().endswith("\n")


def test_failures_keep_their_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    scheduler = RecordedScheduler(
        Limits("fifo", 8, 2, 0.0, 4, 8, 32), group_layers([None]), path=path
    )
    ids = [scheduler.add(Request(i, (1, 2), SamplingParams(), 2))[0].id for i in "ab"]
    failures = [Failure("a", FailureKind.GRAMMAR), Failure("b", FailureKind.CONSTRAINTS)]
    results = {ids[0]: Result(0, failure=failures[0]), ids[1]: Result(5)}
    scheduler.update(scheduler.commit(scheduler.plan()), results)
    scheduler.fail(ids[1], failures[1])
    scheduler.close()
    replayed: list[Failure | None] = []
    end = Scheduler._end

    def recorded_end(*arguments: Any) -> Finished:
        finished = end(*arguments)
        replayed.append(finished.failure)
        return finished

    monkeypatch.setattr(Scheduler, "_end", recorded_end)
    assert replay_command.main([str(path)]) == 0
    assert replayed == failures


def test_a_full_disk_stops_the_recording_and_not_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler = RecordedScheduler(
        Limits("fifo", 8, 2, 0.0, 4, 8, 32), group_layers([None]), path="/dev/full"
    )
    sequence = scheduler.add(Request("r", (1, 2), SamplingParams(), 2))[0]
    while scheduler.has_work:
        work = scheduler.commit(scheduler.plan())
        scheduler.update(work, {sequence.id: Result(5)})
    assert sequence.generated == 2
    assert [r.getMessage()[:17] for r in caplog.records] == ["recording stopped"]


def three_requests(path: Path) -> None:
    scheduler = RecordedScheduler(
        Limits("fifo", 8, 4, 0.0, 4, 7, 64, allow_block_sharing=False),
        group_layers([None]),
        path=path,
    )
    for name, prompt, output in (("long", 10, 6), ("pair", 4, 12)):
        params = SamplingParams(max_tokens=output, n=1 + (name == "pair"))
        scheduler.add(Request(name, tuple(range(prompt)), params, output))
    while scheduler.has_work:
        work = scheduler.commit(scheduler.plan())
        scheduler.update(work, {r.sequence.id: Result(9) for r in work.rows if r.samples})
    scheduler.close()


def test_the_text_shows_slots_ranges_blocks_queue_and_preemptions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    three_requests(tmp_path / "run.jsonl")
    assert trace_command.main([str(tmp_path / "run.jsonl")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[:8] == [
        "fifo: 8 tokens and 4 requests a step; 7 blocks of 4 tokens (full), margin 0%",
        LEGEND,
        "+ long: prompt 10, max_tokens 6, n 1",
        "+ pair: prompt 4, max_tokens 12, n 2",
        (
            "step 0: 8 tokens = 0 decode + 8 prefill, beside 0 cached keys | "
            "blocks 2 held, 0 cached, 5 free | waiting 2 (pair/0 pair/1)"
        ),
        "  packed 00000000",
        "  [0] long |############............| prefill 0..7 of 10        2 blocks  starts",
        (
            "step 1: 6 tokens = 0 decode + 6 prefill, beside 8 cached keys | "
            "blocks 4 held, 0 cached, 3 free | waiting 1 (pair/1)"
        ),
    ]
    assert "  ! pair/1 preempted, to be recomputed" in out
    assert any(line.endswith("fork of pair/0") for line in out)
    assert "  packed 00|1111" in out


def test_long_request_ids_are_numbered_where_they_arrive(tmp_path: Path) -> None:
    scheduler = RecordedScheduler(
        Limits("fifo", 8, 4, 0.0, 4, 7, 64), group_layers([None]), path=tmp_path / "run.jsonl"
    )
    for i in range(2):
        scheduler.add(Request(f"chatcmpl-{i:032}", (1, 2), SamplingParams(max_tokens=4), 4))
    scheduler.commit(scheduler.plan())
    scheduler.abort(f"chatcmpl-{1:032}")
    scheduler.commit(scheduler.plan())
    scheduler.close()
    lines = list(as_text(Recording(tmp_path / "run.jsonl")))
    assert f"+ #1 = chatcmpl-{1:032}: prompt 2, max_tokens 4, n 1" in lines
    assert any(line.startswith("  [0] #0 |") for line in lines)


def test_the_chrome_trace_is_one_json_object_with_a_track_per_slot_and_counters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    three_requests(tmp_path / "run.jsonl")
    assert trace_command.main([str(tmp_path / "run.jsonl"), "--format", "chrome"]) == 0
    events = json.loads(capsys.readouterr().out)["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == {0: "slot 0", 1: "slot 1", 2: "slot 2"}
    rows = [e for e in events if e["ph"] == "X"]
    recording = Recording(tmp_path / "run.jsonl")
    assert len(rows) == sum(len(view.rows) for view in steps(recording))
    for tid in tracks:
        times = [(e["ts"], e["ts"] + e["dur"]) for e in rows if e["tid"] == tid]
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(times)), (
            "rows of a slot overlap"
        )
    for e in events:
        if e["ph"] == "C" and e["name"] == "blocks":
            assert sum(e["args"].values()) == 7
    assert [e["name"] for e in events if e["ph"] == "i"] == ["pair/1 preempted"]


def test_a_clock_times_the_steps_and_leaves_the_plans_alone(tmp_path: Path) -> None:
    ticks = iter(range(100))
    scheduler = RecordedScheduler(
        Limits("fifo", 8, 2, 0.0, 4, 8, 32),
        group_layers([None]),
        path=tmp_path / "run.jsonl",
        clock=lambda: float(next(ticks)),
    )
    scheduler.add(Request("r", (1, 2), SamplingParams(), 3))
    while scheduler.has_work:
        work = scheduler.commit(scheduler.plan())
        scheduler.update(work, {0: Result(5)})
    scheduler.close()
    times = [(view.begin, view.end) for view in steps(Recording(tmp_path / "run.jsonl"))]
    assert times == [(0.0, 1.0), (2.0, 3.0), (4.0, 5.0)]
    assert replay_command.main([str(tmp_path / "run.jsonl")]) == 0


def test_the_header_brings_back_limits_and_groups(tmp_path: Path) -> None:
    changed = {"allow_block_sharing": False, "offload_units": 3, "prefill_beside_decodes": 5}
    limits = Limits("priority", 8, 2, 0.25, 4, 8, 32, **changed)  # type: ignore[arg-type]
    groups = group_layers([None, 7, None, 7])
    RecordedScheduler(limits, groups, b"\x00id", path=tmp_path / "run.jsonl").close()
    recording = Recording(tmp_path / "run.jsonl")
    assert dataclasses.asdict(recording.limits) == dataclasses.asdict(limits)
    assert (recording.groups, recording.identity) == (groups, b"\x00id")


@pytest.mark.parametrize("keys", [True, False])
def test_a_run_with_states_is_replayed_and_pictured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: bool
) -> None:
    """Preemptions, hits on snapshots and both versions of states follow from the header."""
    path = tmp_path / "run.jsonl"
    held = {"state_units": 3 if keys else 1, "cache_tokens": 64, "offload_units": 9}
    limits = Limits("fifo", 16, 4, 0.0, 4, 22 if keys else 5, 64, **held)  # type: ignore[arg-type]
    groups = group_layers([None]) if keys else ()
    scheduler = RecordedScheduler(limits, groups, path=path)
    for i in range(5):
        scheduler.add(Request(f"r{i}", (*range(9), i, i), SamplingParams(n=2, max_tokens=20), 20))
    while scheduler.has_work:
        work = scheduler.commit(scheduler.plan())
        scheduler.update(work, {r.sequence.id: Result(5) for r in work.rows if r.samples})
    assert scheduler.stats().prefix_hits > 0
    assert scheduler.stats().preemptions > 0 or not keys
    scheduler.close()
    assert replay_command.main([str(path)]) == 0
    text = "\n".join(as_text(Recording(path)))
    assert f"{22 if keys else 5} blocks of 4 tokens" in text
    assert f"{limits.state_units} a state" in text
    assert list(as_events(Recording(path)))


@pytest.mark.parametrize("ahead", [False, True])
def test_random_runs_with_states_replay_to_identical_plans(
    ahead: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those whose steps are launched ahead, with a third version, or computed again."""
    path, launched, versions = tmp_path / "run.jsonl", 0, set[int]()
    for seed in range(3000, 3060 if LONG_FORM else 3008):
        outcome = record(seed, path, ahead=ahead, draw=whole_run.draw_states)
        launched += outcome.ahead
        assert replay_command.main([str(path)]) == 0
        assert capsys.readouterr().out == f"identical: {outcome.steps} steps\n"
        limits = Recording(path).limits
        assert limits.state_units > 0
        versions.add(limits.state_versions)
    assert versions == {2, 3}
    assert (launched > 0) == ahead


def test_a_bound_on_prompts_is_replayed_and_a_recording_from_before_it_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    limits = Limits("fifo", 32, 4, 0.0, 4, 32, 64, prefill_beside_decodes=3)
    scheduler = RecordedScheduler(limits, group_layers([None]), path=path)
    scheduler.add(Request("decode", (1, 2), SamplingParams(), 8))
    for step in range(8):
        work = scheduler.commit(scheduler.plan())
        scheduler.update(work, {r.sequence.id: Result(5) for r in work.rows if r.samples})
        if not step:
            scheduler.add(Request("long", tuple(range(12)), SamplingParams(), 3))
    scheduler.close()
    assert replay_command.main([str(path)]) == 0
    assert next(as_text(Recording(path))).startswith(
        "fifo: 32 tokens (3 of prompts while answers run) and 4 requests a step; "
    )
    header, *lines = path.read_text().splitlines()
    old = json.loads(header)
    del old["limits"]["prefill_beside_decodes"]
    path.write_text("\n".join((json.dumps(old), *lines)) + "\n")
    assert Recording(path).limits == dataclasses.replace(limits, prefill_beside_decodes=0)
    capsys.readouterr()
    assert replay_command.main([str(path)]) == 1
    assert capsys.readouterr().out.startswith("step 1 differs")
