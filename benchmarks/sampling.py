"""The cost of sampling per step, compared with a plain implementation: full sort, softmax,
exponential noise (as in vLLM's torch path).

    python benchmarks/sampling.py [--rows 1 32 256] [--vocabulary 32000 151936]
                                  [--device cpu] [--repeat 7]

Prints the best of the repeats in milliseconds, since the machine may be shared, and the ratio of
plain to ours. There are two kinds of logits: ``text`` falls with the rank as in a language model
(the k-th likeliest token has a probability of about k^-1.5), ``flat`` is normal noise, for which no
token can be skipped. Both implementations get the same logits in one process.
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fairlead_runtime.device.sampling.host_sampler import SamplingBatch, sample
from fairlead_runtime.request.sequence import Request, SamplingParams, Sequence

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k": {"top_k": 50},
    "top-p": {"top_p": 0.9},
    "top-k top-p": {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    "min-p": {"min_p": 0.05},
}


def text_logits(rows: int, vocabulary: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    base = -1.5 * torch.arange(1, vocabulary + 1).float().log()
    out = torch.empty(rows, vocabulary)
    for row in out:
        row[torch.randperm(vocabulary, generator=generator)] = base
    return (out + torch.randn(rows, vocabulary, generator=generator) * 0.3).to(device)


def flat_logits(rows: int, vocabulary: int, device: torch.device) -> Tensor:
    return (torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0)) * 2).to(
        device
    )


def plain(logits: Tensor, params: dict[str, Any]) -> Tensor:
    """Temperature, min-p, top-k and top-p by one full sort, softmax and exponential noise."""
    p = SamplingParams(**params)
    if p.temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.float() / p.temperature
    if p.min_p:
        shares = logits.softmax(dim=-1)
        logits = logits.masked_fill(
            shares < p.min_p * shares.amax(dim=-1, keepdim=True), -torch.inf
        )
    if p.top_k or p.top_p < 1:
        ordered, places = logits.sort(dim=-1, descending=False)
        if p.top_k:
            ordered = ordered.masked_fill(ordered < ordered[:, -p.top_k].unsqueeze(1), -torch.inf)
        if p.top_p < 1:
            below = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - p.top_p
            below[:, -1] = False
            ordered = ordered.masked_fill(below, -torch.inf)
        logits = torch.empty_like(ordered).scatter_(-1, places, ordered)
    shares = logits.softmax(dim=-1, dtype=torch.float32)
    return shares.div_(torch.empty_like(shares).exponential_()).argmax(dim=-1)


def sequences(rows: int, params: dict[str, Any]) -> list[Sequence]:
    return [
        Sequence(i, Request(str(i), (1,), SamplingParams(**params), 16, seed=i), 0, [1] * 20)
        for i in range(rows)
    ]


def milliseconds(work: Callable[[], object], repeat: int, device: torch.device) -> float:
    times = []
    for _ in range(repeat + 1):  # the first warms up and is dropped
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description="cost of sampling per step")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32000, 151936])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args()
    device = torch.device(args.device)
    print(f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads")
    print(
        f"{'rows':>4} {'vocabulary':>10} {'logits':>6} {'case':<12} "
        f"{'ours ms':>9} {'plain ms':>9} {'plain/ours':>10}"
    )
    for rows in args.rows:
        for vocabulary in args.vocabulary:
            for kind, make in (("text", text_logits), ("flat", flat_logits)):
                logits = make(rows, vocabulary, device)
                for case, params in CASES.items():
                    batch = sequences(rows, params)
                    ours = milliseconds(ours_of(logits, batch), args.repeat, device)
                    other = milliseconds(
                        functools.partial(plain, logits, params), args.repeat, device
                    )
                    ratio = other / ours
                    print(
                        f"{rows:>4} {vocabulary:>10} {kind:>6} {case:<12} "
                        f"{ours:>9.2f} {other:>9.2f} {ratio:>10.1f}"
                    )


def ours_of(logits: Tensor, batch: list[Sequence]) -> Callable[[], object]:
    """One step of our sampling, including the collection of its parameters."""
    return lambda: sample(logits, SamplingBatch.of(batch))


if __name__ == "__main__":
    main()
