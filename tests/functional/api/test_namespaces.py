"""Functions in a namespace, as coding tools send them to the Responses API: told to the model by
both names, called and answered by two.
"""

from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from fairlead_runtime.api.bodies.tool_bodies import MAX_TOOLS
from fairlead_runtime.api.responses import bodies
from fairlead_runtime.front.errors import ApiError
from fairlead_runtime.request.sequence import FinishReason
from support import tiny
from support.api_harness import MODEL, FakeService, events, fake_server, run

ROUTE = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {"type": "object"}, **fields}


AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Agents.",
    "tools": [function("spawn"), function("wait", description="Wait for it.")],
}
TOOLS = [function("shell"), AGENTS, function("agents__other")]
CALL = '<tool_call>\n{"name": "%s", "arguments": {"n": 1}}\n</tool_call>'
SAID = CALL % "agents__spawn" + CALL % "shell" + CALL % "agents__other"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hello", "tools": TOOLS, **fields}


def saying(text: str) -> FakeService:
    return FakeService(says=text, finish=FinishReason.STOP, max_model_len=8192)


def test_a_call_comes_back_with_its_namespace_streamed_or_not() -> None:
    async def scenario() -> None:
        async with fake_server(saying(SAID)) as (server, service), server.client() as client:
            answer = Response.model_validate((await client.post(ROUTE, json=body())).json())
            named: list[Any] = [*answer.output]
            assert [(call.namespace, call.name) for call in named] == [
                ("agents", "spawn"),
                (None, "shell"),
                (None, "agents__other"),
            ]
            assert answer.tools[1].model_dump(exclude_unset=True) == AGENTS
            told: Any = tiny.tokenizer()
            prompt = told.decode(service.seen[0].prompt)
            for name in ("shell", "agents__spawn", "agents__wait", "agents__other"):
                assert f'"name": "{name}"' in prompt
            stream = (await client.post(ROUTE, json=body(stream=True))).text
            data = [line for line in stream.split("\n") if line.startswith("data: ")]
            found = events("\n\n".join(data))
            for event in found:
                EVENT.validate_python(event)
            items = [e["item"] for e in found if e["type"] == "response.output_item.done"]
            assert [(item.get("namespace"), item["name"]) for item in items] == [
                ("agents", "spawn"),
                (None, "shell"),
                (None, "agents__other"),
            ]

    run(scenario())


