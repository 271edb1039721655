"""What clients shape SmolLM2's answers with: schemas, stop texts, log-probabilities."""

import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it has no stubs
import pytest
import torch

from fairlead_runtime import LLM, SamplingParams
from fairlead_runtime.request.sequence import FinishReason
from support import real_answers
from support.real_answers import Answer

# The first run on a machine fetches 330 MB and converts them.
pytestmark = pytest.mark.timeout(1800)
# Arguments of calls as programs ask for them: each is what one field may hold.
FIELDS: dict[str, dict[str, Any]] = {
    "city": {"type": "string", "minLength": 2, "maxLength": 24},
    "celsius": {"type": "boolean"},
    "days": {"type": "integer", "minimum": 1, "maximum": 14},
    "unit": {"enum": ["metric", "imperial"]},
    "date": {"type": "string", "pattern": "^20[0-9]{2}-[01][0-9]-[0-3][0-9]$"},
    "price": {"type": "number", "minimum": 0, "maximum": 999},
    "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    "note": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 20}]},
    "kind": {"const": "order"},
    "place": {
        "type": "object",
        "properties": {"lat": {"type": "integer"}, "lon": {"type": "integer"}},
        "required": ["lat", "lon"],
        "additionalProperties": False,
    },
}
ASKED = ("Describe the weather report.", "Fill in the order.", "Make up an example.")
LONGEST_JSON = 160  # tokens


def schemas() -> list[dict[str, Any]]:
    """Thirty objects of one to four fields each."""
    names = list(FIELDS)
    return [
        {
            "type": "object",
            "properties": {name: FIELDS[name] for name in chosen},
            "required": chosen,
            "additionalProperties": False,
        }
        for shift in range(len(names))
        for count in (1, 2, 4)
        if (chosen := [names[(shift + 3 * i) % len(names)] for i in range(count)])
    ]


def ids_of(llm: LLM, text: str) -> dict[str, list[int]]:
    messages = [{"role": "user", "content": text}]
    return {"prompt_token_ids": real_answers.prompt_of(llm.built_engine.tokenizer, messages)}


def test_thirty_schemas_are_kept(llm: LLM) -> None:
    wanted = schemas()
    assert len(wanted) == 30
    params = [
        SamplingParams(
            temperature=0, max_tokens=LONGEST_JSON, structured_outputs={"json": json.dumps(schema)}
        )
        for schema in wanted
    ]
    asked = [ids_of(llm, ASKED[n % len(ASKED)]) for n in range(len(wanted))]
    results = llm.generate(asked, params, use_tqdm=False)
    cut = 0
    for schema, result in zip(wanted, results, strict=True):
        (choice,) = result.outputs
        if choice.finish_reason is FinishReason.LENGTH:
            cut += 1  # white space or digits without end are what some schemas allow
            continue
        jsonschema.validate(json.loads(choice.text), schema)
    assert cut <= 6


def test_an_answer_ends_before_its_stop_text(llm: LLM) -> None:
    tokenizer = llm.built_engine.tokenizer
    answers = [answer for answer in Answer.read() if len(answer.tokens) > 16][:10]
    texts = [tokenizer.decode(answer.tokens[:16]) for answer in answers]
    stops = [tokenizer.decode(answer.tokens[8:11]) for answer in answers]
    params = [SamplingParams(temperature=0, max_tokens=16, stop=stop) for stop in stops]
    asked = [{"prompt_token_ids": answer.prompt} for answer in answers]
    results = llm.generate(asked, params, use_tqdm=False)
    for result, text, stop in zip(results, texts, stops, strict=True):
        (choice,) = result.outputs
        assert choice.text == text[: text.index(stop)]
        assert (choice.finish_reason, choice.stop_reason) == (FinishReason.STOP, stop)


@torch.inference_mode()
def test_log_probabilities_are_those_of_transformers(llm: LLM) -> None:
    answers = Answer.read()[::8]
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=5)
    asked = [{"prompt_token_ids": answer.prompt} for answer in answers]
    results = llm.generate(asked, params, use_tqdm=False)
    model: Any = real_answers.load().model
    for answer, result in zip(answers, results, strict=True):
        (choice,) = result.outputs
        assert choice.logprobs
        ids = [*answer.prompt, *choice.token_ids]
        logits = model(torch.tensor([ids])).logits[0, len(answer.prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        for given, row in zip(choice.logprobs, expected, strict=True):
            assert len(given) in (5, 6)
            worst = max(abs(float(row[token]) - one.logprob) for token, one in given.items())
            assert worst <= 1e-3
