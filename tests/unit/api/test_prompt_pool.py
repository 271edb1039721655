"""The threads in which prompts are tokenized."""

import asyncio
import os
import threading

from fairlead_runtime.api.limits import POOL_NICE, PromptPool


def priority(_body: bytes = b"") -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_the_engine_and_the_event_loop_go_before_the_pool() -> None:
    before = priority()
    pool = PromptPool(workers=1)
    assert asyncio.run(pool.run(priority, b"")) == min(19, before + POOL_NICE)
    pool.close()
    assert priority() == before
