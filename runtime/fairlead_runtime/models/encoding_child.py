"""The program that tokenizes large texts: ``python -m fairlead_runtime.models.encoding_child``.

Tokenizes in time that nothing else wants: on full cores every turn of it would stop a step of the
engine. It loads as any other, once, so that the first text does not wait for ever. Reads and writes
messages as ``child.frames`` does: in, first the tokenizer, then one question per text; out, the
token ids of each. Ends when its input does, even in the middle of a text.
"""

import os
import queue
import signal
import sys
import threading
from array import array
from typing import Any

from tokenizers import Tokenizer

from fairlead_runtime.child import frames
from fairlead_runtime.child.heap import release_memory
from fairlead_runtime.child.threads import be_idle


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when this program ends
    questions: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    setup = frames.read(sys.stdin.buffer)
    if setup is None:
        return 0
    threading.Thread(target=_answer_all, args=(setup, questions), daemon=True).start()
    while (question := frames.read(sys.stdin.buffer)) is not None:
        questions.put(question)
    return 0


def _answer_all(setup: dict[str, Any], questions: "queue.SimpleQueue[dict[str, Any]]") -> None:
    try:
        tokenizer = Tokenizer.from_str(setup["definition"])
        tokenizer.encode_special_tokens = setup["split_special"]
        cpu_seconds = setup["cpu_seconds"]
        setup.clear()
        release_memory()
        be_idle()
        while True:
            _answer(tokenizer, cpu_seconds, questions.get())
    finally:
        os._exit(1)  # the server starts another


def _answer(tokenizer: Tokenizer, cpu_seconds: float, question: dict[str, Any]) -> None:
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # its signal ends the process
    # Without offsets, which nobody asks for; in a batch, because this lets the other thread run.
    (encoding,) = tokenizer.encode_batch_fast(
        [question["text"]], add_special_tokens=question["special"]
    )
    signal.setitimer(signal.ITIMER_PROF, 0)
    ids = array("i", encoding.ids).tobytes()
    frames.write(sys.stdout.buffer, {"number": question["number"], "ids": ids})


if __name__ == "__main__":
    sys.exit(main())
