"""Turns the engine's events of one choice into what a client reads: ChoiceEvent → Output.

Owns one choice's text: incremental detokenizing, stop texts, log-probabilities. Never runs in the
engine thread. Knows no queue and no asyncio.
"""

import functools
from collections.abc import Sequence

from fairlead_runtime.outputs import ChoiceEvent, Output, Submission
from fairlead_runtime.request.logprobs import Logprob, PromptLogprobs
from fairlead_runtime.request.sequence import FinishReason
from fairlead_runtime.serving.detokenize import Detokenizer, Vocabulary


class StopTexts:
    """Finds the texts that end a choice and cuts them off, unless ``included``; holds back only
    text that may still become one.
    """

    def __init__(self, stops: tuple[str, ...], *, included: bool = False) -> None:
        self._stops = stops
        self._included = included
        self._held_back = ""
        self._begun = [0] * len(stops)  # characters of each that the text ends with

    def add(self, text: str, *, last: bool, may_stop: bool = True) -> tuple[str, str | None]:
        """The text to show now, and the stop text that ends in it: the leftmost, else the first
        given. ``may_stop`` False: none counts that ends here, min_tokens are not reached yet.
        """
        if not self._stops:
            return text, None
        before = len(self._held_back)
        self._begun = [_begun(*each, text) for each in zip(self._stops, self._begun, strict=True)]
        text = self._held_back + text
        if may_stop:
            # One that ends in the text before the new one came before min_tokens.
            places = ((text.find(s, max(0, before + 1 - len(s))), s) for s in self._stops)
            matches = [(at, i, stop) for i, (at, stop) in enumerate(places) if at >= 0]
            if matches:
                at, _, stop = min(matches)
                return text[: at + len(stop) if self._included else at], stop
        keep = 0 if last else max(self._begun)
        cut = len(text) - keep
        self._held_back = text[cut:]
        return text[:cut], None


def _begun(stop: str, begun: int, text: str) -> int:
    """How many first characters of ``stop``, but not all, end a text that ended with ``begun`` of
    them before ``text``. Each character is read once, however long the stop text is: the algorithm
    of Knuth, Morris and Pratt.
    """
    borders = _borders(stop)
    for character in text:
        while begun and character != stop[begun]:
            begun = borders[begun]
        if character == stop[begun]:
            begun += 1
        if begun == len(stop):
            begun = borders[begun]
    return begun


@functools.lru_cache(maxsize=1024)
def _borders(stop: str) -> tuple[int, ...]:
    """By a number of first characters, how many of these end them again, but not all."""
    borders = [0, 0]
    for character in stop[1:]:
        size = borders[-1]
        while size and character != stop[size]:
            size = borders[size]
        borders.append(size + (character == stop[size]))
    return tuple(borders)


class ChoiceText:
    """One choice of one submission: its text so far."""

    def __init__(self, index: int, submission: Submission, vocabulary: Vocabulary) -> None:
        self.finished = False
        self._index = index
        params = submission.params
        self._stop_ids = frozenset(params.stop_token_ids)
        self._min_tokens = params.min_tokens
        self._generated = 0
        self._wants_logprobs = params.logprobs is not None
        # The first choice's events bring them for all.
        self._wants_prompt = params.prompt_logprobs is not None and not index
        self._shows_stop = params.include_stop_str_in_output
        visible = submission.visible_tokens if params.skip_special_tokens else vocabulary.special
        self._text = Detokenizer(vocabulary, submission.prompt, visible)
        self._stops = StopTexts(tuple(params.stop), included=self._shows_stop)
        self._token_text = vocabulary.token_text

    def take(self, events: Sequence[ChoiceEvent]) -> tuple[Output, bool]:
        """One Output for all events since the last; True when a stop text ended the choice, so that
        the engine must end it too.
        """
        token_ids: list[int] = []
        logprobs: list[dict[int, Logprob]] = []
        pieces: list[str] = []
        prompt = self._prompt_logprobs(events[0])
        for event in events:
            if event.token is not None:
                token_ids.append(event.token)
                self._generated += 1
                if event.logprobs is not None:
                    logprobs.append(event.logprobs.as_dict(self._token_text))
            piece, stop = self._stops.add(
                self._piece(event),
                last=event.finish is not None,
                may_stop=self._generated > self._min_tokens,
            )
            pieces.append(piece)
            if stop is not None or event.finish is not None:
                self.finished = True
                reason = FinishReason.STOP if stop is not None else event.finish
                output = self._output(
                    token_ids, pieces, logprobs, reason, stop or self._stop_id(event), event, prompt
                )
                return output, event.finish is None
        return self._output(token_ids, pieces, logprobs, None, None, None, prompt), False

    def _prompt_logprobs(self, event: ChoiceEvent) -> PromptLogprobs | None:
        """Log-probabilities of the whole prompt, if this event brings them: the first token has
        none.
        """
        if not self._wants_prompt or self._generated or event.token is None:
            return None
        return (None, *(entry.as_dict(self._token_text) for entry in event.prompt))

    def _piece(self, event: ChoiceEvent) -> str:
        """The event's new text. A stop token counts as generated; its text is cut as a stop text
        is.
        """
        piece = ""
        stopped = event.finish is FinishReason.STOP and not self._shows_stop
        if event.token is not None and not stopped:
            piece = self._text.add(event.token)
        return piece + self._text.finish() if event.finish is not None else piece

    def _stop_id(self, event: ChoiceEvent) -> int | None:
        stopped = event.finish is FinishReason.STOP and event.token in self._stop_ids
        return event.token if stopped else None

    def _output(
        self,
        token_ids: list[int],
        pieces: list[str],
        logprobs: list[dict[int, Logprob]],
        reason: FinishReason | None,
        stop_reason: int | str | None,
        last: ChoiceEvent | None,
        prompt: PromptLogprobs | None,
    ) -> Output:
        return Output(
            self._index,
            tuple(token_ids),
            "".join(pieces),
            tuple(logprobs) if self._wants_logprobs else None,
            reason,
            stop_reason,
            last.failure if last is not None else None,
            prompt,
            tuple(map(len, pieces[: len(token_ids)])) if len(token_ids) > 1 else (),
        )
