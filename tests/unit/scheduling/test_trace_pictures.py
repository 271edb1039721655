"""The mask of a recorded step, and the pictures of slots and masks."""

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

import pytest

from fairlead_runtime.commands import trace as command
from fairlead_runtime.recording import picture
from fairlead_runtime.recording.mask import LEGEND, MOST_CELLS, mask_of
from fairlead_runtime.recording.record import RecordedScheduler
from fairlead_runtime.recording.trace import RowView, StepView
from fairlead_runtime.recording.words import MOST_WORDS, Words
from fairlead_runtime.request.sequence import Request, SamplingParams
from fairlead_runtime.scheduling import Limits, Result
from fairlead_runtime.sizing.groups import group_layers

SVG = "{http://www.w3.org/2000/svg}"


def view(*rows: tuple[str, int, int]) -> StepView:
    """Rows as (name, cached tokens, tokens of the step)."""
    made = [
        RowView(name, slot, start, count, start + count, 64, 1, count == 1, "")
        for slot, (name, start, count) in enumerate(rows)
    ]
    return StepView(7, made, [], [], 5, 0)


def test_a_query_sees_its_own_row_up_to_itself() -> None:
    mask = mask_of(view(("a", 0, 3), ("b", 2, 1)), None)
    assert mask.lines == ("#.....", "##....", "###...", "...###")
    assert [row.name for row in mask.owners] == ["a", "a", "a", "b"]
    assert (mask.queries, mask.keys, mask.per_cell) == (4, 6, 1)


def test_a_window_hides_the_keys_that_it_has_passed() -> None:
    assert mask_of(view(("a", 1, 3)), 2).lines == ("##..", ".##.", "..##")
    assert mask_of(view(("a", 1, 3)), 9).lines == mask_of(view(("a", 1, 3)), None).lines


def test_a_large_mask_has_several_tokens_in_a_cell() -> None:
    mask = mask_of(view(("a", 0, 200), ("b", 100, 1)), None)
    assert mask.per_cell == 4
    assert max(len(mask.lines), len(mask.lines[0])) <= MOST_CELLS
    assert mask.lines[0].startswith("+.")
    assert mask.lines[49][:51] == "#" * 49 + "+" + "."
    assert mask.lines[50] == "." * 50 + "#" * 26


def record(path: Path, windows: list[int | None]) -> None:
    scheduler = RecordedScheduler(
        Limits("fifo", 8, 4, 0.0, 4, 14, 64, allow_block_sharing=False),
        group_layers(windows),
        path=path,
    )
    for name, prompt, output in (("<long>", 10, 6), ("pair", 4, 12)):
        params = SamplingParams(max_tokens=output, n=1 + (name == "pair"))
        scheduler.add(Request(name, tuple(range(prompt)), params, output))
    while scheduler.has_work:
        work = scheduler.commit(scheduler.plan())
        scheduler.update(work, {r.sequence.id: Result(9) for r in work.rows if r.samples})
    scheduler.close()


