"""``POST /invocations``, the one route of a SageMaker container: the body says what is asked.

Owns the choice. The route that is chosen gets the body as it came, and does the rest.
"""

from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fairlead_runtime.api.state.state import Backend, ServerState
from fairlead_runtime.front.auth import tenant_of
from fairlead_runtime.front.errors import invalid
from fairlead_runtime.front.limits import PromptPool, read_body, while_connected
from fairlead_runtime.front.strict_json import parse_object

ANTHROPIC = ("system", "anthropic_version")


class Invocations:
    """``routes``: by the field that holds its prompt, in the order in which they are looked for."""

    def __init__(self, state: ServerState, pool: PromptPool, routes: Mapping[str, ASGIApp]) -> None:
        self._state = state
        self._pool = pool
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._state.request() as backend:  # to its end: a drain waits for it
            field, receive = await self._read(scope, receive, backend)
            await self._routes[field](scope, receive, send)

    async def _read(self, scope: Scope, receive: Receive, backend: Backend) -> tuple[str, Receive]:
        """The field that holds the prompt, and what gives the body once more. Nothing else keeps
        the body: an answer takes minutes.
        """
        with self._pool.bodies.hold() as take:
            body = await read_body(scope, receive, take, backend.max_body)
            choosing = self._pool.run(tenant_of(scope), prompt_field, body, [*self._routes])
            return await while_connected(receive, choosing), _read_again(body, receive)


def prompt_field(body: bytes, fields: list[str]) -> str:
    """The first of ``fields`` that the body has; "system" for a chat of Anthropic's API, by what no
    other chat has. Raises ApiError.
    """
    sent = parse_object(body)
    for field in fields:
        if sent.get(field) is not None:
            anthropic = any(sent.get(name) is not None for name in ANTHROPIC)
            return "system" if field == "messages" and anthropic else field
    raise invalid(
        fields[0],
        f"is missing: send {fields[0]} (a chat), prompt (a completion) or input (a response)",
        "missing_required_parameter",
    )


def _read_again(body: bytes, receive: Receive) -> Receive:
    """Gives the whole ``body`` once, then what ``receive`` gives."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again
