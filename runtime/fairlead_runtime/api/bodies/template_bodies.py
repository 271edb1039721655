"""The fields of a body that the chat template reads beside messages and tools, with vLLM's names.

Owns their shapes and what they mean together. Whether the served template reads them is known
where it is rendered (``models.chat``).
"""

from typing import Any

from pydantic import Field

from fairlead_runtime.front.errors import invalid
from fairlead_runtime.front.strict_body import MAX_NAME, StrictBody
from fairlead_runtime.models.chat import RESERVED, TemplateInputs

MAX_DOCUMENTS = 1024


class TemplateBody(StrictBody):
    """Part of the bodies of chats and of ``/tokenize``."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = Field(default=None, max_length=MAX_DOCUMENTS)
    reasoning_effort: str | None = Field(default=None, max_length=MAX_NAME)


def template_inputs(body: TemplateBody) -> TemplateInputs:
    """Raises ApiError 400 for fields that contradict each other."""
    if body.add_special_tokens:
        raise invalid(
            "add_special_tokens",
            "is not supported with messages: the chat template writes them; leave it out",
            "unsupported_parameter",
        )
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise invalid(
            "continue_final_message", "contradicts add_generation_prompt; send one of them"
        )
    return TemplateInputs(
        add_generation_prompt=body.add_generation_prompt is not False and not continues,
        continue_final_message=continues,
        documents=tuple(body.documents or ()),
        chat_template=body.chat_template or None,
        reasoning_effort=body.reasoning_effort,
        kwargs=_kwargs(body),
    )


def _kwargs(body: TemplateBody) -> dict[str, Any]:
    kwargs = body.chat_template_kwargs or {}
    for name in kwargs:
        if name in RESERVED:
            raise invalid(
                "chat_template_kwargs",
                f"{name} is no name of a template's own: send it as a field, or leave it out",
            )
    return kwargs
