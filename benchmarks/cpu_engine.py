"""One engine, in the environment that its project asks for, which need not have ours.

    PYTHON cpu_engine.py KIND MODEL SLOTS

Reads workloads from standard input, a line of JSON each: ``[[prompt, cap], ...]``, prompts as token
ids. All requests of a line arrive at once, and at most SLOTS run at a time. Writes a line for each:
the seconds until the last ended and the number of new tokens. Its first line is written when the
model is loaded, and names settings that the engine chose by itself. Weights and cache are float32,
and every setting is the engine's best one or its default, with prefix caching where it has that.

KINDs that end with -int8 have 8-bit weights. What else is rounded then is the engine's default: the
fastest that it documents. Those that end with -bfloat16 have weights and cache in that.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

Request = tuple[list[int], int]  # prompt, new tokens
Run = Callable[[Sequence[Request]], list[list[int]]]  # returns the new tokens of each request
ROOT = Path(__file__).parents[1]
LONGEST = 1024  # tokens of a request
PADDING = 0  # token id
CACHE = 2  # GiB: more than any workload fills


def fairlead(model: str, slots: int, *, dtype: str = "float32", int8: bool = False) -> Run:
    from fairlead_runtime import LLM, SamplingParams

    weights = {"quantization": "int8", "kernels": "cpu"} if int8 else {}
    llm = LLM(model, dtype=dtype, max_requests=slots, max_model_len=LONGEST, **weights)

    def run(requests: Sequence[Request]) -> list[list[int]]:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        params = [
            SamplingParams(temperature=0.0, max_tokens=cap, ignore_eos=True) for _, cap in requests
        ]
        results = llm.generate(prompts, params, use_tqdm=False)
        return [one.outputs[0].token_ids for one in results]

    return run


def _of_transformers(model: str, dtype: str = "float32") -> Any:
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    loaded.generation_config = transformers.GenerationConfig(
        do_sample=False, eos_token_id=None, pad_token_id=PADDING, bos_token_id=None
    )
    return loaded


def transformers_static(model: str, slots: int, *, dtype: str = "float32") -> Run:
    """``generate`` on batches in the order of arrival, padded left; each runs until its longest
    request ends.
    """
    import torch

    loaded = _of_transformers(model, dtype)

    def run(requests: Sequence[Request]) -> list[list[int]]:
        texts: list[list[int]] = []
        for first in range(0, len(requests), slots):
            group = requests[first : first + slots]
            width = max(len(prompt) for prompt, _ in group)
            ids = [[PADDING] * (width - len(prompt)) + prompt for prompt, _ in group]
            mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in group]
            longest = max(cap for _, cap in group)
            with torch.inference_mode():
                rows = loaded.generate(
                    torch.tensor(ids),
                    attention_mask=torch.tensor(mask),
                    max_new_tokens=longest,
                    min_new_tokens=longest,
                )
            texts += [
                row[width : width + cap].tolist() for row, (_, cap) in zip(rows, group, strict=True)
            ]
        return texts

    return run


def transformers_continuous(model: str, slots: int) -> Run:
    import transformers

    loaded = _of_transformers(model)
    config = transformers.ContinuousBatchingConfig(
        max_requests_per_batch=slots,
        num_blocks=4 * slots + 4,  # of 256 tokens: what it would choose takes all memory
        max_batch_tokens=512,
    )

    def run(requests: Sequence[Request]) -> list[list[int]]:
        texts: dict[str, list[int]] = {}
        with loaded.continuous_batching_context_manager(
            generation_config=loaded.generation_config, continuous_batching_config=config
        ) as manager:
            ids = [
                manager.add_request(prompt, max_new_tokens=cap, eos_token_id=-1)
                for prompt, cap in requests
            ]
            for result in manager:
                if result.is_finished():
                    texts[result.request_id] = list(result.generated_tokens)
                    if len(texts) == len(requests):
                        break
        return [texts[request_id] for request_id in ids]

    return run


def openvino_pipeline(model: str, slots: int, *, int8: bool = False) -> Any:
    """OpenVINO GenAI's continuous batching, on the model as optimum exports it."""
    import openvino_genai

    exported = Path(model) / ("openvino-int8" if int8 else "openvino")
    if not exported.exists():
        program = str(Path(sys.executable).with_name("optimum-cli"))
        how = ["--task", "text-generation-with-past", "--weight-format", "int8" if int8 else "fp32"]
        command = [program, "export", "openvino", "--model", model, *how, str(exported)]
        subprocess.run(command, check=True, stdout=sys.stderr)
    settings = openvino_genai.SchedulerConfig()
    settings.cache_size = CACHE
    settings.max_num_seqs = slots
    settings.enable_prefix_caching = True
    float32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    return openvino_genai.ContinuousBatchingPipeline(
        str(exported), settings, "CPU", {} if int8 else float32
    )


