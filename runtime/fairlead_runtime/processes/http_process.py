"""``fairlead serve`` once its flags are parsed: listen, load, self-test, serve, drain.

This is the HTTP process: it starts the engine's process, which loads torch and the model. Owns the
order of these steps and the Backend that the HTTP server gets. commands/refusals.py has the exit
codes of failures.
"""

import asyncio
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from fairlead_runtime.api.ports import server as http
from fairlead_runtime.api.state.state import Backend, BodyRules, ServerState
from fairlead_runtime.api.state.tracing import Tracing
from fairlead_runtime.api.tools.formats import ReplyFormat, reply_format
from fairlead_runtime.build.host import cpu_limit, process_age, resident_bytes
from fairlead_runtime.child.process import Child
from fairlead_runtime.front.doors import Doors
from fairlead_runtime.grammar.checker import Checker
from fairlead_runtime.grammar.compile import TokenizerFacts, with_definition
from fairlead_runtime.hub import source
from fairlead_runtime.hub.fetch import Progress
from fairlead_runtime.models import files
from fairlead_runtime.models.chat import use_template
from fairlead_runtime.models.files import CONFIG
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.models.sampling_defaults import sampling_defaults
from fairlead_runtime.outputs import DrainResult
from fairlead_runtime.processes import termination
from fairlead_runtime.request.text_facts import TextFacts
from fairlead_runtime.serving import wire
from fairlead_runtime.serving.detokenize import Vocabulary, vocabulary_of
from fairlead_runtime.serving.intake import Intake
from fairlead_runtime.serving.metrics import EngineMetrics
from fairlead_runtime.serving.prompt_encoder import PromptEncoder
from fairlead_runtime.serving.remote_engine import RemoteEngine
from fairlead_runtime.serving.request_templates import RequestTemplates
from fairlead_runtime.serving.service import Service
from fairlead_runtime.serving.startup import Startup
from fairlead_runtime.settings import terminal
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.settings.terminal import BOLD, paint
from fairlead_runtime.sizing.traffic import body_bytes, public_connections

log = logging.getLogger("fairlead.serve")
STOP_SECONDS = 5.0  # for the running step of the engine
LINE_SECONDS = 0.2  # between two looks of the terminal's line
T = TypeVar("T")


def run(engine: Child, model: str, config: EngineConfig, doors: Doors) -> int:
    """Serve until SIGTERM. Returns 0 after a drain; raises ConfigError, ModelError, SelfTestError
    or EngineDead.
    """
    startup = Startup(process_age())
    name = next(iter(config.served_names), model)
    state = ServerState(
        startup=startup,
        name=name,
        source=model,
        keys=doors.keys,
        certificates=doors.certificates,
        cors_origin=config.cors_origin,
        public_metrics=config.public_metrics,
        page=_has_page(config),
        tracing=Tracing.of(name, os.environ),
    )
    try:
        drained = asyncio.run(_serve(state, doors, engine, model, config))
    finally:
        if state.tracing is not None:
            state.tracing.close()
    message = f"{drained.finished} running requests finished, {drained.aborted} were cut off"
    line = terminal.json_line("Drained", message, **drained._asdict())
    termination.write_log(line, os.environ)
    return 0


async def _serve(
    state: ServerState,
    doors: Doors,
    engine: Child,
    model: str,
    config: EngineConfig,
) -> DrainResult:
    # Said from within the loop, which ends at a signal without a trace.
    for name, url in doors.urls().items():
        log.info("%s port: %s", name, url)
    async with AsyncExitStack() as running:
        return await http.serve(
            state,
            doors.listeners,
            lambda: _load_shown(state, engine, model, config, running),
            drain_grace=config.drain_grace,
            drain_timeout=config.drain_timeout,
            connections=public_connections(config),
            ready=lambda: _say_ready(doors, state.startup, page=state.page),
        )


def _has_page(config: EngineConfig) -> bool:
    """Whether the public port has the page to chat. A pod has no terminal."""
    return config.page == "on" or (config.page == "auto" and sys.stderr.isatty())


