"""Bugs of what the server promises about hostile and careless clients, and about its own failures.

One group a promise; the tests in their short form catch each.
"""

from planted.bug import PackageBug

STREAMS = (
    PackageBug(
        "a reader that lags loses tokens",
        "fairlead_runtime.serving.stream:Stream._buffer",
        "self._events.setdefault(event.choice, []).append(event)",
        "self._events[event.choice] = [event]",
        ("functional/api/test_api_streams.py",),
    ),
    PackageBug(
        "a stream goes on after its stop text",
        "fairlead_runtime.serving.stream:Stream.make",
        "            if not self._choices[index].finished\n",
        "",
        ("functional/api/test_api_streams.py",),
    ),
)
FAULTS = (
    PackageBug(
        "a row that raises fails its whole batch",
        "fairlead_runtime.engine.isolate:run_isolated",
        "            if len(rows) == 1:\n                failed.append((rows[0], error))\n",
        "            if rows:\n                failed += [(row, error) for row in rows]\n",
        ("functional/engine/test_fault_injection.py",),
    ),
    PackageBug(
        "a row without a finite logit gets a token",
        "fairlead_runtime.device.sampling.host_sampler:_choose",
        "    finite = torch.isfinite(top)\n",
        "    finite = torch.ones_like(top, dtype=torch.bool)\n",
        ("functional/engine/test_fault_injection.py",),
    ),
)
MUTATED_BODIES = (
    PackageBug(
        "a body that is not UTF-8 is an unexpected error",
        "fairlead_runtime.front.strict_json:_parsed",
        "    except UnicodeDecodeError as error:\n",
        "    except KeyError as error:\n",
        ("functional/api/test_api_errors.py",),
    ),
)
HANGS = (
    PackageBug(
        "a server whose step hangs is ready",
        "fairlead_runtime.serving.service:Service.health",
        "        if age is not None and age > max(READY_STEP_SECONDS, allowance):\n",
        "        if False:\n",
        ("unit/serving/test_service.py",),
    ),
    PackageBug(
        "an engine process that stands still is healthy",
        "fairlead_runtime.serving.remote_engine:RemoteEngine.state",
        "        elif silent > QUIET_SECONDS:\n",
        "        elif False:\n",
        ("unit/serving/test_remote_engine.py",),
    ),
)
HALF_SENT = (
    PackageBug(
        "a header may take for ever",
        "fairlead_runtime.front.connection:GuardedProtocol._await_header",
        "        if self._header_timer is None and not self.transport.is_closing():\n",
        "        if False:\n",
        ("functional/api/test_api_connections.py",),
    ),
    PackageBug(
        "a body may arrive as slowly as it likes",
        "fairlead_runtime.front.limits:BodyPace.due",
        "return min(self._enough_at + RATE_SECONDS, self._began + self._allowed)",
        "return self._began + self._allowed",
        ("unit/api/test_limits.py",),
    ),
)
BOMBS = (
    PackageBug(
        "a body may have any number of chunks",
        "fairlead_runtime.front.connection:BoundedConnection.next_event",
        "            if self._chunks > CHUNKS:\n",
        "            if False:\n",
        ("functional/api/test_api_connections.py",),
    ),
    PackageBug(
        "a header may have any number of fields",
        "fairlead_runtime.front.connection:_check_request",
        "if size > HEADER_BYTES or len(event.headers) > HEADER_COUNT:",
        "if size > HEADER_BYTES:",
        ("functional/api/test_api_connections.py",),
    ),
)
ECHOES = (
    PackageBug(
        "an error is as long as what it names",
        "fairlead_runtime.front.errors:printable",
        "text.encode()[:MAX_MESSAGE].decode(errors=",
        "text.encode().decode(errors=",
        ("unit/api/test_api_errors.py",),
    ),
    PackageBug(
        "a refusal names whatever key the client wrote",
        "fairlead_runtime.front.strict_json:_field_name",
        "return key if _FIELD.fullmatch(key) else None",
        "return key",
        ("unit/api/test_strict_json.py",),
    ),
    PackageBug(
        "an integer that two pieces of a body share is not found",
        "fairlead_runtime.front.strict_json:_has_long_number",
        "body[place : place + _PIECE + rest]",
        "body[place : place + _PIECE]",
        ("unit/api/test_strict_json.py",),
    ),
    PackageBug(
        "an integer of 65 bits is a float",
        "fairlead_runtime.front.strict_json:parse_object",
        "    if _has_long_number(body):\n",
        "    if not body:\n",
        ("unit/api/test_strict_json.py",),
    ),
)
SLOW_READERS = (
    PackageBug(
        "a client that reads nothing keeps its connection",
        "fairlead_runtime.front.connection:GuardedProtocol.pause_writing",
        "call_later(WRITE_STALL_SECONDS, self._raw.abort)",
        "call_later(WRITE_STALL_SECONDS + 3600, self._raw.abort)",
        ("functional/api/test_api_connections.py",),
    ),
)
DISCONNECTS = (
    PackageBug(
        "a client that leaves keeps its blocks",
        "fairlead_runtime.serving.stream:Stream.aclose",
        "            await self._service.cancel(self.request_id)\n",
        "            pass\n",
        ("unit/serving/test_service.py",),
    ),
    PackageBug(
        "the kernel waits for hours for a peer that vanished",
        "fairlead_runtime.front.connection:",
        '            ("TCP_USER_TIMEOUT", 60_000),\n',
        "",
        ("functional/api/test_api_connections.py",),
    ),
)
KEYS = (
    PackageBug(
        "a path that begins as a probe's needs no key",
        "fairlead_runtime.front.auth:AuthMiddleware.__call__",
        'scope["path"] in self._open:',
        'scope["path"].startswith(tuple(self._open)):',
        ("functional/api/test_api_auth.py",),
    ),
    PackageBug(
        "the comparison of keys ends with the right one",
        "fairlead_runtime.front.key_file:KeyRing.find",
        "                match = key\n        return match\n",
        "                return key\n        return match\n",
        ("functional/api/test_api_auth.py",),
    ),
)
DRAINS = (
    PackageBug(
        "a drain cuts the streams that run",
        "fairlead_runtime.serving.service:Service.drain",
        "                await self._no_clients.wait()\n",
        "                raise TimeoutError\n",
        ("unit/serving/test_service.py",),
    ),
)
PRIVACY = (
    PackageBug(
        "the log has the path that a client asked for",
        "fairlead_runtime.front.access_log:_route",
        '        return "other"\n',
        '        return str(scope["path"])\n',
        ("functional/api/test_api_auth.py",),
    ),
    PackageBug(
        "the log has an exception's message",
        "fairlead_runtime.front.access_log:describe",
        'return f"{type(error).__name__} at {place}"',
        'return f"{type(error).__name__}: {error} at {place}"',
        ("functional/api/test_api_errors.py",),
    ),
    PackageBug(
        "a client that left before its answer is a failure in the log",
        "fairlead_runtime.front.access_log:AccessLogMiddleware.__call__",
        "status = 499 if status in (0, 500) else status",
        "status = status or 499",
        ("functional/api/test_api_connections.py",),
    ),
)
NEIGHBOURS = (
    PackageBug(
        "large texts do not rest beside a busy engine",
        "fairlead_runtime.serving.prompt_encoder:Pacer.before_next",
        "            self._until = ended + min(MAX_REST, REST * (ended - began))\n",
        "            self._until = ended\n",
        ("unit/serving/test_prompt_encoder.py",),
    ),
    PackageBug(
        "large texts rest beside an idle engine",
        "fairlead_runtime.serving.prompt_encoder:Pacer.before_next",
        "while self._now() < self._until and self._busy():",
        "while self._now() < self._until:",
        ("unit/serving/test_prompt_encoder.py",),
    ),
    PackageBug(
        "a tenant's large prompts wait behind all of another's",
        "fairlead_runtime.request.tenant_queue:TenantQueue.take",
        "        if queue:\n            self._items[tenant] = queue\n",
        "        if queue:\n            self._items = {tenant: queue} | self._items\n",
        ("unit/api/test_prompt_pool.py",),
    ),
)

