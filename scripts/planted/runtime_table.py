"""Bugs of the runtime."""

from planted.bug import PackageBug

RUNTIME = "runtime/fairlead_runtime"
TERMS, PROFILING = f"{RUNTIME}/sizing/terms.py", f"{RUNTIME}/device/profiling.py"
FETCH, LLM = f"{RUNTIME}/hub/fetch.py", f"{RUNTIME}/llm.py"
COMPLETIONS, RESPONSES, BODIES, AUTH = (
    f"{RUNTIME}/api/{name}.py"
    for name in ("completions", "response_bodies", "request_bodies", "auth")
)
STREAM, METRICS = (f"{RUNTIME}/serving/{name}.py" for name in ("stream", "metrics"))

BUGS = (
    PackageBug(
        "the stop reason is not reported",
        RESPONSES,
        '"stop_reason": output.stop_reason}',
        '"stop_reason": None}',
        ("unit/api/test_completions.py",),
    ),
    PackageBug(
        "an aborted request is answered as a success",
        COMPLETIONS,
        "if output.finish_reason is FinishReason.ABORT:",
        "if False:",
        ("unit/api/test_completions.py",),
    ),
    PackageBug(
        "a proxy may buffer the stream",
        COMPLETIONS,
        '    (b"x-accel-buffering", b"no"),\n',
        "",
        ("unit/api/test_completions.py",),
    ),
    PackageBug(
        "top_k -1 is taken for a count",
        BODIES,
        "return 0 if value is None or value == -1 else value",
        "return 0 if value is None else value",
        ("unit/api/test_completions.py",),
    ),
    PackageBug(
        "a key may have any length",
        AUTH,
        "return tenant if key and len(key) <= MAX_KEY else None",
        "return tenant if key else None",
        ("unit/api/test_completions.py",),
    ),
    PackageBug(
        "an output may stay unread for ever",
        STREAM,
        " or now - since > MAX_UNREAD_SECONDS",
        "",
        ("unit/serving/test_stream.py",),
    ),
    PackageBug(
        "a full disk is a hub that cannot be reached",
        FETCH,
        "error.errno in {errno.ENOSPC, errno.EDQUOT}",
        "error.errno in {errno.EDQUOT}",
        ("unit/hub/test_fetch_failures.py",),
    ),
    PackageBug(
        "a settings file may have any size",
        FETCH,
        "if size > files.LARGEST_JSON:",
        "if False:",
        ("unit/hub/test_fetch_failures.py",),
    ),
    PackageBug(
        "a commit stays complete when its snapshot is deleted",
        FETCH,
        "return files.CONFIG in sizes and bool(_weight_files(snapshot, sizes))",
        "return True",
        ("functional/hub/test_fetch.py",),
    ),
    PackageBug(
        "a link without its blob stops a download",
        FETCH,
        "            link.unlink(missing_ok=True)\n",
        "            pass\n",
        ("functional/hub/test_fetch.py",),
    ),
    PackageBug(
        "free blocks are counted in units",
        METRICS,
        "(scheduler.units - scheduler.used) / units_per_block",
        "(scheduler.units - scheduler.used)",
        ("unit/serving/test_gauges.py",),
    ),
    PackageBug(
        "a batch's requests time out in the queue",
        LLM,
        "queue_timeout=math.inf",
        "queue_timeout=settings.queue_timeout",
        ("unit/start/test_llm.py",),
    ),
    PackageBug(
        "a choice that a stop text ended runs on",
        LLM,
        "                    self._require_parts().engine.finish(event.request_id, event.choice)\n",
        "                    pass\n",
        ("unit/start/test_llm.py",),
    ),
    PackageBug(
        "attention takes nothing",
        TERMS,
        '"attention": _attention(',
        '"attention": 0 * _attention(',
        ("unit/sizing/test_terms.py",),
    ),
    PackageBug(
        "logits take nothing",
        TERMS,
        '"logits": rows * max(',
        '"logits": 0 * max(',
        ("unit/sizing/test_terms.py",),
    ),
    PackageBug(
        "a row's histogram is a kibibyte",
        TERMS,
        "HISTOGRAM = 33 << 10",
        "HISTOGRAM = 1 << 10",
        ("unit/sizing/test_terms.py",),
    ),
    PackageBug(
        "profiled logits are not scaled up",
        PROFILING,
        '"logits": logits * whole // rows,',
        '"logits": logits,',
        ("unit/device/test_profiling.py",),
    ),
    PackageBug(
        "profiled sampling is not scaled up",
        PROFILING,
        '"sampling": sampling * whole // rows,',
        '"sampling": sampling,',
        ("unit/device/test_profiling.py",),
    ),
)
