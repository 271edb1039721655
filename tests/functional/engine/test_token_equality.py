"""Our engine's greedy text equals transformers' ``generate``, token for token.

Families by block size by chunk by forced preemption by prefix cache by n by kernels (plain torch,
or C++ with fused layers where they fit): every combination in the long form (FAIRLEAD_FULL=1: 3,240
runs, over 16,200 requests), in the short one every pair of values.

The first difference of a request is excused only as a tie: where the reference's top two logits (or
a router's k-th and next) lie within 1e-4. With an fp8 cache it may also be that a key or value,
which another order of sums changes by 1e-7, is rounded to the other of two numbers. Ties are
counted, shown and limited.
"""

import functools
import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest

from fairlead_runtime.request.sequence import FinishReason, Request
from support import tiny, tiny_parts
from support.engine_rig import (
    FP8_CACHE,
    GRAPHS,
    MAX_LEN,
    ON_TRITON,
    UNFUSED,
    Rig,
    Setting,
    greedy,
    prompts,
    rig,
)
from support.full import LONG_FORM
from support.rank_pair import SPLIT

TIE = 1e-4
# How near a key lies to the middle of two numbers of fp8 that it may become either, and how far one
# such key moves logits.
MIDDLE, MOVED = 1e-6, 0.02
TIES_ALLOWED = 1e-3
FAMILIES = (*tiny.FAMILIES, *tiny.VARIANTS)
# Layers that differ in their heads.
OWN_SIZES = ("mimo_v2_flash", "gemma4_text", "gemma4_unified_text")
# The place of a family is the seed of its prompts: those that came later are behind the others.
LATER = ("gemma3n_text", "gemma3n", *OWN_SIZES, "gemma4", "gemma4_unified")
OTHERS = {*tiny.SIZED, *tiny.UNLISTED} - {*LATER}
SEEDED = (
    *(family for family in FAMILIES if family not in LATER),
    *sorted(OTHERS, key=lambda name: (name != "gpt_bigcode", name)),
    *(family for family in tiny_parts.FAMILIES if family not in LATER),
    *LATER,
)
# Of those the ones whose layers do not fuse: experts, another activation, no norm before attention.
SPLIT_UNFUSED = ("qwen3_moe", "mixtral", "apertus", "exaone4", "olmo")
# Those whose decoder layers can be fused: test_fused_layers.py.
FUSED = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox"),
    *tiny.VARIANTS,
)
# The same of texts of models of several parts: test_models_of_parts.py.
UNFUSED_TEXTS = ("qwen3_vl_moe", "gemma3n", "gemma4", "gemma4_unified")
FUSED_TEXTS = tuple(family for family in tiny_parts.FAMILIES if family not in UNFUSED_TEXTS)
# Their code waits for the device in each pass: its steps run as they are.
UNCAPTURED = ("gemma3n_text",)
PER_FAMILY = 8  # cases of the short form
UNBOUNDED = 4096  # more tokens than all prompts of a run have together

# Steps of arrival. Staggered, so that later requests hit the blocks of earlier ones; closer
# together where they must compete for memory.
ARRIVAL_STEPS = (0, 0, 4, 9, 14)
ARRIVAL_STEPS_FORCED = (0, 0, 0, 1, 2)
SEVERAL = 3  # preemptions in one run
# Lengths of the prompts, tokens they share, tokens to generate.
SHORT = ((17, 41, 26, 53, 34), 24, 24)
# What stands for a GPU, rounds or splits takes longer for each: in the short form half as many.
SHORT_FEW = (*SHORT[:2], 12)
# Around the end of a block of 256, and long enough that chunks of 8 take two of them past it; what
# larger chunks put past it at once needs fewer, and the short form has no more.
LONG = ((250, 285, 247, 300, 254), 260, 64)
LONG_FEW = (*LONG[:2], 36)


@dataclass(frozen=True)
class Case:
    family: str
    block_size: int
    chunk: int
    preemption: str  # none, reset or offload
    sharing: bool
    n: int
    kernels: str  # of the rig

    @property
    def seed(self) -> int:
        """The same prompts for every setting of a family, so that a reference serves many runs."""
        return SEEDED.index(self.family)


