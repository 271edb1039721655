"""What a pod takes in: bounds that know each other, and what binds each."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_runtime.settings.engine_config import EngineConfig, flag_of
from fairlead_runtime.sizing.fixes import resource_field
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.terms import GIB, DeviceFacts, host_terms
from fairlead_runtime.sizing.traffic import (
    ALL_BODIES,
    ALL_PROMPTS,
    BODY,
    CONNECTION_BYTES,
    LEAST_FILES,
    OWN_FILES,
    PARSED,
    TLS_BYTES,
    Bound,
    PortBounds,
    Traffic,
    body_bytes,
    files_of,
    public_connections,
    waiting_tokens,
)
from fairlead_runtime.sizing.verdict import plan_memory

DEFAULT = EngineConfig()
LONG = 131_072
SHAPE = ModelShape.from_config(
    {
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 1 << 20,
        "dtype": "bfloat16",
    }
)


def test_the_default_settings_keep_their_bounds() -> None:
    traffic = Traffic.of(DEFAULT, LONG)
    assert traffic.connections == Bound(2048, "at least")
    assert traffic.requests.most == 256 + 1024
    assert (traffic.body.most, traffic.files, traffic.http_bytes) == (BODY, 5376, 0)


def test_every_request_that_runs_or_waits_has_a_connection() -> None:
    traffic = Traffic.of(EngineConfig(max_requests=4096), LONG)
    assert traffic.connections.most == 4096 + 1024 + 256
    assert traffic.connections.text(flag_of) == "--max-requests 4096 + --max-queue 1024 + 256"
    assert traffic.http_bytes == (5376 - 2048) * CONNECTION_BYTES
    few_tokens = EngineConfig(max_requests=65_536, max_batch_tokens=2048)
    assert public_connections(few_tokens).most == 2048 + 1024 + 256, "a row has a token in a step"


@given(st.integers(1, 65_536), st.integers(1, 10**6))
def test_connections_are_never_fewer_than_requests(rows: int, queue: int) -> None:
    config = EngineConfig(max_requests=rows, max_queue=queue, max_batch_tokens=65_536)
    traffic = Traffic.of(config, LONG)
    assert traffic.connections.most > traffic.requests.most
    assert traffic.files == files_of(traffic.connections.most)


@given(st.integers(LEAST_FILES, 20_000), st.integers(2048, 10_000))
def test_connections_handshakes_and_our_own_files_fit_the_file_limit(
    files: int, connections: int
) -> None:
    bounds = PortBounds.within(files, Bound(connections, "settings"))
    assert bounds.files == sum((bounds.public.most, bounds.admin, bounds.handshakes, OWN_FILES))
    assert bounds.files <= files
    assert min(bounds.admin, bounds.handshakes) >= 32
    assert bounds.public.most <= connections
    if files >= files_of(connections):
        assert bounds == PortBounds.within(None, Bound(connections, "settings"))
    elif bounds.public.most < connections:
        assert bounds.public.reason == f"RLIMIT_NOFILE is {files}"
        assert bounds.public.most >= (files - OWN_FILES) * 3 // 4


def test_a_queue_of_long_prompts_is_bounded_by_memory_and_not_by_1024_tokens_each() -> None:
    """With 1,024 tokens for each, the default queue held 13 prompts of 100,000."""
    bound = waiting_tokens(1024, 256, LONG)
    assert bound.most // 100_000 == 335
    assert bound.text() == "256 MiB / 8 bytes a token"
    small = waiting_tokens(1024, 256, LONG, memory=4 * GIB)
    assert small.text() == "1/64 of 4096 MiB of memory / 8 bytes a token"
    assert small.most * 8 == 4 * GIB // 64


def test_prompts_that_fit_memory_are_bounded_by_the_queue_alone() -> None:
    bound = waiting_tokens(1024, 256, 2048)
    assert bound.most == (1024 + 256) * 2048
    name = resource_field
    assert bound.text(name) == "(maxQueue 1024 + maxRequests 256) * 2048 tokens of maxModelLen"
    assert Traffic.of(DEFAULT, 2048).full_queue_tokens == 2048
    assert Traffic.of(DEFAULT, LONG).full_queue_tokens == (ALL_PROMPTS // 8) // (1024 + 256)


def test_a_queue_of_very_many_has_1024_tokens_for_each() -> None:
    bound = waiting_tokens(1_000_000, 256, LONG)
    assert bound.most == 1_000_256 * 1024
    assert bound.text() == "(max_queue 1000000 + max_requests 256) * 1024 tokens"


@pytest.mark.parametrize(
    ("longest", "most"),
    [(2048, BODY), (LONG, BODY), (1 << 20, 16 << 20), (10 << 20, ALL_BODIES)],
)
def test_a_body_holds_the_text_of_a_whole_context(longest: int, most: int) -> None:
    assert body_bytes(longest).most == most


def test_more_connections_and_longer_bodies_are_planned_as_host_memory() -> None:
    short = replace(DEFAULT, max_model_len=LONG)
    assert "http" not in host_terms(SHAPE, short, "cuda")
    many = host_terms(SHAPE, replace(short, max_requests=4096), "cuda")
    assert many["http"] == 3328 * CONNECTION_BYTES
    assert host_terms(SHAPE, DEFAULT, "cuda")["http"] == ((16 << 20) - BODY) * PARSED
    encrypted = replace(short, ssl_certfile="a.crt", ssl_keyfile="a.key")
    assert host_terms(SHAPE, encrypted, "cuda")["http"] == 2048 * TLS_BYTES
    plan = plan_memory(SHAPE, replace(short, max_requests=4096), DeviceFacts("cpu", 32 * GIB))
    assert plan.terms["http"] == many["http"]
    assert plan.traffic.connections.most == 5376
