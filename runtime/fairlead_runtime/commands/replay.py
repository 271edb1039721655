"""`fairlead replay FILE`: replay a recorded run and compare every plan.

Exit code: 0 all plans are identical, 1 a plan differs, 2 the file cannot be read.
"""

import sys

from fairlead_runtime.recording.record import RecordError, Recording
from fairlead_runtime.recording.replay import replay
from fairlead_runtime.settings import terminal
from fairlead_runtime.settings.arguments import ArgumentParser


def main(argv: list[str]) -> int:
    parser = ArgumentParser(
        prog="fairlead replay", description="Replay a recorded run and compare every plan."
    )
    parser.add_argument("file", metavar="FILE", help="written by `fairlead serve --record FILE`")
    options = parser.parse_args(argv)
    try:
        recording = Recording(options.file)
        steps, difference = replay(recording)
    except RecordError as error:
        terminal.refuse("BadRecording", str(error))
        return 2
    if recording.truncated:
        sys.stderr.write("fairlead replay: the last line is incomplete and was ignored\n")
    if difference is None:
        sys.stdout.write(f"identical: {steps} steps\n")
        return 0
    sys.stdout.write(f"step {difference.step} differs\n")
    sys.stdout.write(f"recorded {difference.recorded}\n")
    sys.stdout.write(f"replayed {difference.replayed}\n")
    return 1
