"""Every value of every field of the resource that is a setting of the engine: it starts an engine,
or it is refused before a pod exists.

The values are the CRD's: every word of an enumeration, both booleans, both ends of a range and the
default. The operator's reader stands for admission; ``tests/contract/test_crd_fields.py`` compares
the two.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.harness.cel_cases import BASE, merge
from fairlead_operator.decide.children.capacity import PlanError, capacity_of
from fairlead_operator.resource.fields import ResourceError
from fairlead_operator.resource.resource import SETTINGS, InferenceDeployment
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.settings.supported import IN_RESOURCE, Limit, check_supported
from fairlead_runtime.sizing.terms import GIB
from support import tiny
from support.crd import SPEC
from support.started import pod_root, start_engine

# Text and quantities have neither words nor ends: one value each besides the default.
TEXTS = {"model.revision": "v1", "model.servedName": "a/b", "resources.sharedMemory": "512Mi"}
# What a value needs beside it, where a rule between fields would refuse it alone.
BESIDE = {
    ("scheduler.maxBatchTokens", 1): {"scheduler": {"maxRequests": 1}},
    ("scheduler.maxRequests", 65536): {"scheduler": {"maxBatchTokens": 65536}},
}
POD_BYTES = 8 * GIB
POD = {
    "model": {"source": "hf://owner/name"},
    "resources": {"accelerator": {"count": 0}, "memory": str(POD_BYTES)},
    "scheduler": {"maxBatchTokens": 256},
}


def values() -> Iterator[tuple[str, Any]]:
    for path in SETTINGS:
        node = SPEC
        for part in path.split("."):
            node = node["properties"][part]
        every = [TEXTS[path]] if path in TEXTS else list(node.get("enum", ()))
        every += [node[end] for end in ("minimum", "maximum") if end in node]
        every += [False, True] if node.get("type") == "boolean" else []
        assert every, f"{path} has no values to try"
        yield from ((path, value) for value in (*every, node.get("default")) if value is not None)


VALUES = list({f"{path}={value}": (path, value) for path, value in values()}.values())


def nested(path: str, value: Any) -> Any:
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.build("llama").to(torch.bfloat16), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """The field refused, or "", by configuration: each is started once."""
    return {}


@pytest.mark.parametrize(("path", "value"), VALUES, ids=[f"{p}={v}" for p, v in VALUES])
def test_a_value_starts_an_engine_or_is_refused_before_a_pod_exists(
    path: str,
    value: Any,
    model: Path,
    outcomes: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = merge(merge(BASE, {"spec": POD}), {"spec": nested(path, value)})
    body = merge(body, {"spec": BESIDE.get((path, value), {})})
    try:
        deployment = InferenceDeployment.from_body(body)
    except ResourceError as error:
        refused = error.field
    else:
        key = repr(deployment.engine)  # most defaults are one and the same configuration
        if key not in outcomes:
            root = pod_root(tmp_path, POD_BYTES)
            outcomes[key] = started_or_refused(deployment, model, root, monkeypatch)
        refused = outcomes[key]
    assert refused in ("", f"spec.{path}")


def started_or_refused(
    deployment: InferenceDeployment, model: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """The field that both the plan and the runtime refuse; "" when an engine has started."""
    try:
        capacity = capacity_of(json.loads((model / "config.json").read_text()), deployment)
        planned = "" if capacity["fits"] else str(capacity["message"])
    except PlanError as error:
        planned = str(error)
    try:
        # A revision chooses what is downloaded; a directory has none.
        config = dataclasses.replace(deployment.engine, revision="")
        resolved = start_engine(monkeypatch, root, model, config)
    except ConfigError as error:
        if not planned:
            pytest.fail(f"the plan accepts what the runtime refuses: {error}")
        return next(f"spec.{path}" for path, f in SETTINGS.items() if f.name == error.field)
    # Too small a cache for one full-length sequence: the plan says so, the runtime warns.
    assert not planned or resolved.warnings
    return ""


# Values of other settings beside which one is refused.
OTHERS: dict[str, Any] = {"tensor_parallel": 2, "quantization": "fp8", "deterministic": True}
PATHS = {f.name: path for path, f in SETTINGS.items()}


@pytest.mark.parametrize("limit", IN_RESOURCE, ids=lambda limit: limit.path)
def test_admission_and_the_runtime_refuse_a_value_for_the_same_reason(limit: Limit) -> None:
    refused = [value for path, value in VALUES if path == limit.path and value not in limit.works]
    assert refused
    dtypes: tuple[Any, ...] = ("bfloat16", "float32", "float16")
    dtype = next(one for one in dtypes if one not in limit.dtypes)
    # A limit that reads no type and no other setting can be broken on the other device only.
    elsewhere = limit.only_on == "cuda" and not limit.dtypes
    ways = [("auto", {name: OTHERS[name]}) for name, _ in limit.companions]
    if elsewhere or not ways:
        ways.append(("cpu" if elsewhere else "auto", {}))
    for value, (device, more) in itertools.product(refused, ways):
        config = EngineConfig(dtype=dtype, device=device, **{limit.field: value}, **more)
        with pytest.raises(ConfigError) as runtime:
            check_supported(config)
        assert runtime.value.field == limit.field
        assert limit.reason in str(runtime.value)
        assert runtime.value.hint == f"use {limit.fix}"
        spec: Any = {"engine": {"dtype": dtype}}
        accelerators = 0 if device == "cpu" else config.tensor_parallel
        spec["resources"] = {"accelerator": {"count": accelerators}}
        body = merge(BASE, {"spec": spec})
        for name, other in more.items():
            body = merge(body, {"spec": nested(PATHS[name], other)})
        with pytest.raises(ResourceError, match="is not supported yet") as admission:
            InferenceDeployment.from_body(merge(body, {"spec": nested(limit.path, value)}))
        assert limit.message in str(admission.value)
        assert limit.reason in limit.message


def test_a_pod_with_more_accelerators_than_it_uses_is_refused() -> None:
    body = merge(BASE, {"spec": {"resources": {"accelerator": {"count": 2}}}})
    with pytest.raises(ResourceError, match=r"accelerator\.count must equal") as error:
        InferenceDeployment.from_body(body)
    assert error.value.field == "spec.resources.accelerator.count"
