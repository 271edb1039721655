"""The parser of the commands that a pod runs: a wrong flag ends in the termination log, too."""

import os
from collections.abc import Mapping
from typing import Any

from fairlead_runtime.processes import termination
from fairlead_runtime.settings.arguments import ArgumentParser


class Parser(ArgumentParser):
    """``environ`` names the termination log."""

    def __init__(self, *, environ: Mapping[str, str] = os.environ, **settings: Any) -> None:
        super().__init__(**settings)
        self._environ = environ

    def write(self, message: str, hint: str) -> None:
        termination.report("InvalidConfig", message, hint, self._environ)
