"""Bodies become frozen values; what the API server refuses is refused here too, by field."""

import dataclasses
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.harness.cel_cases import BASE, CASES, Case, build, merge
from fairlead_operator.resource.fields import Quantity, ResourceError, as_body
from fairlead_operator.resource.resource import InferenceDeployment
from fairlead_operator.resource.spec import HUB, Source, Toleration
from fairlead_runtime.hub.source import parse as parse_model
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.settings.engine_config import EngineConfig


def parse(**spec: Any) -> InferenceDeployment:
    return InferenceDeployment.from_body(merge(BASE, {"spec": spec}))


@pytest.mark.parametrize("case", [c for c in CASES if c.message is None], ids=lambda c: c.name)
def test_what_the_api_server_accepts_is_accepted(case: Case) -> None:
    assert InferenceDeployment.from_body(build(case)).name == case.object_name


@pytest.mark.parametrize("case", [c for c in CASES if c.message is not None], ids=lambda c: c.name)
def test_what_the_api_server_refuses_is_refused_by_field(case: Case) -> None:
    with pytest.raises(ResourceError) as caught:
        InferenceDeployment.from_body(build(case))
    # A CRD message begins with the field; a schema's names it as spec.…
    message = str(case.message).partition(":")[0].removeprefix("spec.")
    field = message.split(" ")[0] if "." in message else ""
    assert field.split("[")[0] in str(caught.value)
    assert caught.value.field.startswith(("spec.", "metadata."))


def test_an_empty_spec_is_the_engines_defaults() -> None:
    parsed = parse()
    assert parsed.engine == EngineConfig(served_name="demo", shared_memory=1.0)
    assert (parsed.namespace, parsed.image, parsed.spec.replicas) == ("default", "", 1)
    assert parsed.spec.autoscaling is None


def test_every_setting_of_the_engine_arrives() -> None:
    engine = parse(
        model={"source": "hf://a/b", "revision": "abc", "servedName": "x", "trustRemoteCode": True},
        engine={
            "dtype": "float32",
            "maxModelLen": 100,
            "cudaGraphs": {"enabled": "off", "maxCachedGraphs": 32},
        },
        scheduler={"type": "fair", "safetyMargin": 0, "queueTimeoutSeconds": 5},
        cache={"blockSize": 64, "numBlocks": 7, "cpuOffloadSpace": 2, "dtype": "auto"},
        resources={"sharedMemory": "512Mi"},
        rollout={"drainTimeoutSeconds": 9},
    ).engine
    assert engine == EngineConfig(
        revision="abc",
        served_name="x",
        trust_remote_code=True,
        dtype="float32",
        max_model_len=100,
        cuda_graphs="off",
        scheduler_type="fair",
        safety_margin=0,
        queue_timeout=5,
        block_size=64,
        num_blocks=7,
        cpu_offload_space=2,
        shared_memory=0.5,
        drain_timeout=9.0,
    )
    assert EngineConfig.from_args(engine.to_args()) == engine


@pytest.mark.parametrize(
    ("change", "field", "hint"),
    [
        ({"cache": {"blocksize": 16}}, "spec.cache.blocksize", "did you mean blockSize?"),
        ({"modle": {}}, "spec.modle", "did you mean model?"),
        (
            {"engine": {"cudaGraphs": {"enable": "on"}}},
            "spec.engine.cudaGraphs.enable",
            "did you mean enabled?",
        ),
        ({"engine": []}, "spec.engine", "must be an object"),
        # docs/runtime.md says that the resource takes one name.
        ({"model": {"source": "demo:", "servedName": "a,b"}}, "spec.model.servedName", ""),
        ({"cache": {"numBlocks": "7"}}, "spec.cache.numBlocks", "expected int"),
        ({"scheduler": {"safetyMargin": 2}}, "spec.scheduler.safetyMargin", "set at most 0.9"),
        ({"replicas": True}, "spec.replicas", "a whole number"),
        ({"podTemplate": {"tolerations": {}}}, "spec.podTemplate.tolerations", "must be a list"),
        (
            {"podTemplate": {"tolerations": [{"effect": "x"}]}},
            "spec.podTemplate.tolerations[0].effect",
            "use NoSch",
        ),
        ({"podTemplate": {"labels": {"a": 1}}}, "spec.podTemplate.labels.a", "a string"),
        ({"resources": {"memory": "lots"}}, "spec.resources.memory", "16Gi"),
        (
            {"resources": {"accelerator": {"count": 65}}},
            "spec.resources.accelerator.count",
            "lower it",
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_an_error_names_the_field_and_the_fix(
    change: Mapping[str, Any], field: str, hint: str
) -> None:
    with pytest.raises(ResourceError) as caught:
        parse(**change)
    assert caught.value.field == field
    assert hint in str(caught.value)


@pytest.mark.parametrize("body", [None, [], {}, {"apiVersion": "v1", "kind": "Pod"}], ids=str)
def test_another_kind_is_refused(body: Any) -> None:
    with pytest.raises(ResourceError):
        InferenceDeployment.from_body(body)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("demo:", Source("demo")),
        ("hf://a/b", Source("hf", "a/b")),
        ("a/b", Source("hf", "a/b")),
        ("pvc://weights/llama/3", Source("pvc", "llama/3", "weights")),
        ("file:///models/x", Source("file", "/models/x")),
        ("/models/x", Source("file", "/models/x")),
    ],
)
def test_sources_are_told_apart(text: str, source: Source) -> None:
    assert Source.parse(text) == source


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("16Gi", 16 << 30),
        ("1.5Gi", 3 << 29),
        ("80G", 80 * 10**9),
        ("500m", 1),
        ("2", 2),
        ("1k", 1000),
        # Forms of other objects, such as quotas.
        ("1e3", 1000),
        ("+1.5E-1", 1),
        ("1319413953331200m", 1319413953332),
        ("5.", 5),
        (".5k", 500),
        ("1500000u", 2),
        ("100n", 1),
    ],
)
def test_quantities_are_read_as_kubernetes_reads_them(text: str, value: int) -> None:
    assert Quantity(text).value == value
    assert Quantity("500m").exact == Fraction(1, 2)


def test_rendering_keeps_what_was_set() -> None:
    assert as_body(Toleration(key="gpu", operator="Exists")) == {"key": "gpu", "operator": "Exists"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
SECTIONS = st.sampled_from(
    [
        "model",
        "engine",
        "scheduler",
        "cache",
        "resources",
        "replicas",
        "autoscaling",
        "rollout",
        "podTemplate",
    ]
)


@given(st.dictionaries(SECTIONS, JSON, max_size=3))
def test_any_body_is_read_or_refused_with_a_field(change: dict[str, Any]) -> None:
    body = {**BASE, "spec": {**BASE["spec"], **change}}
    try:
        parsed = InferenceDeployment.from_body(body)
    except ResourceError as error:
        refused = error.field
    else:
        refused = "spec"
        assert dataclasses.replace(parsed) == parsed
    assert refused.startswith("spec")


@given(st.from_regex(HUB, fullmatch=True))
def test_the_runtime_takes_every_hub_model_that_the_resource_takes(source: str) -> None:
    try:
        ours = Source.parse(source)
    except ResourceError:
        with pytest.raises(ModelError):
            parse_model(source)
    else:
        assert parse_model(f"hf://{ours.path}").name == ours.path
