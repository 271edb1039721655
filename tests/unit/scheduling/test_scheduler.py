"""The scheduler by example: each rule once, small enough to follow by hand."""

import dataclasses
from collections.abc import Callable

import pytest

from fairlead_runtime.cache import paged, prefix
from fairlead_runtime.request.sequence import (
    Failure,
    FinishReason,
    Request,
    RequestError,
    SamplingParams,
    Sequence,
    Status,
)
from fairlead_runtime.scheduling import (
    Event,
    Finished,
    Limits,
    Plan,
    Result,
    Scheduler,
    Token,
    Work,
)
from fairlead_runtime.scheduling.admission import most_needed, refusal, room
from fairlead_runtime.scheduling.scheduler import StepError
from fairlead_runtime.settings.engine_config import EngineConfig
from fairlead_runtime.sizing.groups import group_layers

LIMITS = Limits(
    policy="fifo",
    max_batch_tokens=64,
    max_requests=8,
    safety_margin=0.0,
    block_size=4,
    num_blocks=64,
    max_model_len=256,
)


def scheduler(windows: tuple[int | None, ...] = (None,), **limits: object) -> Scheduler:
    return Scheduler(dataclasses.replace(LIMITS, **limits), group_layers(windows))  # type: ignore[arg-type]


def request(name: str, prompt: int | tuple[int, ...], output: int, **more: object) -> Request:
    """A request with the given prompt, or with that many tokens that no other name shares."""
    tokens = (
        tuple(prompt_token(name, i) for i in range(prompt)) if isinstance(prompt, int) else prompt
    )
    fields = {f.name for f in dataclasses.fields(Request)}
    params = SamplingParams(max_tokens=output, **{k: v for k, v in more.items() if k not in fields})  # type: ignore[arg-type]
    return Request(name, tokens, params, output, **{k: v for k, v in more.items() if k in fields})  # type: ignore[arg-type]


def prompt_token(name: str, i: int) -> int:
    return int.from_bytes(name.encode(), "little") % 997 * 1000 + i


def step(
    s: Scheduler, token: int | Callable[[Sequence], int] = 7
) -> tuple[Plan, Work, list[Event]]:
    plan = s.plan()
    assert plan == s.plan()
    work = s.commit(plan)
    answer = {
        r.sequence.id: Result(token if isinstance(token, int) else token(r.sequence))
        for r in work.rows
        if r.samples
    }
    events = s.update(work, answer)
    s.check()
    return plan, work, events


def finish_all(s: Scheduler) -> tuple[int, list[Event]]:
    steps, events = 0, []
    while s.has_work:
        events += step(s)[2]
        steps += 1
    return steps, events


def shape(plan: Plan) -> list[tuple[str, int, int, bool]]:
    return [(r.sequence.request.id, r.start, r.count, r.samples) for r in plan.rows]


def plans_and_ends(s: Scheduler) -> tuple[list[Plan], dict[str, int]]:
    """Every plan until all is done, and the number of steps after which each request ends."""
    plans: list[Plan] = []
    ends = {}
    while s.has_work:
        plan, _, events = step(s)
        plans.append(plan)
        for event in events:
            if isinstance(event, Token) and event.finish is not None:
                ends[event.sequence.request.id] = len(plans)
    return plans, ends


def test_three_requests_of_20_15_and_25_tokens_end_in_steps_20_15_and_25_not_after_60() -> None:
    s = scheduler()
    outputs = {"A": 20, "B": 15, "C": 25}
    for name, n in outputs.items():
        s.add(request(name, 3, n))
    assert plans_and_ends(s)[1] == outputs  # one after another they take 60 steps


def test_three_decodes_and_prompts_of_100_and_200_tokens_make_a_step_of_303() -> None:
    s = scheduler(max_batch_tokens=512, num_blocks=256)
    for name in "ABC":
        s.add(request(name, 3, 20))
    step(s)
    s.add(request("D", 100, 5))
    s.add(request("E", 200, 5))
    rows = shape(step(s)[0])
    assert [(name, count) for name, _, count, _ in rows] == [
        *(("A", 1), ("B", 1), ("C", 1)),
        *(("D", 100), ("E", 200)),
    ]


