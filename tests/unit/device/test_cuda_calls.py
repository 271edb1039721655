"""What runs on NVIDIA GPUs alone asks CUDA for the right things in the right order: the calls of
captures, of streams and of the copy that a step waits for, written down by a pretended torch.cuda.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fairlead_kernels.sampling.sample_rows import RowLogprobs
from fairlead_runtime.device.memory.streams import cuda_streams
from fairlead_runtime.device.sampling.token_readback import TokenReadback
from fairlead_runtime.device.step.cuda_graphs import CudaRecorder
from fairlead_runtime.device.step.graph_cache import GraphCache

GPU = torch.device("cuda", 0)
FREE = [1000, 900, 900, 840]  # bytes, before and after each of two captures


class Cuda:
    """``torch.cuda``, as far as it is used: ``log`` has its calls, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        log: list[Any] = []
        self.log = log
        free, made = iter(FREE), iter(range(100))

        class Event:
            def __init__(self) -> None:
                self.number = next(made)

            def record(self, stream: Any = "current") -> None:
                log.append(("record", self.number, str(stream)))

            def synchronize(self) -> None:
                log.append(("synchronize", self.number))

        class Stream:
            def __init__(self, _device: torch.device) -> None:
                self.name = "side"

            def __str__(self) -> str:
                return self.name

            def wait_event(self, event: Event) -> None:
                log.append(("wait", event.number, self.name))

        class Graph:
            def __init__(self) -> None:
                self.number = next(made)

            def replay(self) -> None:
                log.append(("replay", self.number))

            def reset(self) -> None:
                log.append(("reset", self.number))

        def current(_device: torch.device) -> Stream:
            stream = Stream(GPU)
            stream.name = "current"
            return stream

        @contextmanager
        def within(stream: Stream) -> Iterator[None]:
            log.append(("enter", stream.name))
            yield
            log.append(("leave", stream.name))

        @contextmanager
        def capture(_graph: Graph, **options: Any) -> Iterator[None]:
            log.append(("capture", options.pop("capture_error_mode"), options["pool"]))
            yield
            log.append("captured")

        def mem_get_info(_device: torch.device) -> tuple[int, int]:
            log.append("measure")
            return next(free), 2000

        fakes = {
            "Event": Event,
            "Stream": Stream,
            "CUDAGraph": Graph,
            "current_stream": current,
            "stream": within,
            "graph": capture,
            "graph_pool_handle": lambda: "pool",
            "mem_get_info": mem_get_info,
            "synchronize": lambda _device: log.append("synchronize"),
            "empty_cache": lambda: log.append("empty_cache"),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        empty = torch.empty

        def host(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            if pin_memory:
                log.append("pinned")
            return empty(*shape, **options)

        monkeypatch.setattr(torch, "empty", host)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def test_each_capture_is_measured_when_the_device_is_idle_and_all_share_a_pool(cuda: Cuda) -> None:
    recorder = CudaRecorder(GPU)
    graphs = GraphCache(recorder, 2)
    for key in "ab":
        graphs.run(key, lambda: cuda.log.append("step"))
    one = ["step", "synchronize", "empty_cache", "measure", ("capture", "thread_local", "pool")]
    assert cuda.log == 2 * [*one, "step", "captured", "synchronize", "measure"]
    assert graphs.nbytes == 100 + 60
    cuda.log.clear()
    graphs.run("a", lambda: cuda.log.append("step"))
    graphs.clear()
    assert [what for what, _ in cuda.log] == ["replay", "reset", "reset"]


def test_a_capture_that_gave_memory_back_takes_none(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([900, 1000])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (next(free), 2000))
    recorder = CudaRecorder(GPU)
    recorder.record(lambda: None)
    assert recorder.nbytes == 0


def test_tokens_are_looked_at_behind_the_event_that_follows_their_copies(cuda: Cuda) -> None:
    fetched = TokenReadback(4, 2, GPU)
    assert cuda.log == ["pinned"] * 3
    cuda.log.clear()
    tokens = torch.tensor([7, 8, 9])
    made = RowLogprobs(torch.rand(3, 3), torch.arange(9).view(3, 3))
    fetched.fetch(tokens, made)
    assert cuda.log == [("record", 0, "current")]
    assert fetched.wait() == [7, 8, 9]
    assert cuda.log[1:] == [("synchronize", 0)]
    assert fetched.logprobs(2, 9, 2).top_ids == (7, 8)
    fetched.fetch(tokens[:1], None)
    fetched.wait()
    assert cuda.log[2:] == [("record", 0, "current"), ("synchronize", 0)]


def test_work_beside_the_steps_runs_on_a_stream_of_its_own_and_waits_by_events(cuda: Cuda) -> None:
    steps, side = cuda_streams(GPU)
    for lane in (steps, side):
        lane.run(lambda: cuda.log.append("work"))
    assert cuda.log == ["work", ("enter", "side"), "work", ("leave", "side")]
    cuda.log.clear()
    side.wait(steps.record())
    steps.wait(side.record())
    assert cuda.log == [
        ("record", 0, "current"),
        ("wait", 0, "side"),
        ("record", 1, "side"),
        ("wait", 1, "current"),
    ]