@dataclass
class Tally:
    """Counts over the runs of one family."""

    runs: int = 0
    requests: int = 0
    tokens: int = 0
    texts: int = 0
    constant: int = 0  # texts that repeat one or two tokens: they would prove little
    stopped_early: int = 0
    preemptions: int = 0
    offloads: int = 0
    hits: int = 0
    ties: list[str] = field(default_factory=list)
    # The texts whose next token is a tie: each setting may meet the same one.
    tied: set[tuple[int, ...]] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    # cases that need a preemption and had none, or the wrong kind
    without_preemption: list[Case] = field(default_factory=list)
    # cases with the prefix cache and enough memory, but no hit
    without_hits: list[Case] = field(default_factory=list)


def every_case() -> list[Case]:
    return [
        Case(*values)
        for values in itertools.product(
            FAMILIES,
            (4, 16, 256),
            (8, 64, UNBOUNDED),
            ("none", "reset", "offload"),
            (False, True),
            (1, 3),
            ("torch", "cpu"),
        )
    ]


def values(case: Case) -> tuple[object, ...]:
    return tuple(vars(case).values())


@functools.cache
def pairs(case: Case) -> frozenset[tuple[int, object, int, object]]:
    v = values(case)
    return frozenset((i, v[i], j, v[j]) for i, j in itertools.combinations(range(len(v)), 2))


def cost(case: Case) -> int:
    """Roughly how much longer a case takes than the shortest."""
    return (
        (6 if case.block_size == 256 else 1)
        * (3 if case.chunk == 8 else 1)
        * (2 if case.kernels == "torch" else 1)
        * case.n
    )


@functools.cache
def selected_cases() -> tuple[Case, ...]:
    """All cases, or those that hold every pair of values, cheap ones rather than dear ones, and
    then at least PER_FAMILY of every family, with short prompts. Deterministic.
    """
    everything = every_case()
    if LONG_FORM:
        return tuple(everything)
    order = everything[:]
    random.Random(0).shuffle(order)
    left = set().union(*map(pairs, order))
    taken: list[Case] = []
    while left:
        best = max(order, key=lambda case: len(pairs(case) & left) ** 2 / cost(case))
        left -= pairs(best)
        taken.append(best)
        order.remove(best)
    for family in FAMILIES:
        lacking = PER_FAMILY - sum(case.family == family for case in taken)
        short = [c for c in order if c.family == family and c.block_size != 256]
        taken += short[: max(0, lacking)]
    return tuple(taken)


def arrivals_of(case: Case, copies: int = 1) -> list[tuple[int, Request]]:
    """The family's five prompts, each ``copies`` times."""
    long = LONG if LONG_FORM or case.chunk == 8 else LONG_FEW
    short = SHORT if LONG_FORM or case.kernels in ("torch", "cpu") else SHORT_FEW
    lengths, shared, max_tokens = long if case.block_size == 256 else short
    all_prompts = prompts(case.seed, lengths, shared)
    steps = ARRIVAL_STEPS if case.preemption == "none" else ARRIVAL_STEPS_FORCED
    return [
        (step, greedy(f"{i}.{copy}", prompt, max_tokens, case.n))
        for i, (step, prompt) in enumerate(zip(steps, all_prompts, strict=True))
        for copy in range(copies)
    ]


