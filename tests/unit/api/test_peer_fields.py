"""Every request field of other servers is honoured, refused by name, or ignored and named; a slip
of a known one is refused.
"""

import json
import re
import tracemalloc
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from fairlead_runtime.api.anthropic import bodies as anthropic
from fairlead_runtime.api.bodies import field_names, request_bodies
from fairlead_runtime.api.bodies.harmless_fields import HARMLESS
from fairlead_runtime.api.bodies.refused_fields import REFUSED
from fairlead_runtime.api.bodies.request_bodies import ChatBody, CompletionBody
from fairlead_runtime.api.responses import bodies
from fairlead_runtime.api.responses.bodies import ResponseBody
from fairlead_runtime.api.state.state import BodyRules
from fairlead_runtime.front.errors import ApiError
from fairlead_runtime.request.sequence import RequestError
from fairlead_runtime.request.structured import Reasoning
from support.api_harness import MODEL, FakeService, chat, completion, events, fake_server, run

SOURCES = json.loads((Path(__file__).parents[3] / "scripts" / "peer_fields.json").read_text())
RESPONSE = {"model": MODEL, "input": "hello"}
RESPONSE_FIELDS = {*ResponseBody.model_fields, *ChatBody.model_fields} - bodies._REFUSED.keys()
JSON_TYPE = {"content-type": "application/json"}
ROUTES: dict[str, tuple[Any, dict[str, Any], set[str]]] = {
    "chat": (request_bodies.chat, chat(), {*ChatBody.model_fields}),
    "completions": (request_bodies.completion, completion(), {*CompletionBody.model_fields}),
    "responses": (bodies.response, RESPONSE, RESPONSE_FIELDS),
}


@pytest.mark.parametrize("route", ROUTES)
def test_no_field_of_another_server_is_dropped_in_silence(route: str) -> None:
    check, body, honoured = ROUTES[route]
    for source in SOURCES["sources"]:
        for name in source["fields"].get(route, ()):
            if name in honoured:
                continue
            odd = {"nobody": "sends this"}
            if name in HARMLESS and not (route == "responses" and name in bodies._REFUSED):
                assert check(body | {name: odd}, MODEL).ignored == name.encode(), name
                continue
            with pytest.raises(ApiError, match=name) as refused:
                check(body | {name: odd}, MODEL)
            assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")


def test_the_lists_of_openai_are_those_of_its_client() -> None:
    (source,) = (each for each in SOURCES["sources"] if each["whose"] == "OpenAI")
    for route, kind in (
        ("chat", chat_create_params.CompletionCreateParamsBase),
        ("completions", completion_create_params.CompletionCreateParamsBase),
        ("responses", response_create_params.ResponseCreateParamsBase),
    ):
        assert source["fields"][route] == sorted({*kind.__annotations__, "stream"})


def test_a_name_has_one_fate() -> None:
    assert not HARMLESS.keys() & (REFUSED.keys() | ChatBody.model_fields.keys())


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_tokns", "max_tokens"),
        ("max_token", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("max-tokens", "max_tokens"),
        ("temprature", "temperature"),
        ("temperatrue", "temperature"),
        ("tempurature", "temperature"),
        ("repetion_penalty", "repetition_penalty"),
        ("presense_penalty", "presence_penalty"),
        ("top_kk", "top_k"),
        ("tpo_k", "top_k"),
        ("seeds", "seed"),
        ("stopp", "stop"),
        ("mdoel", "model"),
        ("streem", "stream"),
        ("n_probss", "n_probs"),
    ],
)
def test_a_slip_of_a_known_name_is_refused_with_that_name(name: str, meant: str) -> None:
    for check, body, _ in ROUTES.values():
        with pytest.raises(ApiError, match=f"is not known; did you mean {meant}") as refused:
            check(body | {name: 1}, MODEL)
        assert refused.value.param == name
        assert check(body | {name: None}, MODEL).ignored == b""


