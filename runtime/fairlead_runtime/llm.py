"""The Python API for batches: ``LLM(model, **engine_config).generate(prompts, sampling_params)``.

Owns the loop that runs an engine in the caller's thread, without asyncio, and the shape of results,
which is vLLM's. Uses the same engine, intake and detokenizer as the server.
"""

import gc
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, NamedTuple, Self, cast

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from fairlead_runtime.build.build_engine import BuiltEngine, build
from fairlead_runtime.grammar.checker import Checker
from fairlead_runtime.grammar.compile import CheckLimits
from fairlead_runtime.hub.download_progress import resolve_with_bar
from fairlead_runtime.models import chat
from fairlead_runtime.outputs import ChoiceEvent, EngineDead, Output, QueueFull, Submission
from fairlead_runtime.request.logprobs import Logprob
from fairlead_runtime.request.sequence import (
    Failure,
    FailureKind,
    FinishReason,
    Request,
    RequestError,
    SamplingParams,
    TooLongError,
)
from fairlead_runtime.serving.choice import ChoiceText
from fairlead_runtime.serving.detokenize import vocabulary_of
from fairlead_runtime.serving.startup import Startup
from fairlead_runtime.settings import terminal
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.settings.startup_parts import Part

Prompt = str | Mapping[str, Sequence[int]]
Message = Mapping[str, Any]  # role and content
# No client waits: a grammar is checked by its processor time, however long that takes to come.
GRAMMAR_LIMITS = CheckLimits(seconds=300.0)


@dataclass(slots=True)
class CompletionOutput:
    """One choice. ``logprobs`` has one mapping (token id → Logprob) per token id; None if they were
    not requested. ``message`` is the error when ``finish_reason`` is "error".
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Mapping[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    message: str = ""


@dataclass(slots=True)
class RequestOutput:
    """One prompt with its choices. ``prompt`` is None for a prompt of token ids.
    ``prompt_logprobs``, if requested, has an entry per prompt token: None for the first.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[Mapping[int, Logprob] | None] | None = None


@dataclass(slots=True)
class Reader:
    """Who reads some of the requests: a stream, or the caller of ``step``. ``live`` counts those
    that have not ended, ``outputs`` are what steps have made of them.
    """

    live: int = 0
    outputs: "deque[tuple[LiveText, Output]]" = field(default_factory=deque)

    def has_unread(self, request_id: str) -> bool:
        """Whether outputs of a request of this id are unread."""
        return any(live.id == request_id for live, _ in self.outputs)

    def drop(self, request_id: str) -> None:
        """Forget the unread outputs of a request."""
        self.outputs = deque(pair for pair in self.outputs if pair[0].id != request_id)


class LiveText(NamedTuple):
    """A request that lives: its submission's id, the text of each choice, and who reads it."""

    id: str
    choices: Mapping[int, ChoiceText]
    reader: Reader