def setting_and_arrivals(case: Case, engine: Rig) -> tuple[Setting, list[tuple[int, Request]]]:
    """A setting with ample memory, or with the first amount that preempts several times in a dry
    run without the model.

    If five requests do not fill the memory because windows release it too fast, more are sent.
    """
    size = case.block_size
    ample = Setting(
        size, case.chunk, -(-MAX_LEN // size) * 16, case.preemption == "offload", case.sharing
    )
    if case.preemption == "none":
        return ample, arrivals_of(case)
    best, most = (ample, arrivals_of(case)), 0
    for copies in (1, 2, 4, 8):
        arrivals = arrivals_of(case, copies)
        needs = [-(-(len(r.prompt) + r.max_tokens) // size) for _, r in arrivals]
        low, high = max(needs), sum(needs) * case.n
        for num_blocks in sorted({low + (high - low) * i // 24 for i in range(18)}):
            setting = replace(ample, num_blocks=num_blocks)
            stats = engine.dry_run(setting, arrivals)
            assert stats is not None
            count = stats.offloads if case.preemption == "offload" else stats.preemptions
            if count > most:
                best, most = (setting, arrivals), count
            if most >= SEVERAL:
                return best
        if most:
            return best
    return best


def compare(
    case: Case, engine: Rig, request: Request, choice: int, got: list[int], tally: Tally
) -> None:
    want = engine.reference(request.prompt, request.max_tokens)
    tally.tokens += len(got)
    if got == want:
        return
    at = next(
        (i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b),
        min(len(got), len(want)),
    )
    before = (*request.prompt, *want[:at])
    logits, router, key = engine.margin(list(before))
    tie = min(logits, router) <= TIE or (key <= MIDDLE and logits <= MOVED)
    text = (
        f"{case} request {request.id} choice {choice}: token {at} is {got[at : at + 1]}, "
        f"transformers says {want[at : at + 1]}; its top two logits lie {logits:.2g} apart, "
        f"its closest router {router:.2g}, a key {key:.2g} from the middle of two numbers"
    )
    (tally.ties if tie else tally.wrong).append(text)
    if tie:
        tally.tied.add(before)


@functools.cache
def tally_of(family: str) -> Tally:
    """Run the family's selected cases, once."""
    return tally_over(family, [case for case in selected_cases() if case.family == family])


def tally_over(family: str, cases: Iterable[Case]) -> Tally:
    tally = Tally()
    for case in cases:
        engine = rig(family, case.kernels)
        kernels = case.kernels.removeprefix(FP8_CACHE)
        if kernels.startswith("ranks"):
            fused = kernels != "ranks" and family not in SPLIT_UNFUSED
        else:
            fused = kernels in UNFUSED and family in (*FUSED, *FUSED_TEXTS)
        assert engine.fusion.fused == (engine.fusion.layers if fused else 0)
        setting, arrivals = setting_and_arrivals(case, engine)
        outcome = engine.run(setting, arrivals)
        stats = outcome.stats
        assert stats is not None
        tally.runs += 1
        tally.requests += len(arrivals)
        for _, request in arrivals:
            for choice in range(case.n):
                got = outcome.texts[request.id, choice]
                tally.texts += 1
                tally.constant += len(got) > 8 and len(set(got)) <= 2
                tally.stopped_early += outcome.finishes[request.id, choice] is FinishReason.STOP
                compare(case, engine, request, choice, got, tally)
        tally.preemptions += stats.preemptions
        tally.offloads += stats.offloads
        tally.hits += stats.prefix_hits
        forced = {"none": True, "reset": stats.preemptions > 0, "offload": stats.offloads > 0}
        if not forced[case.preemption] or (case.preemption == "reset" and stats.offloads):
            tally.without_preemption.append(case)
        if case.sharing and case.preemption == "none" and not stats.prefix_hits:
            tally.without_hits.append(case)
    print(
        f"{family}: {tally.runs} runs, {tally.requests} requests, {tally.tokens} tokens, "
        f"{tally.preemptions} preemptions ({tally.offloads} offloaded), {tally.hits} prefix hits, "
        f"{len(tally.ties)} ties"
    )
    return tally


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_equals_transformers(family: str) -> None:
    assert tally_of(family).wrong == []


def three_settings(family: str, kernels: str) -> list[Case]:
    return [
        Case(family, 16, 64, "none", sharing=True, n=3, kernels=kernels),
        Case(family, 4, 8, "reset", sharing=True, n=1, kernels=kernels),
        Case(family, 4, UNBOUNDED, "offload", sharing=False, n=1, kernels=kernels),
    ]


def check_three_settings(family: str, kernels: str) -> None:
    """No wrong text with prefix hits and choices, with preemption, and with offload."""
    check(family, kernels, three_settings(family, kernels))


def check(family: str, kernels: str, cases: list[Case], constant: int = 0) -> None:
    """``constant``: texts that may have no more than two tokens, which show little."""
    tally = tally_over(family, cases)
    assert tally.wrong == []
    if kernels.removeprefix(ON_TRITON) in GRAPHS and family in UNCAPTURED:
        with pytest.raises(AssertionError, match="waits for the device"):
            rig(family, kernels).captured()
    elif kernels.removeprefix(ON_TRITON) in GRAPHS:
        assert rig(family, kernels).captured() > 0
    assert (tally.without_preemption, tally.without_hits) == ([], [])
    assert tally.constant <= constant
    assert len(tally.tied) <= 1, tally.ties  # each setting may meet the same one


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "gpt_neox"])
def test_with_int8_weights_greedy_text_equals_transformers_with_the_rounded_ones(
    family: str,
) -> None:
    check_three_settings(family, "int8")
    assert str(rig(family, "int8").fusion).endswith("int8 weights, int8 head")


@pytest.mark.parametrize(
    ("family", "quantized"),
    [("llama", "fp8"), pytest.param("gpt_neox", "fp8", marks=pytest.mark.full), ("gpt2", "int8")],
)
def test_with_quantized_weights_on_the_layers_of_gpus_greedy_text_equals_transformers(
    family: str, quantized: str
) -> None:
    """Activations are rounded to fp8 in bfloat16 alone."""
    check_three_settings(family, f"layers {quantized}")
    assert str(rig(family, f"layers {quantized}").fusion).endswith(f"{quantized} weights")


# One key-value head per query head, one for two, one for all; a window; a cap; sinks.
HEAD_FORMS = ("gpt2", "llama", "gpt_bigcode", "gemma2", "gpt_oss")


def head_forms(*families: str) -> tuple[str, ...]:
    """What stands for a GPU runs every form in the long form; in the short one these families, of
    which each form has one on some stand-in.
    """
    return HEAD_FORMS if LONG_FORM else families


@pytest.mark.parametrize("family", head_forms("gpt_bigcode", "gpt_oss"))
def test_on_flashinfers_wrappers_greedy_text_equals_transformers(family: str) -> None:
    """The wrappers are the stand-in of tests/support."""
    check_three_settings(family, "flashinfer")


@pytest.mark.parametrize("family", head_forms("llama"))
def test_with_decodes_on_the_device_greedy_text_equals_transformers(family: str) -> None:
    """Ids, positions, slots and blocks of decodes come from the sequence table."""
    check_three_settings(family, "resident")


@pytest.mark.parametrize("family", [*head_forms("gpt2", "gemma2"), "gemma3n_text"])
def test_with_captured_decodes_greedy_text_equals_transformers(family: str) -> None:
    """Steps are padded, recorded and replayed on the stand-in of graphs."""
    check_three_settings(family, "graphs")


@pytest.mark.parametrize("family", [*FUSED, "qwen3_moe"] if LONG_FORM else ["gemma2", "gpt_neox"])
def test_with_captured_decodes_of_fused_layers_greedy_text_equals_transformers(family: str) -> None:
    """What a GPU runs by default."""
    check_three_settings(family, "graphs layers")


@pytest.mark.parametrize("kernels", ["flashinfer", "graphs"] if LONG_FORM else ["graphs"])
@pytest.mark.parametrize(
    "family", sorted({*OTHERS, *FAMILIES}) if LONG_FORM else (*HEAD_FORMS, "mixtral", "phimoe")
)
def test_on_flashinfers_wrappers_every_family_gives_transformers_text(
    family: str, kernels: str
) -> None:
    """With prefix hits, preemption and blocks of 4; of some families also with blocks of 256."""
    cases = [Case(family, 4, 8, "reset", sharing=True, n=1, kernels=kernels)]
    if LONG_FORM:
        cases = three_settings(family, kernels)
    if LONG_FORM or family in ("llama", "gemma2"):
        cases.append(Case(family, 256, UNBOUNDED, "none", sharing=True, n=1, kernels=kernels))
    # One prompt goes on with the same token in every setting.
    constant = sum(case.n for case in cases) if family == "stablelm" else 0
    check(family, kernels, cases, constant)


@pytest.mark.parametrize("family", head_forms("gpt_oss"))
def test_on_tritons_attention_with_captured_decodes_greedy_text_equals_transformers(
    family: str,
) -> None:
    """Its kernels are the stand-in of tests/support, and read what they find at a replay."""
    check_three_settings(family, "triton graphs")


@pytest.mark.parametrize(
    "kernels", ["triton attention", pytest.param("triton resident", marks=pytest.mark.full)]
)
def test_on_tritons_attention_greedy_text_equals_transformers(kernels: str) -> None:
    check_three_settings("gemma2", kernels)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_few_tokens_on_tritons_attention_in_its_interpreter_are_those_of_transformers() -> None:
    """A window, a cap and sinks; the interpreter takes a second for each step."""
    engine, few = rig("gpt_oss", "triton interpreted"), 2
    asked = [greedy(str(n), prompt, few) for n, prompt in enumerate(prompts(0, (17, 20), 16))]
    outcome = engine.run(Setting(block_size=16), enumerate(asked))
    for one in asked:
        assert outcome.texts[one.id, 0] == engine.reference(one.prompt, few)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_on_tritons_attention_in_its_interpreter_greedy_text_equals_transformers(
    family: str,
) -> None:
    case = Case(family, 16, UNBOUNDED, "none", sharing=True, n=1, kernels="triton interpreted")
    tally = tally_over(family, [case])
    assert (tally.wrong, tally.ties, tally.without_hits) == ([], [], [])


# The forms of a layer: norms of attention's result, of heads, with a mean; biases; no gate; MLP and
# attention beside each other.
@pytest.mark.parametrize("family", ["gemma2", "gpt_neox"])
def test_on_the_layers_of_gpus_greedy_text_equals_transformers(family: str) -> None:
    check_three_settings(family, "layers")


@pytest.mark.full
@pytest.mark.parametrize("family", FUSED)
def test_on_the_layers_of_gpus_every_family_gives_transformers_text(family: str) -> None:
    check_three_settings(family, "layers")


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@pytest.mark.parametrize("family", FUSED if LONG_FORM else ["qwen3"])
def test_on_triton_kernels_greedy_text_equals_transformers(family: str) -> None:
    """In Triton's interpreter, beside the stand-in of flashinfer's wrappers."""
    case = Case(family, 16, UNBOUNDED, "none", sharing=True, n=1, kernels="triton")
    tally = tally_over(family, [case])
    assert (tally.wrong, tally.ties, tally.without_hits) == ([], [], [])


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
def test_on_triton_kernels_with_an_fp8_cache_greedy_text_equals_transformers() -> None:
    case = Case("llama", 16, UNBOUNDED, "none", sharing=True, n=1, kernels=FP8_CACHE + "triton")
    tally = tally_over("llama", [case])
    assert (tally.wrong, tally.without_hits) == ([], [])


# On each attention, and on each operation that writes the cache; a window, a cap, sinks.
@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        ("gemma2", "torch"),
        ("gpt_bigcode", "flashinfer"),
        ("gemma2", "graphs"),
        ("gpt_oss", "triton graphs"),
        ("llama", "layers"),
    ],
)
def test_with_an_fp8_cache_greedy_text_equals_transformers_with_rounded_keys_and_values(
    family: str, kernels: str
) -> None:
    check_three_settings(family, FP8_CACHE + kernels)


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        *itertools.product(FAMILIES, ("torch",)),
        *(("llama", kernels) for kernels in ("flashinfer", "graphs", "layers fp8", "ranks")),
        ("llama", "triton graphs"),
    ],
)
def test_with_an_fp8_cache_every_setting_gives_transformers_text(family: str, kernels: str) -> None:
    cases = [
        replace(case, kernels=FP8_CACHE + kernels)
        for case in every_case()
        if (case.family, case.kernels) == (family, "torch")
    ]
    tally = tally_over(family, cases)
    assert (tally.wrong, tally.without_hits) == ([], [])
    assert len(tally.tied) <= max(1, 3 * TIES_ALLOWED * tally.requests), tally.ties


