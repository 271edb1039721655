"""A route's own names of a chat's fields, for refusals of a body that is checked as a chat's."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from fairlead_runtime.front.errors import ApiError

_PATH = re.compile(r"(?:^|(?<=; ))[a-z_]+(?:\.\w+)*(?=: )")  # of each problem in a message


class SentNames(NamedTuple):
    """``places``: patterns of a chat's fields and what the client sent, the longest first; what is
    below such a field keeps its name.
    """

    places: Sequence[tuple[re.Pattern[str], str]]

    def name(self, param: str) -> str:
        """The client's name of a chat's field."""
        for of_chat, sent in self.places:
            match = of_chat.match(param)
            if match and param[match.end() : match.end() + 1] in {"", "."}:
                return match.expand(sent) + param[match.end() :]
        return param

    def renamed(self, error: ApiError) -> ApiError:
        """The error, in whose message every problem has the client's name."""
        return ApiError(
            error.status,
            _PATH.sub(lambda path: self.name(path[0]), error.message),
            param=None if error.param is None else self.name(error.param),
            code=error.code,
            headers=error.headers,
        )


def without_tags(error: ApiError, tag: re.Pattern[str]) -> ApiError:
    """The error without the types of items, which pydantic names in the path to a field: each
    ``tag`` becomes its first group.
    """
    param = tag.sub(r"\1", error.param or "") or None
    return ApiError(error.status, tag.sub(r"\1", error.message), param=param, code=error.code)