@pytest.mark.parametrize(
    "name",
    ["metadata2", "top_p2", "top_a", "id", "stop_sequences", "user_id", "provider", "x", "seed_2x"],
)
def test_a_name_that_means_another_thing_is_ignored_and_named(name: str) -> None:
    for check, body, _ in ROUTES.values():
        assert check(body | {name: 1}, MODEL).ignored == name.encode()


def test_objects_are_looked_at_as_the_body_is() -> None:
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "name": None, "weight": 1, "content": [part]}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "examples": []}, "zzz": 1}
    options = {"include_usage": True, "foo": 1}
    body = {"messages": [message, message], "tools": [tool], "stream_options": options}
    assert request_bodies.chat(chat(stream=True) | body, MODEL).ignored == (
        b"messages.weight, messages.content.cache_control, tools.function.examples, "
        b"tools.zzz, stream_options.foo"
    )
    anthropic_tool = {"name": "f", "input_schema": {}, "cache_control": {}, "zzz": 1}
    sent = {"max_tokens": 4, "messages": TURNS[:1], "tools": [anthropic_tool]}
    assert anthropic.message(sent, MODEL).ignored == b"tools.zzz"
    wrong = chat(stream=True, stream_options={"include_usge": True})
    with pytest.raises(ApiError, match=r"did you mean stream_options\.include_usage") as refused:
        request_bodies.chat(wrong, MODEL)
    assert refused.value.param == "stream_options.include_usge"


def test_what_a_header_cannot_hold_is_escaped_and_counted() -> None:
    names = ["a\r\nb: c", "naïve, x", "y" * 500, *(f"field_{number}" for number in range(5000))]
    listed = field_names.listed(names)
    assert len(listed) <= field_names.MAX_HEADER
    assert listed.startswith(b"a%0D%0Ab%3A%20c, na%C3%AFve%2C%20x, " + b"y" * 64 + b", field_0, ")
    shown = listed.decode().split(", ")
    assert shown[-1] == f"+{len(names) - len(shown) + 1}"


def test_thousands_of_names_cost_little_memory() -> None:
    body = completion(**{f"abcdefgh{chr(97 + n % 26)}{n:x}": n for n in range(20_000)})
    messages = [{"role": "user", "content": "x", "a": 1}] * 1024
    for check, sent in (
        (request_bodies.completion, body),
        (request_bodies.chat, chat(messages=messages)),
    ):
        check(sent, MODEL)  # what the first one of a process caches
        tracemalloc.start()
        try:
            assert len(check(sent, MODEL).ignored) <= field_names.MAX_HEADER
            assert tracemalloc.get_traced_memory()[1] < 16 * 1024 * 1024
        finally:
            tracemalloc.stop()


def test_any_name_at_all_makes_a_valid_header() -> None:
    async def scenario() -> None:
        names = ["", " ", "\t", "\r\n", "\0", "%", "%2", "é" * 100, "x" * 9000, '""', ","]
        async with fake_server() as (server, _), server.client() as client:
            for name in names:
                for place in ({name: 1}, {"stream_options": {name: 1}}, {"zz": 1, name: 1}):
                    content = json.dumps(chat(stream=True) | place)
                    answer = await client.post(
                        "/v1/chat/completions", content=content, headers=JSON_TYPE
                    )
                    assert answer.status_code == 200, (name, answer.text)
                    value = answer.headers["fairlead-ignored-fields"]
                    assert value == value.strip()
                    assert re.fullmatch(r"[\x21-\x7e]+(, [\x21-\x7e]+)*", value), value

    run(scenario())


def test_no_name_is_cut_within_a_character() -> None:
    for lead in range(4):
        shown = field_names.listed(["x" * lead + "é" * 100]).decode()
        assert len(shown) <= field_names.MAX_SHOWN
        assert unquote(shown, errors="strict") == "x" * lead + "é" * ((64 - lead) // 6)


def test_a_slip_has_the_place_in_its_list() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "user", "contnt": "x"}]
    with pytest.raises(ApiError, match=r"did you mean messages\.1\.content\?") as refused:
        request_bodies.chat(chat(messages=messages), MODEL)
    assert refused.value.param == "messages.1.contnt"


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("do_samples", "send temperature 0"),
        ("num_predict", "send max_tokens"),
        ("typical", "leave it out"),
    ],
)
def test_a_slip_of_a_refused_name_says_what_to_send(name: str, instead: str) -> None:
    with pytest.raises(ApiError, match=f"not supported; {instead}"):
        request_bodies.chat(chat(**{name: 0.5}), MODEL)


