"""A template of a request is rendered as the model's own would be, in a process with limits."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from fairlead_runtime.api.state.state import BodyRules
from fairlead_runtime.models.chat import TemplateInputs, render_chat
from fairlead_runtime.models.template_child import RenderLimits
from fairlead_runtime.outputs import ServiceError
from fairlead_runtime.request.sequence import RequestError
from fairlead_runtime.serving.request_templates import RequestTemplates
from support import tiny
from support.api_harness import FakeService, chat, fake_server, run

MESSAGES = [{"role": "user", "content": "é?"}, {"role": "assistant", "content": "Sure, "}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
LONG = RenderLimits(seconds=300.0)  # processor time alone decides


@pytest.fixture(scope="module")
def templates() -> Iterator[RequestTemplates]:
    one = RequestTemplates(tiny.tokenizer(), LONG)
    yield one
    one.close()


@pytest.mark.parametrize(
    ("source", "fields"),
    [
        ("{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}", {}),
        (
            "{% for m in messages %}{{ m.content }}!{% endfor %}",
            {"continue_final_message": True, "add_generation_prompt": False},
        ),
        ("{{ tools | length }}{{ mood }}{{ messages[0].content }}", {"kwargs": {"mood": "calm"}}),
        (
            "{% for d in documents %}{{ d.text }}{% endfor %}{{ tools }}{{ reasoning_effort }}",
            {"documents": ({"text": "ü"},), "reasoning_effort": "low"},
        ),
    ],
)
def test_a_template_writes_what_it_writes_in_this_process(
    templates: RequestTemplates, source: str, fields: dict[str, Any]
) -> None:
    inputs = TemplateInputs(chat_template=source)._replace(**fields)
    tools = TOOLS if "tools" in source else []
    here = render_chat(tiny.tokenizer(), MESSAGES, tools=tools, inputs=inputs)
    assert templates.render(MESSAGES, tools, inputs, 10_000) == here


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10**10 }}",
        "{{ 'x' * 10**7 }}",
        "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s * 2 %}{% endfor %}",
        "{{ (9**9)**(9**9) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ messages.__class__ }}{{ ''.__class__.__mro__ }}{{ raise_exception('x') }}",
        "{% for",
        "{{ cycler.__init__.__globals__.os.system('kill -9 0') }}",
    ],
)
def test_no_template_takes_more_than_its_limits_and_the_next_is_rendered(
    templates: RequestTemplates, source: str
) -> None:
    with pytest.raises(RequestError, match="chat_template: ") as refused:
        templates.render(MESSAGES, (), TemplateInputs(chat_template=source), 1_000_000)
    assert refused.value.param == "chat_template"
    assert len(str(refused.value)) < 600
    plain = TemplateInputs(chat_template="{{ messages[0].content }}")
    assert templates.render(MESSAGES, (), plain, 10) == "é?"


def test_half_of_a_surrogate_pair_is_no_text(templates: RequestTemplates) -> None:
    for source in (r"{{ '\ud800' }}", r"{{ raise_exception('\ud800') }}"):
        with pytest.raises(RequestError, match=r"no valid text|fails: \\ud800"):
            templates.render(MESSAGES, (), TemplateInputs(chat_template=source), 100)


def test_a_rendering_that_lacked_the_processor_is_no_verdict() -> None:
    templates = RequestTemplates(tiny.tokenizer(), RenderLimits(seconds=0.0))
    try:
        with pytest.raises(ServiceError, match="retry"):
            templates.render(MESSAGES, (), TemplateInputs(chat_template="{{ 1 }}"), 10)
    finally:
        templates.close()


def test_hostile_templates_keep_no_other_request_waiting() -> None:
    async def scenario() -> None:
        service = FakeService(rules=BodyRules(templates=True))
        async with fake_server(service) as (server, _), server.client() as client:
            endless = "{% for a in range(9**5) %}{% for b in range(9**5) %}{% endfor %}{% endfor %}"
            route = "/v1/chat/completions"
            slow = [
                asyncio.ensure_future(client.post(route, json=chat(chat_template=endless)))
                for _ in range(4)
            ]
            await asyncio.sleep(0.2)
            began = time.monotonic()
            assert (await client.post(route, json=chat())).status_code == 200
            taken = time.monotonic() - began
            assert not all(each.done() for each in slow), taken
            for answer in await asyncio.gather(*slow):
                assert answer.status_code in {400, 503}, answer.text
                if answer.status_code == 400:
                    assert answer.json()["error"]["param"] == "chat_template"
            hidden = json.dumps(chat(chat_template="{{ 1 }}")).replace("plate", "pl\\u0061te")
            headers = {"content-type": "application/json"}
            for path in (route, "/tokenize"):
                answer = await client.post(path, content=hidden.encode(), headers=headers)
                assert (answer.status_code, answer.json()["error"]["param"]) == (
                    400,
                    "chat_template",
                )

    run(scenario())
