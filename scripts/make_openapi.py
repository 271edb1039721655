"""Write api/ports/openapi.json, the OpenAPI document of the public port, which serves it, from the
types that check the bodies. `--check` writes nothing and exits with 1 when the file is out of date.

The bodies are the runtime's own types; the answers are described here, and the tests hold the
server to them.
"""

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic.json_schema import models_json_schema

from fairlead_runtime.api.anthropic.bodies import CountBody, MessagesBody
from fairlead_runtime.api.bodies.request_bodies import ChatBody, CompletionBody
from fairlead_runtime.api.ports.app import DOCUMENT
from fairlead_runtime.api.responses.bodies import ResponseBody
from fairlead_runtime.api.routes.tokenize import DetokenizeBody, TokenizeBody
from fairlead_runtime.front.strict_body import StrictBody

PORTS = Path(__file__).parents[1] / "runtime" / "fairlead_runtime" / "api" / "ports"
FILE = PORTS / DOCUMENT
REF = "#/components/schemas/"
Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
ANY_OBJECT: Schema = {"type": "object"}
# Of a stream, OpenAPI 3.1 describes each event.
EVENT: Schema = {
    "type": "object",
    "properties": {"event": TEXT, "data": TEXT},
    "required": ["data"],
}

# Refusals that any route may answer, before it sees the request.
EVERYWHERE = {
    "400": "The request is not valid HTTP or not valid for this route; `param` names the field.",
    "401": "API keys are set, and neither the bearer token nor `x-api-key` is one of them.",
    "408": "The header, the body or the answer took too long.",
    "429": "The key's limits or the queue are reached; `Retry-After` says when to retry.",
    "431": "The header is larger than 32 KiB or has more than 100 fields.",
    "503": "The server loads, drains, has no working engine or too many connections.",
}
WITH_BODY = {
    "404": "The model is not the one that is served.",
    "413": "The body is larger than 2 MiB, or than 16 bytes a token of a longer context.",
    "415": "The body is not `application/json`.",
    "500": "This request failed; the others did not.",
}
PROBE = {name: EVERYWHERE[name] for name in ("400", "408", "431", "503")}


def ref(name: str) -> Schema:
    return {"$ref": REF + name}