def test_the_tutorials_six_requests_start_and_end_in_its_steps() -> None:
    """The log of "Serving Multiple Users at Once", with three slots and GPT-2's prompt lengths."""
    s = scheduler(max_requests=3, max_batch_tokens=512, num_blocks=256, max_model_len=1024)
    caps = (6, 50, 300, 30, 180, 45)
    for name, prompt, cap in zip("ABCDEF", (5, 5, 7, 10, 8, 7), caps, strict=True):
        s.add(request(name, prompt, cap))
    plans, ends = plans_and_ends(s)
    starts = {a.sequence.request.id: i for i, plan in enumerate(plans) for a in plan.admitted}
    assert starts == {"A": 0, "B": 0, "C": 0, "D": 6, "E": 36, "F": 50}
    assert ends == {"A": 6, "D": 36, "B": 50, "F": 95, "E": 216, "C": 300}
    seventh = {name: (start, count) for name, start, count, _ in shape(plans[6])}
    assert seventh == {"D": (0, 10), "B": (10, 1), "C": (12, 1)}  # 12 queries, 22 keys cached


def test_a_long_prompt_continues_over_steps_while_others_decode() -> None:
    s = scheduler(max_batch_tokens=8)
    s.add(request("short", 3, 20))
    step(s)
    s.add(request("long", 20, 2))
    plans = [shape(step(s)[0]) for _ in range(4)]
    assert plans == [
        [("short", 3, 1, True), ("long", 0, 7, False)],
        [("short", 4, 1, True), ("long", 7, 7, False)],
        [("short", 5, 1, True), ("long", 14, 6, True)],
        [("short", 6, 1, True), ("long", 20, 1, True)],
    ]


def test_prefill_first_finishes_a_chunked_prefill_before_decodes_go_on() -> None:
    s = scheduler(policy="prefill_first", max_batch_tokens=8)
    s.add(request("short", 3, 20))
    step(s)
    s.add(request("long", 20, 2))
    plans = [shape(step(s)[0]) for _ in range(3)]
    assert plans == [
        [("short", 3, 1, True), ("long", 0, 7, False)],
        [("long", 7, 8, False)],
        [("long", 15, 5, True), ("short", 4, 1, True)],
    ]


def test_priority_runs_lower_first_and_preempts_the_highest() -> None:
    s = scheduler(policy="priority", max_requests=1)
    for name, priority in (("b", 5), ("c", 5), ("a", 1)):
        s.add(request(name, 2, 1, priority=priority))
    order = [shape(step(s)[0])[0][0] for _ in range(3)]
    assert order == ["a", "b", "c"]


def test_fair_alternates_tenants_however_many_requests_one_of_them_sends() -> None:
    s = scheduler(policy="fair", max_requests=1)
    for i in range(6):
        s.add(request(f"hog{i}", 4, 4, tenant="hog"))
    for i in range(2):
        s.add(request(f"guest{i}", 4, 4, tenant="guest"))
    order = []
    while s.has_work:
        name = shape(step(s)[0])[0][0]
        if name not in order:
            order.append(name)
    assert order[:4] == ["hog0", "guest0", "hog1", "guest1"]


def test_fair_gives_no_credit_for_having_been_idle() -> None:
    s = scheduler(policy="fair", max_requests=1)
    s.add(request("early", 4, 4, tenant="sleeper"))
    finish_all(s)
    for i in range(10):
        s.add(request(f"busy{i}", 4, 4, tenant="busy"))
    for _ in range(5 * 4):
        step(s)
    for i in range(4):
        s.add(request(f"back{i}", 4, 4, tenant="sleeper"))
    order = []
    while s.has_work:
        name = shape(step(s)[0])[0][0]
        if name not in order:
            order.append(name)
    # Without the raised counter the idle tenant's four would all run before the next busy one.
    assert [name[:4] for name in order[:5]].count("back") <= 3


