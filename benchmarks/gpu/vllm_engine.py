"""vLLM's own decode, in the environment that it asks for, which need not have ours.

    PYTHON vllm_engine.py FOLDER DTYPE LONGEST ROWS CONTEXT STEPS [ROWS CONTEXT STEPS ...]

Random weights of the shape in FOLDER. The last line of standard output is JSON: vLLM's version and
milliseconds a step for each case, the difference of a long and a short run over their steps.
"""

import json
import random
import sys
import time
from typing import Any

LONG = 3  # times as many steps as the short run


def main() -> None:
    from vllm import LLM, SamplingParams, __version__

    folder, dtype, longest, *numbers = sys.argv[1:]
    cases = [(int(a), int(b), int(c)) for a, b, c in zip(*[iter(numbers)] * 3, strict=True)]
    llm = LLM(
        folder,
        dtype=dtype,
        load_format="dummy",
        max_model_len=int(longest),
        max_num_seqs=max(rows for rows, _, _ in cases),
        enable_prefix_caching=False,
    )
    draw = random.Random(0)

    def seconds(rows: int, context: int, new: int) -> float:
        prompts: list[Any] = [
            {"prompt_token_ids": [draw.randrange(3, 500) for _ in range(context)]}
            for _ in range(rows)
        ]
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        results = llm.generate(prompts, params, use_tqdm=False)
        taken = time.perf_counter() - began
        made = {len(result.outputs[0].token_ids) for result in results}
        if made != {new}:
            raise SystemExit(f"vLLM made {sorted(made)} tokens where {new} were asked for")
        return taken

    found = []
    for rows, context, steps in cases:
        seconds(rows, context, steps)  # warms up
        apart = seconds(rows, context, LONG * steps) - seconds(rows, context, steps)
        found.append(apart / ((LONG - 1) * steps) * 1e3)
    print(json.dumps({"version": __version__, "milliseconds": found}), flush=True)


if __name__ == "__main__":
    main()
