"""Mutations of whole configurations of every served family, and what plan, pod and transformers do
with one.

Owns the tiny configuration that each family starts from, the values that a setting may become, and
the comparison. Equal seeds give equal mutations.
"""

import copy
import json
import random
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from fairlead_runtime.models import architecture, families, text_model
from fairlead_runtime.models.headers import Header, TensorEntry
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.sizing.config_json import STANDARD, ShapeError
from fairlead_runtime.sizing.families.judged import SIZED
from fairlead_runtime.sizing.families.wholes import WHOLES
from fairlead_runtime.sizing.families.with_states import WITH_STATES
from fairlead_runtime.sizing.family_table import FAMILIES
from fairlead_runtime.sizing.shape import ModelShape
from support import tiny, tiny_any, tiny_parts, tiny_states

ALONE = sorted({**FAMILIES, **WITH_STATES, **SIZED})
SERVED = [*ALONE, *sorted(WHOLES)]
# What no size follows from, or other tests mutate.
_LEFT = ("model_type", "architectures", "transformers_version", "quantization_config", "auto_map")
_STRAY = (
    *(key for key in STANDARD if key != "use_bidirectional_attention"),
    *("layer_types", "sliding_window", "use_sliding_window", "rope_theta", "rope_scaling"),
    *("attention_bias", "mlp_bias", "use_bias", "dtype", "partial_rotary_factor"),
)
_KINDS = ("full_attention", "sliding_attention", "linear_attention", "conv", "moe", "sparse", "x")
LARGEST = 4_000_000  # parameters of a model that is run
_REMOVED = object()
_PLAIN: tuple[Any, ...] = (None, 0, -1, 1, 2, 3, True, False, "x", "", 1.5, [], {}, [1], _REMOVED)


def settings_of(family: str) -> dict[str, Any]:
    """A tiny model's config.json, with what its class adds or without."""
    if family in WHOLES:
        return _whole(family)
    if family in WITH_STATES:
        own = tiny_states.settings_of(family)
    elif family in (*tiny.FAMILIES, *tiny.SIZED, *tiny.UNLISTED):
        own = tiny.settings_of(family)
    else:
        own = tiny_any.settings_of(family)
    return {"model_type": family, **own}


def _whole(family: str) -> dict[str, Any]:
    kind = WHOLES[family].text
    text: dict[str, Any]
    vision: Mapping[str, Any]
    if family in tiny_parts.FAMILIES:
        text, vision, _ = tiny_parts._FAMILIES[family]
        text = {**tiny_parts._SIZES, "model_type": kind, **text}
    elif family in tiny_states.WHOLES:
        kind, vision = tiny_states.WHOLES[family]
        text = {"model_type": kind, **tiny_states.settings_of(kind)}
    else:
        vision, text = {}, settings_of(kind) if kind in ALONE else {"model_type": kind}
        if kind not in ALONE:
            text |= tiny_parts._SIZES | next(
                own for name, (own, *_) in tiny_parts._FAMILIES.items() if WHOLES[name].text == kind
            )
    config = {"model_type": family, "text_config": text, "tie_word_embeddings": False}
    config |= {key: text[key] for key in WHOLES[family].head}
    config |= tiny_parts._SOUND if family == "gemma3n" else {}
    return config | ({"vision_config": dict(vision)} if vision else {})


@cache
def _completed(family: str) -> str:
    factory: Any = CONFIG_MAPPING[family]
    full = factory.from_dict(copy.deepcopy(settings_of(family)))
    completed: str = full.to_json_string(use_diff=False)
    return completed


def mutation(family: str, seed: int) -> tuple[dict[str, Any], str]:
    """A config.json of the family with one or two settings changed, and these in words."""
    rng = random.Random(f"{family}:{seed}")
    config = json.loads(_completed(family)) if rng.random() < 0.5 else settings_of(family)
    config = copy.deepcopy(config)
    words = [_change(rng, config, family) for _ in range(rng.choice((1, 1, 2)))]
    return config, "; ".join(words)


def _change(rng: random.Random, config: dict[str, Any], family: str) -> str:
    settings, place = config, ""
    if family in WHOLES and isinstance(config.get("text_config"), dict) and rng.random() < 0.9:
        settings, place = config["text_config"], "text_config."
    keys = sorted(({*settings, *_STRAY} if rng.random() < 0.3 else {*settings}) - {*_LEFT})
    keys = [key for key in keys if not key.endswith(("vision_config", "audio_config"))]
    key = rng.choice(keys)
    while isinstance(settings.get(key), dict) and settings[key] and rng.random() < 0.7:
        settings, place = settings[key], f"{place}{key}."
        key = rng.choice(sorted(settings))
    value = _value(rng, settings.get(key))
    if value is _REMOVED:
        settings.pop(key, None)
        return f"{place}{key} removed"
    settings[key] = value
    return f"{place}{key}={json.dumps(value)[:60]}"