def test_the_safety_margin_keeps_new_requests_out_and_lets_decodes_go_on() -> None:
    s = scheduler(num_blocks=10, safety_margin=0.3)
    s.add(request("first", 20, 10))  # 5 blocks, 6 with the next
    step(s)
    s.add(request("second", 4, 4))  # 1 block and one more: 6 + 2 > 7
    step(s)
    plan, _, _ = step(s)
    assert [r[0] for r in shape(plan)] == ["first"]
    (second,) = s.waiting
    assert most_needed(s.state, second) == 2 > room(s.state) == 1
    s.abort("first")
    assert [r[0] for r in shape(step(s)[0])] == ["second"]


def test_the_safety_margin_does_not_apply_when_nothing_runs() -> None:
    s = scheduler(num_blocks=4, safety_margin=0.9)
    s.add(request("whole", 12, 4))
    assert finish_all(s)[0] == 4


@pytest.mark.parametrize(
    ("prompt", "output", "fits"),
    [(12, 20, True), (12, 21, False), (31, None, True), (32, None, False), (0, 1, False)],
)
def test_a_request_is_refused_iff_prompt_and_output_exceed_what_holds_one(
    prompt: int, output: int | None, fits: bool
) -> None:
    assert (refusal(scheduler(num_blocks=8).limits, prompt, output) == "") == fits


def test_a_refusal_shows_its_arithmetic_and_the_fix() -> None:
    message = refusal(scheduler(num_blocks=8, block_size=16).limits, 300, 20)
    assert message == (
        "prompt 300 + max_tokens 20 = 320 tokens, but the cache holds 128 (8 blocks * 16): "
        "shorten the prompt"
    )
    assert message.isascii()  # error bodies are ASCII and escape other characters
    message = refusal(scheduler(max_model_len=100).limits, 90, 20)
    assert message == (
        "prompt 90 + max_tokens 20 = 110 tokens, but one sequence holds 100 (max_model_len): "
        "lower max_tokens to 10 or shorten the prompt"
    )
    with pytest.raises(RequestError, match="prompt 300"):
        scheduler(num_blocks=8).add(request("x", 300, 20))


def test_a_request_id_in_use_is_refused() -> None:
    s = scheduler()
    s.add(request("same", 2, 2))
    with pytest.raises(RequestError, match="already"):
        s.add(request("same", 2, 2))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="prompt"):
        scheduler().add(request("empty", (), 2))


def test_a_full_cache_preempts_the_youngest_and_starts_nobody_who_would_delay_it() -> None:
    s = scheduler(num_blocks=6, allow_block_sharing=False)
    s.add(request("old", 8, 12))
    s.add(request("young", 8, 12))
    s.add(request("next", 9, 4))
    preempted_at = None
    for i in range(40):
        if not s.has_work:
            break
        plan, _, _ = step(s)
        if plan.preempted:
            assert preempted_at is None, "preempted once, it waits until the old one ends"
            preempted_at = i
            assert [p.sequence.request.id for p in plan.preempted] == ["young"]
            assert not plan.admitted
            assert [q.request.id for q in s.waiting] == ["young", "next"]
    assert preempted_at is not None
    assert not s.has_work


@pytest.mark.parametrize(("output", "starts"), [(6, True), (7, False)])
def test_after_a_preemption_only_those_start_that_end_before_the_victim_can(
    output: int, starts: bool
) -> None:
    """The old one has six tokens to go when it takes the last block; the young one then needs five
    of six, and the late one takes two.
    """
    s = scheduler(num_blocks=6, allow_block_sharing=False)
    old = s.add(request("old", 8, 12))[0]
    s.add(request("young", 8, 12))
    while not s.stats().preemptions:
        step(s)
    assert old.limit - len(old.tokens) == 6
    s.add(request("late", 1, output))
    assert [r[0] for r in shape(step(s)[0])] == ["old", "late"][: 1 + starts]
    while old.status is not Status.FINISHED:
        step(s)
    assert "young" in [r[0] for r in shape(step(s)[0])], "not a step later"


def test_after_a_preemption_a_more_urgent_request_starts_at_once() -> None:
    s = scheduler(policy="priority", num_blocks=6, allow_block_sharing=False)
    s.add(request("old", 8, 12, priority=5))
    s.add(request("young", 8, 12, priority=6))
    while not s.stats().preemptions:
        step(s)
    s.add(request("urgent", 1, 8, priority=0))
    assert [r[0] for r in shape(step(s)[0])] == ["old", "urgent"]