ERROR = ref("Error")


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def many(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def record(optional: tuple[str, ...] = (), /, **fields: Schema) -> Schema:
    required = [name for name in fields if name not in optional]
    return {"type": "object", "properties": fields, "required": required}


def const(value: str) -> Schema:
    return {"type": "string", "const": value}


def one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


FINISH = one_of("stop", "length", "tool_calls")
STOP_REASON: Schema = {"anyOf": [TEXT, {"type": "integer"}, {"type": "null"}]}
TOKEN = {"token": TEXT, "logprob": NUMBER, "bytes": many(COUNT)}
PROMPT_LOGPROBS = many(
    nullable(
        {
            "type": "object",
            "additionalProperties": record(
                logprob=NUMBER, rank=nullable(COUNT), decoded_token=nullable(TEXT)
            ),
        }
    )
)
# Keys that other servers have in an answer.
NONE_HERE: Schema = {
    name: {"type": "null"} for name in ("service_tier", "system_fingerprint", "kv_transfer_params")
}
ANSWERS: dict[str, Schema] = {
    "Error": record(
        error=record(message=TEXT, type=TEXT, param=nullable(TEXT), code=TEXT),
    ),
    # Of Anthropic's routes; a refusal of the connection itself is an Error there, too.
    "MessageError": record(
        type=const("error"),
        error=record(type=TEXT, message=TEXT),
        request_id=TEXT,
    ),
    "Health": record(status=const("ok")),
    "Version": record(version=TEXT),
    "Model": record(
        id=TEXT,
        object=const("model"),
        created=COUNT,
        owned_by=TEXT,
        root=TEXT,
        parent={"type": "null"},
        max_model_len=COUNT,
        sampling_defaults=ANY_OBJECT,
    ),
    "Models": record(object=const("list"), data=many(ref("Model"))),
    "Tokens": record(
        count=COUNT, max_model_len=COUNT, tokens=many(COUNT), token_strs=nullable(many(TEXT))
    ),
    "Text": record(prompt=TEXT),
    "TokenizerInfo": record(tokenizer_class=TEXT),
    "Usage": record(
        prompt_tokens=COUNT,
        completion_tokens=COUNT,
        total_tokens=COUNT,
        prompt_tokens_details=record(cached_tokens=COUNT),
        completion_tokens_details=record(reasoning_tokens=COUNT),
    ),
    "Completion": record(
        id=TEXT,
        object=const("text_completion"),
        created=COUNT,
        model=TEXT,
        choices=many(
            record(
                index=COUNT,
                text=TEXT,
                logprobs=nullable(
                    record(
                        tokens=many(TEXT),
                        token_logprobs=many(nullable(NUMBER)),
                        top_logprobs=many(nullable(ANY_OBJECT)),
                        text_offset=many(COUNT),
                    )
                ),
                finish_reason=FINISH,
                stop_reason=STOP_REASON,
                prompt_logprobs=nullable(PROMPT_LOGPROBS),
                token_ids=nullable(many(COUNT)),
                prompt_token_ids=nullable(many(COUNT)),
            )
        ),
        usage=ref("Usage"),
        **NONE_HERE,
    ),
    "ChatCompletion": record(
        id=TEXT,
        object=const("chat.completion"),
        created=COUNT,
        model=TEXT,
        choices=many(
            record(
                index=COUNT,
                message=record(
                    ("tool_calls",),
                    role=const("assistant"),
                    content=nullable(TEXT),
                    refusal={"type": "null"},
                    annotations={"type": "null"},
                    audio={"type": "null"},
                    function_call={"type": "null"},
                    reasoning=nullable(TEXT),
                    reasoning_content=nullable(TEXT),
                    tool_calls=many(
                        record(
                            id=TEXT,
                            type=const("function"),
                            function=record(name=TEXT, arguments=TEXT),
                        )
                    ),
                ),
                logprobs=nullable(
                    record(content=many(record(**TOKEN, top_logprobs=many(record(**TOKEN)))))
                ),
                finish_reason=FINISH,
                stop_reason=STOP_REASON,
                token_ids=nullable(many(COUNT)),
            )
        ),
        usage=ref("Usage"),
        prompt_logprobs=nullable(PROMPT_LOGPROBS),
        prompt_token_ids=nullable(many(COUNT)),
        **NONE_HERE,
    ),
    "Response": record(
        id=TEXT,
        object=const("response"),
        created_at=COUNT,
        model=TEXT,
        status=one_of("completed", "incomplete"),
        error={"type": "null"},
        incomplete_details=nullable(record(reason=const("max_output_tokens"))),
        output=many(
            record(
                id=TEXT,
                type=one_of("message", "reasoning", "function_call"),
                status=one_of("completed", "incomplete"),
            )
        ),
        usage=record(
            input_tokens=COUNT,
            input_tokens_details=record(cached_tokens=COUNT, cache_write_tokens=COUNT),
            output_tokens=COUNT,
            output_tokens_details=record(reasoning_tokens=COUNT),
            total_tokens=COUNT,
        ),
    ),
    "MessageAnswer": record(
        id=TEXT,
        type=const("message"),
        role=const("assistant"),
        model=TEXT,
        content=many(
            record(
                ("text", "thinking", "signature", "id", "name", "input"),
                type=one_of("text", "thinking", "tool_use"),
                text=TEXT,
                thinking=TEXT,
                signature=TEXT,
                id=TEXT,
                name=TEXT,
                input=ANY_OBJECT,
            )
        ),
        stop_reason=one_of(
            "end_turn",
            "max_tokens",
            "stop_sequence",
            "tool_use",
            "model_context_window_exceeded",
        ),
        stop_sequence=nullable(TEXT),
        usage=record(
            input_tokens=COUNT,
            cache_creation_input_tokens=COUNT,
            cache_read_input_tokens=COUNT,
            output_tokens=COUNT,
        ),
    ),
    "MessageTokens": record(input_tokens=COUNT),
}
REQUEST_ID = {
    "X-Request-Id": {
        "description": "The request's own id where it is safe to log, else a new one.",
        "required": True,
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"},
    }
}


IGNORED = {
    "Fairlead-Ignored-Fields": {
        "description": "Names in the body that nothing read; absent where all had a meaning.",
        "schema": {"type": "string", "pattern": r"^[A-Za-z0-9_.~%+, -]{1,1024}$"},
    }
}


def answer(description: str, schema: Schema, *, stream: str = "") -> Schema:
    content: Schema = {"application/json": {"schema": schema}}
    if stream:
        content["text/event-stream"] = {"schema": EVENT | {"description": stream}}
    return {"description": description, "headers": REQUEST_ID, "content": content}


def ignoring(response: Schema) -> Schema:
    return response | {"headers": response["headers"] | IGNORED}


def refusals(reasons: dict[str, str], schema: Schema = ERROR) -> Schema:
    return {
        # A refusal of the connection itself has no id: no application has seen the request.
        status: {
            "description": reason,
            "content": {"application/json": {"schema": schema}},
        }
        for status, reason in sorted(reasons.items())
    }


def reading_text(summary: str, kind: str, schema: Schema, reasons: dict[str, str]) -> Schema:
    good = answer(summary, schema)
    good["content"] = {kind: good["content"].pop("application/json")}
    return {"summary": summary, "responses": {"200": good, **refusals(reasons)}}


def reading(summary: str, name: str, reasons: dict[str, str] = EVERYWHERE) -> Schema:
    return {"summary": summary, "responses": {"200": answer(name, ref(name)), **refusals(reasons)}}


def posting(
    summary: str, body: type[StrictBody], name: str, stream: str = "", error: Schema = ERROR
) -> Schema:
    return posting_any(summary, name, {name: body}, stream, error)


def posting_any(
    summary: str,
    what: str,
    bodies: dict[str, type[StrictBody]],
    stream: str = "",
    error: Schema = ERROR,
) -> Schema:
    """One of these bodies, each with an answer of its own."""
    asked, answered = (
        [ref(n) for n in names] for names in ([body.__name__ for body in bodies.values()], bodies)
    )
    return {
        "summary": summary,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": any_of(asked)}},
        },
        "responses": {
            "200": ignoring(answer(what, any_of(answered), stream=stream)),
            **refusals(EVERYWHERE | WITH_BODY, error),
        },
    }