PAGES = (
    PackageBug(
        "a page of another site drains a pod",
        "fairlead_runtime.front.cors:_foreign",
        '    if any(site not in {"same-origin", "none"} for site in sites):\n',
        "    if False:\n",
        ("functional/api/test_api_routes.py",),
    ),
    PackageBug(
        "a page of another origin drains a pod",
        "fairlead_runtime.front.cors:_foreign",
        "    if any(_host_of(origin) != host.lower() for origin in origins):\n",
        "    if False:\n",
        ("functional/api/test_api_routes.py",),
    ),
    PackageBug(
        "a page whose name was made to point here drains a pod",
        "fairlead_runtime.front.cors:_foreign",
        "    if (sites or origins) and not _is_private(host):\n",
        "    if False:\n",
        ("functional/api/test_api_routes.py",),
    ),
    PackageBug(
        "a page's form drains a pod",
        "fairlead_runtime.front.cors:_foreign",
        "    if kind in _FORMS:\n",
        "    if False:\n",
        ("functional/api/test_api_routes.py",),
    ),
    PackageBug(
        "the admin port takes what any page sends",
        "fairlead_runtime.api.ports.app:admin_app",
        "ForeignPages(HeadAsGet(app))",
        "HeadAsGet(app)",
        ("functional/api/test_api_routes.py",),
    ),
    PackageBug(
        "metrics are public unasked",
        "fairlead_runtime.api.ports.app:public_app",
        "    if state.public_metrics:\n",
        "    if True:\n",
        ("functional/api/test_api_routes.py",),
    ),
    PackageBug(
        "the tokenizer's folder is shown to clients",
        "fairlead_runtime.api.routes.tokenize:tokenizer_info",
        "        if name not in _FILES and",
        "        if",
        ("functional/api/test_api_routes.py",),
    ),
    PackageBug(
        "a server has the page to chat unasked",
        "fairlead_runtime.api.ports.app:public_app",
        "    if state.page:\n",
        "    if True:\n",
        ("functional/api/test_chat_page.py",),
    ),
    PackageBug(
        "the page's picture needs no key",
        "fairlead_runtime.front.auth:AuthMiddleware.__init__",
        "OPEN_PATHS | {PAGE} if page",
        "OPEN_PATHS | {PAGE, LIVE} if page",
        ("functional/api/test_chat_page.py",),
    ),
    PackageBug(
        "the page's picture uses up a key's requests",
        "fairlead_runtime.front.auth:AuthMiddleware.__init__",
        "{LIVE} if page else set()",
        "set()",
        ("functional/api/test_chat_page.py",),
    ),
    PackageBug(
        "a caller sees the requests of others",
        "fairlead_runtime.api.ports.live:picture",
        "own = [view for view in views if tenant is None or view.tenant == tenant]",
        "own = views",
        ("functional/api/test_chat_page.py",),
    ),
    PackageBug(
        "the block map shows how many others hold a block",
        "fairlead_runtime.api.ports.live:_anonymous",
        "replace(run, references=1, requests=own)",
        "replace(run, requests=own)",
        ("functional/api/test_chat_page.py",),
    ),
    PackageBug(
        "the block map shows where a request of others ends",
        "fairlead_runtime.api.ports.live:_map",
        "_joined(_anonymous(run, numbers, cache.per_cell) for run in cache.blocks)",
        "(_anonymous(run, numbers, cache.per_cell) for run in cache.blocks)",
        ("functional/api/test_chat_page.py",),
    ),
    PackageBug(
        "each who asks for the picture looks at the engine",
        "fairlead_runtime.api.ports.live:LivePicture._looked",
        "        if self._look is None or old:\n",
        "        if True:\n",
        ("functional/api/test_chat_page.py",),
    ),
    PackageBug(
        "a page may run any script",
        "fairlead_runtime.api.ports.page:_policy",
        "script-src {hashes['script']};",
        "script-src 'unsafe-inline';",
        ("functional/api/test_chat_page.py", "functional/api/test_page.py"),
    ),
    PackageBug(
        "every invocation is a chat",
        "fairlead_runtime.api.routes.invocations:prompt_field",
        "        if sent.get(field) is not None:\n",
        "        if sent:\n",
        ("functional/api/test_api_routes.py",),
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
    *PAGES,
)
