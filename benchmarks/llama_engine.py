"""llama.cpp with continuous batching, over the C functions that its Python package has.

Runs in llama.cpp's environment (`peers.LLAMA_CPP`). The package's own server answers one request at
a time; continuous batching is in llama.cpp's `llama-server`, which the package does not build. The
loop here does what that server does: each call of `llama_decode` takes the last token of every
running request, and of prompts as many tokens as fit into its default batch.

- Each request has cells of its own in the cache, which llama.cpp's header advises where requests
  share no large prefix. Where they do, all share one cache, and the prefix is computed once before
  they start: the server would compute the prefix of requests that arrive together for each.
- As many threads as processors that this process may use. Flash attention is its default: it picks.
- In float32 the cache is float32, beside 8-bit weights float16, its default.

In float32 its answers equal those of transformers, token for token, on the Llama of 15 M parameters
(prompts of 1 to 257 tokens in three slots, and three with a common prefix). On GPT-2 they part at
near ties: it looks GELU up in a table of 16-bit values.
"""

import ctypes
import os
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp
import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Request = tuple[list[int], int]  # prompt, new tokens

BATCH = 2048  # tokens of a call: the default of its server
CELLS = 512  # of a request that has its own
SHARED_CELLS = 4096  # of all requests together
SHARED = 64  # tokens of a prefix that is shared


class Part(NamedTuple):
    """Tokens that follow ``at`` others of a sequence, and whether the next one is wanted."""

    sequence: int
    at: int
    tokens: Ids
    wanted: bool


class Running:
    """A request in a slot: ``at`` of its tokens are in the cache, ``todo`` follow."""

    def __init__(self, slot: int, at: int, prompt: Sequence[int], cap: int) -> None:
        self.slot, self.at, self.cap = slot, at, cap
        self.todo = np.array(prompt[at:], dtype=np.int32)
        self.answer: list[int] = []

    def take(self, room: int) -> Part:
        """The next tokens, at most ``room``."""
        tokens, self.todo = self.todo[:room], self.todo[room:]
        at, self.at = self.at, self.at + len(tokens)
        return Part(self.slot, at, tokens, len(self.todo) == 0)

    def append(self, token: int) -> bool:
        """Whether it was the last."""
        self.answer.append(token)
        self.todo = np.array([token], dtype=np.int32)
        return len(self.answer) == self.cap


class Context:
    """A cache for requests in ``slots``; where it is ``shared``, the sequence ``slots`` has their
    prefix.
    """

    def __init__(self, model: Any, slots: int, *, shared: bool, float32: bool) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = slots + shared
        params.n_ctx = SHARED_CELLS if shared else slots * CELLS
        params.n_batch = BATCH
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        params.kv_unified = shared
        if float32:
            params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError("llama.cpp makes no context")
        self._memory = llama_cpp.llama_get_memory(self._context)
        vocabulary = llama_cpp.llama_model_get_vocab(model)
        self._width = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._sequences = np.arange(slots + shared, dtype=np.int32)

    def decode(self, parts: Sequence[Part]) -> list[int]:
        """The likeliest next token of each part that wants one. Raises RuntimeError where the cache
        has no room.
        """
        lengths = [len(part.tokens) for part in parts]
        tokens = np.concatenate([part.tokens for part in parts])
        positions = np.concatenate(
            [np.arange(part.at, part.at + len(part.tokens), dtype=np.int32) for part in parts]
        )
        counts = np.ones(len(tokens), dtype=np.int32)
        # A pointer to the sequence's number for each token.
        of = np.repeat([part.sequence for part in parts], lengths)
        sequences = (self._sequences.ctypes.data + 4 * of).astype(np.uintp)
        last = np.cumsum(lengths) - 1
        wanted = np.zeros(len(tokens), dtype=np.int8)
        wanted[last] = [part.wanted for part in parts]
        number = ctypes.POINTER(ctypes.c_int32)
        batch = llama_cpp.llama_batch(
            n_tokens=len(tokens),
            token=tokens.ctypes.data_as(number),
            pos=positions.ctypes.data_as(number),
            n_seq_id=counts.ctypes.data_as(number),
            seq_id=sequences.ctypes.data_as(ctypes.POINTER(number)),
            logits=wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )
        if code := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        return [self._likeliest(at) for at in last.tolist() if wanted[at]]

    def _likeliest(self, at: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, at)
        return int(np.ctypeslib.as_array(logits, (self._width,)).argmax())

    def copy(self, source: int, target: int) -> None:
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, -1, -1)

    def drop(self, sequence: int) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)


class LlamaCpp:
    """The engine on a GGUF file. Raises RuntimeError where it does not load."""

    def __init__(self, file: Path, slots: int, *, float32: bool) -> None:
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {file.name}")
        self._slots, self._float32 = slots, float32
        self._contexts: dict[bool, Context] = {}  # by whether all requests share one cache

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        """The greedy answers, each as long as its request says."""
        prefix = _prefix([prompt for prompt, _ in requests]) if len(requests) > 1 else 0
        shared = prefix >= SHARED
        context = self._context(shared)
        if shared:
            ids = np.array(requests[0][0][:prefix], dtype=np.int32)
            context.decode([Part(self._slots, 0, ids, wanted=False)])
        waiting, free = deque(enumerate(requests)), deque(range(self._slots))
        running: dict[int, Running] = {}  # by the request's number, in the order of arrival
        answers: list[list[int]] = [[] for _ in requests]
        while waiting or running:
            while waiting and free:
                number, (prompt, cap) = waiting.popleft()
                running[number] = Running(free.popleft(), prefix * shared, prompt, cap)
                if shared:
                    context.copy(self._slots, running[number].slot)
            for number in _step(context, running):
                ended = running.pop(number)
                answers[number] = ended.answer
                context.drop(ended.slot)
                free.append(ended.slot)
        if shared:
            context.drop(self._slots)
        return answers

    def _context(self, shared: bool) -> Context:
        if shared not in self._contexts:
            self._contexts[shared] = Context(
                self._model, self._slots, shared=shared, float32=self._float32
            )
        return self._contexts[shared]


def _step(context: Context, running: dict[int, Running]) -> list[int]:
    """One call for the requests that fit, decodes first. Returns the numbers of those that end."""
    room = BATCH
    parts, takers = [], []
    for number, one in sorted(running.items(), key=lambda item: len(item[1].todo) > 1):
        if not room:
            break
        parts.append(one.take(room))
        room -= len(parts[-1].tokens)
        if parts[-1].wanted:
            takers.append(number)
    answers = zip(takers, context.decode(parts), strict=True)
    return [number for number, token in answers if running[number].append(token)]


def _prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens that all begin with, at least one less than the shortest has."""
    columns: Iterable[tuple[int, ...]] = zip(*prompts, strict=False)
    count = 0
    for column in columns:
        if len(set(column)) > 1:
            break
        count += 1
    return min(count, min(map(len, prompts)) - 1)


def settings() -> str:
    """The instructions and libraries that it was built with."""
    return str(llama_cpp.llama_print_system_info().decode().strip())