def shown(capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> str:
    assert command.main([str(path), *options]) == 0
    return capsys.readouterr().out


def test_a_steps_mask_is_shown_once_for_each_kind_of_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    record(path, [None, 3, None])
    lines = shown(capsys, path, "--step", "1").splitlines()
    assert lines[0] == "step 1, full attention: 6 queries, 14 keys"
    assert lines[1] == "  keys of      AAAAAAAAAABBBB"
    assert lines[2] == "               ========######"
    assert lines[3] == "  [0] A <long> #########....."
    assert lines[5] == "  [1] B pair/0 ..........#..."
    assert lines[9] == "step 1, a window of 3: 6 queries, 14 keys"
    assert lines[12] == "  [0] A <long> ......###....."
    assert lines[-1] == LEGEND


def letters(ids: Sequence[int]) -> str:
    """A decoder: 0 is a, 1 is b; 9 is a line break."""
    return "".join("\n" if i == 9 else chr(97 + i) for i in ids)


def test_with_a_tokenizer_every_view_shows_the_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_words", lambda _model: Words(letters))
    path = tmp_path / "run.jsonl"
    record(path, [None])
    text = shown(capsys, path, "--tokenizer", "m").splitlines()
    first = text.index(next(line for line in text if line.startswith("  [0] <long>")))
    assert text[first + 1] == "      'a' 'b' 'c' 'd' 'e' 'f' 'g' 'h' ->"
    assert "      'i' '\\n' -> '\\n'" in text
    assert r"  = <long> ends with 6 tokens: '\n\n\n\n\n\n'" in text
    mask = shown(capsys, path, "--tokenizer", "m", "--step", "1").splitlines()
    assert mask[0] == "A = [0] <long>: 'a' 'b' 'c' 'd' 'e' 'f' 'g' 'h' | 'i' '\\n'"
    assert any(line.startswith("  [1] B pair/0 'b'") for line in mask)
    drawn = ET.fromstring(shown(capsys, path, "--tokenizer", "m", "--format", "svg", "--step", "1"))
    assert texts(drawn).count("'b'") == 3, "two keys and one query"
    assert texts(drawn).count("'\\n'") == 2, (
        "the key and the query of the last token of the long one"
    )
    tips = shown(capsys, path, "--tokenizer", "m", "--format", "svg")
    assert "prefill 8..9, 3 blocks: 'i' '\\n' -&gt; '\\n'" in tips
    events = json.loads(shown(capsys, path, "--tokenizer", "m", "--format", "chrome"))
    assert "'i' '\\n'" in {e.get("args", {}).get("tokens") for e in events["traceEvents"]}


def test_a_long_row_shows_its_first_and_last_words() -> None:
    words = Words(letters)
    assert words.words(range(5)).split() == ["'a'", "'b'", "'c'", "'d'", "'e'"]
    assert len(words.words([0] * 100).split()) == MOST_WORDS + 1
    assert Words(lambda _ids: "x" * 50).word(1) == "'" + "x" * 11 + "…'"


def test_the_pictures_are_svg_with_a_rectangle_for_each_row_and_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    record(path, [None])
    text = shown(capsys, path)
    rows = [line for line in text.splitlines() if line.startswith("  [")]
    slots = ET.fromstring(shown(capsys, path, "--format", "svg"))
    drawn = slots.findall(f"{SVG}rect")
    assert len(drawn) == len(rows)
    assert {one.get("fill-opacity") for one in drawn} == {"1", "0.45"}, "prefill and decode"
    tips = [one.findtext(f"{SVG}title") or "" for one in drawn]
    assert tips[0].startswith("step 0: <long> prefill 0..7")
    crosses = [t for t in slots.findall(f"{SVG}text") if t.findtext(f"{SVG}title")]
    assert len(crosses) == text.count("preempted")
    mask = ET.fromstring(shown(capsys, path, "--format", "svg", "--step", "1"))
    assert len(mask.findall(f"{SVG}rect")) == 6 * 14 + 14
    seen = [r for r in mask.findall(f"{SVG}rect") if r.get("fill") != "#eeeeee"]
    assert len(seen) == 9 + 10 + 1 + 2 + 3 + 4 + 14
    bar = [r for r in seen if r.get("fill-opacity") == "0.35"]
    assert len(bar) == 8, "the keys that were cached before the step"


def texts(element: ET.Element) -> list[str]:
    return [one.text or "" for one in element.iter(f"{SVG}text")]


def test_the_picture_of_a_long_run_has_bands_with_axes_and_begins_where_one_asks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.jsonl"
    record(path, [None])
    last = int(re.findall(r"^step (\d+):", shown(capsys, path), re.MULTILINE)[-1])
    monkeypatch.setattr(picture, "BAND", 4)
    monkeypatch.setattr(picture, "TICK", 2)
    monkeypatch.setattr(picture, "MOST_STEPS", 10)
    drawn = ET.fromstring(shown(capsys, path, "--format", "svg", "--from", "2"))
    width, height = int(drawn.get("width", 0)), int(drawn.get("height", 0))
    assert drawn.get("viewBox") == f"0 0 {width} {height}"
    rights = [int(one.get("x", 0)) + int(one.get("width", 0)) for one in drawn.iter(f"{SVG}rect")]
    assert max(rights) <= width
    said = texts(drawn)
    assert said[0] == f"fifo: steps 2 to 11 of {last}, 3 slots; the next: --from 12"
    assert said.count("slot 0") == said.count("step") == 3, "of three bands"
    assert [number for number in said if number.isdecimal()] == ["2", "4", "6", "8", "10"]
    assert {"prefill", "decode", "x preempted"} <= set(said)
    tips = [one.text or "" for one in drawn.iter(f"{SVG}title")]
    assert min(int(re.findall(r"step (\d+)", tip)[0]) for tip in tips) == 2
    text = shown(capsys, path, "--from", "5")
    assert re.findall(r"^step (\d+):", text, re.MULTILINE)[0] == "5"
    events = json.loads(shown(capsys, path, "--format", "chrome", "--from", "5"))["traceEvents"]
    assert min(e["args"]["step"] for e in events if "step" in e.get("args", {})) == 5
    assert command.main([str(path), "--from", str(last + 1)]) == 2
    assert f"ends before step {last + 1}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main([str(path), "--from", "1", "--step", "1"])


def test_the_labels_of_a_mask_stand_apart_and_say_whose_the_keys_are() -> None:
    many = view(("a", 50, 1), ("b", 60, 1), ("c", 0, 150))
    drawn = ET.fromstring("".join(picture.mask_picture(many, None)))
    labels = [one for one in drawn.findall(f"{SVG}text") if (one.text or "").startswith("[")]
    assert [one.text for one in labels] == ["[0] a and 1 more", "[2] c"]
    heights = [int(one.get("y", 0)) for one in labels]
    assert heights[1] - heights[0] >= int(drawn.get("font-size", 0))
    said = texts(drawn)
    assert [name for name in said if name in {"a", "b", "c"}] == ["a", "b", "c"]
    assert {"keys, across", "queries, down"} <= set(said)


def test_the_text_says_when_a_request_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    record(path, [None])
    ends = [line for line in shown(capsys, path).splitlines() if line.startswith("  = ")]
    assert ends[0] == "  = <long> ends with 6 tokens"
    assert sorted(ends[1:]) == [f"  = pair/{n} ends with 12 tokens" for n in (0, 1)]


def test_a_step_that_was_not_recorded_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    record(path, [None])
    assert command.main([str(path), "--tokenizer", "/no/such/model"]) == 2
    assert "/no/such/model: no such directory" in capsys.readouterr().err
    assert command.main([str(path), "--step", "999"]) == 2
    assert "has no step 999" in capsys.readouterr().err
    with pytest.raises(SystemExit) as refusal:
        command.main([str(path), "--step", "1", "--format", "chrome"])
    assert refusal.value.code == 2