class LLM:
    """A model in this process. ``engine_config`` takes the fields of EngineConfig, which are the
    server's flags.

    ``model``: ``demo:``, ``owner/name``, ``hf://owner/name``, a path or ``file:///path``. Raises
    ConfigError, ModelError or SelfTestError. Not safe for use from two threads at once.
    """

    def __init__(self, model: str, **engine_config: object) -> None:
        try:
            settings = EngineConfig.from_mapping(engine_config)
            path = resolve_with_bar(model, settings)
            # A batch has no client that waits for an answer: requests may queue for any time.
            startup = Startup()
            with terminal.live_line("Starting") as show:

                def report(part: Part, done: int = 0, total: int = 0, /) -> None:
                    startup.reach(part, done, total)
                    show(startup.line())

                self._built_engine: BuiltEngine | None = build(
                    path, settings, queue_timeout=math.inf, report=report
                )
        except ConfigError as error:
            raise error.in_python() from None
        self._model = model
        self._grammars = Checker(self._built_engine.grammar_facts, limits=GRAMMAR_LIMITS)
        self._queue: deque[Request] = deque()  # of those that live, which the engine has not taken
        self._live: dict[str, LiveText] = {}  # by the engine's id
        self._engine_ids: dict[str, str] = {}  # of those that live, by the submission's id
        self._numbers = itertools.count()
        self._by_hand = Reader()  # of the requests of add_request
        self._vocabulary = vocabulary_of(self._built_engine.tokenizer)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt; results in the order of the prompts.

        ``prompts``: texts or ``{"prompt_token_ids": [...]}``; ``sampling_params``: one for all or
        one per prompt. A prompt that is too long beside others that are not ends with
        ``finish_reason`` "error" and the reason as ``message``. Raises RequestError, before any
        step, for any other prompt that cannot be served, or when all are too long, and EngineDead
        when the engine gives up.
        """
        prompt_list = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        params_list = _params_per_prompt(sampling_params, len(prompt_list))
        submissions = []
        for number, (prompt, params) in enumerate(zip(prompt_list, params_list, strict=True)):
            with _placed(number, len(prompt_list)):
                submissions.append(Submission(prompt=self._token_ids(prompt), params=params))
        results = [
            RequestOutput(
                prompt if isinstance(prompt, str) else None,
                list(submission.prompt),
                [CompletionOutput(i) for i in range(submission.params.n)],
            )
            for prompt, submission in zip(prompt_list, submissions, strict=True)
        ]
        unfinished = [submission.params.n for submission in submissions]
        pieces: dict[tuple[int, int], list[str]] = defaultdict(list)  # of each choice's text
        with tqdm(
            total=len(prompt_list), desc="prompts", unit="prompt", disable=not use_tqdm
        ) as bar:
            for number, output in self.stream(submissions):
                text = pieces[number, output.index]
                text.append(output.text)
                _append(results[number].outputs[output.index], output, text)
                if output.prompt_logprobs is not None:
                    results[number].prompt_logprobs = list(output.prompt_logprobs)
                unfinished[number] -= output.finish_reason is not None
                if output.finish_reason is not None and not unfinished[number]:
                    bar.update()
        return results

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, ``[{"role": "user", "content": TEXT}, …]``, or each of several, by
        the model's chat template. Results, as those of ``generate``, have the rendered ``prompt``;
        their texts are as the model writes them, with tool calls and reasoning. Raises
        RequestError as ``generate`` does, and for what the template refuses.
        """
        several = [messages] if messages and isinstance(messages[0], Mapping) else messages
        inputs = chat.TemplateInputs(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            kwargs=chat_template_kwargs or {},
        )
        conversations = cast("Sequence[Sequence[Message]]", several)
        tokenizer, texts, prompts = self.get_tokenizer(), [], []
        for number, conversation in enumerate(conversations):
            with _placed(number, len(conversations), "messages"):
                text = chat.render_chat(tokenizer, conversation, tools=tools, inputs=inputs)
                texts.append(text)
                prompts.append({"prompt_token_ids": chat.encode_chat(tokenizer, text)})
        results = self.generate(prompts, sampling_params, use_tqdm=use_tqdm)
        for result, text in zip(results, texts, strict=True):
            result.prompt = text
        return results

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, of transformers."""
        return self._require_engine().tokenizer

    def __repr__(self) -> str:
        if self._built_engine is None:
            return f"LLM({self._model!r}, shut down)"
        resolved = self._built_engine.resolved
        return (
            f"LLM({self._model!r}, device={resolved.device!r}, dtype={resolved.dtype!r}, "
            f"max_model_len={resolved.max_model_len}, num_blocks={resolved.num_blocks})"
        )

    def stream(self, submissions: Sequence[Submission]) -> Generator[tuple[int, Output]]:
        """Yield (index of the submission, Output) while the engine runs, one per choice and step.

        Closing the iterator early aborts the running requests. Too long prompts end and errors are
        raised as ``generate`` does. Other streams and requests of ``add_request`` may run beside
        it: a step is one of all, and what it made waits for its reader.
        """
        requests = self._checked_all(submissions)
        reader, numbers = Reader(), {}
        try:
            for number, (submission, request) in enumerate(zip(submissions, requests, strict=True)):
                if not isinstance(request, TooLongError):
                    numbers[self._enqueue(submission, request, reader)] = number
            for number, request in enumerate(requests):
                if isinstance(request, TooLongError):
                    for choice in range(submissions[number].params.n):
                        yield number, _refused(choice, request)
            while reader.live or reader.outputs:
                if not reader.outputs:
                    self._step()
                while reader.outputs:
                    live, output = reader.outputs.popleft()
                    yield numbers[live.id], output
        finally:
            self._abort_all(reader)

    def _abort_all(self, reader: Reader) -> None:
        """Abort what still runs for ``reader``. Where nothing else runs, nobody may step any more:
        the engine then gets the steps in which it frees their blocks.
        """
        unfinished = [live.id for live in self._live.values() if live.reader is reader]
        for request_id in unfinished:
            self.abort_request(request_id)
        while unfinished and not self._live and not self._require_engine().engine.dead_reason:
            self._require_engine().engine.step()
            if self._require_engine().engine.idle:
                break

    def add_request(self, submission: Submission) -> str:
        """Queue a request for the steps to come. Returns its id: the submission's, or a new one.
        Raises RequestError for one that can never run.
        """
        return self._enqueue(submission, self._checked(submission), self._by_hand)

    def abort_request(self, request_id: str) -> None:
        """End a request, of which nothing more comes: of one that has ended, too, not what ``step``
        has not returned yet. An unknown one is ignored.
        """
        self._by_hand.drop(request_id)
        engine_id = self._engine_ids.pop(request_id, None)
        if engine_id is None:
            return
        reader = self._live.pop(engine_id).reader
        reader.live -= 1
        reader.drop(request_id)
        queued = [request for request in self._queue if request.id == engine_id]
        for request in queued:
            self._queue.remove(request)
        if not queued:
            self._require_engine().engine.abort(engine_id)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has more to return of the requests of ``add_request``."""
        return bool(self._by_hand.live or self._by_hand.outputs)

    def step(self) -> list[tuple[str, Output]]:
        """Compute one step of all requests. Returns (request id, Output) of every choice of the
        requests of ``add_request`` that it, or a stream's step since the last call, continued or
        ended; nothing without requests. Raises EngineDead.
        """
        self._step()
        outputs = [(live.id, output) for live, output in self._by_hand.outputs]
        self._by_hand.outputs.clear()
        return outputs

    def _step(self) -> None:
        """Compute one step; file what it made with its readers."""
        engine = self._require_engine().engine
        self._check_alive()
        self._feed()
        events = engine.step()
        self._file(events)
        if engine.idle and self._live and not events:
            engine.sleep()  # until a grammar is compiled

    def _check_alive(self) -> None:
        reason = self._require_engine().engine.dead_reason
        if reason:
            self._forget_all()
            raise EngineDead(reason)

    def _forget_all(self) -> None:
        """No request lives any more; streams keep the outputs that they have."""
        self._live.clear()
        self._engine_ids.clear()
        self._queue.clear()
        self._by_hand = Reader()

    def _checked_all(self, submissions: Sequence[Submission]) -> list[Request | TooLongError]:
        """A request for each submission, or why it is too long. Raises RequestError if all are."""
        requests: list[Request | TooLongError] = []
        for number, submission in enumerate(submissions):
            try:
                with _placed(number, len(submissions)):
                    requests.append(self._checked(submission))
            except TooLongError as error:
                requests.append(error)
        refusals = [request for request in requests if isinstance(request, TooLongError)]
        if refusals and len(refusals) == len(requests):
            raise refusals[0]
        return requests

    def _checked(self, submission: Submission) -> Request:
        """The request, once its grammar was found to be one that the engine may compile."""
        request = self._require_engine().intake.request(self._with_bad_word_ids(submission))
        outputs = request.params.guided
        if outputs is None:
            return request
        checked = self._grammars.check_now(outputs)
        return replace(request, params=replace(request.params, structured_outputs=checked))

    def _enqueue(self, submission: Submission, request: Request, reader: Reader) -> str:
        """Queue it under an id of its own: what the engine still says of an ended request must not
        be taken for a later one's with the same id.
        """
        if request.id in self._engine_ids or self._by_hand.has_unread(request.id):
            raise RequestError("id", f"{request.id!r} is already in use: choose another id")
        choices = {i: ChoiceText(i, submission, self._vocabulary) for i in range(request.params.n)}
        engine_id = f"{request.id}-{next(self._numbers)}"
        self._live[engine_id] = LiveText(request.id, choices, reader)
        reader.live += 1
        self._engine_ids[request.id] = engine_id
        self._queue.append(replace(request, id=engine_id))
        return request.id

    def _feed(self) -> None:
        """Submit as many requests as the engine's queue has room for."""
        engine = self._require_engine().engine
        while self._queue:
            try:
                engine.submit(self._queue[0])
            except QueueFull:
                return
            self._queue.popleft()

    def _file(self, events: Sequence[ChoiceEvent]) -> None:
        for event in events:
            if event.request_id not in self._live:
                continue  # a canary, an aborted one, or a choice that a stop string ended
            if isinstance(event.error, EngineDead):
                continue  # the next step raises it: no reader may take it for the request's own end
            live = self._live[event.request_id]
            choice = live.choices[event.choice]
            if not choice.finished:
                output, stopped_early = choice.take([event])
                if stopped_early:
                    self._require_engine().engine.finish(event.request_id, event.choice)
                if all(text.finished for text in live.choices.values()):
                    del self._live[event.request_id], self._engine_ids[live.id]
                    live.reader.live -= 1
                live.reader.outputs.append((live, output))

    def _with_bad_word_ids(self, submission: Submission) -> Submission:
        words = submission.params.bad_words
        if not words:
            return submission
        ids = chat.bad_word_ids(self._require_engine().tokenizer, words)
        return replace(submission, params=replace(submission.params, bad_words=ids))

    def _token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(chat.encode(self._require_engine().tokenizer, prompt))
        ids: object = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
        if not isinstance(ids, list | tuple) or any(type(i) is not int for i in ids):
            raise RequestError("prompt", "must be a text or {'prompt_token_ids': [integers]}")
        return tuple(ids)

    def _require_engine(self) -> BuiltEngine:
        if self._built_engine is None:
            raise RuntimeError("this LLM is shut down: create a new one")
        return self._built_engine

    @property
    def built_engine(self) -> BuiltEngine:
        """The engine and what it is built of, for the command line and for tests."""
        return self._require_engine()

    def shutdown(self) -> None:
        """Free the model and the cache. Later calls of ``generate`` fail; a second ``shutdown``
        does nothing.
        """
        if self._built_engine is not None:
            self._built_engine.close()
        self._built_engine = None
        self._forget_all()
        self._grammars.close()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()


def _params_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(
            "sampling_params", f"{len(params)} for {count} prompts: give one, or one per prompt"
        )
    return params


@contextmanager
def _placed(number: int, count: int, of: str = "prompts") -> Iterator[None]:
    """Let an error about one of several prompts say which."""
    try:
        yield
    except RequestError as error:
        raise (error.placed(f"{of}[{number}]") if count > 1 else error) from None


def _refused(choice: int, error: TooLongError) -> Output:
    failure = Failure(str(error), FailureKind.LENGTH)
    return Output(choice, (), "", finish_reason=FinishReason.ERROR, failure=failure)


def _append(result: CompletionOutput, output: Output, text: Sequence[str]) -> None:
    """``text``: the pieces of the choice so far. Joined once: a copy at each token takes time that
    grows with the square of an answer's length.
    """
    result.token_ids += output.token_ids
    if output.logprobs is not None:
        if result.logprobs is None:
            result.logprobs = []
        result.logprobs += output.logprobs
    if output.finish_reason is not None:
        result.text = "".join(text)
        result.finish_reason, result.stop_reason = output.finish_reason, output.stop_reason
        result.message = str(output.failure or "")
