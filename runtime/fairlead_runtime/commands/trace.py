"""`fairlead trace FILE [--format text|chrome|svg] [--step N]`: show the steps of a recorded run.

Exit code: 0 shown, 2 the file cannot be read or has no such step.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator

from fairlead_runtime.recording.mask import mask_text
from fairlead_runtime.recording.picture import mask_picture, slots_picture
from fairlead_runtime.recording.record import RecordError, Recording
from fairlead_runtime.recording.trace import StepView, as_events, as_text, steps


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="fairlead trace", description="Show every step of a recorded run."
    )
    parser.add_argument("file", metavar="FILE", help="written by `fairlead serve --record FILE`")
    parser.add_argument(
        "--format",
        choices=("text", "chrome", "svg"),
        default="text",
        help="chrome: JSON for Perfetto or chrome://tracing; svg: a picture of the slots",
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="show the mask of step N, as text or svg"
    )
    options = parser.parse_args(argv)
    if options.step is not None and options.format == "chrome":
        parser.error("--step: takes --format text or svg")
    try:
        recording = Recording(options.file)
        for line in _lines(recording, options.format, options.step):
            sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`| head`) has exited. Without this, Python's flush at exit fails, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except RecordError as error:
        sys.stderr.write(f"fairlead trace: {error}\n")
        return 2
    if recording.truncated:
        sys.stderr.write("fairlead trace: the last line is incomplete and was ignored\n")
    return 0


def _lines(recording: Recording, form: str, step: int | None) -> Iterator[str]:
    if step is None:
        renderings = {"text": as_text, "chrome": _json, "svg": slots_picture}
        return renderings[form](recording)
    # A picture has one mask: the first group's. The text has one for each window.
    view, window = _step(recording, step), recording.groups[0].window
    return mask_picture(view, window) if form == "svg" else mask_text(recording, view)


def _step(recording: Recording, number: int) -> StepView:
    for view in steps(recording):
        if view.step == number:
            return view
    raise RecordError(f"{recording.path}: has no step {number}")


def _json(recording: Recording) -> Iterator[str]:
    """One JSON object in lines of one event each, so that long runs need no memory."""
    separator = '{"displayTimeUnit":"ms","traceEvents":['
    for event in as_events(recording):
        yield separator + json.dumps(event, separators=(",", ":"))
        separator = ","
    yield "]}"
