"""Chats rendered with a template of the request, by a child process with limits.

Owns that process (``models/template_child.py``), which starts with the first such request.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from fairlead_runtime.child.process import command_of
from fairlead_runtime.child.program import ChildLost, ChildProgram
from fairlead_runtime.models.chat import TemplateInputs
from fairlead_runtime.models.template_child import (
    ANSWER,
    QUESTION,
    Render,
    Rendered,
    RenderLimits,
    Setup,
)
from fairlead_runtime.outputs import ServiceError
from fairlead_runtime.request.sequence import RequestError

COMMAND = command_of("fairlead_runtime.models.template_child")
# One arena: each further one takes 64 MiB of the address space that the child limits.
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}


class RequestTemplates:
    """``tokenizer``: whose special tokens a template may name."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, limits: RenderLimits | None = None
    ) -> None:
        own = json.dumps(getattr(tokenizer, "chat_template", None))
        special = json.dumps(dict(tokenizer.special_tokens_map), default=str)
        setup = Setup(special, own, limits or RenderLimits())
        self.child: ChildProgram[Setup | Render, Rendered] = ChildProgram(
            COMMAND, setup, QUESTION, ANSWER, ENVIRONMENT
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        inputs: TemplateInputs,
        most: int,
    ) -> str:
        """The chat as the request's template writes it, at most ``most`` characters. Blocks. Raises
        RequestError, and ServiceError where the processor was too busy.
        """
        fields = inputs._replace(kwargs=dict(inputs.kwargs))._asdict()
        chat = {"messages": [*messages], "tools": [*tools], "inputs": fields}
        try:
            rendered = self.child.ask(Render(json.dumps(chat), most)).result()
        except ChildLost:
            raise ServiceError(
                "the process that renders templates ended: retry", retry_after=1.0
            ) from None
        if rendered.late:
            raise ServiceError(
                "the template was not rendered in time, since the processor is busy: retry",
                retry_after=1.0,
            )
        if rendered.error:
            raise RequestError(rendered.param, rendered.error)
        return rendered.text

    def close(self) -> None:
        """End the process, even in the middle of a template."""
        self.child.close()
