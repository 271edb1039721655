"""The messages of a chat body, and what a chat template gets of them."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from fairlead_runtime.api.strict_body import MAX_NAME, StrictBody

MAX_MESSAGES = 1024


class Message(StrictBody):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any = None
    name: str | None = Field(default=None, max_length=MAX_NAME)
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    @field_validator("content")
    @classmethod
    def _content(cls, value: Any) -> str:
        return _text(value)


def for_template(message: Message) -> dict[str, str]:
    # Chat templates know "system"; "developer" is OpenAI's newer name for it.
    role = "system" if message.role == "developer" else message.role
    named = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": message.content or "", **named}


def _text(value: Any) -> str:
    """A message's content (text, null or a list of text parts) as one text."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be text or a list of text parts")  # noqa: TRY004 - pydantic reports ValueError
    texts = []
    for part in value:
        if (
            not isinstance(part, dict)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            raise ValueError(
                'parts must be {"type": "text", "text": ...}; other media are not supported'
            )
        texts.append(part["text"])
    return "".join(texts)
