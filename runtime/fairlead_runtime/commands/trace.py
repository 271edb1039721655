"""`fairlead trace FILE [--format text|chrome|svg] [--from N] [--step N] [--tokenizer MODEL]`: show
the steps of a recorded run.

Exit code: 0 shown, 2 the file or the tokenizer cannot be read, or there is no such step.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator

from fairlead_runtime.hub.source import resolve
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.recording.mask import mask_text
from fairlead_runtime.recording.picture import mask_picture, slots_picture
from fairlead_runtime.recording.record import RecordError, Recording
from fairlead_runtime.recording.trace import StepView, as_events, as_text, steps
from fairlead_runtime.recording.words import Words
from fairlead_runtime.settings import terminal
from fairlead_runtime.settings.arguments import ArgumentParser
from fairlead_runtime.settings.engine_config import ConfigError


def main(argv: list[str]) -> int:
    parser = ArgumentParser(prog="fairlead trace", description="Show every step of a recorded run.")
    parser.add_argument("file", metavar="FILE", help="written by `fairlead serve --record FILE`")
    parser.add_argument(
        "--format",
        choices=("text", "chrome", "svg"),
        default="text",
        help="chrome: JSON for Perfetto or chrome://tracing; svg: a picture of the slots",
    )
    parser.add_argument(
        "--from", type=int, dest="first", metavar="N", help="begin with step N (default: the first)"
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="show the mask of step N, as text or svg"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="show what the tokens say: the model of the run, demo:, a directory, or on the hub, "
        "from which its weights are not downloaded",
    )
    options = parser.parse_args(argv)
    if options.step is not None and options.format == "chrome":
        parser.error("--step: takes --format text or svg")
    if options.step is not None and options.first is not None:
        parser.error("--from: has no effect beside --step")
    try:
        recording = Recording(options.file)
        words = None if options.tokenizer is None else _words(options.tokenizer)
        for line in _lines(recording, options, words):
            sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`| head`) has exited. Without this, Python's flush at exit fails, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except RecordError as error:
        terminal.refuse("BadRecording", str(error))
        return 2
    except (ModelError, ConfigError) as error:
        from fairlead_runtime.commands.refusals import refusal_for

        if (refusal := refusal_for(error)) is not None:
            terminal.refuse(refusal.code, refusal.message, refusal.hint)
        return 2
    if recording.truncated:
        sys.stderr.write("fairlead trace: the last line is incomplete and was ignored\n")
    return 0


def _words(model: str) -> Words:
    """Raises ModelError or ConfigError where the model has no tokenizer that can be read."""
    path = resolve(model, weights=False).path
    # Imported here: transformers takes seconds, and a trace without words needs neither.
    from fairlead_runtime.models.tokenizer_files import load_tokenizer
    from fairlead_runtime.serving.detokenize import vocabulary_of

    return Words(vocabulary_of(load_tokenizer(path)).decode)


def _lines(recording: Recording, options: argparse.Namespace, words: Words | None) -> Iterator[str]:
    if options.step is None:
        renderings = {"text": as_text, "chrome": _json, "svg": slots_picture}
        first = options.first or 0
        if first and next(steps(recording, first), None) is None:
            raise RecordError(f"{recording.path}: ends before step {first}")
        return renderings[options.format](recording, words, first)
    # A picture has one mask: the first group's. The text has one for each window.
    view, window = _step(recording, options.step), recording.groups[0].window
    if options.format == "svg":
        return mask_picture(view, window, words)
    return mask_text(recording, view, words)


def _step(recording: Recording, number: int) -> StepView:
    for view in steps(recording):
        if view.step == number:
            return view
    raise RecordError(f"{recording.path}: has no step {number}")


def _json(recording: Recording, words: Words | None, first: int) -> Iterator[str]:
    """One JSON object in lines of one event each, so that long runs need no memory."""
    separator = '{"displayTimeUnit":"ms","traceEvents":['
    for event in as_events(recording, words, first):
        yield separator + json.dumps(event, separators=(",", ":"))
        separator = ","
    yield "]}"