def _say_ready(doors: Doors, startup: Startup, *, page: bool) -> None:
    """For programs one word, for a person on a terminal the addresses and what to try."""
    log.info("started in %.1f s: %s", startup.elapsed, startup.summary())
    if not terminal.as_text():
        log.info("serving")
        return
    public, admin = doors.urls(local=True).values()
    ready = paint(f"Ready in {startup.elapsed:.0f} s:", BOLD)
    chat = f" · chat {public}/" if page else ""
    sys.stderr.write(f"{ready} {public}/v1{chat} · watch {admin}/\n")
    sys.stderr.write(f"Try:  fairlead chat --url {public}   (Ctrl-C ends this server)\n")


async def _load_shown(
    state: ServerState,
    started: Child,
    model: str,
    config: EngineConfig,
    running: AsyncExitStack,
) -> Backend:
    """``_load``, with what it does on one line of the terminal, in log lines elsewhere."""
    with terminal.live_line(state.startup.line()) as show:

        async def follow() -> None:
            while True:
                show(state.startup.line())
                await asyncio.sleep(LINE_SECONDS)

        following = asyncio.create_task(follow())
        try:
            return await _load(state, started, model, config, running)
        finally:
            following.cancel()


async def _load(
    state: ServerState,
    started: Child,
    model: str,
    config: EngineConfig,
    running: AsyncExitStack,
) -> Backend:
    """Download, load, self-test. The ports already answer during this.

    ``running`` ends what was started.
    """
    engine = RemoteEngine(started)
    running.push_async_callback(engine.stop, STOP_SECONDS)
    await engine.open()
    startup = state.startup
    report = _progress_report(state)
    local = await _in_thread(lambda: source.resolve(model, revision=config.revision, report=report))
    startup.reach("imports")  # of the other process, beside which the download ran
    source.warn_of_moving_revision(local, config.revision)
    state.model_config = await _in_thread(lambda: _config_json(local.path))
    rules = await _in_thread(lambda: _rules(config, local.path))
    start = wire.Start(str(local.path), config, beside=resident_bytes())
    checks = asyncio.Event()  # the engine's own of what needs no weights, once they have passed

    def reached(told: wire.Progress) -> None:
        _reached(startup, told)
        if told.part == "weights":
            checks.set()

    loading = engine.load(start, reached)
    # Seconds for a large vocabulary: beside the loading, in a thread, so that the probes answer.
    checked = source.parse(model).kind != "hub"  # before anything was started
    words = _read_words(engine, local.path, config, checks, checked=checked)
    loaded, (tokenizer, vocabulary, definition) = await asyncio.gather(loading, words)
    metrics = EngineMetrics(state.name)
    ids = loaded.facts
    facts = TokenizerFacts.of(tokenizer, ids.vocab_size, ids.eos_ids, definition)
    intake = Intake(loaded.bounds.resolve_max_tokens, loaded.facts)
    service = Service(engine, intake, vocabulary, grammars=Checker(facts))
    encoder = _prompt_encoder(tokenizer, facts, service)
    running.callback(encoder.close)
    if rules.templates:
        renderer = RequestTemplates(tokenizer)
        running.callback(renderer.close)
        rules = rules._replace(renderer=renderer)
    service.start()
    startup.end()
    metrics.started(startup.seconds)
    running.push_async_callback(service.stop, STOP_SECONDS)

    async def exposition() -> bytes:
        report = await service.report()
        return await asyncio.to_thread(
            metrics.exposition,
            report,
            draining=state.draining,
            front=state.front(resident_bytes()),
        )

    return Backend(
        service=service,
        encoder=encoder,
        vocabulary=vocabulary,
        metrics=exposition,
        memory=loaded.memory,
        died=service.died,
        replies=_replies(config, tokenizer),
        rules=rules,
        max_body=body_bytes(loaded.bounds.max_model_len).most,
    )


def _reached(startup: Startup, told: wire.Progress) -> None:
    """Keep what the engine's process has told; each part's begin is one line of the log."""
    if not startup.seconds[told.part] and not terminal.as_text():
        log.info("starting: %s", told.part)
    startup.reach(told.part, told.done, told.total, at=told.at)