def any_of(schemas: list[Schema]) -> Schema:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


CHUNKS = "With `stream: true`: server-sent events with chunks, at the end `data: [DONE]`."
MESSAGE_EVENTS = "With `stream: true`: server-sent events with Anthropic's names, in its order."
MESSAGE_ERROR: Schema = {"anyOf": [ref("MessageError"), ERROR]}
EVENTS = "With `stream: true`: server-sent events with OpenAI's names and sequence numbers."
NAME = {"name": "name", "in": "path", "required": True, "schema": TEXT}


def paths() -> Schema:
    model = reading(
        "The model, by its served name", "Model", EVERYWHERE | {"404": "No such model."}
    )
    probes = {
        path: {"get": {**reading(what, "Health", PROBE), "security": []}}
        for path, what in {
            "/healthz": "Alive",
            "/readyz": "Ready for traffic",
            "/health": "As /readyz",
            "/ping": "As /readyz",
        }.items()
    }
    probes["/ping"]["post"] = probes["/ping"]["get"]
    metrics = reading_text(
        "As the admin port's, with --public-metrics",
        "text/plain",
        TEXT,
        EVERYWHERE | {"404": "The server runs without --public-metrics."},
    )
    return {
        "/v1/models": {"get": reading("The model that is served", "Models")},
        "/v1/models/{name}": {"get": {**model, "parameters": [NAME]}},
        "/v1/completions": {
            "post": posting("Complete prompts", CompletionBody, "Completion", CHUNKS)
        },
        "/v1/chat/completions": {
            "post": posting("Answer a chat", ChatBody, "ChatCompletion", CHUNKS)
        },
        "/v1/responses": {
            "post": posting("Answer a conversation", ResponseBody, "Response", EVENTS)
        },
        "/v1/messages": {
            "post": posting(
                "Answer a conversation",
                MessagesBody,
                "MessageAnswer",
                MESSAGE_EVENTS,
                MESSAGE_ERROR,
            )
        },
        "/v1/messages/count_tokens": {
            "post": posting(
                "Tokens of a conversation", CountBody, "MessageTokens", error=MESSAGE_ERROR
            )
        },
        "/invocations": {
            "post": posting_any(
                "Answer a chat (messages), a completion (prompt) or a conversation (input)",
                "ChatCompletion, Completion or Response",
                {
                    "ChatCompletion": ChatBody,
                    "Completion": CompletionBody,
                    "Response": ResponseBody,
                },
                "With `stream: true`: server-sent events of the route that has such a body.",
            )
        },
        "/tokenize": {"post": posting("Tokens of a prompt or a chat", TokenizeBody, "Tokens")},
        "/detokenize": {"post": posting("Text of tokens", DetokenizeBody, "Text")},
        "/tokenizer_info": {
            "get": reading("The tokenizer's configuration, as in vLLM", "TokenizerInfo")
        },
        "/metrics": {"get": metrics},
        "/openapi.json": {
            "get": reading_text("This document", "application/json", ANY_OBJECT, EVERYWHERE)
        },
        "/version": {"get": reading("The server's version", "Version")},
        **probes,
    }


def document() -> Schema:
    bodies = (
        CompletionBody,
        ChatBody,
        ResponseBody,
        MessagesBody,
        CountBody,
        TokenizeBody,
        DetokenizeBody,
    )
    _, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template=REF + "{model}"
    )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Fairlead",
            "version": version("fairlead"),
            "description": "The public port of `fairlead serve`. docs/http.md has the bounds and "
            "conventions of every field. Unknown fields are ignored and named in a header.",
        },
        # A server without --api-key-file needs no key.
        "security": [{}, {"key": []}, {"header": []}],
        "paths": paths(),
        "components": {
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": schemas["$defs"] | ANSWERS,
        },
    }


def text() -> str:
    return json.dumps(document(), indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        FILE.write_text(text())
    elif not FILE.exists() or FILE.read_text() != text():
        print(f"{FILE.name} is out of date: run `make generate`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