def test_a_preempted_sequence_keeps_its_tokens_and_continues_after_them() -> None:
    s = scheduler(num_blocks=6)
    s.add(request("old", 8, 12))
    young = s.add(request("young", 8, 12))[0]
    events: list[Event] = []
    while s.has_work:
        events += step(s, token=lambda q: 100 * q.id + q.generated)[2]
    assert young.preemptions == 1
    seen = [(e.index, e.token) for e in events if isinstance(e, Token) and e.sequence is young]
    assert seen == [(i, 100 + i) for i in range(12)]


def test_a_victim_moves_to_host_memory_when_there_is_room_and_returns_without_recompute() -> None:
    s = scheduler(num_blocks=6, allow_block_sharing=False, offload_units=4)
    s.add(request("old", 8, 12))
    young = s.add(request("young", 8, 12))[0]
    moved: list[Work] = []
    computed = 0
    while s.has_work:
        _, work, _ = step(s)
        moved += [work] if work.offload or work.restore else []
        computed += sum(row.count for row in work.rows if row.sequence is young)
    assert [(len(w.offload), len(w.restore)) for w in moved] == [(3, 0), (0, 3)]
    assert {host for _, host in moved[0].offload} == {host for host, _ in moved[1].restore}
    assert computed == 8 + 12 - 1
    assert s.stats().offloads == s.stats().preemptions == 1


def test_a_victim_that_host_memory_cannot_hold_is_reset() -> None:
    s = scheduler(num_blocks=6, offload_units=2)
    s.add(request("old", 8, 12))
    s.add(request("young", 8, 12))
    finish_all(s)
    assert (s.stats().preemptions, s.stats().offloads) == (1, 0)


def test_equal_prompts_share_blocks_only_after_their_forward_pass() -> None:
    s = scheduler()
    prompt = tuple(range(12))
    s.add(request("a", prompt, 4))
    s.add(request("b", prompt, 4))
    plan, _, _ = step(s)  # b waits: nothing is computed yet
    assert shape(plan) == [("a", 0, 12, True)]
    plan, _, _ = step(s)
    # at least one token must be computed, so the third block is not used
    assert shape(plan) == [("a", 12, 1, True), ("b", 8, 4, True)]
    assert (s.stats().prefix_queries, s.stats().prefix_hits) == (24, 8)


def test_a_salt_or_sharing_switched_off_keeps_prompts_apart() -> None:
    prompt = tuple(range(12))
    for salts, sharing in (((b"x", b"y"), True), ((b"", b""), False)):
        s = scheduler(allow_block_sharing=sharing)
        for name, salt in zip("ab", salts, strict=True):
            s.add(request(name, prompt, 2, salt=salt))
            plan, _, _ = step(s)
        assert shape(plan)[-1] == ("b", 0, 12, True)


def test_choices_share_the_prompt_and_copy_its_partial_tail() -> None:
    s = scheduler(allow_block_sharing=False)
    a, b, c = s.add(request("n", 10, 3, n=3))
    plan, _, _ = step(s)
    assert shape(plan) == [("n", 0, 10, True)]
    plan = s.plan()
    assert [(x.source.value, x.start) for x in plan.admitted] == [("fork", 9), ("fork", 9)]
    work = s.commit(plan)
    assert a.tables[0][:2] == b.tables[0][:2] == c.tables[0][:2]
    assert len({a.tables[0][2], b.tables[0][2], c.tables[0][2]}) == 3
    assert work.copies == [(a.tables[0][2], b.tables[0][2]), (a.tables[0][2], c.tables[0][2])]
    s.update(work, {q.id: Result(q.choice) for q in (a, b, c)})
    s.check()
    assert [q.generated for q in (a, b, c)] == [2, 1, 1]
    finish_all(s)
    assert s.stats().used == 0


def test_a_choice_whose_sibling_has_ended_computes_the_prompt_itself() -> None:
    s = scheduler(allow_block_sharing=False)
    s.add(request("n", 10, 1, n=2))  # choice 0 finishes with its first token
    step(s)
    plan, work, events = step(s)
    assert shape(plan) == [("n", 0, 10, True)]
    assert not work.copies
    assert [e.finish for e in events if isinstance(e, Token)] == [FinishReason.LENGTH]