def test_a_slip_of_a_name_that_only_other_routes_refuse_is_one_of_a_field() -> None:
    with pytest.raises(ApiError, match=r"did you mean tools\?$"):
        request_bodies.chat(chat(toolss=[]), MODEL)


def test_names_of_other_apis_that_look_like_slips_are_ignored_and_named() -> None:
    messages = [{"role": "user", "content": "x", "context": {}}]
    for check, body, _ in ROUTES.values():
        assert check(body | {"models": ["a"]}, MODEL).ignored == b"models"
    body = chat(messages=messages)
    assert request_bodies.chat(body, MODEL).ignored == b"messages.context"


ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": "x"},
    {
        "type": "reasoning",
        "id": "rs_1",
        "status": "completed",
        "summary": [],
        "encrypted_content": None,
        "content": [{"type": "reasoning_text", "text": "x"}],
    },
    {
        "type": "message",
        "id": "msg_1",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "x", "annotations": [], "logprobs": []}],
    },
    {
        "type": "function_call",
        "id": "fc_1",
        "status": "completed",
        "call_id": "c",
        "name": "f",
        "arguments": "{}",
    },
    {
        "type": "function_call_output",
        "id": "o",
        "status": "completed",
        "call_id": "c",
        "output": "x",
    },
]
CACHE = {"cache_control": {"type": "ephemeral"}}
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "x", "citations": None} | CACHE]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "x", "signature": "s"},
            {"type": "redacted_thinking", "data": "d"},
            {"type": "text", "text": "x"},
            {"type": "tool_use", "id": "c", "name": "f", "input": {}} | CACHE,
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "c",
                "is_error": False,
                "content": [{"type": "text", "text": "x"} | CACHE],
            }
            | CACHE
        ],
    },
]


def test_each_object_of_a_list_is_read_as_its_type() -> None:
    response = {"model": MODEL, "input": ITEMS}
    message = {"model": MODEL, "max_tokens": 4, "messages": TURNS}
    assert bodies.response(response, MODEL).ignored == b""
    assert anthropic.message(message, MODEL).ignored == b""
    odd = [item | {"arguments_2": 1} for item in ITEMS]
    assert bodies.response(response | {"input": odd}, MODEL).ignored == b"input.arguments_2"


@pytest.mark.parametrize(
    ("place", "slip", "meant"),
    [(0, "roel", "role"), (2, "contnt", "content"), (3, "argumnts", "arguments")],
)
def test_a_slip_in_an_item_is_refused(place: int, slip: str, meant: str) -> None:
    items = [item | ({slip: 1} if at == place else {}) for at, item in enumerate(ITEMS)]
    with pytest.raises(ApiError, match=f"did you mean input.{place}.{meant}") as refused:
        bodies.response(RESPONSE | {"input": items}, MODEL)
    assert refused.value.param == f"input.{place}.{slip}"


def test_a_slip_in_a_block_is_refused() -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "is_eror": True}
    turns = [*TURNS[:2], {"role": "user", "content": [result]}]
    with pytest.raises(
        ApiError, match=r"did you mean messages\.2\.content\.0\.is_error"
    ) as refused:
        anthropic.message({"max_tokens": 4, "messages": turns}, MODEL)
    assert refused.value.param == "messages.2.content.0.is_eror"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["chat/completions", "completions", "responses"])
def test_the_answers_header_names_what_was_ignored(route: str, *, stream: bool) -> None:
    async def scenario() -> None:
        body = {"chat/completions": chat(), "completions": completion(), "responses": RESPONSE}
        async with fake_server() as (server, _), server.client() as client:
            for more, named in (({}, None), ({"metadata2": {}, "session_id": "s"}, True)):
                sent = body[route] | {"stream": stream, **more}
                answer = await client.post(f"/v1/{route}", json=sent)
                assert answer.status_code == 200, answer.text
                header = answer.headers.get("fairlead-ignored-fields")
                assert header == ("metadata2, session_id" if named else None)

    run(scenario())