def openvino_greedy(cap: int) -> Any:
    """The settings of a request of ``cap`` new tokens."""
    import openvino_genai

    one = openvino_genai.GenerationConfig()
    one.max_new_tokens, one.ignore_eos, one.do_sample = cap, True, False
    # The model has none, and the package does not take that.
    one.eos_token_id, one.stop_token_ids = PADDING, {PADDING}
    return one


def openvino(model: str, slots: int, *, int8: bool = False) -> Run:
    import numpy as np
    from openvino import Tensor

    pipeline = openvino_pipeline(model, slots, int8=int8)

    def run(requests: Sequence[Request]) -> list[list[int]]:
        prompts = [Tensor(np.array([prompt], dtype=np.int64)) for prompt, _ in requests]
        results = pipeline.generate(prompts, [openvino_greedy(cap) for _, cap in requests])
        return [list(one.m_generation_ids[0]) for one in results]

    return run


def openvino_settings() -> str:
    """What its plugin for this CPU does where nothing else is asked for."""
    from openvino import Core

    def value(name: str) -> object:
        found = Core().get_property("CPU", name)
        return found.get_type_name() if hasattr(found, "get_type_name") else found

    names = ("INFERENCE_PRECISION_HINT", "DYNAMIC_QUANTIZATION_GROUP_SIZE", "KV_CACHE_PRECISION")
    return ", ".join(f"{name} {value(name)}" for name in names)


def vllm(model: str, slots: int, *, dtype: str = "float32") -> Run:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(CACHE))
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype=dtype,
        max_model_len=LONGEST,
        max_num_seqs=slots,
        enable_prefix_caching=True,
    )

    def run(requests: Sequence[Request]) -> list[list[int]]:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        params = [
            SamplingParams(temperature=0.0, max_tokens=cap, ignore_eos=True, detokenize=False)
            for _, cap in requests
        ]
        results = llm.generate(prompts, params, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in results]

    return run


def llama_cpp(model: str, slots: int, *, dtype: str = "float32") -> Run:
    """llama.cpp, see ``llama_engine.py``."""
    sys.path.insert(0, str(ROOT))
    from benchmarks import gguf_models, llama_engine

    file = gguf_models.save(Path(model), dtype)
    engine = llama_engine.LlamaCpp(file, slots, float32=dtype == "float32")

    def run(requests: Sequence[Request]) -> list[list[int]]:
        return [list(tokens) for tokens in engine.generate(requests)]

    return run


def llama_cpp_settings() -> str:
    from benchmarks import llama_engine

    return llama_engine.settings()


KINDS: dict[str, Callable[[str, int], Run]] = {
    "fairlead": fairlead,
    "transformers-static": transformers_static,
    "transformers-continuous": transformers_continuous,
    "openvino": openvino,
    "vllm": vllm,
    "llama.cpp": llama_cpp,
    "fairlead-bfloat16": partial(fairlead, dtype="bfloat16"),
    "fairlead-int8": partial(fairlead, int8=True),
    "openvino-int8": partial(openvino, int8=True),
    "llama.cpp-int8": partial(llama_cpp, dtype="int8"),
    "transformers-static-bfloat16": partial(transformers_static, dtype="bfloat16"),
    "vllm-bfloat16": partial(vllm, dtype="bfloat16"),
    "llama.cpp-bfloat16": partial(llama_cpp, dtype="bfloat16"),
}
SETTINGS: dict[str, Callable[[], str]] = {
    "openvino-int8": openvino_settings,
    "llama.cpp": llama_cpp_settings,
    "llama.cpp-int8": llama_cpp_settings,
    "llama.cpp-bfloat16": llama_cpp_settings,
}


def _answers(run: Run) -> Iterator[str]:
    for line in sys.stdin:
        requests = [(prompt, cap) for prompt, cap in json.loads(line)]
        began = time.perf_counter()
        tokens = run(requests)
        seconds = time.perf_counter() - began
        yield json.dumps({"seconds": seconds, "tokens": sum(map(len, tokens))})


def main() -> None:
    kind, model, slots = sys.argv[1:]
    # Engines write to standard output what belongs into a log.
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)
        run = KINDS[kind](model, int(slots))
        print(json.dumps({"settings": SETTINGS.get(kind, str)()}), file=out)
        for answer in _answers(run):
            print(answer, file=out)


if __name__ == "__main__":
    main()
