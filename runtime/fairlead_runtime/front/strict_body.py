"""What the bodies of all routes share: strict types, the model's name, the words of a refusal."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from fairlead_runtime.front.errors import ApiError

MAX_NAME = 256  # characters of model, user, cache_salt
MAX_ERRORS = 5
MAX_WHOLE = 2**53  # a float up to here is the number that its text says


# By a word in the type of a content's part, or in a key of one without a type, what it is.
_MEDIA = {
    "image": "images are not",
    "audio": "sound is not",
    "video": "videos are not",
    **dict.fromkeys(("file", "document"), "files are not"),
}
_MAX_TYPE = 64  # characters of a type that a refusal repeats


class StrictBody(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True, frozen=True
    )


def _whole(value: Any) -> Any:
    """A whole float as an integer, as clients in JavaScript and R write it; beyond 2^53 it may be
    another one.
    """
    return int(value) if type(value) is float and whole(value) else value


def whole(value: float) -> bool:
    return value.is_integer() and abs(value) <= MAX_WHOLE


def wholes(value: Any) -> Any:
    """A list with its whole floats as integers."""
    if isinstance(value, list) and float in {*map(type, value)}:
        return [_whole(item) for item in value]
    return value


Whole = Annotated[int, BeforeValidator(_whole)]
Wholes = Annotated[list[int], BeforeValidator(wholes)]


@dataclass(frozen=True, slots=True)
class ObjectsOf:
    """Marks a field of any type: its objects, or those of its list, have the fields of ``kind``."""

    kind: type[StrictBody]


class TextPart(StrictBody):
    """The names in a part of a content; ``text_of`` reads it."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None


BodyT = TypeVar("BodyT", bound=StrictBody)


def validated(kind: type[BodyT], body: Mapping[str, Any]) -> BodyT:
    """Raises ApiError 400, which names the fields."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise explain(error) from None


def text_of(content: Any, *kinds: str, refusals: bool = False) -> str:
    """A content, text or a list of texts and of parts of one of these types, as one text, a line
    for each. With ``refusals``, which our own answers may hold, these are text. Raises ValueError,
    for an image, sound or a file by its name.
    """
    kinds = (*kinds, "refusal") if refusals else kinds
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part if isinstance(part, str) else _part_text(part, kinds) for part in parts]
    if not isinstance(content, list) or None in texts:
        for part in parts:
            refuse_media(part)
        raise ValueError(
            f'must be text or a list of parts {{"type": "{kinds[0]}", "text": ...}}; other parts '
            "are not supported"
        )
    return "\n".join(text for text in texts if text is not None)


def _part_text(part: Any, kinds: tuple[str, ...]) -> str | None:
    if not isinstance(part, dict):
        return None
    kind = part.get("type")
    text = part.get("refusal" if kind == "refusal" else "text")
    # Tuples: what a client sends as the type need not be hashable.
    return text if kind in kinds and isinstance(text, str) else None


def refuse_media(part: Any) -> None:
    """Raise ValueError for a part that is an image, sound or a file, by the name of its type."""
    kind = part.get("type") if isinstance(part, dict) else None
    names = [kind] if isinstance(kind, str) else part if isinstance(part, dict) else ()
    for name in names:
        for word in name[:_MAX_TYPE].split("_"):
            if word in _MEDIA:
                raise ValueError(
                    f"{name[:_MAX_TYPE]}: this model is served for text; {_MEDIA[word]}"
                )


def check_model(name: Any, *served: str) -> None:
    """Raises ApiError 404 for a name that is none of the served model's; does not echo it."""
    if isinstance(name, str) and name not in served:
        raise ApiError(
            404,
            f"model: this server has no such model; it serves {', '.join(served)}",
            param="model",
            code="model_not_found",
        )


def by_first_name(
    body: dict[str, Any], served: str, aliases: Collection[str]
) -> tuple[dict[str, Any], str]:
    """The body, which calls the model by its first name, ``served``, and the name that it was sent
    with. Raises ApiError 404.
    """
    name = body.get("model")
    check_model(name, served, *aliases)
    if not isinstance(name, str) or name == served:
        return body, served
    return body | {"model": served}, name


def explain(error: ValidationError) -> ApiError:
    """At most MAX_ERRORS problems, each with its field; ``param`` is the first problem's field."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)[
        :MAX_ERRORS
    ]
    lines = [
        f"{_path(item['loc'])}: {item['msg'].removeprefix('Value error, ')}" for item in problems
    ]
    code = "missing_required_parameter" if problems[0]["type"] == "missing" else "invalid_type"
    return ApiError(400, "; ".join(lines), param=_path(problems[0]["loc"]), code=code)


def _path(location: tuple[int | str, ...]) -> str:
    return ".".join(str(key) for key in location)[:MAX_NAME]
