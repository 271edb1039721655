"""An argument parser that tells a wrong flag as every other refusal is told.

Owns the one JSON line and the exit code 2 for command lines that make no sense.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from fairlead_runtime.start import termination


class Parser(argparse.ArgumentParser):
    """``environ`` names the termination log; abbreviated flags are refused, so that new flags break
    no one.
    """

    def __init__(self, *, environ: Mapping[str, str] = os.environ, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self._environ = environ

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        termination.report("InvalidConfig", message, f"see {self.prog} --help", self._environ)
        raise SystemExit(2)
