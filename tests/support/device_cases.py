"""What the engine must give on any device, against transformers on the same device: greedy text in
float32, log-probabilities in 16 bits, and both for published quantized checkpoints.

The tests of a GPU run them there, and tests/functional/engine/test_device_cases.py on a CPU, so
that nothing but the device is new when a GPU is at hand.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from fairlead_runtime import LLM, SamplingParams
from fairlead_runtime.llm import RequestOutput
from support import tiny
from support.published import compressed_tensors, publish

PROMPTS = [
    *([i, i + 1, i + 2] for i in range(10, 18)),
    [3, 17, 29, 41, 5],
    [7] * 40,
    [11, 13],
    list(range(1, 120)),
]
SETTINGS: dict[str, Any] = {
    "num_blocks": 12,
    "max_requests": 16,
    "max_batch_tokens": 256,
    "max_model_len": 192,
    "safety_margin": 0.0,
}
# The reference's best two logits this near are a tie: another order of sums may pick the other.
TIE = 1e-3
# Root mean square of the differences of log-probabilities, in units of the logits' spread: what
# rounding to 16 bits may cost. The self-test of bfloat16 allows 0.2.
CLOSE = {torch.bfloat16: 0.1, torch.float16: 0.03, torch.float32: 1e-3}
ROUTED = ("qwen3_moe", "mixtral", "gpt_oss")  # a router's near tie changes a text, too


class Case(NamedTuple):
    """A model on a device. ``folder``: its directory; ``output``: tokens of each text."""

    folder: Path
    device: torch.device
    output: int = 48

    def reference(self, dtype: torch.dtype = torch.float32) -> Any:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=dtype, attn_implementation="eager"
        )
        return loaded.to(self.device).eval()

    def results(self, **settings: Any) -> list[RequestOutput]:
        """Greedy, all prompts at once, with log-probabilities if ``logprobs`` says how many."""
        params = SamplingParams(
            temperature=0,
            max_tokens=self.output,
            ignore_eos=True,
            logprobs=settings.pop("logprobs", None),
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        with LLM(str(self.folder), device=self.device.type, **SETTINGS, **settings) as llm:
            return llm.generate(prompts, params, use_tqdm=False)


def texts(results: list[RequestOutput]) -> list[list[int]]:
    return [list(result.outputs[0].token_ids) for result in results]


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """transformers' generate, the prompt alone."""
    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
        )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """float32 [T, vocabulary] on the CPU, of the model's own pass over all tokens."""
    with torch.inference_mode():
        out: torch.Tensor = model(torch.tensor([tokens], device=model.device)).logits[0]
    return out.float().cpu()


def check_deterministic(folder: Path, device: torch.device, dtype: str, **settings: Any) -> int:
    """A request's text is the same alone and in a crowd, drawn too, with preemption and chunks.
    Returns how many sequences of the crowd were preempted.
    """
    params = [
        SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=24, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    few = SETTINGS | {"max_batch_tokens": 64, "dtype": dtype} | settings
    with LLM(str(folder), device=device.type, deterministic=True, **few) as llm:
        pairs = zip(prompts, params, strict=True)
        alone = [texts(llm.generate([a], b, use_tqdm=False)) for a, b in pairs]
        before = llm.built_engine.engine.snapshot().scheduler.preemptions
        crowd = texts(llm.generate(prompts, params, use_tqdm=False))
        preempted = llm.built_engine.engine.snapshot().scheduler.preemptions - before
    assert [one for (one,) in alone] == crowd
    return preempted


def check_equal(case: Case, found: list[list[int]]) -> None:
    """Greedy texts in float32 equal transformers', up to a tie."""
    model = case.reference()
    others = sum(
        not is_text_of(model, prompt, text) for prompt, text in zip(PROMPTS, found, strict=True)
    )
    assert others <= 1, f"{others} of {len(found)} texts are others"


def is_text_of(model: Any, prompt: list[int], text: list[int]) -> bool:
    """Whether transformers' greedy text in float32 is this one; an assertion fails where it is
    another and no tie has led there.
    """
    want = greedy(model, prompt, len(text))
    at = next((i for i, pair in enumerate(zip(text, want, strict=True)) if len({*pair}) > 1), None)
    if at is None:
        return True
    best = logits(model, [*prompt, *want[:at]])[-1].topk(2).values
    gap = float(best[0] - best[1])
    tie = model.config.model_type in ROUTED or gap < TIE
    assert tie, f"{prompt[:5]}: token {at} is another, by {gap:.2g}"
    return False


def check_close(case: Case, dtype: torch.dtype, **settings: Any) -> float:
    """Log-probabilities of the texts that the engine makes in ``dtype`` are those of transformers
    in float32 with the same weights. Returns how far they are, in units of the logits' spread.
    """
    name = str(dtype).removeprefix("torch.")
    results = case.results(dtype=name, logprobs=5, **settings)
    model, apart, spread = case.reference(), [], []
    for prompt, result in zip(PROMPTS, results, strict=True):
        output = result.outputs[0]
        assert output.logprobs is not None
        every = logits(model, [*prompt, *output.token_ids])[len(prompt) - 1 : -1]
        wanted = every.log_softmax(-1)
        spread.append(every.std(-1))
        for at, likeliest in enumerate(output.logprobs):
            apart += [one.logprob - float(wanted[at, token]) for token, one in likeliest.items()]
    far = float(torch.tensor(apart).square().mean().sqrt() / torch.cat(spread).mean())
    print(f"{case.folder.name} in {name}: {far:.2g} of {CLOSE[dtype]}")
    assert far < CLOSE[dtype]
    return far


def check_published(family: str, device: torch.device, folder: Path, kind: str) -> None:
    """A compressed-tensors checkpoint gives what the matrices give that it stands for: in int8 the
    text in float32, in fp8, which needs 16 bits and rounds activations, close logits.
    """
    saved = tiny.save(tiny.build(family), folder / "model")
    form: dict[str, Any] = {"kind": kind}
    if kind == "float":
        form["activations"] = True
    quantized, plain = publish(saved, folder, *compressed_tensors(**form))
    if kind == "int":
        found = texts(Case(quantized, device).results(dtype="float32"))
        check_equal(Case(plain, device), found)
        return
    check_rounded(Case(quantized, device), Case(plain, device))


def check_rounded(quantized: Case, plain: Case) -> None:
    """The text of rounded activations follows the reference's: of its tokens most are among the
    five likeliest there.
    """
    results = quantized.results(dtype="bfloat16")
    model, among = plain.reference(), []
    for prompt, result in zip(PROMPTS, results, strict=True):
        tokens = list(result.outputs[0].token_ids)
        every = logits(model, [*prompt, *tokens])[len(prompt) - 1 : -1]
        likeliest = every.topk(5).indices
        among += [token in row for token, row in zip(tokens, likeliest.tolist(), strict=True)]
    share = sum(among) / len(among)
    print(f"{share:.3f} of the tokens are among the reference's five likeliest")
    assert share > 0.9