def _value(rng: random.Random, value: Any) -> Any:
    """Another value, one of the same type as often as not."""
    near: list[Any] = []
    if isinstance(value, bool):
        near = [not value]
    elif isinstance(value, int):
        near = [2 * value, value + 1, value // 2, 3 * value, value - 1, value + 8]
    elif isinstance(value, float):
        near = [2 * value, -value, int(value)]
    elif isinstance(value, list) and value:
        place, rest = rng.randrange(len(value)), list(value)
        rest[place] = rng.choice((None, 0, *_KINDS)) if rng.random() < 0.7 else value[0]
        near = [value[:-1], [*value, value[-1]], value[::-1], rest, [value[0]] * len(value)]
    elif isinstance(value, str):
        near = ["gelu", "silu", "relu", "default", "float16", "bfloat16", *_KINDS]
    return rng.choice(near) if near and rng.random() < 0.6 else rng.choice(_PLAIN)


def disagreement(config: Mapping[str, Any], folder: Path, *, runs: bool) -> str:
    """What plan, pod and transformers do not agree on for this config.json, "" for nothing.
    ``folder`` takes the file; ``runs``: whether the model runs with any weights, too.
    """
    try:
        shape = ModelShape.from_config(copy.deepcopy(config))
    except ShapeError:
        try:
            architecture.check(copy.deepcopy(config))
        except ModelError:
            return ""
        return "the plan refuses it, the pod takes it"
    (folder / "config.json").write_text(json.dumps(config))
    try:
        resolved = text_model.config_to_load(folder, json.loads(json.dumps(config)))
        text = text_model.text_of(resolved)
        windows, sources = families.check(resolved), families.sources_of(text)
        model = build(resolved)
    except Exception as error:  # noqa: BLE001 - a class may raise any
        return f"the plan takes it, transformers does not: {type(error).__name__}: {error}"
    if problem := _differences(config, shape, windows, sources, model):
        return problem
    if runs and shape.parameters < LARGEST and (raised := run(model)):
        return f"the plan takes it, its class does not run: {raised}"
    return ""


def _differences(
    config: Mapping[str, Any],
    shape: ModelShape,
    windows: tuple[int | None, ...],
    sources: tuple[int, ...],
    model: Any,
) -> str:
    held = sum(x.numel() for x in model.parameters())
    entries = {n: TensorEntry("F32", tuple(x.shape), 0, 0) for n, x in model.named_parameters()}
    weights = {"model.safetensors": Header(entries, b"", 0, 0)}
    served = architecture.check(dict(config), weights=weights)
    if served.parameters != held:
        return f"{served.parameters} parameters are counted, {held} are held"
    head = 0 if shape.tied is served.tied else shape.vocab * shape.hidden
    if shape.parameters - served.parameters != head:
        return f"{shape.parameters} parameters are planned, {held} are held"
    if (served.windows, shape.windows) != (windows, windows):
        return f"windows {shape.windows} are planned, {windows} are served"
    own = [source for layer, source in enumerate(shape.sources) if source not in (-1, layer)]
    if own != [source for layer, source in enumerate(sources) if source != layer]:
        return f"keys of {shape.sources} are planned, of {sources} are read"
    return ""


def build(resolved: Any) -> Any:
    """The module that a pod fills, on the meta device."""
    factory = text_model.class_to_load(resolved)
    with torch.device("meta"):
        model = factory._from_config(resolved, attn_implementation="eager").eval()
    # torch's grouped products take not every width; a pod has its own where they do not.
    model.set_experts_implementation("eager")
    return model


def run(model: Any) -> str:
    """What a pass of a few tokens raises, with any weights, "" for nothing."""
    model.to_empty(device="cpu")
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 5, dtype=torch.long), use_cache=False)
    except Exception as error:  # noqa: BLE001 - of its class, whatever it is
        return f"{type(error).__name__}: {error}"
    return ""


@cache
def runs_alone(family: str, folder: Path) -> bool:
    """Whether the family's own configuration runs with any weights."""
    config = settings_of(family)
    (folder / "config.json").write_text(json.dumps(config))
    return not run(build(text_model.config_to_load(folder, config)))


def disagreements(seeds: range, folder: Path, kinds: list[str]) -> Iterator[str]:
    """Those of all mutations with these seeds of these families."""
    for family in kinds:
        runs = runs_alone(family, folder)
        for seed in seeds:
            config, words = mutation(family, seed)
            try:
                problem = disagreement(config, folder, runs=runs)
            except Exception as error:  # noqa: BLE001 - a crash is one
                problem = f"{type(error).__name__}: {error}"
            if problem:
                yield f"{family}, seed {seed}: {words}: {problem}"
