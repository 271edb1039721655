"""Messages between the two processes: each arrives equal, and what is no message is refused."""

import asyncio
import dataclasses
import socket
import threading
from typing import Any

import msgspec
import pytest

from fairlead_runtime.child.frames import Channel, Codec, FrameError
from fairlead_runtime.engine.cache_map import CacheCopy
from fairlead_runtime.engine.inbox import Bounds
from fairlead_runtime.models.model_error import ModelError, SelfTestError
from fairlead_runtime.outputs import (
    CacheReset,
    ChoiceEvent,
    Draining,
    EngineDead,
    EngineState,
    ModelFacts,
    QueueFull,
    QueueTimeout,
    RequestView,
    ServiceError,
    SlowReader,
)
from fairlead_runtime.request.logprobs import TokenLogprobs
from fairlead_runtime.request.sequence import (
    Failure,
    FailureKind,
    FinishReason,
    Request,
    SamplingParams,
    Status,
)
from fairlead_runtime.request.text_facts import TextFacts
from fairlead_runtime.serving import wire
from fairlead_runtime.serving.measurements import EngineReport, RequestMetrics
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.sizing.traffic import Bound
from support.fake_engine import Collected, rig, run
from support.fake_engine import request as a_request

LENGTH = 4


def engine_channel(connection: socket.socket) -> wire.EngineChannel:
    return Channel(connection, wire.FROM_ENGINE, wire.TO_ENGINE)


def across(message: Any) -> Any:
    codec: Codec[Any] = wire.TO_ENGINE if isinstance(message, wire.ToEngine) else wire.FROM_ENGINE
    return codec.decode(codec.encode(message)[LENGTH:])


# Two values for every type of a field, so that one of them differs from its default.
SAMPLES: dict[type, tuple[Any, ...]] = {
    bool: (True, False),
    int: (3, 2),
    float: (0.25, 0.5),
    str: ("ß🙂", "x"),
    bytes: (b"\x00\xff", b"x"),
}


def filled(kind: type) -> Any:
    """A value of a dataclass in which no field of a plain type has its default."""
    values: dict[str, Any] = {}
    for field in msgspec.inspect.type_info(kind).fields:  # type: ignore[attr-defined]
        for sample in _samples(field.type):
            if sample != field.default:
                values[field.name] = sample
                break
    return kind(**values)


def _samples(info: Any) -> tuple[Any, ...]:
    for option in getattr(info, "types", [info]):
        name = type(option).__name__.removesuffix("Type").lower()
        for plain, samples in SAMPLES.items():
            if plain.__name__ == name:
                return samples
        if name == "vartuple":
            return (_samples(option.item_type),)
        if name in {"frozenset", "list"}:
            return ({"frozenset": frozenset, "list": list}[name](_samples(option.item_type)),)
        if name in {"dict", "mapping"}:
            keys, values = _samples(option.key_type), _samples(option.value_type)
            return (dict(zip(keys, values, strict=True)),)
        if name == "dataclass":
            return (filled(option.cls),)
        if name == "any":
            return ({"regex": "[a-z]+"},)  # structured_outputs
        if name == "literal":
            return tuple(option.values)
    return ()


def test_every_field_of_a_request_crosses() -> None:
    """A field that somebody adds is in here by itself."""
    params = filled(SamplingParams)
    unset = [f.name for f in dataclasses.fields(params) if getattr(params, f.name) == f.default]
    assert not unset, "these fields were not tried: give _samples their type"
    request = dataclasses.replace(
        Request("r", (1, 2**31 - 1), params, 7), seed=-(2**63), salt=b"s", eos_ids=frozenset({2})
    )
    assert across(wire.Submit(request, bounded=True)) == wire.Submit(request, bounded=True)


def test_every_setting_crosses() -> None:
    config = EngineConfig(max_requests=7, num_blocks=33, dtype="float16", record="/r", seed=5)
    start = wire.Start("/models/ä", config, 1 << 40)
    assert across(start) == start


def test_what_was_read_of_a_tokenizer_crosses() -> None:
    words = wire.Words(TextFacts((2, 7), (5, 6, 2**31 - 1), '{"version": "ä"}', 2**17))
    assert across(words) == words
    assert across(wire.Words(None)) == wire.Words(None)


def test_the_events_of_a_step_cross_with_log_probabilities() -> None:
    logprobs = TokenLogprobs(5, -0.5, 2, (4, 5), (-0.25, -0.5))
    events = [
        ChoiceEvent("a", 0, 5, logprobs, None, cached=16),
        ChoiceEvent("a", 1, None, None, FinishReason.ERROR, Failure("why", FailureKind.GRAMMAR)),
    ]
    assert across(wire.Events(events)) == wire.Events(events)


@pytest.mark.parametrize(
    "error",
    [
        ServiceError("plain"),
        QueueFull("full", 2.5),
        QueueTimeout("late", 1.0),
        Draining("drains"),
        EngineDead("dead"),
        SlowReader("slow"),
    ],
)
def test_an_error_of_the_service_keeps_its_class_message_and_time(error: ServiceError) -> None:
    event = ChoiceEvent("a", 0, None, None, FinishReason.ERROR, error=error)
    found = across(wire.Events([event])).events[0].error
    assert type(found) is type(error)
    assert (str(found), found.retry_after) == (str(error), error.retry_after)


