"""The program that tokenizes large texts: ``python -m fairlead_runtime.models.encoding_child``.

Tokenizes in time that nothing else wants: on full cores every turn of it would stop a step of the
engine. It loads as any other, once, so that the first text does not wait for ever. Owns the
messages, which ``child.program`` numbers: in, first ``Setup``, then one ``Text`` for each question;
out, the token ids of each, as the bytes of 32-bit integers. Ends when its input does, even in the
middle of a text.
"""

import os
import queue
import signal
import sys
import threading
from array import array
from collections.abc import Callable

from tokenizers import Tokenizer

from fairlead_runtime.child.frames import Channel, Codec, Message
from fairlead_runtime.child.heap import release_memory
from fairlead_runtime.child.life import parent_socket
from fairlead_runtime.child.threads import be_idle


class Setup(Message):
    """``definition``: the JSON of a tokenizer. ``split_special``: it spells special tokens in texts
    out. ``cpu_seconds``: the most that one text may take.
    """

    definition: str
    split_special: bool
    cpu_seconds: float


class Text(Message):
    """``special``: with the special tokens that the tokenizer adds."""

    text: str
    special: bool


QUESTION: Codec[tuple[int, Setup | Text]] = Codec(tuple[int, Setup | Text])
ANSWER: Codec[tuple[int, bytes]] = Codec(tuple[int, bytes])


def main() -> int:
    channel = Channel(parent_socket(), ANSWER, QUESTION)
    first = channel.receive()
    if first is None or not isinstance(first[1], Setup):
        return 0
    questions: queue.SimpleQueue[tuple[int, Text]] = queue.SimpleQueue()
    work = (first[1], questions, channel.send)
    threading.Thread(target=_answer_all, args=work, daemon=True).start()
    while True:
        match channel.receive():
            case (number, Text() as text):
                questions.put((number, text))
            case _:
                return 0


def _answer_all(
    setup: Setup,
    questions: "queue.SimpleQueue[tuple[int, Text]]",
    send: Callable[[tuple[int, bytes]], None],
) -> None:
    try:
        tokenizer = Tokenizer.from_str(setup.definition)
        tokenizer.encode_special_tokens = setup.split_special
        setup.definition = ""
        release_memory()
        be_idle()
        while True:
            number, text = questions.get()
            send((number, _ids(tokenizer, text, setup.cpu_seconds)))
    finally:
        os._exit(1)  # the server starts another


def _ids(tokenizer: Tokenizer, text: Text, cpu_seconds: float) -> bytes:
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # its signal ends the process
    # Without offsets, which nobody asks for; in a batch, because this lets the other thread run.
    (encoding,) = tokenizer.encode_batch_fast([text.text], add_special_tokens=text.special)
    signal.setitimer(signal.ITIMER_PROF, 0)
    return array("i", encoding.ids).tobytes()


if __name__ == "__main__":
    sys.exit(main())