@pytest.mark.full
@pytest.mark.parametrize("kernels", ["torch", "cpu"])
@pytest.mark.parametrize("family", tiny_parts.FAMILIES)
def test_of_models_of_several_parts_every_setting_gives_transformers_text(
    family: str, kernels: str
) -> None:
    """``test_models_of_parts.py`` compares the reference with the whole model."""
    cases = [
        replace(case, family=family)
        for case in every_case()
        if (case.family, case.kernels) == ("llama", kernels)
    ]
    tally = tally_over(family, cases)
    assert (tally.wrong, tally.without_hits) == ([], [])
    assert len(tally.ties) <= max(1, TIES_ALLOWED * tally.requests)


# C++ and plain torch, a cache of 8 bits, and offloading on a GPU's streams.
@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        *itertools.product(OWN_SIZES if LONG_FORM else OWN_SIZES[:2], ("cpu", "torch", "layers")),
        ("gemma4_text", FP8_CACHE + "torch"),
    ],
)
def test_of_layers_that_differ_in_their_heads_greedy_text_equals_transformers(
    family: str, kernels: str
) -> None:
    cases = three_settings(family, kernels)
    if kernels == "cpu":
        cases += [
            Case(family, 256, UNBOUNDED, "none", sharing=True, n=1, kernels=kernels),
            Case(family, 16, 8, "reset", sharing=False, n=3, kernels=kernels),
            Case(family, 4, 64, "offload", sharing=True, n=3, kernels=kernels),
        ]
    check(family, kernels, cases)