async def _read_words(
    engine: RemoteEngine, path: Path, config: EngineConfig, checks: asyncio.Event, *, checked: bool
) -> tuple[PreTrainedTokenizerBase, Vocabulary, str]:
    """The tokenizer, what its tokens spell, and its definition; the engine is told what it needs
    of it, since nothing is read twice. ``checked``: its files are.

    Raises ModelError and ConfigError, once ``checks`` have passed: what the engine refuses says
    more, and a tokenizer does not wait for the weights.
    """
    try:
        tokenizer, text = await _in_thread(lambda: _tokenizer_of(path, checked=checked))
        engine.tell(text)
        if config.chat_template:
            use_template(tokenizer, config.chat_template)
        return tokenizer, await _in_thread(lambda: vocabulary_of(tokenizer)), text.definition
    except (ModelError, ConfigError):
        await checks.wait()
        raise


def _tokenizer_of(path: Path, *, checked: bool) -> tuple[PreTrainedTokenizerBase, TextFacts]:
    # Imported here: transformers takes seconds, and the probes must answer before that.
    from fairlead_runtime.models.tokenizer_files import load_tokenizer, text_facts

    if not checked:
        files.check(path)
    tokenizer = load_tokenizer(path)
    return tokenizer, with_definition(tokenizer, text_facts(tokenizer))


def _rules(config: EngineConfig, path: Path) -> BodyRules:
    """Raises ModelError."""
    rules = BodyRules(templates=config.trust_request_chat_template, aliases=config.served_names[1:])
    if config.generation_config == "none":
        return rules
    sampling = sampling_defaults(path)
    if sampling:
        words = ", ".join(f"{name} {value}" for name, value in sampling.items())
        log.info("where a request names none, as in generation_config.json: %s", words)
    return rules._replace(sampling=sampling)


def _prompt_encoder(
    tokenizer: PreTrainedTokenizerBase, facts: TokenizerFacts | None, service: Service
) -> PromptEncoder:
    from fairlead_runtime.models.tokenizer_files import encodes_as_defined

    if facts is None or not encodes_as_defined(tokenizer):
        return PromptEncoder(tokenizer)
    shared = cpu_limit() <= 2  # of more, the engine leaves one
    return PromptEncoder(tokenizer, facts.definition, busy=lambda: shared and service.busy)


def _replies(config: EngineConfig, tokenizer: PreTrainedTokenizerBase) -> ReplyFormat:
    replies = reply_format(
        tokenizer,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
    )
    log.info(
        "tool calls: %s; reasoning: %s",
        _origin(config.tool_call_parser, replies.tools.name if replies.tools else ""),
        _origin(config.reasoning_parser, replies.reasoning),
    )
    return replies


def _origin(setting: str, format_name: str) -> str:
    if setting != "auto":
        return setting
    if format_name:
        return f"{format_name} format, found in the chat template"
    return "no format in the chat template"


def _config_json(path: Path) -> bytes | None:
    """config.json; None without one, which the engine refuses."""
    file = path / CONFIG
    return file.read_bytes() if file.is_file() else None


async def _in_thread(work: Callable[[], T]) -> T:
    """Run ``work`` in a daemon thread, so that a signal ends the process at once while weights
    load.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[], None]) -> None:
        if not done.done():
            set_outcome()

    def target() -> None:
        try:
            value = work()
        except BaseException as error:  # noqa: BLE001 - the awaiting task gets it
            outcome = functools.partial(done.set_exception, error)
        else:
            outcome = functools.partial(done.set_result, value)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=target, name="loading", daemon=True).start()
    return await done


def _progress_report(state: ServerState) -> Callable[[Progress], None]:
    """Log each tenth of the download; serve config.json as soon as it is downloaded."""
    last_tenth = 0

    def report(progress: Progress) -> None:
        nonlocal last_tenth
        if progress.path is not None and state.model_config is None:
            state.model_config = (progress.path / CONFIG).read_bytes()
        state.startup.reach("download", progress.done, progress.total)
        tenth = 10 * progress.done // max(1, progress.total)
        if tenth > last_tenth:
            last_tenth = tenth
            log.info("fetched %d %% of %.2f GiB", 10 * tenth, progress.total / 2**30)

    return report
