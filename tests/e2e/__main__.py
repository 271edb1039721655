"""``make e2e``: builds the node's programs, checks the sandbox from outside, then runs the
scenarios inside one. Arguments go to pytest, e.g. ``-k rollout``.
"""

import os
import subprocess
import sys
from pathlib import Path

from cluster.harness import binaries
from e2e.harness import sandbox
from e2e.harness.images import NoImagesError, archives
from e2e.harness.node import PROGRAMS
from support.full import LONG_FORM

TESTS = Path(__file__).parent
# The first test waits for the node, the images and the chart as well; the long soak takes an hour.
TIMEOUT = 4 * 3600 if LONG_FORM else 1200
PYTEST = (sys.executable, "-m", "pytest", f"--timeout={TIMEOUT}", "--durations=10", str(TESTS))


def main() -> int:
    try:
        if lacks := sandbox.missing():
            raise sandbox.NoSandboxError(sandbox.LACKING + ", ".join(lacks))
        archives()
        binaries.build(PROGRAMS)  # nothing can be downloaded inside
    except (sandbox.NoSandboxError, NoImagesError, binaries.NoControlPlaneError) as error:
        print(f"[e2e] {error}", file=sys.stderr)
        return 2
    outside = subprocess.run([*PYTEST, "-m", "e2e_machine"], check=False)
    if outside.returncode:
        return outside.returncode
    os.environ["PYTHONPATH"] = str(TESTS.parent)
    return sandbox.run([*PYTEST, "-m", "e2e", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