def test_the_routes_of_tokens_name_it_too() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            for route, body in (("tokenize", completion()), ("detokenize", {"tokens": [20.0, 21]})):
                answer = await client.post(f"/{route}", json=body | {"metadata2": 1})
                assert answer.headers["fairlead-ignored-fields"] == "metadata2", answer.text
            refused = await client.post("/tokenize", json={"content": "hello"})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "content")

    run(scenario())


# -- values


def test_a_whole_float_is_an_integer_and_nothing_else_is() -> None:
    fields = {"max_tokens": 3.0, "top_k": 5.0, "n": 2.0, "seed": -7.0, "stop_token_ids": [1.0, 2]}
    params = request_bodies.completion(completion([12.0, 13], **fields), MODEL).params
    assert (params.max_tokens, params.top_k, params.n, params.seed) == (3, 5, 2, -7)
    assert params.stop_token_ids == (1, 2)
    assert type(params.seed) is int
    assert request_bodies.completion(completion([[12.0], [13]]), MODEL).prompts == ((12,), (13,))
    for value in (3.5, True, "3", 1e300):
        for name in ("max_tokens", "seed", "prompt_logprobs", "priority"):
            with pytest.raises((ApiError, RequestError), match=f"^{name}: "):
                request_bodies.completion(completion(**{name: value}), MODEL)
    with pytest.raises(ApiError, match="prompt"):
        request_bodies.completion(completion([1.5]), MODEL)


def test_top_p_0_is_greedy() -> None:
    assert request_bodies.completion(completion(top_p=0), MODEL).params.temperature == 0


def test_bounds_of_prompts_choices_and_stop_texts() -> None:
    body = completion(["a"] * 1024, n=4, stop=[f"{n} " for n in range(32)])
    request = request_bodies.completion(body, MODEL)
    assert (len(request.prompts), request.params.n, len(request.params.stop)) == (1024, 4, 32)
    with pytest.raises(ApiError, match=r"1024 prompts \* 5 are more than 4096 choices"):
        request_bodies.completion(body | {"n": 5}, MODEL)


def test_usage_in_every_event_needs_the_usage_at_the_end() -> None:
    options = {"continuous_usage_stats": True}
    request = request_bodies.chat(chat(stream=True, stream_options=options), MODEL)
    assert not request.running_usage
    assert not request.include_usage


# -- of the answer


@pytest.mark.parametrize("route", ["chat/completions", "completions", "responses"])
def test_the_id_of_the_answer_is_the_one_of_the_body(route: str) -> None:
    async def scenario() -> None:
        body = {"chat/completions": chat(), "completions": completion(), "responses": RESPONSE}
        prefix = {"chat/completions": "chatcmpl-", "completions": "cmpl-", "responses": "resp_"}
        async with fake_server() as (server, service), server.client() as client:
            for sent in ("of-the-client_1", prefix[route] + "of-the-client_1"):
                answer = await client.post(f"/v1/{route}", json=body[route] | {"request_id": sent})
                assert answer.json()["id"] == prefix[route] + "of-the-client_1"
                assert service.seen[-1].id == answer.headers["x-request-id"] != "of-the-client_1"
            for hostile in ("", "a b", "x" * 65, "a\nb", "<x>", 'a"', "é", 7):
                answer = await client.post(
                    f"/v1/{route}", json=body[route] | {"request_id": hostile}
                )
                assert answer.status_code == 400
                assert answer.json()["error"]["param"] == "request_id"

    run(scenario())