@pytest.mark.parametrize("choice", [None, 0, 1])
def test_abort_frees_waiting_and_running_choices(choice: int | None) -> None:
    s = scheduler()
    s.add(request("n", 10, 3, n=2))
    step(s)
    ended = s.abort("n", choice)
    assert [e.reason for e in ended] == [FinishReason.ABORT] * (2 if choice is None else 1)
    s.check()
    assert s.abort("n", choice) == []
    finish_all(s)
    assert s.stats().used == 0


def test_an_abort_between_commit_and_update_leaves_no_event_for_update() -> None:
    s = scheduler()
    a, b = (s.add(request(name, 3, 2))[0] for name in "ab")
    work = s.commit(s.plan())
    assert [e.sequence for e in s.abort("a")] == [a]
    events = s.update(work, {a.id: Result(1), b.id: Result(1)})
    assert [e.sequence for e in events] == [b]
    s.check()


def test_an_abort_frees_the_host_memory_of_an_offloaded_sequence() -> None:
    s = scheduler(num_blocks=6, offload_units=4)
    s.add(request("old", 8, 12))
    s.add(request("young", 8, 12))
    while not s.stats().offloaded:
        step(s)
    s.abort("young")
    s.check()
    assert len(s.state.cache.host.free) == 4


def test_an_error_fails_its_own_sequence_and_drops_its_blocks_from_the_cache() -> None:
    s = scheduler()
    prompt = tuple(range(12))
    a, b = s.add(request("a", prompt, 9))[0], s.add(request("b", 3, 2))[0]
    step(s)
    work = s.commit(s.plan())
    failure = Failure("logits are not finite")
    events = s.update(work, {a.id: Result(0, failure=failure), b.id: Result(1)})
    assert [(e.sequence, e.reason, e.failure) for e in events if isinstance(e, Finished)] == [
        (a, FinishReason.ERROR, failure)
    ]
    assert a.status is Status.FAILED
    s.add(request("again", prompt, 2))
    plan, _, _ = step(s)
    assert shape(plan)[-1] == ("again", 0, 12, True)
    assert [e.reason for e in s.fail(s.running[-1].id, Failure("culprit"))] == [FinishReason.ERROR]
    assert s.fail(a.id, Failure("twice")) == []


def test_stop_tokens_end_a_sequence_unless_ignored_or_too_early() -> None:
    def tokens(**more: object) -> int:
        s = scheduler()
        s.add(request("r", 2, 9, eos_ids=frozenset({7}), **more))
        return sum(isinstance(e, Token) for e in finish_all(s)[1])

    assert tokens() == 1
    assert tokens(min_tokens=3) == 3
    assert tokens(ignore_eos=True) == 9
    assert tokens(ignore_eos=True, stop_token_ids=(7,)) == 1


def test_a_window_group_releases_blocks_and_a_full_one_keeps_them() -> None:
    s = scheduler((None, 4), block_size=4)
    q = s.add(request("r", 17, 8))[0]
    step(s)
    full, window = q.tables
    assert all(unit >= 0 for unit in full)
    assert window[:3] == [-1, -1, -1]  # position 17 sees 14..17, which begin in block 3
    assert window[3] >= 0
    assert s.stats().used == 5 + 2


