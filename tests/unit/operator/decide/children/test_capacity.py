"""A resource's capacity is the runtime's own sizing, and `fairlead plan` prints it without a
cluster.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cluster.harness.cel_cases import BASE, merge
from fairlead_operator.commands.plan import main
from fairlead_operator.decide.children.capacity import (
    MEASURED,
    PlanError,
    capacity_of,
    host_shortage,
    plan_of,
    with_measured,
)
from fairlead_operator.decide.judge import judge, plan_capacity, with_measurement
from fairlead_operator.decide.pods.observed import Snapshot
from fairlead_operator.decide.pods.probe_results import ProbeResults
from fairlead_operator.decide.status import Capacity, states_of
from fairlead_operator.resource.resource import InferenceDeployment
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.terms import GIB, DeviceFacts
from fairlead_runtime.sizing.verdict import plan_memory
from support.operator_bodies import QWEN

# Only the base dependencies are importable.
WITHOUT_EXTRAS = """
import sys
BLOCKED = {"torch", "transformers", "numpy", "kopf", "kubernetes", "fastapi", "httpx"}
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Block())
from fairlead_operator.commands.plan import main
sys.exit(main(sys.argv[1:]))
"""


def body(**spec: Any) -> dict[str, Any]:
    return merge(BASE, {"spec": {"model": {"source": "hf://Qwen/Qwen2.5-0.5B"}, **spec}})


def deployment(**spec: Any) -> InferenceDeployment:
    return InferenceDeployment.from_body(body(**spec))


GPU = {"resources": {"accelerator": {"memory": "80Gi"}}}


def test_a_gpu_is_planned_by_the_runtimes_equation() -> None:
    idep = deployment(**GPU)
    capacity = capacity_of(QWEN, idep)
    plan = plan_memory(ModelShape.from_config(QWEN), idep.engine, DeviceFacts("cuda", 80 * GIB))
    assert capacity == {
        "planned": {
            "weightsBytes": 494_032_768 * 2 + 4 * 64,  # with frequencies of rotary embeddings
            "kvBytesPerToken": 2 * 24 * 2 * 64 * 2,
            "numBlocks": plan.num_blocks,
            "concurrentTokens": plan.num_blocks * 16,
            "fullLengthSequences": plan.full_length_sequences,
            "formula": plan.formula,
        },
        "fits": True,
        "message": plan.message,
    }


HYBRID = {"model_type": "qwen3_5_text", "dtype": "bfloat16"}


def test_states_are_counted_in_the_plan_and_in_the_autoscalers_target() -> None:
    idep = deployment(**GPU, engine={"maxModelLen": 8192})
    plan = plan_memory(ModelShape.from_config(HYBRID), idep.engine, DeviceFacts("cuda", 80 * GIB))
    planned = capacity_of(HYBRID, idep)["planned"]
    assert planned["stateBytesPerSequence"] == plan.state_bytes_per_sequence > 90 << 20
    states = states_of(planned)
    assert states.tokens == plan.state_bytes_per_sequence / plan.kv_bytes_per_token
    assert Capacity({"planned": planned}).states == states
    measured = planned | {"stateBytesPerSequence": 2 * planned["stateBytesPerSequence"]}
    body = {"planned": planned, "measured": measured}
    assert Capacity(body).states.tokens == 2 * states.tokens
    full = states_of({"stateBytesPerSequence": 7, "kvBytesPerToken": 0, "fullLengthSequences": 9})
    assert full == (0.0, 9)


def test_a_gpus_blocks_computed_by_hand() -> None:
    planned = capacity_of(QWEN, deployment(**GPU))["planned"]
    weights = 494_032_768 * 2
    # 8192 tokens a step, 256 rows of 32768 tokens, blocks of 16; see test_memory_plan.
    activations = 8192 * (2 * (4 * 896 + 2 * 64 + 3 * 4864) + 32)
    attention = 32768 * (2 * 128 * 2 + 16) + (1 << 24) * 2 + 256 * 32768 * (2 + 2)
    logits = 256 * 2 * (2 * 896 + 151_936)
    sampling = 256 * (151_936 * (16 + 8) + 33 * 1024)
    kept = 257 * (80 + 2048 * 4 + 4096 * 12) + 256 * (24 + 21 * 12)
    kept += 16 * 2 * 128 * 2 * 24 + 151_936 * 4
    batch = 2 * (8192 * 24 + 256 * 64 + 256 * 2048 * 4) + kept
    graphs = logits + (48 << 23) + 256 * 4096 * 12 + 32 * (4 << 20)
    graphs += 10 * (8 << 20) + 256 * 2048 * 4 + 256 * 151_936 * 2
    left = int(80 * GIB * 0.9) - weights - activations - attention - logits - sampling - batch
    left -= graphs
    block = 16 * 2 * 24 * 2 * 64 * 2
    assert planned["numBlocks"] == left // block
    assert planned["fullLengthSequences"] == left // block // 2048


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_the_runtime_refuses_for_the_checkpoints_type_is_not_planned(dtype: str) -> None:
    config = QWEN | {"torch_dtype": "float32"}
    with pytest.raises(PlanError, match="quantization: fp8 is not supported in float32"):
        capacity_of(config, deployment(engine={"quantization": "fp8"}, **GPU))
    in_half = deployment(engine={"quantization": "fp8", "dtype": dtype}, **GPU)
    assert capacity_of(config, in_half)["fits"]


def test_an_fp8_cache_has_twice_the_blocks_and_none_beside_int8_weights_on_a_cpu() -> None:
    fp8 = {"cache": {"dtype": "fp8"}}
    wide, small = (capacity_of(QWEN, deployment(**GPU, **more))["planned"] for more in ({}, fp8))
    assert 2 * small["kvBytesPerToken"] == wide["kvBytesPerToken"]
    assert small["numBlocks"] >= 2 * wide["numBlocks"] - 200, "attention widens one sequence"
    on_cpu = {"resources": {"accelerator": {"count": 0}, "memory": "8Gi"}}
    with pytest.raises(PlanError, match=r"spec\.cache\.dtype: fp8 is not supported with int8 we"):
        capacity_of(QWEN, deployment(engine={"quantization": "int8"}, **on_cpu, **fp8))
    few = {"scheduler": {"maxBatchTokens": 512}}
    assert capacity_of(QWEN, deployment(**few, **on_cpu, **fp8))["fits"]


def test_a_cpu_is_planned_in_the_pods_memory() -> None:
    idep = deployment(
        resources={"accelerator": {"count": 0}, "memory": "8Gi", "sharedMemory": "1Gi"},
        scheduler={"maxBatchTokens": 512},
        cache={"cpuOffloadSpace": 1},
    )
    capacity = capacity_of(QWEN, idep)
    assert capacity["fits"]
    for term in ("process 1.0", "offload 1.0", "shared_memory 1.0", "* 8.0 GiB"):
        assert term in capacity["planned"]["formula"]
    assert capacity["planned"]["numBlocks"] * 16 * 2 * 24 * 2 * 64 * 2 <= 4 * GIB


def test_an_accelerator_of_unknown_memory_is_not_guessed() -> None:
    with pytest.raises(PlanError, match=r"resources\.accelerator\.memory") as caught:
        capacity_of(QWEN, deployment())
    assert caught.value.reason == "AcceleratorMemoryUnknown"


def test_models_and_lengths_that_cannot_be_are_refused_with_a_reason() -> None:
    with pytest.raises(PlanError, match="supported are") as caught:
        capacity_of({"model_type": "rwkv"}, deployment(**GPU))
    assert caught.value.reason == "UnsupportedModel"
    with pytest.raises(PlanError, match="a pod loads such a model") as unknown:
        capacity_of({"model_type": "next_moe"}, deployment(**GPU))
    assert unknown.value.reason == "FamilyUnknown"
    with pytest.raises(
        PlanError, match=r"spec\.engine\.maxModelLen: 99999 is more than the model's own 32768"
    ):
        capacity_of(QWEN, deployment(engine={"maxModelLen": 99999}, **GPU))


def test_the_hosts_memory_is_checked_beside_an_accelerator() -> None:
    idep = deployment(
        resources={"accelerator": {"memory": "80Gi"}, "memory": "2Gi", "sharedMemory": "4Gi"}
    )
    assert "set resources.memory to at least 7Gi" in host_shortage(idep, plan_of(QWEN, idep))
    capacity = capacity_of(QWEN, idep)
    assert capacity["fits"]
    assert (
        "; but the host needs process 1.1 + offload 0.0 + shared_memory 4.0 + grammars 0.2 + "
        "tokenizers 0.4 + bookkeeping 0.7 = 6.4 GiB"
    ) in capacity["message"]
    enough = deployment(**GPU)
    assert host_shortage(enough, plan_of(QWEN, enough)) == ""


def test_measured_figures_stand_beside_planned_ones_with_their_drift() -> None:
    capacity = {"planned": {"numBlocks": 1000}, "fits": True, "message": "fits"}
    report = {
        "numBlocks": 950,
        "concurrentTokens": 15200,
        "totalBytes": 1,
        "terms": [{"name": "weights", "plannedBytes": 7, "measuredBytes": 8, "driftPercent": 14.3}],
    }
    merged = with_measured(capacity, report)
    assert merged["measured"] == {"numBlocks": 950, "concurrentTokens": 15200, "weightsBytes": 8}
    assert merged["driftPercent"] == -5.0
    assert with_measured({}, {"numBlocks": None}) == {"measured": {}}
    few = {"connections": {"most": 708, "reason": "RLIMIT_NOFILE is 1200"}}
    assert with_measured({}, {"bounds": few}) == {"measured": {"connections": 708}}
    for broken in (7, {"connections": 7}, {"connections": {"most": "708"}}):
        assert with_measured({}, {"bounds": broken}) == {"measured": {}}


@pytest.mark.parametrize("number", [True, -5, 1.5, "7", 2**63, 10**30])
def test_no_number_of_a_pod_reaches_the_status_that_is_no_count(number: Any) -> None:
    report = {
        **dict.fromkeys(MEASURED, number),
        "terms": [{"name": "weights", "measuredBytes": number}],
        "bounds": {"connections": {"most": number}},
    }
    assert with_measured({}, report) == {"measured": {}}


@pytest.mark.parametrize("terms", [5, [5], {"name": "weights"}, None])
def test_terms_of_another_form_measure_nothing(terms: Any) -> None:
    assert with_measured({}, {"terms": terms}) == {"measured": {}}


def test_a_model_of_more_bytes_than_a_status_takes_is_refused() -> None:
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 1 << 24)
    huge = {**sizes, "num_hidden_layers": 4096, "vocab_size": 1 << 26}
    heads = {"num_attention_heads": 1 << 14, "num_key_value_heads": 1 << 14}
    with pytest.raises(PlanError, match="parameters are more than any model's") as refusal:
        plan_of({**QWEN, **huge, **heads}, deployment(**GPU))
    assert refusal.value.reason == "UnsupportedModel"


def test_what_a_pod_measured_is_shown_without_a_plan() -> None:
    results = ProbeResults(config=QWEN, measured={"numBlocks": 950, "concurrentTokens": 15200})

    def shown(idep: InferenceDeployment, config: Mapping[str, Any] | None = QWEN) -> Capacity:
        return with_measurement(plan_capacity(idep, config, results.config_error), results)

    idep = deployment()  # accelerator.memory is unset
    known = shown(idep)
    assert known.body == {"measured": {"numBlocks": 950, "concurrentTokens": 15200}}
    assert known.reason == "AcceleratorMemoryUnknown"
    assert known.concurrent_tokens == 15200
    gated = shown(idep, None)
    assert (gated.body, gated.reason) == (known.body, "ConfigUnavailable")
    blockers = judge(idep, Snapshot((), (), (), (), ()), results, "r", 1, known, [], {})
    assert [one.code for one in blockers] == ["Starting"]
    planned = shown(deployment(**GPU))
    assert planned.body is not None
    assert {"planned", "measured", "driftPercent"} <= set(planned.body)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    resource, config = tmp_path / "cr.yaml", tmp_path / "config.json"
    resource.write_text(json.dumps(body(**GPU)))
    config.write_text(json.dumps(QWEN))
    return str(resource), str(config)


def test_plan_runs_without_torch_and_kopf_and_prints_the_status(files: tuple[str, str]) -> None:
    command = [
        sys.executable,
        "-c",
        WITHOUT_EXTRAS,
        "-f",
        files[0],
        "--config",
        files[1],
        "-o",
        "json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == capacity_of(QWEN, deployment(**GPU))


def test_plan_prints_what_a_pod_takes_in_and_what_binds(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = tmp_path / "large.yaml"
    scaled = {"autoscaling": {}, "scheduler": {"maxRequests": 4096}}
    large.write_text(json.dumps(body(**scaled, **GPU)))
    assert main(["-f", str(large), "--config", files[1]]) == 0
    lines = [line.split(":", 1) for line in capsys.readouterr().out.splitlines() if ":" in line]
    rows = {name: text.strip() for name, text in lines}
    assert rows["connections"] == "5,376 (maxRequests 4096 + maxQueue 1024 + 256)"
    assert rows["requests"] == "5,120 (maxRequests 4096 + maxQueue 1024)"
    assert rows["waiting tokens"] == "33,554,432 (256 MiB / 8 bytes a token)"
    assert rows["bytes of a body"] == "2,097,152 (at least)"
    assert rows["open files"].startswith("8,704 ")
    assert rows["what binds the queue"].startswith("maxQueue up to 6,553 prompt tokens a request,")
    assert "min(4096 maxRequests" in rows["autoscaler's target"]


def test_plan_ends_with_1_when_it_does_not_fit(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small.yaml"
    small.write_text(json.dumps(body(resources={"accelerator": {"memory": "2Gi"}})))
    assert main(["-f", str(small), "--config", files[1]]) == 1
    assert "DOES NOT FIT: needs" in capsys.readouterr().out


def test_plan_reads_a_models_directory_and_several_documents(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local = merge(body(**GPU), {"spec": {"model": {"source": f"file://{tmp_path}"}}})
    resource = tmp_path / "two.yaml"
    resource.write_text("kind: ConfigMap\n---\n" + json.dumps(local))
    assert main(["-f", str(resource)]) == 0
    assert "FITS: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "config", "message"),
    [
        ("{", None, "is not YAML"),
        ("", None, "is empty"),
        ("[" * 10_000, None, "is nested too deeply"),
        ("kind: Pod", None, "apiVersion: must be"),
        (
            json.dumps(body(cache={"blockSize": 5}, **GPU)),
            None,
            "spec.cache.blockSize: 5 is not a power of two",
        ),
        (json.dumps(body(**GPU)), None, "give it with --config"),
        (json.dumps(body(**GPU)), "no json", "must hold a JSON object: Expecting value"),
        (json.dumps(body(**GPU)), "[]", "must hold a JSON object: it is not an object"),
        (json.dumps(body(**GPU)), "[" * 100_000, "it is nested too deeply"),
        (json.dumps(body(**GPU)), '{"a":' * 65 + "1" + "}" * 65, "it is nested too deeply"),
        (json.dumps(body(**GPU)), " " * (1 << 20) + "{}", "larger than 1 MiB"),
        (json.dumps(body()), json.dumps(QWEN), "resources.accelerator.memory"),
        (json.dumps(body(**GPU)), '{"model_type": "x"}', "is not in the table of families"),
    ],
    ids=lambda v: None if v is None else v[:20],
)
def test_plan_ends_with_2_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, config: str | None, message: str
) -> None:
    resource, facts = tmp_path / "cr.yaml", tmp_path / "config.json"
    resource.write_text(text)
    arguments = []
    if config is not None:
        facts.write_text(config)
        arguments = ["--config", str(facts)]
    assert main(["-f", str(resource), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert main(["-f", str(tmp_path / "missing.yaml")]) == 2