def test_a_chat_echoes_the_message_that_it_goes_on_with() -> None:
    async def scenario() -> None:
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Sure, "}]
        body = chat(messages=messages, echo=True, continue_final_message=True, max_tokens=3)
        async with fake_server() as (server, _), server.client() as client:
            route = "/v1/chat/completions"
            whole = (await client.post(route, json=body)).json()["choices"][0]["message"]
            assert whole["content"] == "Sure, naï"
            chunks = events((await client.post(route, json=body | {"stream": True})).text)[:-1]
            deltas = [each["choices"][0]["delta"].get("content", "") for each in chunks]
            assert deltas[1] == "Sure, "
            assert "".join(deltas) == "Sure, naï"
            user = (await client.post(route, json=chat(echo=True, max_tokens=3))).json()
            assert user["choices"][0]["message"]["content"] == "naï"

    run(scenario())


def test_keys_that_peers_always_have_are_null_in_whole_answers_and_absent_in_streams() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            answer = (await client.post("/v1/chat/completions", json=chat(max_tokens=1))).json()
            for name in ("prompt_logprobs", "prompt_token_ids", "system_fingerprint"):
                assert answer[name] is None
            (choice,) = answer["choices"]
            assert choice["token_ids"] is None
            for name in ("reasoning", "reasoning_content", "refusal"):
                assert choice["message"][name] is None
            answer = (await client.post("/v1/completions", json=completion(max_tokens=1))).json()
            assert answer["system_fingerprint"] is None
            for name in ("prompt_logprobs", "token_ids", "prompt_token_ids"):
                assert answer["choices"][0][name] is None
            text = (await client.post("/v1/chat/completions", json=chat(stream=True))).text
            assert "reasoning" not in text
            assert "prompt_logprobs" not in text
            client_answer = await server.openai.chat.completions.create(**chat(max_tokens=1))
            assert client_answer.choices[0].message.reasoning is None

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_log_probabilities_may_be_their_ids(*, stream: bool) -> None:
    async def scenario() -> None:
        more = {"max_tokens": 2, "stream": stream, "return_tokens_as_token_ids": True}
        async with fake_server() as (server, _), server.client() as client:

            async def answers(route: str, body: dict[str, Any]) -> list[Any]:
                text = (await client.post(route, json=body | more)).text
                found = events(text)[:-1] if stream else [json.loads(text)]
                choices = [choice for each in found for choice in each["choices"]]
                return [choice["logprobs"] for choice in choices if choice["logprobs"]]

            named = ["token_id:10", "token_id:11"]
            shapes = await answers("/v1/completions", completion(logprobs=1))
            assert [name for shape in shapes for name in shape["tokens"]] == named
            tops = [name for shape in shapes for top in shape["top_logprobs"] for name in top]
            assert tops == ["token_id:11", "token_id:10", "token_id:12", "token_id:11"]
            shapes = await answers("/v1/chat/completions", chat(logprobs=True, top_logprobs=1))
            entries = [entry for shape in shapes for entry in shape["content"]]
            assert [entry["token"] for entry in entries] == named
            assert entries[0]["top_logprobs"][0]["token"] == "token_id:11"
            assert entries[0]["bytes"] == [*b"n"]

    run(scenario())


# -- prompts and tools


def test_of_a_longer_prompt_the_last_tokens_are_kept() -> None:
    async def scenario() -> None:
        ids = [*range(20, 60)]
        async with fake_server() as (server, service), server.client() as client:

            async def kept(route: str, body: dict[str, Any], **more: Any) -> list[int]:
                answer = await client.post(route, json=body | more)
                assert answer.status_code == 200, answer.text
                return [*service.seen[-1].prompt] if "v1" in route else answer.json()["tokens"]

            text = completion(ids, max_tokens=4)
            assert await kept("/v1/completions", text, truncate_prompt_tokens=3) == ids[-3:]
            assert await kept("/v1/completions", text, truncate_prompt_tokens=99) == ids
            first = {"truncate_prompt_tokens": 3, "truncation_side": "right"}
            assert await kept("/v1/completions", text, **first) == ids[:3]
            long = completion(ids * 20, max_tokens=4)
            fit = await kept("/v1/completions", long, truncate_prompt_tokens=-1)
            assert fit == (ids * 20)[-508:]
            whole = await kept("/v1/chat/completions", chat("hello there " * 9))
            for route, body in (
                ("/v1/chat/completions", chat("hello there " * 9)),
                ("/tokenize", chat("hello there " * 9)),
                ("/v1/responses", RESPONSE | {"input": "hello there " * 9}),
            ):
                assert await kept(route, body, truncate_prompt_tokens=5) == whole[-5:]
            for route, body in (("/v1/completions", text), ("/tokenize", chat())):
                for wrong in (0, -2, 513, 1.5, "3"):
                    answer = await client.post(route, json=body | {"truncate_prompt_tokens": wrong})
                    assert answer.json()["error"]["param"] == "truncate_prompt_tokens"

    run(scenario())


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("a", "b", "c")
]


