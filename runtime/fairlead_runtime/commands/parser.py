"""An argparse parser that reports a wrong flag as commands report every other refusal.

Owns the JSON line and the exit code 2 for command lines that cannot be parsed.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from fairlead_runtime.processes import termination
from fairlead_runtime.settings.engine_config import EngineConfig, flag_of
from fairlead_runtime.settings.other_names import hint_for


class Parser(argparse.ArgumentParser):
    """``environ`` names the termination log. Abbreviated flags are refused, as a new flag could
    make them ambiguous.
    """

    def __init__(self, *, environ: Mapping[str, str] = os.environ, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self._environ = environ

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, but the first unknown flag is refused with our name for it."""
        options, unknown = super().parse_known_args(args, namespace)
        flags = [arg.partition("=")[0] for arg in unknown if arg.startswith("--")]
        if flags:
            settings = [f.name for f in dataclasses.fields(EngineConfig)]
            hint = hint_for(flags[0][2:].removeprefix("no-").replace("-", "_"), settings, flag_of)
            self._refuse(f"unrecognized arguments: {' '.join(unknown)}", hint)
        return options, unknown

    def error(self, message: str) -> NoReturn:
        self._refuse(message, "")

    def _refuse(self, message: str, hint: str) -> NoReturn:
        self.print_usage(sys.stderr)
        hint = hint or f"see {self.prog} --help"
        termination.report("InvalidConfig", message, hint, self._environ)
        raise SystemExit(2)
