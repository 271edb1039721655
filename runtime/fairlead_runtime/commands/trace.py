"""`fairlead trace FILE [--format text|chrome]`: show every step of a recorded run.

Exit code: 0 shown, 2 the file cannot be read.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator

from fairlead_runtime.recording.record import RecordError, Recording
from fairlead_runtime.recording.trace import as_events, as_text


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="fairlead trace", description="Show every step of a recorded run."
    )
    parser.add_argument("file", metavar="FILE", help="written by `fairlead serve --record FILE`")
    parser.add_argument(
        "--format",
        choices=("text", "chrome"),
        default="text",
        help="chrome: JSON for Perfetto or chrome://tracing",
    )
    options = parser.parse_args(argv)
    try:
        recording = Recording(options.file)
        for line in as_text(recording) if options.format == "text" else _json(recording):
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


def _json(recording: Recording) -> Iterator[str]:
    """One JSON object in lines of one event each, so that long runs need no memory."""
    separator = '{"displayTimeUnit":"ms","traceEvents":['
    for event in as_events(recording):
        yield separator + json.dumps(event, separators=(",", ":"))
        separator = ","
    yield "]}"