@pytest.mark.full
@pytest.mark.parametrize("kernels", ["cpu", "torch"])
@pytest.mark.parametrize("family", OWN_SIZES)
def test_of_layers_that_differ_in_their_heads_every_setting_gives_transformers_text(
    family: str, kernels: str
) -> None:
    cases = [
        replace(case, family=family)
        for case in every_case()
        if (case.family, case.kernels) == ("llama", kernels)
    ]
    tally = tally_over(family, cases)
    assert (tally.wrong, tally.without_hits) == ([], [])
    assert len(tally.ties) <= max(1, TIES_ALLOWED * tally.requests)


@pytest.mark.full
@pytest.mark.parametrize("family", [*SPLIT, "gemma3", "qwen2_5_vl", "qwen3_vl_moe"])
def test_on_two_ranks_greedy_text_equals_transformers(family: str) -> None:
    """Two processes, each with half of the model and of the cache, over gloo."""
    check_three_settings(family, "ranks")


@pytest.mark.full
@pytest.mark.parametrize("kernels", ["ranks cpu", "ranks layers"])
@pytest.mark.parametrize("family", SPLIT)
def test_on_two_ranks_with_fused_layers_greedy_text_equals_transformers(
    family: str, kernels: str
) -> None:
    check_three_settings(family, kernels)
    fused = rig(family, kernels).fusion
    assert fused.fused == (0 if family in SPLIT_UNFUSED else fused.layers)


