"""Messages reach each kind of chat template in the form that it reads."""

import json
from typing import Any

import pytest

from fairlead_runtime.models import chat
from fairlead_runtime.models.template_forms import USUAL, TemplateForms, forms_of
from support import tiny

HEAD = "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}"
TAIL = "{% endfor %}{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
PARTS = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}"
    "{% endfor %}<|end|>{% endfor %}"
)
CALLS = {
    "as json": HEAD + "{{ c.function.name }}{{ c.function.arguments | tojson }}" + TAIL,
    "text or json": HEAD
    + "{{ c.function.name }}{% if c.function.arguments is string %}{{ c.function.arguments }}"
    + "{% else %}{{ c.function.arguments | tojson }}{% endif %}"
    + TAIL,
    "items": HEAD
    + "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
    + TAIL,
    "keys": HEAD + "{% for k in c.function.arguments.keys() %}{{ k }}{% endfor %}" + TAIL,
    "joined": HEAD + "{{ c.function.name + '\\n' + c.function.arguments }}" + TAIL,
    "written": HEAD + "{{ c.function.name }}{{ c.function.arguments }}" + TAIL,
}


def rendered(template: str, messages: list[dict[str, Any]], **more: Any) -> str:
    tokenizer: Any = tiny.tokenizer()
    tokenizer.chat_template = template
    return chat.render_chat(tokenizer, messages, **more)


def conversation(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": arguments}}
    return [
        {"role": "user", "content": "time?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "12:00"},
    ]


def test_a_template_that_reads_only_parts_gets_parts_of_every_role() -> None:
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": f"{role}'s words"} for role in roles]
    text = rendered(PARTS, messages)
    assert text == "".join(f"<|{role}|>{role}'s words<|end|>" for role in roles)
    assert "12:00" in rendered(PARTS, conversation("{}"))
    continued = chat.TemplateInputs(add_generation_prompt=False, continue_final_message=True)
    assert rendered(PARTS, messages[:3], inputs=continued).endswith("assistant's words")


def test_a_template_that_reads_parts_of_one_role_gets_texts_of_the_others() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content[0].text }}"
        "{% else %}{{ m.content + '!' }}{% endif %}{% endfor %}"
    )
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert rendered(template, messages) == "a!b"


ARGUMENTS = '{"zone":  "UTC"}'  # two spaces: the client's own text


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("as json", 'now{"zone": "UTC"}'),
        ("text or json", 'now{"zone": "UTC"}'),
        ("items", "zone=UTC"),
        ("keys", "zone"),
        ("joined", f"now\n{ARGUMENTS}"),
        ("written", f"now{ARGUMENTS}"),
    ],
)
def test_earlier_calls_have_their_arguments_as_the_template_writes_them(
    name: str, shown: str
) -> None:
    assert f"<|end|>{shown}<|tool|>" in rendered(CALLS[name], conversation(ARGUMENTS))


def test_arguments_that_are_no_object_stay_text() -> None:
    for arguments in ("[1]", "now", "[" * 100_000):
        assert json.dumps(arguments) in rendered(CALLS["as json"], conversation(arguments))


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('never') }}",
        "{% for m in messages %}{{ m.role }}{% endfor %}",
        "{{ messages[0].content | upper }}",
        tiny.tokenizer().chat_template,
    ],
)
def test_a_template_that_shows_no_form_better_gets_the_usual_ones(template: str) -> None:
    tokenizer: Any = tiny.tokenizer()

    def render(messages: list[dict[str, Any]]) -> str:
        text: str = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
        return text

    assert forms_of(render) == USUAL


def test_the_usual_forms_are_texts_and_values() -> None:
    (message,) = TemplateForms().fit(conversation(ARGUMENTS)[1:2])
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"]["arguments"] == {"zone": "UTC"}