def test_a_decode_looks_at_its_tables_where_a_block_is_full_or_passed_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A window of 6 passes a block of 4 with the 9th token, the 13th, ..."""
    s = scheduler((None, 6), block_size=4)
    q = s.add(request("r", 6, 16))[0]
    step(s)
    finish, looks = s.state.cache.finish_forward, list[int]()

    def counted(sequence: Sequence) -> None:
        looks.append(sequence.computed)
        finish(sequence)

    monkeypatch.setattr(s.state.cache, "finish_forward", counted)
    for _ in range(11):
        step(s)
        assert q.tables[1].count(-1) == max(0, q.computed - 5) // 4
    assert looks == [8, 9, 12, 13, 16, 17]


def test_a_window_group_needs_only_its_window_for_a_prefix_hit() -> None:
    s = scheduler((4,), num_blocks=8)
    prompt = tuple(range(21))
    s.add(request("a", prompt, 2))
    finish_all(s)
    s.add(request("filler", 9, 1))  # evicts some of what the window freed first
    finish_all(s)
    s.add(request("b", prompt, 2))
    plan, _, _ = step(s)
    assert shape(plan) == [("b", 20, 1, True)]


@pytest.mark.parametrize(("changed", "looks"), [(False, 1), (True, 2)])
def test_commit_looks_a_prefix_up_again_only_where_the_cache_has_changed_since_the_plan(
    changed: bool, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = scheduler()
    prompt = tuple(range(21))
    s.add(request("a", prompt, 2))
    finish_all(s)
    sequence = s.add(request("b", prompt, 2))[0]
    calls, find = [], prefix.longest_hit
    monkeypatch.setattr(paged, "longest_hit", lambda *a: calls.append(1) or find(*a))  # type: ignore[func-returns-value]
    plan = s.plan()
    assert (plan.admitted[0].start, len(calls)) == (20, 1)
    if changed:
        s.state.cache.pool.register(s.state.cache.pool.free[0], 0, b"other")
    s.commit(plan)
    assert len(calls) == looks
    assert len(sequence.tables[0]) == 6


def test_a_hit_that_is_gone_at_its_commit_is_refused() -> None:
    s = scheduler()
    prompt = tuple(range(21))
    s.add(request("a", prompt, 2))
    finish_all(s)
    s.add(request("b", prompt, 2))
    plan = s.plan()
    s.state.cache.pool.take(s.state.cache.pool.available)
    with pytest.raises(StepError, match="0 tokens cached, 20 planned"):
        s.commit(plan)


def test_the_statistics_of_a_step_count_rows_tokens_and_units() -> None:
    s = scheduler(max_batch_tokens=8)
    s.add(request("a", 3, 9))
    step(s)
    s.add(request("b", 20, 2))
    s.commit(s.plan())
    last = s.stats().last
    assert (last.rows, last.prefill_tokens, last.decode_tokens, last.units_held) == (2, 7, 1, 3)


def test_commit_and_update_refuse_plans_and_results_of_another_step() -> None:
    s = scheduler()
    s.add(request("a", 3, 9))
    plan = s.plan()
    work = s.commit(plan)
    with pytest.raises(StepError, match="plan of step 0 committed in step 1"):
        s.commit(plan)
    with pytest.raises(StepError, match="has no result"):
        s.update(work, {})
    s = scheduler()
    a = s.add(request("a", 3, 9))[0]
    _, work, _ = step(s)
    with pytest.raises(StepError, match="has 3 tokens computed, not 0"):
        s.update(work, {a.id: Result(1)})


def test_a_rerun_of_some_rows_makes_no_copies() -> None:
    s = scheduler(allow_block_sharing=False)
    s.add(request("n", 10, 3, n=2))
    step(s)
    work = s.commit(s.plan())
    assert work.copies
    part = work.subset(work.rows[1:])
    assert (part.rows, part.copies, part.offload, part.restore) == (work.rows[1:], [], [], [])


def test_a_sequence_passes_through_its_states() -> None:
    s = scheduler(num_blocks=6, max_batch_tokens=6, allow_block_sharing=False)
    old, young = s.add(request("old", 8, 12))[0], s.add(request("young", 7, 13))[0]
    seen: dict[int, list[Status]] = {old.id: [old.status], young.id: [young.status]}
    while s.has_work:
        step(s)
        for q in (old, young):
            if seen[q.id][-1] is not q.status:
                seen[q.id].append(q.status)
    life = [Status.PENDING, Status.PREFILLING, Status.DECODING]
    assert seen == {old.id: [*life, Status.FINISHED], young.id: [*life, *life, Status.FINISHED]}


def test_limits_come_from_the_configuration() -> None:
    limits = Limits.of(
        EngineConfig(scheduler_type="fair", block_size=32),
        num_blocks=7,
        max_model_len=99,
        prefill_beside_decodes=5,
    )
    assert limits.prefill_beside_decodes == 5
    assert (limits.policy, limits.block_size, limits.num_blocks, limits.capacity) == (
        "fair",
        32,
        7,
        99,
    )
