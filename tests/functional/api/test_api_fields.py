"""No field of a body is silently another answer: model's values, foreign names, template fields."""

import pytest

from fairlead_runtime.api.state.state import BodyRules
from support.api_harness import FakeService, chat, completion, fake_server, run

ROUTES = {
    "/v1/completions": completion(),
    "/v1/chat/completions": chat(),
    "/v1/responses": {"model": "tiny", "input": "hello"},
}


@pytest.mark.parametrize("route", ROUTES)
def test_the_models_sampling_values_count_where_a_body_leaves_them_out(route: str) -> None:
    model = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    own = {"temperature": 0, "top_k": 0, "repetition_penalty": None}

    async def scenario() -> None:
        service = FakeService(rules=BodyRules(sampling=model))
        async with fake_server(service) as (server, _), server.client() as client:
            for more, values in (({}, model), (own, model | {"temperature": 0, "top_k": 0})):
                answer = await client.post(route, json=ROUTES[route] | more)
                assert answer.status_code == 200, answer.text
                params = service.seen[-1].params
                assert {name: getattr(params, name) for name in model} == values
            if "responses" in route:
                assert (answer.json()["temperature"], answer.json()["top_p"]) == (0, 0.95)

    run(scenario())
