"""Bugs of what the server promises about hostile and careless clients, and about its own failures.

One group a promise; the tests in their short form catch each.
"""

from planted.bug import PackageBug

RUNTIME = "runtime/fairlead_runtime"
CONNECTION, AUTH, ACCESS_LOG, ERRORS, STRICT_JSON, LIMITS = (
    f"{RUNTIME}/api/{name}.py"
    for name in ("connection", "auth", "access_log", "errors", "strict_json", "limits")
)
STREAM, SERVICE = f"{RUNTIME}/serving/stream.py", f"{RUNTIME}/serving/service.py"

STREAMS = (
    PackageBug(
        "a reader that lags loses tokens",
        STREAM,
        "self._events.setdefault(event.choice, []).append(event)",
        "self._events[event.choice] = [event]",
        ("functional/api/test_api_streams.py",),
    ),
    PackageBug(
        "a stream goes on after its stop text",
        STREAM,
        "            if not self._choices[index].finished\n",
        "",
        ("functional/api/test_api_streams.py",),
    ),
)
FAULTS = (
    PackageBug(
        "a row that raises fails its whole batch",
        f"{RUNTIME}/engine/isolate.py",
        "            if len(rows) == 1:\n                failed.append((rows[0], error))\n",
        "            if rows:\n                failed += [(row, error) for row in rows]\n",
        ("functional/engine/test_fault_injection.py",),
    ),
    PackageBug(
        "a row without a finite logit gets a token",
        f"{RUNTIME}/device/sampling.py",
        "    finite = torch.isfinite(top)\n",
        "    finite = torch.ones_like(top, dtype=torch.bool)\n",
        ("functional/engine/test_fault_injection.py",),
    ),
)
MUTATED_BODIES = (
    PackageBug(
        "a body that is not UTF-8 is an unexpected error",
        STRICT_JSON,
        "    except UnicodeDecodeError as error:\n",
        "    except KeyError as error:\n",
        ("functional/api/test_api_errors.py",),
    ),
)
HANGS = (
    PackageBug(
        "a server whose step hangs is ready",
        SERVICE,
        "        if age is not None and age > max(READY_STEP_SECONDS, allowance):\n",
        "        if False:\n",
        ("unit/serving/test_service.py",),
    ),
    PackageBug(
        "an engine process that stands still is healthy",
        f"{RUNTIME}/serving/remote_engine.py",
        "        elif silent > QUIET_SECONDS:\n",
        "        elif False:\n",
        ("unit/serving/test_remote_engine.py",),
    ),
)
HALF_SENT = (
    PackageBug(
        "a header may take for ever",
        CONNECTION,
        "        if self._header_timer is None and not self.transport.is_closing():\n",
        "        if False:\n",
        ("functional/api/test_api_connections.py",),
    ),
    PackageBug(
        "a body may arrive as slowly as it likes",
        LIMITS,
        "return min(self._enough_at + RATE_SECONDS, self._began + self._allowed)",
        "return self._began + self._allowed",
        ("unit/api/test_limits.py",),
    ),
)
BOMBS = (
    PackageBug(
        "a body may have any number of chunks",
        CONNECTION,
        "            if self._chunks > CHUNKS:\n",
        "            if False:\n",
        ("functional/api/test_api_connections.py",),
    ),
    PackageBug(
        "a header may have any number of fields",
        CONNECTION,
        "if size > HEADER_BYTES or len(event.headers) > HEADER_COUNT:",
        "if size > HEADER_BYTES:",
        ("functional/api/test_api_connections.py",),
    ),
)
ECHOES = (
    PackageBug(
        "an error is as long as what it names",
        ERRORS,
        "text.encode()[:MAX_MESSAGE].decode(errors=",
        "text.encode().decode(errors=",
        ("unit/api/test_api_errors.py",),
    ),
    PackageBug(
        "a refusal names whatever key the client wrote",
        STRICT_JSON,
        "if depth and _FIELD.fullmatch(key) else None",
        "if depth else None",
        ("unit/api/test_strict_json.py",),
    ),
)
SLOW_READERS = (
    PackageBug(
        "a client that reads nothing keeps its connection",
        CONNECTION,
        "call_later(WRITE_STALL_SECONDS, self._raw.abort)",
        "call_later(WRITE_STALL_SECONDS + 3600, self._raw.abort)",
        ("functional/api/test_api_connections.py",),
    ),
)
DISCONNECTS = (
    PackageBug(
        "a client that leaves keeps its blocks",
        STREAM,
        "            await self._service.cancel(self.request_id)\n",
        "            pass\n",
        ("unit/serving/test_service.py",),
    ),
    PackageBug(
        "the kernel waits for hours for a peer that vanished",
        CONNECTION,
        '            ("TCP_USER_TIMEOUT", 60_000),\n',
        "",
        ("functional/api/test_api_connections.py",),
    ),
)
KEYS = (
    PackageBug(
        "a path that begins as a probe's needs no key",
        AUTH,
        'scope["path"] in OPEN_PATHS:',
        'scope["path"].startswith(tuple(OPEN_PATHS)):',
        ("functional/api/test_api_auth.py",),
    ),
    PackageBug(
        "the comparison of keys ends with the right one",
        f"{RUNTIME}/api/key_file.py",
        "                found = key\n        return found\n",
        "                return key\n        return found\n",
        ("functional/api/test_api_auth.py",),
    ),
)
DRAINS = (
    PackageBug(
        "a drain cuts the streams that run",
        SERVICE,
        "                await self._no_clients.wait()\n",
        "                raise TimeoutError\n",
        ("unit/serving/test_service.py",),
    ),
)
PRIVACY = (
    PackageBug(
        "the log has the path that a client asked for",
        ACCESS_LOG,
        '        return "other"\n',
        '        return str(scope["path"])\n',
        ("functional/api/test_api_auth.py",),
    ),
    PackageBug(
        "the log has an exception's message",
        ACCESS_LOG,
        'return f"{type(error).__name__} at {place}"',
        'return f"{type(error).__name__}: {error} at {place}"',
        ("functional/api/test_api_errors.py",),
    ),
)
NEIGHBOURS = (
    PackageBug(
        "large texts do not rest beside a busy engine",
        f"{RUNTIME}/serving/prompt_encoder.py",
        "            self._until = ended + min(MAX_REST, REST * (ended - began))\n",
        "            self._until = ended\n",
        ("unit/serving/test_prompt_encoder.py",),
    ),
    PackageBug(
        "large texts rest beside an idle engine",
        f"{RUNTIME}/serving/prompt_encoder.py",
        "while self._now() < self._until and self._busy():",
        "while self._now() < self._until:",
        ("unit/serving/test_prompt_encoder.py",),
    ),
    PackageBug(
        "a tenant's large prompts wait behind all of another's",
        f"{RUNTIME}/api/turns.py",
        "            if queue:\n                self._waiting[tenant] = queue\n",
        "            if queue:\n                self._waiting = {tenant: queue} | self._waiting\n",
        ("unit/api/test_prompt_pool.py",),
    ),
)

BUGS = (
    *STREAMS,
    *FAULTS,
    *MUTATED_BODIES,
    *HANGS,
    *HALF_SENT,
    *BOMBS,
    *ECHOES,
    *SLOW_READERS,
    *DISCONNECTS,
    *KEYS,
    *DRAINS,
    *PRIVACY,
    *NEIGHBOURS,
)
