"""The argument parser of every command: a command line that is wrong costs one short refusal.

Owns ``--log-format`` and the words for wrong flags: the nearest flag, ours for another engine's.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from fairlead_runtime.settings.engine_config import SERVER_ONLY, flag_of
from fairlead_runtime.settings.other_names import hint_for
from fairlead_runtime.settings.terminal import LOG_FORMAT_FLAG, LOG_FORMAT_HELP, LOG_FORMATS
from fairlead_runtime.settings.terminal import refuse as write_refusal
from fairlead_runtime.settings.terminal import use as use_format

_ARGUMENT = re.compile(r"argument (?:[^:]*/)?(?P<name>[^:/]+): (?P<problem>.*)", re.DOTALL)
_CHOICE = re.compile(r"invalid choice: (?P<value>'.*?'|\S+) \(choose from (?P<choices>.*)\)")
_OF_SERVE = "leave it out: only `fairlead serve` has it"
_NUMBERS = {"int": "write a whole number", "float": "write a number"}


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, without abbreviated flags, as a new flag could make them ambiguous, and without
    the usage before an error.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self._given: list[str] = []
        self.add_argument(
            LOG_FORMAT_FLAG, choices=LOG_FORMATS, default="auto", help=LOG_FORMAT_HELP
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, but the first unknown flag is refused with our name for it."""
        self._given = list(sys.argv[1:] if args is None else args)
        # Before the rest: what is wrong with it is said in this form, too.
        log_format = _value_of(LOG_FORMAT_FLAG, self._given)
        use_format(log_format if log_format in LOG_FORMATS else "auto")
        options, unknown = super().parse_known_args(args, namespace)
        if any(map(_is_flag, unknown)):
            self._refuse_flags(unknown)
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """Refuse a command line. An unknown flag is the reason of whatever else is wrong."""
        known = self._option_string_actions
        flags = filter(_is_flag, self._given)
        if unknown := [arg for arg in flags if arg.partition("=")[0] not in known]:
            self._refuse_flags(unknown)
        found = _ARGUMENT.fullmatch(message)
        name, problem = (found["name"], found["problem"]) if found else ("", message)
        value = re.search(r"invalid (int|float) value", problem)
        hint = _NUMBERS[value[1]] if value else ""
        if choice := _CHOICE.fullmatch(problem):
            hint = _nearest(choice["value"].strip("'"), choice["choices"])
            problem = f"{choice['value']} is not one of {choice['choices'].replace(chr(39), '')}"
        self.refuse(f"{name}: {problem}" if name else problem, hint)

    def _refuse_flags(self, unknown: Sequence[str]) -> NoReturn:
        # Not the values: an unknown flag may be one for a key.
        flags = [arg.partition("=")[0] for arg in unknown if _is_flag(arg)]
        message, flag = f"unrecognized arguments: {' '.join(flags)}", flags[0]
        name = flag.lstrip("-").removeprefix("no-").replace("-", "_")
        if name in SERVER_ONLY:
            self.refuse(message, _OF_SERVE)
        ours = self._option_string_actions

        def spell(name: str) -> str:
            if not flag.startswith("--no-"):
                return flag_of(name)
            no = flag_of(f"no_{name}")
            # The flag itself is a name of another engine's, where it is none of a setting of ours.
            theirs = no == flag and flag_of(name) not in ours
            return no if no in ours or theirs else flag_of(name)

        self.refuse(message, hint_for(name, self._settings(), spell))

    def _settings(self) -> Iterable[str]:
        """The names of the flags, as Python has them."""
        flags = (flag for flag in self._option_string_actions if flag.startswith("--"))
        return [flag[2:].replace("-", "_") for flag in flags if not flag.startswith("--no-")]

    def refuse(self, message: str, hint: str) -> NoReturn:
        """End with 2. ``hint``: "" for where to read more."""
        self.write(message, hint or f"see {self.prog} --help")
        raise SystemExit(2)

    def write(self, message: str, hint: str) -> None:
        write_refusal("InvalidConfig", message, hint)


def _is_flag(argument: str) -> bool:
    """Whether it is meant as one: long, or short as another engine's ``-tp``."""
    return re.match(r"--?[A-Za-z]", argument) is not None


def _value_of(flag: str, args: Sequence[str]) -> str:
    """The value of a flag among ``args``; "" without it."""
    for number, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name == flag:
            return value if equals else "".join(args[number + 1 : number + 2])
    return ""


def _nearest(value: str, choices: str) -> str:
    words = re.findall(r"[\w.-]+", choices)
    nearest = difflib.get_close_matches(value, words, n=1, cutoff=0.5)
    return f"did you mean {nearest[0]}?" if nearest else ""