def test_a_report_and_the_views_of_a_working_engine_cross() -> None:
    measurements = RequestMetrics()
    engine = rig(observer=measurements)
    engine.submit(a_request("a", n=2))
    run(engine, into=Collected())
    report = EngineReport(engine.snapshot(), measurements.read())
    assert report.requests.totals.finished[FinishReason.LENGTH] == 1
    assert across(wire.Report(3, report)) == wire.Report(3, report)
    view = RequestView("a", Status.PENDING, "t", 0, 1.5, 4, (0, 0), 6, 2, 0, "next")
    assert across(wire.Views(4, [view])) == wire.Views(4, [view])
    assert across(wire.Views(4, None)) == wire.Views(4, None)
    cache = CacheCopy.of(engine._scheduler, 0).view()
    assert cache.cached
    assert across(wire.Cache(5, cache)) == wire.Cache(5, cache)
    reset = CacheReset(evicted=3, held=2)
    assert across(wire.Reset(6, reset)) == wire.Reset(6, reset)
    assert across(wire.Ask(6, "reset")) == wire.Ask(6, "reset")


def test_what_a_start_reports_crosses() -> None:
    bounds = Bounds(4, 60.0, 8, 64, 4, 256, Bound(100, "{max_queue} of the test"))
    facts = ModelFacts(frozenset({1, 2}), 1000, 7)
    loaded = wire.Loaded(facts, bounds, {"terms": [{"name": "kv", "measuredBytes": None}]})
    assert across(loaded) == loaded
    progress = wire.Progress("self_test", 3, 30, 12.5)
    assert across(progress) == progress
    pulse = wire.Pulse(EngineState("", "no canary", 1.5, 3.0))
    assert across(pulse) == pulse


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("num_blocks", "4 are too few", "raise it"),
        ModelError("BadWeights", "a tensor is missing", "fetch it again"),
        SelfTestError("self-test: different"),
    ],
)
def test_a_refused_start_is_raised_equal_in_the_other_process(error: Exception) -> None:
    refused = across(wire.Refused.of(error))
    again = refused.error
    assert type(again) is type(error)
    assert refused.kind == type(error).__name__
    assert (str(again), vars(again)) == (str(error), vars(error))


GOOD = wire.TO_ENGINE.encode(wire.Ask(1, "report"))[LENGTH:]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",
        b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00K\x01.",  # a pickle
        GOOD + b"\x00",
        GOOD[:-1],
        GOOD.replace(b"report", b"shell!"),
        GOOD.replace(b"Ask", b"Run"),
        msgspec.msgpack.encode({"type": "Ask"}),
        msgspec.msgpack.encode(["Submit", {"id": 3}, True]),
        msgspec.msgpack.encode(["Abort", "a", ["queue_full"]]),
        b"\x91" * 100_000,
        # A constructor's own checks hold on this side of the socket, too.
        wire.TO_ENGINE.encode(
            wire.Submit(Request("a", (1,), SamplingParams(top_p=0.5), 1), bounded=True)
        )[LENGTH:].replace(msgspec.msgpack.encode(0.5), msgspec.msgpack.encode(7.5)),
    ],
)
def test_what_is_no_message_is_refused(content: bytes) -> None:
    with pytest.raises(FrameError):
        wire.TO_ENGINE.decode(content)


def test_a_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(FrameError):
        wire.FROM_ENGINE.decode(GOOD)


def test_a_frame_beyond_the_limit_is_neither_sent_nor_read() -> None:
    assert (wire.TO_ENGINE.max_frame, wire.FROM_ENGINE.max_frame) == (64 << 20, 64 << 20)
    codec: Codec[str] = Codec(str, max_frame=64)
    with pytest.raises(FrameError, match="larger than 64"):
        codec.encode("x" * 100)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall((65).to_bytes(LENGTH, "big"))
        with pytest.raises(FrameError, match="65 bytes is announced"):
            Channel(theirs, codec, codec).receive()


@pytest.mark.parametrize("cut", [1, LENGTH, LENGTH + 1])
def test_a_connection_that_ends_within_a_frame_is_an_end(cut: int) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(wire.TO_ENGINE.encode(wire.Stop())[:cut])
        ours.close()
        assert engine_channel(theirs).receive() is None

    async def other_side() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(wire.TO_ENGINE.encode(wire.Stop())[:cut])
        reader.feed_eof()
        assert await wire.TO_ENGINE.read(reader) is None

    asyncio.run(other_side())


def test_frames_of_several_threads_do_not_mix() -> None:
    ours, theirs = socket.socketpair()
    channel, texts = engine_channel(theirs), [letter * 300_000 for letter in "abcd"]

    def send(text: str) -> None:
        for _ in range(5):
            channel.send(wire.Gone(text))

    senders = [threading.Thread(target=send, args=(text,)) for text in texts]
    for sender in senders:
        sender.start()

    async def receive() -> list[str]:
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        found: list[str] = []
        for _ in range(20):
            message = await wire.FROM_ENGINE.read(reader)
            assert isinstance(message, wire.Gone)
            found.append(message.reason)
        writer.close()
        return found

    assert sorted(asyncio.run(receive())) == sorted(texts * 5)
    for sender in senders:
        sender.join()
    theirs.close()
