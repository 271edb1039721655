"""Messages reach each kind of chat template in the form that it reads."""

import json
from typing import Any

import pytest

from fairlead_runtime.models import chat
from fairlead_runtime.models.template_forms import USUAL, TemplateForms, forms_of
from fairlead_runtime.request.sequence import RequestError
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


def rendered(template: str | dict[str, str], messages: list[dict[str, Any]], **more: Any) -> str:
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


ALTERNATING = (
    "{% set ns = namespace(last='') %}{% for m in messages %}"
    "{% if m.role == ns.last or (m.role == 'system' and not loop.first) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.last = m.role %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
)
ONE_SYSTEM = ALTERNATING.replace("m.role == ns.last or ", "")
SENT_APART = [
    {"role": "system", "content": "You are a coding tool."},
    {"role": "system", "content": "Ask first."},
    {"role": "user", "content": "The folder is empty."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "Bye"},
]


@pytest.mark.parametrize(
    ("template", "users"),
    [
        (ALTERNATING, "<|user|>The folder is empty.\nHello<|end|>"),
        (ONE_SYSTEM, "<|user|>The folder is empty.<|end|><|user|>Hello<|end|>"),
    ],
    ids=["alternating", "one system"],
)
def test_messages_of_one_role_are_one_where_the_template_refuses_two(
    template: str, users: str
) -> None:
    text = rendered(template, SENT_APART)
    assert text == (
        "<|system|>You are a coding tool.\nAsk first.<|end|>"
        f"{users}<|assistant|>Hi<|end|><|user|>Bye<|end|>"
    )
    late = [*SENT_APART[:5], {"role": "system", "content": "Be brief."}, SENT_APART[5]]
    assert rendered(template, late) == text.replace("Ask first.", "Ask first.\nBe brief.")


def test_messages_of_one_role_stay_apart_where_the_template_takes_them() -> None:
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    text = rendered(template, SENT_APART)
    assert text.startswith("<|system|>You are a coding tool.<|system|>Ask first.<|user|>The folder")
    late = [SENT_APART[2], {"role": "system", "content": "late"}, SENT_APART[3]]
    assert rendered(template, late) == "<|user|>The folder is empty.<|system|>late<|user|>Hello"


def test_the_message_that_is_continued_stays_the_last() -> None:
    continued = chat.TemplateInputs(add_generation_prompt=False, continue_final_message=True)
    late = [*SENT_APART[2:5], {"role": "system", "content": "late"}]
    for last in ("system", "user", "assistant"):
        messages = [*late[:3], late[3], {"role": last, "content": "to go on"}]
        if last == "system":
            with pytest.raises(RequestError, match="messages: the model's chat template refuses"):
                rendered(ONE_SYSTEM, messages, inputs=continued)
        else:
            text = rendered(ONE_SYSTEM, messages, inputs=continued)
            assert text.startswith("<|system|>late<|end|>")
            assert text.endswith(f"<|{last}|>to go on")
    with pytest.raises(RequestError, match="messages: the model's chat template refuses"):
        rendered(ONE_SYSTEM, late, inputs=continued)


def test_messages_that_are_one_have_a_name_where_all_have_it() -> None:
    forms = TemplateForms(joined=frozenset({"user"}))
    named = [
        {"role": "user", "content": text, "name": name}
        for text, name in zip("abc", "xxy", strict=True)
    ]
    assert forms.fit(named[:2]) == [{"role": "user", "content": "a\nb", "name": "x"}]
    assert forms.fit(named) == [{"role": "user", "content": "a\nb\nc"}]
    assert forms.fit([{"role": "user", "content": "z"}, named[0]]) == [
        {"role": "user", "content": "z\na"}
    ]


SHOWN = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
PRIVATE = [
    {"role": "user", "content": "secret"},
    {"role": "assistant", "content": "<think>secret</think>Sure"},
]


@pytest.mark.parametrize(
    ("template", "inputs", "message"),
    [
        (
            SHOWN,
            {"continue_final_message": True, "add_generation_prompt": False},
            "continue_final_message: the chat template does not show the last message's content",
        ),
        (
            SHOWN + "\n{{ 1 + (size or 1) }}",
            {"kwargs": {"size": "secret"}},
            "chat_template_kwargs: the template refuses them: TypeError in line 2",
        ),
        (
            SHOWN
            + "{% if reasoning_effort == 'x' %}{{ raise_exception('low or high') }}{% endif %}",
            {"reasoning_effort": "x"},
            "reasoning_effort: is refused: low or high",
        ),
        (
            SHOWN,
            {"chat_template": "\n{{ raise_exception('use \\u202e' + 'x' * 999) }}"},
            r"chat_template: fails: use \u202e" + "x" * 390,
        ),
        (
            SHOWN,
            {"chat_template": "\n{% if %}"},
            "chat_template: fails: TemplateSyntaxError in line 2",
        ),
        (
            "{{ [].index(messages[0].content) }}",
            {},
            "messages: the model's chat template refuses them: ValueError in line 1",
        ),
    ],
    ids=["goes on", "kwargs", "effort", "own template", "own syntax", "messages"],
)
def test_a_refusal_names_the_field_at_fault_and_quotes_no_message(
    template: str, inputs: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError) as refused:
        rendered(template, PRIVATE, inputs=chat.TemplateInputs(**inputs))
    assert str(refused.value).startswith(message)
    assert "secret" not in str(refused.value)


NAMED = {
    "default": "default {{ messages[0].content }}",
    "tool_use": "tool_use {{ (tools or []) | length }}",
    "rag": "rag {% for d in documents %}{{ d.text }}{% endfor %}"
    "{% for m in messages %}{{ m.content[0].text }}{% endfor %}",
}


@pytest.mark.parametrize(
    ("documents", "tools", "name", "text"),
    [
        ((), [], None, "default x"),
        (({"title": "t", "text": "page "},), [], None, "rag page x"),
        ((), [{"type": "function", "function": {"name": "f"}}], None, "tool_use 1"),
        ((), [], "tool_use", "tool_use 0"),
    ],
    ids=["plain", "documents", "tools", "by name"],
)
def test_the_template_for_what_a_chat_brings_is_rendered_or_the_one_that_it_names(
    documents: Any, tools: Any, name: str | None, text: str
) -> None:
    inputs = chat.TemplateInputs(chat_template=name, documents=documents)
    messages = [{"role": "user", "content": "x"}]
    assert rendered(NAMED, messages, tools=tools, inputs=inputs) == text
    if documents:
        with pytest.raises(RequestError, match="no place for documents"):
            rendered(NAMED, messages, inputs=inputs._replace(chat_template="default"))


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
