"""SmolLM2's greedy answers to forty conversations are those of transformers' ``generate``, token
for token, in little memory: in chunks, with preemptions and prefix hits.
"""

from pathlib import Path

import pytest

from fairlead_runtime import LLM, SamplingParams
from support import real_answers
from support.full import LONG_FORM
from support.real_answers import Answer

# The first run on a machine fetches 330 MB and converts them.
pytestmark = pytest.mark.timeout(1800)
TOKENS = real_answers.LONGEST if LONG_FORM else 48
# Logits lie between -10 and 30, and sums in another order change them by so much at most.
TIE = 2e-3
TIES = 2
DOCUMENT = Path(__file__).parents[3] / "docs" / "models.md"


def first_difference(got: list[int], want: list[int]) -> int | None:
    """Where two answers part; None where one begins with the other, as the shorter was cut."""
    pairs = zip(got, want, strict=False)
    return next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), None)


def test_the_answers_are_those_of_generate(llm: LLM) -> None:
    expected = Answer.read()
    tokenizer = llm.built_engine.tokenizer
    prompts = [real_answers.prompt_of(tokenizer, each) for each in real_answers.conversations()]
    assert prompts == [answer.prompt for answer in expected]
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    results = llm.generate(asked, params, use_tqdm=False)
    ties = []
    for number, (result, answer) in enumerate(zip(results, expected, strict=True)):
        (choice,) = result.outputs
        at = first_difference(choice.token_ids, answer.tokens)
        if at is None:
            whole = min(TOKENS, len(answer.tokens))
            # The token that ends an answer is generate's last and is not among ours.
            assert whole - 1 <= len(choice.token_ids) <= whole, number
        else:
            assert answer.margins[at] <= TIE, (number, at, choice.text)
            ties.append((number, at))
    assert len(ties) <= TIES, ties
    seen = llm.built_engine.engine.snapshot().scheduler
    assert min(seen.preemptions, seen.prefix_hits) > 0, seen


def test_a_conversation_of_ten_turns_goes_on_as_with_generate(llm: LLM) -> None:
    """Each turn finds the one before it in the cache; its text shows nothing of the template."""
    tokenizer = llm.built_engine.tokenizer
    params = SamplingParams(temperature=0, max_tokens=real_answers.TURN)
    said: list[dict[str, str]] = []
    found = []
    for question, turn in zip(real_answers.QUESTIONS, Answer.read("turns"), strict=True):
        said.append({"role": "user", "content": question})
        prompt = real_answers.prompt_of(tokenizer, said)
        assert prompt == turn.prompt
        before = llm.built_engine.engine.snapshot().scheduler.prefix_hits
        (result,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        found.append(llm.built_engine.engine.snapshot().scheduler.prefix_hits - before)
        (choice,) = result.outputs
        expected = real_answers.text_of(tokenizer, turn)
        at = first_difference(choice.token_ids, turn.tokens)
        assert at is None or turn.margins[at] <= TIE, (question, choice.text, expected)
        if at is None:
            assert choice.text == expected
        assert choice.text.strip()
        assert not any(mark in choice.text for mark in ("<|", "\ufffd", "assistant\n"))
        said.append({"role": "assistant", "content": expected})
    # The prompt of the turn before was computed then, but for its end, which fills no block.
    prompts = [turn.prompt for turn in Answer.read("turns")]
    for hits, before_it in zip(found[1:], prompts, strict=False):
        assert hits >= len(before_it) // 16 * 16, found


def transcript() -> list[dict[str, str]]:
    """Messages of the conversation in docs/models.md."""
    _, _, after = DOCUMENT.read_text().partition("A conversation with SmolLM2")
    lines = [line.split(maxsplit=1) for line in after.split("```")[1].strip().splitlines()]
    return [{"role": role, "content": text} for role, text in lines]


def test_the_conversation_in_the_documents_is_what_is_said(llm: LLM) -> None:
    messages, tokenizer = transcript(), llm.built_engine.tokenizer
    assert [message["role"] for message in messages] == ["user", "assistant"] * 3
    asked = [
        {"prompt_token_ids": real_answers.prompt_of(tokenizer, messages[:end])} for end in (1, 3, 5)
    ]
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    results = llm.generate(asked, params, use_tqdm=False)
    texts = [result.outputs[0].text for result in results]
    assert texts == [message["content"] for message in messages[1::2]]


@pytest.mark.full
def test_the_conversation_in_the_documents_is_what_transformers_says() -> None:
    loaded, messages = real_answers.load(), transcript()
    for end in (1, 3, 5):
        answered = real_answers.answer(loaded, messages[:end])
        assert real_answers.text_of(loaded.tokenizer, answered) == messages[end]["content"]


@pytest.mark.full
def test_the_stored_answers_are_those_that_generate_gives_now() -> None:
    loaded = real_answers.load()
    stored = Answer.read()
    made = [real_answers.answer(loaded, each) for each in real_answers.conversations()]
    assert [answer.tokens for answer in made] == [answer.tokens for answer in stored]
    turns = real_answers.dialogue(loaded)
    assert [turn.tokens for turn in turns] == [turn.tokens for turn in Answer.read("turns")]
