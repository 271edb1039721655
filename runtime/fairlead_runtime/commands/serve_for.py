"""The server of another command: `fairlead serve`, which ends with the process that started it.

``python -m fairlead_runtime.commands.serve_for PID ARGUMENTS``.
"""

import sys

from fairlead_runtime.child.life import end_with
from fairlead_runtime.commands import serve


def main() -> int:
    end_with(int(sys.argv[1]))
    return serve.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