def test_earlier_calls_and_a_forced_one_have_the_name_that_the_model_knows() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "spawn", "namespace": "agents"}
    items = [
        {"role": "user", "content": "x"},
        {**call, "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "done"},
    ]
    request = bodies.response(body(input=items), MODEL)
    assert request.messages[1]["tool_calls"][0]["function"]["name"] == "agents__spawn"
    assert request.ignored == b""
    choice = {"type": "function", "name": "wait", "namespace": "agents"}
    assert bodies.response(body(tool_choice=choice), MODEL).tools.use.forced == "agents__wait"
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [choice]}
    assert bodies.response(body(tool_choice=allowed), MODEL).tools.use.names == {"agents__wait"}


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "namespace", "tools": []}, "tools.1.name"),
        ({**AGENTS, "name": ""}, "tools.1.name"),
        ({**AGENTS, "name": "my agents"}, "tools.1.name"),
        ({**AGENTS, "name": "a" * 129}, "tools.1.name"),
        ({**AGENTS, "description": 3}, "tools.1.description"),
        ({**AGENTS, "tools": [function("a", description=3)]}, "tools.1.tools.0.description"),
        ({**AGENTS, "tools": None}, "tools.1.tools"),
        ({**AGENTS, "tools": ["spawn"]}, "tools.1.tools"),
        ({**AGENTS, "tools": [function("a"), {"type": "custom"}]}, "tools.1.tools.1.type"),
        ({**AGENTS, "tools": [function("a"), function("a b")]}, "tools.1.tools.1.name"),
        ({**AGENTS, "tools": [{"type": "function"}]}, "tools.1.tools.0.name"),
        ({**AGENTS, "tools": [AGENTS]}, "tools.1.tools.0.type"),
        (
            {**AGENTS, "tools": [function("a", parameters={"type": "nothing"})]},
            "tools.1.tools.0.parameters",
        ),
        ({**AGENTS, "tools": [{"type": "web_search"}]}, "tools.1.tools.0.type"),
        ({"type": "web_search_call"}, "tools.1.type"),
        ({"type": "web_search_preview_today"}, "tools.1.type"),
        ({"type": "file_search", "vector_store_ids": ["x"]}, "tools.1.type"),
        ({"type": "mcp", "server_label": "x"}, "tools.1.type"),
        ({"type": "local_shell"}, "tools.1.type"),
        ({"type": ["web_search"]}, "tools.1.type"),
        ({}, "tools.1.type"),
    ],
)
def test_what_is_wrong_in_a_namespace_is_refused_at_its_place(tool: Any, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        bodies.response(body(tools=[function("shell"), tool]), MODEL)
    assert (refused.value.status, refused.value.param) == (400, param)


# As Codex sends it with every request, and the other names that OpenAI's API has for it.
SEARCH = {"type": "web_search", "external_web_access": False}


@pytest.mark.parametrize(
    "name",
    [
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    ],
)
def test_a_search_of_the_web_is_left_out_and_named(name: str) -> None:
    search = {**SEARCH, "type": name}

    async def scenario() -> None:
        async with fake_server(saying(SAID)) as (server, service), server.client() as client:
            for tools in ([search, *TOOLS], [*TOOLS, search, search]):
                answer = await client.post(ROUTE, json=body(tools=tools))
                assert answer.headers["fairlead-ignored-fields"] == f"tools.{name}"
                read = Response.model_validate(answer.json())
                assert [call.type for call in read.output] == ["function_call"] * 3
                assert search in answer.json()["tools"]
                told: Any = tiny.tokenizer()
                assert "web_search" not in told.decode(service.seen[-1].prompt)

    run(scenario())


def test_a_search_of_the_web_cannot_be_forced() -> None:
    for choice in ({"type": "web_search"}, "required"):
        with pytest.raises(ApiError) as refused:
            bodies.response(body(tools=[SEARCH], tool_choice=choice), MODEL)
        assert (refused.value.status, refused.value.param) == (400, "tool_choice")
    assert bodies.response(body(tools=[SEARCH]), MODEL).tools.for_template in (None, [], ())


@pytest.mark.parametrize("within", [False, True])
def test_a_tool_in_a_chats_form_is_refused_with_the_form_of_this_api(within: bool) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    tools = [{**AGENTS, "tools": [tool]}] if within else [tool]
    with pytest.raises(ApiError, match="beside type") as refused:
        bodies.response(body(tools=tools), MODEL)
    path = "tools.0.tools.0.function" if within else "tools.0.function"
    assert (refused.value.status, refused.value.param) == (400, path)


def test_too_many_functions_are_refused_before_any_is_looked_at() -> None:
    many = [{"type": "nothing"}] * MAX_TOOLS
    for tools, param in (
        ([function("shell"), {**AGENTS, "tools": many}], "tools.1.tools"),
        ([{**AGENTS, "tools": many}, function("shell")], "tools"),
        ([{**AGENTS, "tools": many[:100]}, {**AGENTS, "tools": many[:100]}], "tools.1.tools"),
    ):
        with pytest.raises(ApiError, match=f"more than {MAX_TOOLS} functions") as refused:
            bodies.response(body(tools=tools), MODEL)
        assert refused.value.param == param
    some = [function(f"f{number}") for number in range(MAX_TOOLS)]
    request = bodies.response(body(tools=[{**AGENTS, "tools": some}]), MODEL)
    assert len(request.tools.for_template) == MAX_TOOLS


def test_the_model_reads_what_a_namespace_is_for_before_each_of_its_functions() -> None:
    request = bodies.response(body(), MODEL)
    told = {each["function"]["name"]: each["function"] for each in request.tools.for_template}
    assert told["agents__spawn"]["description"] == "Agents."
    assert told["agents__wait"]["description"] == "Agents.\nWait for it."
    assert "description" not in told["shell"]
    assert request.echo["tools"][1] == AGENTS
