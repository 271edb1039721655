"""`fairlead replay FILE`: does the same run lead to the same plans? 0 identical, 1 differs, 2 unreadable."""

import argparse
import sys

from fairlead_runtime.scheduling.record import RecordError, Recording
from fairlead_runtime.scheduling.replay import replay


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="fairlead replay", description="Replay a recorded run and compare every plan."
    )
    parser.add_argument("file", metavar="FILE", help="written by `fairlead serve --record FILE`")
    options = parser.parse_args(argv)
    try:
        recording = Recording(options.file)
        steps, difference = replay(recording)
    except RecordError as error:
        print(f"fairlead replay: {error}", file=sys.stderr)  # noqa: T201 - a command's answer
        return 2
    if recording.cut:
        print("fairlead replay: the last line breaks off and was left out", file=sys.stderr)  # noqa: T201 - see above
    if difference is None:
        print(f"identical: {steps} steps")  # noqa: T201 - see above
        return 0
    print(f"step {difference.step} differs")  # noqa: T201 - see above
    print(f"recorded {difference.recorded}")  # noqa: T201 - see above
    print(f"replayed {difference.replayed}")  # noqa: T201 - see above
    return 1
