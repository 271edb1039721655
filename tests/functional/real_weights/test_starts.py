"""Published models start in the types in which people serve them, with every layer fused and the
whole model in one call, whatever random tokens the start compares on.
"""

from typing import NamedTuple

import pytest

from fairlead_runtime.device.proof import selftest
from fairlead_runtime.models import loading
from fairlead_runtime.settings.engine_config import EngineConfig
from support.full import LONG_FORM
from support.real_weights import GEMMA, SMOLLM2, Published
from support.token_draws import DRAWS, draw

# The first run on a machine fetches 330 MB and converts them.
pytestmark = pytest.mark.timeout(1800)


class Start(NamedTuple):
    model: Published
    dtype: str
    quantization: str = "none"
    deterministic: bool = False
    fp8_cache: bool = False

    def __str__(self) -> str:
        words = (self.model.name, self.dtype, self.quantization.removesuffix("none"))
        also = "deterministic" * self.deterministic, "fp8 cache" * self.fp8_cache
        return " ".join(filter(None, (*words, *also)))


# On a CPU plain torch has the fp8 cache, and transformers' code the layers.
CACHED = "fused 0/30 layers"
# Each with what the log says of its layers.
STARTS = {
    Start(SMOLLM2, "float32", "int8"): "fused 30/30 layers, int8 weights, int8 head",
    Start(SMOLLM2, "bfloat16", deterministic=True): (
        "fused 30/30 layers, bfloat16 weights, bfloat16 head"
    ),
    Start(SMOLLM2, "float32", fp8_cache=True): CACHED,
    Start(GEMMA, "bfloat16"): "fused 18/18 layers, bfloat16 weights, bfloat16 head",
    Start(GEMMA, "bfloat16", "int8"): "fused 18/18 layers, int8 weights, bfloat16 head",
}
# The long form's alone.
MORE_STARTS = {
    Start(SMOLLM2, "float32"): "fused 30/30 layers, float32 head",
    Start(SMOLLM2, "bfloat16"): "fused 30/30 layers, bfloat16 weights, bfloat16 head",
    Start(SMOLLM2, "float32", deterministic=True): "fused 30/30 layers, float32 head",
    Start(SMOLLM2, "bfloat16", "int8"): "fused 30/30 layers, int8 weights, bfloat16 head",
    Start(SMOLLM2, "bfloat16", fp8_cache=True): CACHED,
    Start(GEMMA, "float32", fp8_cache=True): CACHED.replace("30", "18"),
    Start(GEMMA, "bfloat16", fp8_cache=True): CACHED.replace("30", "18"),
    Start(GEMMA, "float32"): "fused 18/18 layers, float32 head",
    Start(GEMMA, "float32", deterministic=True): "fused 18/18 layers, float32 head",
    Start(GEMMA, "float32", "int8"): "fused 18/18 layers, int8 weights, int8 head",
    Start(GEMMA, "bfloat16", deterministic=True): (
        "fused 18/18 layers, bfloat16 weights, bfloat16 head"
    ),
}
if LONG_FORM:
    STARTS |= MORE_STARTS


@pytest.mark.parametrize("number", DRAWS)
@pytest.mark.parametrize(("start", "fused"), STARTS.items(), ids=map(str, STARTS))
def test_a_published_model_starts_whole(
    start: Start, fused: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(monkeypatch, number)
    config = EngineConfig(dtype=start.dtype, max_model_len=2048)  # type: ignore[arg-type]
    loaded = loading.load(start.model.folder(), config=config)
    served, result = selftest.prepare_and_test(
        loaded,
        quantization=start.quantization,
        deterministic=start.deterministic,
        fp8_cache=start.fp8_cache,
    )
    assert str(served.fusion) == fused
    # Products of ours sum in float32. Those of plain torch round as transformers' own do, those of
    # int8 weights what they multiply where a processor has such products.
    rounds = start.fp8_cache or start.quantization == "int8"
    assert 0 < result.delta <= result.tolerance / (1 if rounds else 2), str(result)
    assert (result.rounding is not None) == (start.quantization == "int8")
    if start.fp8_cache:
        assert result.cached is not None
        assert 0 < result.cached[0] <= result.cached[1] / 1.5, str(result)
