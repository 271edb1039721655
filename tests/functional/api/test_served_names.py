"""A model of several names is asked by each, and an answer has the one that it was asked by."""

from typing import Any

import pytest

from fairlead_runtime.api.state.state import BodyRules
from support.api_harness import MODEL, FakeService, chat, completion, events, fake_server, run

OTHER = "owner/other"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": completion(),
    "/v1/chat/completions": chat(),
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
}
QUIET: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [5]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hello"}]},
}


def of_two_names() -> FakeService:
    return FakeService(rules=BodyRules(aliases=(OTHER,)))


def test_an_answer_has_the_name_that_it_was_asked_by() -> None:
    async def scenario() -> None:
        async with fake_server(of_two_names()) as (server, _), server.client() as client:
            for route, body in BODIES.items():
                for name in (MODEL, OTHER, None):
                    answer = await client.post(route, json=body | {"model": name})
                    assert answer.json()["model"] == (name or MODEL), (route, answer.text)
            stream = await client.post("/v1/chat/completions", json=chat(model=OTHER, stream=True))
            assert {event["model"] for event in events(stream.text)[:-1]} == {OTHER}
            for route, body in QUIET.items():
                counts = [
                    (await client.post(route, json=body | {"model": name})).json()
                    for name in (MODEL, OTHER)
                ]
                assert counts[0] == counts[1], route

    run(scenario())


def test_each_name_is_listed_and_found() -> None:
    async def scenario() -> None:
        async with fake_server(of_two_names()) as (server, _), server.client() as client:
            listed = (await client.get("/v1/models")).json()["data"]
            assert [model["id"] for model in listed] == [MODEL, OTHER]
            for model in listed:
                found = await client.get(f"/v1/models/{model['id']}")
                assert found.json() == model
            assert (await client.get("/v1/models/third")).status_code == 404

    run(scenario())


@pytest.mark.parametrize("route", [*BODIES, *QUIET])
def test_another_name_is_refused_with_those_that_there_are(route: str) -> None:
    async def scenario() -> None:
        async with fake_server(of_two_names()) as (server, _), server.client() as client:
            body = (BODIES | QUIET)[route] | {"model": "third"}
            answer = await client.post(route, json=body)
            assert answer.status_code == 404, answer.text
            assert f"it serves {MODEL}, {OTHER}" in answer.text

    run(scenario())