@pytest.mark.full
@pytest.mark.parametrize("kernels", ["ranks cpu int8", "ranks layers int8"])
@pytest.mark.parametrize("family", [x for x in SPLIT if x not in SPLIT_UNFUSED])
def test_on_two_ranks_with_int8_weights_greedy_text_equals_transformers_with_the_rounded_ones(
    family: str, kernels: str
) -> None:
    check_three_settings(family, kernels)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@pytest.mark.parametrize("family", ["gpt_neox", "gemma2"] if LONG_FORM else ["qwen3"])
def test_on_two_ranks_with_triton_kernels_greedy_text_equals_transformers(family: str) -> None:
    case = Case(family, 16, UNBOUNDED, "none", sharing=True, n=1, kernels="ranks triton")
    tally = tally_over(family, [case])
    assert (tally.wrong, tally.ties, tally.without_hits) == ([], [], [])
    assert rig(family, "ranks triton").fusion.fused > 0


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_on_flashinfers_wrappers_every_setting_gives_transformers_text(family: str) -> None:
    cases = [
        replace(case, kernels="flashinfer")
        for case in every_case()
        if (case.family, case.kernels) == (family, "torch")
    ]
    tally = tally_over(family, cases)
    assert tally.wrong == []
    assert tally.without_hits == []
    assert len(tally.ties) <= max(1, TIES_ALLOWED * tally.requests)


@pytest.mark.parametrize("family", FAMILIES)
def test_preemption_happens_in_every_case_that_needs_it(family: str) -> None:
    tally = tally_of(family)
    assert tally.preemptions > tally.offloads > 0
    if None in rig(family).model.windows:
        assert tally.without_preemption == []
    else:
        # If every layer has a window, the memory of one long request is enough for a whole batch
        # of running ones: some settings cannot run out of memory.
        assert len(tally.without_preemption) < tally.runs / 3


@pytest.mark.parametrize("family", FAMILIES)
def test_the_prefix_cache_is_hit_wherever_it_is_on(family: str) -> None:
    assert tally_of(family).without_hits == []


def test_the_matrix_is_covered_and_ties_stay_rare() -> None:
    tallies = [tally_of(family) for family in FAMILIES]
    requests, ties = sum(t.requests for t in tallies), [tie for t in tallies for tie in t.ties]
    print(
        "\n".join(
            [f"{sum(t.runs for t in tallies)} runs, {requests} requests, {len(ties)} ties", *ties]
        )
    )
    assert requests >= (5000 if LONG_FORM else 500)
    assert set().union(*map(pairs, selected_cases())) == set().union(*map(pairs, every_case()))
    assert len(ties) <= TIES_ALLOWED * requests
    assert sum(t.constant for t in tallies) == 0
    # Some texts must end at an end-of-sequence id and some must not.
    assert 0 < sum(t.stopped_early for t in tallies) < sum(t.texts for t in tallies)
