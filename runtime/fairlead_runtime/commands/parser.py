"""An argparse parser that reports a wrong flag as commands report every other refusal.

Owns the JSON line and the exit code 2 for command lines that cannot be parsed.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from fairlead_runtime.processes import termination


class Parser(argparse.ArgumentParser):
    """``environ`` names the termination log. Abbreviated flags are refused, as a new flag could
    make them ambiguous.
    """

    def __init__(self, *, environ: Mapping[str, str] = os.environ, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self._environ = environ

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        termination.report("InvalidConfig", message, f"see {self.prog} --help", self._environ)
        raise SystemExit(2)
