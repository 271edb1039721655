"""Token ids of prompts: small texts in the calling thread, large ones in a process of its own.

Owns that process (``models/encoding_child.py``). A thread of this process cannot take its place:
one of a low priority holds the interpreter's lock while others take its core, and the event loop
waits for it.
"""

from array import array
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from fairlead_runtime.child.program import ChildLost, ChildProgram, command_of
from fairlead_runtime.models.chat import encode, encode_chat
from fairlead_runtime.outputs import ServiceError

COMMAND = command_of("fairlead_runtime.models.encoding_child")
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false"}  # one text at a time needs no pool of threads
CPU_SECONDS = 30.0  # of one text; by then nobody waits for it


class PromptEncoder:
    """``definition``: the JSON of the tokenizer's Rust part; None where that alone does not decide
    the ids (``models.tokenizer_files.encodes_as_defined``): every text is then tokenized here. The
    other process starts with the first large text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        definition: str | None = None,
        *,
        cpu_seconds: float = CPU_SECONDS,
        command: tuple[str, ...] = COMMAND,
    ) -> None:
        self.tokenizer = tokenizer
        self.child: ChildProgram | None = None
        if definition is not None:
            setup = {
                "definition": definition,
                "split_special": bool(getattr(tokenizer, "split_special_tokens", False)),
                "cpu_seconds": cpu_seconds,
            }
            self.child = ChildProgram(command, setup, ENVIRONMENT)

    def encode(self, text: str, *, special: bool, large: bool) -> Sequence[int]:
        """The ids of a text; ``special``: with the special tokens that the tokenizer adds. Blocks.

        Raises RequestError for a text that is not valid Unicode, and ServiceError when the other
        process ends.
        """
        if self.child is None or not large or not _is_valid(text):
            return encode(self.tokenizer, text) if special else encode_chat(self.tokenizer, text)
        try:
            answer = self.child.ask({"text": text, "special": special}).result()
        except ChildLost:
            raise ServiceError(
                "the process that tokenizes large prompts ended: retry", retry_after=1.0
            ) from None
        return array("i", answer["ids"])

    def close(self) -> None:
        """End the other process, even in the middle of a text."""
        if self.child is not None:
            self.child.close()


def _is_valid(text: str) -> bool:
    """Whether it can be sent: half a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
