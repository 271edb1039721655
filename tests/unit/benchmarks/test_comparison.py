"""What the comparison with other engines counts and draws: turns, bytes of a step, bars."""

import math
import os
import random
import signal
import subprocess
import time
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from benchmarks import cpu_peers, cpu_picture, machine, models, peers, tutorial
from benchmarks.turns import OURS, Terms, take_turns
from torch import nn

from support import byte_tokenizer
from support.real_answers import Answer


def test_the_order_changes_from_round_to_round_and_the_warm_up_does_not_count() -> None:
    ran = []

    def run(name: str, number: int) -> float:
        ran.append((number, name))
        return 1.0 + number

    def rest() -> None:
        rested.append(len(ran))

    rested: list[int] = []
    found = take_turns([OURS, "other"], Terms(2, math.inf, rest), "mixed", run, float)
    assert rested == list(range(6))
    assert ran == [(0, "other"), (0, OURS), (1, OURS), (1, "other"), (2, "other"), (2, OURS)]
    assert found == {OURS: [2.0, 3.0], "other": [2.0, 3.0]}


def test_the_tutorial_has_its_six_requests_and_says_where_two_engines_texts_differ() -> None:
    assert [cap for _, cap in tutorial.REQUESTS] == [6, 50, 300, 30, 180, 45]
    assert [len(ids) for ids, _ in tutorial.requests()] == [5, 10, 15, 17, 21, 17]
    static = [[1, 2], [3, 4, 5]]
    assert tutorial.difference({"static": static, "ours": [[1, 2], [3, 4, 5]]}) == ""
    for other, at in (([3, 4, 6], 2), ([3, 4], 2), ([7, 4, 5], 0)):
        problem = tutorial.difference({"static": static, "same": static, "ours": [[1, 2], other]})
        assert problem == f"request 1: ours differs from static from token {at} on"


def test_a_side_that_takes_too_long_runs_once_and_a_failing_one_is_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(name: str, number: int) -> float:
        if name == "failing" and number == 2:
            raise RuntimeError("no room")
        return {OURS: 1.0, "slow": 2.1, "fast": 1.9, "failing": 1.0}[name]

    found = take_turns([OURS, "slow", "fast", "failing"], Terms(3, 2.0), "mixed", run, float)
    assert {name: len(taken) for name, taken in found.items()} == {OURS: 3, "slow": 1, "fast": 3}
    assert "failing: left out of mixed, RuntimeError: no room" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("caps", "slots", "steps"),
    [
        ([7], 3, 7),
        ([6, 50, 300, 30, 180, 45], 3, 300),
        ([6, 50, 300, 30, 180, 45], 1, 611),
        ([4, 9, 5, 2], 2, 11),
        ([3, 3, 3, 3], 2, 6),
    ],
)
def test_requests_in_slots_take_the_steps_of_the_slot_that_ends_last(
    caps: list[int], slots: int, steps: int
) -> None:
    assert cpu_peers.steps_of(caps, slots) == steps


def test_a_turn_waits_until_the_cores_rest_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # busy ticks of 40 each: both cores, one, almost none
    ticks = iter([(0, 0), (40, 40), (60, 80), (63, 120)])
    monkeypatch.setattr(machine, "_used", lambda: next(ticks))
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    machine.wait_until_idle()
    assert next(ticks, None) is None
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(machine, "_used", lambda: (0, 0))
    machine.wait_until_idle(most=0.0)
    assert capsys.readouterr().out == "the cores are still busy after 0 s\n"


def test_ticks_of_the_machine_are_read() -> None:
    busy, total = machine._used()
    assert 0 < busy < total


class Model(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(100, 4), nn.Embedding(10, 4)
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 100, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.head


@pytest.mark.parametrize(("tied", "total"), [(True, 460), (False, 860)])
def test_a_step_reads_the_layers_and_the_head_but_no_embedding(tied: bool, total: int) -> None:
    model: Any = Model(tied=tied)
    assert models.size(model) == models.Size(total, layers=20, head=400)


def test_every_engine_has_a_bar_of_its_median_ratio_and_long_ones_are_cut() -> None:
    seconds = {"15 M": {"mixed": {OURS: [1.0, 2.0, 4.0], "other": [1.5, 3.0, 6.0], "slow": [9.0]}}}
    root = ET.fromstring("\n".join(cpu_picture.draw(seconds)))
    bars = [one for one in root.iter() if one.find("{*}title") is not None]
    unit = cpu_picture.WIDTH / cpu_picture.LONGEST
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert widths == [unit, 1.5 * unit, cpu_picture.WIDTH]
    texts = [one.text for one in root.findall(".//{*}text")]
    assert {"15 M, mixed", "1.00", "1.50", "→ 9.00"} <= set(texts)
    assert float(root.attrib["viewBox"].split()[3]) >= max(float(bar.attrib["y"]) for bar in bars)


def test_an_engine_that_ends_leaves_no_process_behind() -> None:
    process = subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!; wait"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    peers.end(process)
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
    assert process.returncode == -signal.SIGTERM


def test_conversations_are_new_in_each_round_and_answers_as_long_as_the_models_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    characters = byte_tokenizer.byte_level([], max_length=4096)
    monkeypatch.setattr(cpu_peers, "_tokenizer", lambda: characters)
    draw = random.Random(0)
    first, second = (cpu_peers.conversations(draw, 0) for _ in range(2))
    assert len(first) == 40
    assert not {tuple(prompt) for prompt, _ in first} & {tuple(prompt) for prompt, _ in second}
    lengths = [cap for _, cap in first]
    assert lengths == [len(answer.tokens) for answer in Answer.read()]
    ((_, cap),) = cpu_peers.one_conversation(draw, 0)
    assert cap >= cpu_peers.ALONE


def test_each_engine_of_the_published_weights_is_taken_by_its_name() -> None:
    names = [name for name in cpu_peers.REAL if name.startswith((OURS, "llama.cpp"))]
    assert names == [OURS, "llama.cpp", f"{OURS}, bfloat16", f"{OURS}, int8", "llama.cpp, int8"]
