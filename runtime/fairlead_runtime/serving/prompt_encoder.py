"""Token ids of prompts: small texts in the calling thread, large ones in a process of its own.

Owns that process (``models/encoding_child.py``), and its rests where the engine has no core to
spare. A thread of this process cannot take its place: one of a low priority holds the interpreter's
lock while others take its core, and the event loop waits for it.
"""

import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from transformers import PreTrainedTokenizerBase

from fairlead_runtime.child.process import command_of
from fairlead_runtime.child.program import ChildLost, ChildProgram
from fairlead_runtime.models.chat import encode, encode_chat
from fairlead_runtime.models.encoding_child import ANSWER, QUESTION, Setup, Text
from fairlead_runtime.outputs import ServiceError

COMMAND = command_of("fairlead_runtime.models.encoding_child")
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false"}  # one text at a time needs no pool of threads
CPU_SECONDS = 30.0  # of one text; by then nobody waits for it
REST = 4.0  # seconds of rest after each second of a text, while the engine runs
MAX_REST = 2.0  # seconds, however long the text took
POLL_SECONDS = 0.02  # between two looks at the engine


class Pacer:
    """Rests between two texts, while the engine is ``busy``: its steps were seen to take longer
    beside a flood of texts that had only time that nothing else wanted. The first text after a rest
    never waits, and no text does while the engine is idle.

    ``now`` is a monotonic clock, in seconds.
    """

    def __init__(
        self, busy: Callable[[], bool], *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._busy = busy
        self._now = now
        self._until = now()
        self._closed = threading.Event()

    @contextmanager
    def before_next(self) -> Iterator[None]:
        """Waits until the next text may begin; the block is the work on it. Raises ChildLost when
        it is closed before.
        """
        while self._now() < self._until and self._busy():
            if self._closed.wait(POLL_SECONDS):
                raise ChildLost
        began = self._now()
        try:
            yield
        finally:
            ended = self._now()
            self._until = ended + min(MAX_REST, REST * (ended - began))

    def close(self) -> None:
        """End the rest of a thread that waits."""
        self._closed.set()


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
        busy: Callable[[], bool] = lambda: False,
        cpu_seconds: float = CPU_SECONDS,
        command: tuple[str, ...] = COMMAND,
    ) -> None:
        self.tokenizer = tokenizer
        self._pacer = Pacer(busy)
        self.child: ChildProgram[Setup | Text, bytes] | None = None
        if definition is not None:
            split_special = bool(getattr(tokenizer, "split_special_tokens", False))
            setup = Setup(definition, split_special, cpu_seconds)
            self.child = ChildProgram(command, setup, QUESTION, ANSWER, ENVIRONMENT)

    def encode(self, text: str, *, special: bool, large: bool) -> Sequence[int]:
        """The ids of a text; ``special``: with the special tokens that the tokenizer adds. Blocks,
        a large text also while the other process rests.

        Raises RequestError for a text that is not valid Unicode, and ServiceError when the other
        process ends.
        """
        if self.child is None or not large or not _is_valid(text):
            return encode(self.tokenizer, text) if special else encode_chat(self.tokenizer, text)
        try:
            with self._pacer.before_next():
                ids = self.child.ask(Text(text, special)).result()
        except ChildLost:
            raise ServiceError(
                "the process that tokenizes large prompts ended: retry", retry_after=1.0
            ) from None
        return array("i", ids)

    def close(self) -> None:
        """End the other process, even in the middle of a text or of a rest."""
        self._pacer.close()
        if self.child is not None:
            self.child.close()


def _is_valid(text: str) -> bool:
    """Whether the text can be sent: half a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