def allowed(mode: Any, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_a_choice_of_allowed_tools_leaves_the_others_out() -> None:
    request = request_bodies.chat(chat(tools=TOOLS, tool_choice=allowed("auto", "c", "a")), MODEL)
    assert request.tools.use.names == {"a", "c"}
    assert [tool["function"]["name"] for tool in request.tools.for_template] == ["a", "c"]
    assert request.params.guided is None
    request = request_bodies.chat(chat(tools=TOOLS, tool_choice=allowed("required", "b")), MODEL)
    assert request.tools.use.required
    assert request.params.guided is not None
    assert '"b"' in request.params.guided.source
    assert '"a"' not in request.params.guided.source
    flat = [{"name": "a", "type": "function"}, {"name": "b", "type": "function"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "b"}]}
    response = bodies.response(RESPONSE | {"tools": flat, "tool_choice": choice}, MODEL)
    assert response.tools.use.names == {"b"}


@pytest.mark.parametrize(
    "choice",
    [
        allowed("auto", "d"),
        allowed("none", "a"),
        allowed("auto"),
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["a"]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": [], "tools": [None]}},
    ],
)
def test_a_choice_of_allowed_tools_that_says_nothing_is_refused(choice: Any) -> None:
    with pytest.raises(ApiError) as refused:
        request_bodies.chat(chat(tools=TOOLS, tool_choice=choice), MODEL)
    assert refused.value.param == "tool_choice"


def test_the_models_sampling_values_are_shown() -> None:
    async def scenario() -> None:
        service = FakeService(rules=BodyRules(sampling={"temperature": 0.6, "top_k": 20}))
        async with fake_server(service) as (server, _), server.client() as client:
            (model,) = (await client.get("/v1/models")).json()["data"]
            assert model["sampling_defaults"] == {"temperature": 0.6, "top_k": 20}

    run(scenario())


# -- reasoning


@pytest.mark.parametrize("route", ["chat/completions", "completions", "responses"])
def test_a_budget_of_thoughts_is_a_bound_on_the_reasoning_of_the_answer(route: str) -> None:
    async def scenario() -> None:
        body = {"chat/completions": chat(), "completions": completion(), "responses": RESPONSE}
        field = "thinking_token_budget"
        sent = body[route] | {field: 7.0}
        service = FakeService(reasoning_parser="qwen3")
        async with fake_server(service) as (server, _), server.client() as client:
            assert (await client.post(f"/v1/{route}", json=sent)).status_code == 200
            bound = service.seen[-1].params.reasoning
            assert bound == Reasoning(most=7, end="</think>", begin="<think>")
            if route == "completions":
                opened = await client.post(f"/v1/{route}", json=sent | {"prompt": "x <think>\n"})
                assert opened.status_code == 200
                assert service.seen[-1].params.reasoning == Reasoning(most=7, end="</think>")
            for none in (-1, None):
                free = await client.post(f"/v1/{route}", json=sent | {field: none})
                assert free.status_code == 200
                assert service.seen[-1].params.reasoning is None
            for wrong in (-2, 1.5, "7", True):
                refused = await client.post(
                    f"/v1/{route}", json=sent | {"thinking_token_budget": wrong}
                )
                assert refused.json()["error"]["param"] == "thinking_token_budget"
        async with fake_server() as (server, _), server.client() as client:
            refused = await client.post(f"/v1/{route}", json=sent)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "thinking_token_budget"
            assert "--reasoning-parser" in refused.json()["error"]["message"]

    run(scenario())
