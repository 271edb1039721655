"""CUDA graphs on NVIDIA GPUs, through torch.

Owns one pool of memory for all graphs: they run one after another, so one may use what another has
finished with. It has not run on a GPU yet.
"""

from collections.abc import Callable

import torch


class CudaRecorder:
    """``graphs.Recorder`` on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def record(self, step: Callable[[], object]) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # as capturing does first: it is not the graph's
        free, _ = torch.cuda.mem_get_info(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA while this one captures.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode):
            step()
        torch.cuda.synchronize(self._device)
        self.nbytes += max(0, free - torch.cuda.mem_get_info(self._device)[0])
        return graph
