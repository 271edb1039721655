"""What the bodies of all routes share: strict types, the model's name, the words of a refusal."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from fairlead_runtime.front.errors import ApiError

MAX_NAME = 256  # characters of model, user, cache_salt
MAX_ERRORS = 5


# By the type of a content's part, what it is in words.
_MEDIA = {
    **dict.fromkeys(("image_url", "input_image", "image"), "images are not"),
    **dict.fromkeys(("input_audio", "audio_url", "audio"), "sound is not"),
    **dict.fromkeys(("video_url", "input_video", "video"), "videos are not"),
    **dict.fromkeys(("file", "input_file", "document"), "files are not"),
}


class StrictBody(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True, frozen=True
    )


BodyT = TypeVar("BodyT", bound=StrictBody)


def validated(kind: type[BodyT], body: Mapping[str, Any]) -> BodyT:
    """Raises ApiError 400, which names the fields."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise explain(error) from None


def refuse_media(parts: Any) -> None:
    """Raises ValueError, with its type, for a part of a content that is known and no text."""
    for part in parts if isinstance(parts, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _MEDIA:
            raise ValueError(f"{kind}: this model is served for text; {_MEDIA[kind]}")


def check_model(name: Any, served: str) -> None:
    """Raises ApiError 404 for a model that this server does not serve; does not echo its name."""
    if isinstance(name, str) and name != served:
        raise ApiError(
            404,
            f"model: this server has no such model; it serves {served}",
            param="model",
            code="model_not_found",
        )


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
