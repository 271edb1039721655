"""`fairlead plan`: a model by its name, the table, what binds, and short refusals."""

import json
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.harness.cel_cases import BASE, merge
from fairlead_operator.commands.plan import main
from fairlead_operator.decide.children.capacity import capacity_of
from fairlead_operator.resource.resource import InferenceDeployment
from support.operator_bodies import QWEN


def body(**spec: Any) -> dict[str, Any]:
    return merge(BASE, {"spec": {"model": {"source": "hf://Qwen/Qwen2.5-0.5B"}, **spec}})


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN))
    return str(file)


def test_a_name_and_a_size_are_planned_as_the_resource_that_says_the_same(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--max-model-len", "4096", "--quantization", "int8", "--dtype", "bfloat16"]
    name = ["Qwen/Qwen2.5-0.5B-Instruct", "--memory", "24Gi", "--config", config, "-o", "json"]
    assert main([*name, *flags]) == 0
    engine = {"maxModelLen": 4096, "quantization": "int8", "dtype": "bfloat16"}
    resources = {"accelerator": {"memory": "24Gi"}}
    same = InferenceDeployment.from_body(body(resources=resources, engine=engine))
    assert json.loads(capsys.readouterr().out) == capacity_of(QWEN, same)


def test_several_accelerators_and_a_cpu_are_planned_by_flags(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = ["a/b", "--memory", "24Gi", "--config", config]
    assert main([*name, "--tensor-parallel", "2"]) == 0
    assert "memory of each of 2" in capsys.readouterr().out
    assert main([*name, "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "memory of the pod" in out
    bound = next(line for line in out.splitlines() if line.startswith("what binds the cache:"))
    assert "a CPU's cache takes at most 4 GiB unless numBlocks asks for more" in bound


def test_the_memory_of_the_host_is_assumed_for_a_name_and_checked_for_a_resource(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = ["a/b", "--memory", "24Gi", "--config", config]
    assert main([*name, "--cpu-offload-space", "100"]) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith("memory of the host:"))
    needed, of, has, _ = row.removeprefix("memory of the host:").split()
    assert of == "of"
    assert 100 < float(needed) <= float(has) < float(needed) + 1
    assert "FITS: " in out
    assert "but the host" not in out
    file = tmp_path / "cr.yaml"
    gpu = {"accelerator": {"memory": "24Gi"}, "memory": "16Gi"}
    for memory, code, verdict in (
        ("16Gi", 1, "DOES NOT FIT THE HOST: "),
        ("128Gi", 0, "FITS: "),
    ):
        resources = gpu | {"memory": memory}
        file.write_text(yaml.safe_dump(body(resources=resources, cache={"cpuOffloadSpace": 100})))
        assert main(["-f", str(file), "--config", config]) == code, capsys.readouterr().err
        out = capsys.readouterr().out
        assert any(line.startswith(verdict) for line in out.splitlines()), out
        assert ("set resources.memory to at least" in out) == bool(code)


def test_the_table_adds_up(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["a/b", "--memory", "24Gi", "--config", config]) == 0
    table, _, rest = capsys.readouterr().out.partition("\n\n")
    rows = [line.split() for line in table.splitlines()]
    (head, *terms, left, budget) = rows
    assert head[-1] == "GiB"
    assert budget[:2] == ["budget", "21.6"]
    total = sum(float(row[1]) for row in [*terms, left])
    assert total == pytest.approx(21.6, abs=0.1 * len(terms))
    sizes = [float(row[1]) for row in terms]
    assert sizes == sorted(sizes, reverse=True)
    assert all(len(line) <= 110 for line in rest.splitlines()), "no line is a wall"


def test_states_have_a_row_of_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "qwen3_5_text", "dtype": "bfloat16"}))
    assert main(["some/model", "--memory", "80Gi", "--config", str(file)]) == 0
    held = 3 * 99 * 16 * 8 * 4 * 2 * 256 * 2  # thrice 99 units of 8 layers' keys and values
    assert f"states per sequence:    {held:,} bytes" in capsys.readouterr().out


def test_what_lacks_a_little_is_told_apart_from_what_is_there() -> None:
    def plan(mebibytes: int) -> Mapping[str, Any]:
        memory = {"resources": {"accelerator": {"memory": f"{mebibytes}Mi"}}}
        return capacity_of(QWEN, InferenceDeployment.from_body(body(**memory)))

    enough = bisect_left(range(1 << 14), True, lo=512, key=lambda size: plan(size)["fits"])
    words = plan(enough - 1)["message"]
    needed, has = words.removeprefix("needs ").split(":")[0].split(" GiB of KV cache, has ")
    assert needed != has
    assert f"{float(needed):.1f}" == f"{float(has):.1f}", "one digit would not tell"


class HubOfOne(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = self.path == "/a/b/resolve/v1/config.json"
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(json.dumps(QWEN).encode() if found else b"")

    def log_message(self, *_: object) -> None:
        """Be silent."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), HubOfOne) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield url
        server.shutdown()


def test_the_hubs_configuration_is_read_only_when_asked_for(
    hub: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = ["a/b", "--memory", "24Gi", "--revision", "v1"]
    assert main([*name, "--download", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True
    assert main(name) == 2
    words = json.loads(capsys.readouterr().err)
    assert words["code"] == "ConfigUnavailable"
    assert f"--download take it from {hub}/a/b/resolve/v1/config.json" in words["hint"]
    assert main(["a/other", "--memory", "24Gi", "--download"]) == 2
    assert json.loads(capsys.readouterr().err)["code"] == "ConfigUnavailable"


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        ([], "nothing to plan", "MODEL --memory 24Gi"),
        (["demo:"], "--memory: is missing", "as in 24Gi"),
        (["demo:", "--memory", "80"], "--memory: 80 is 80 bytes: write its unit, as in 80Gi", ""),
        (["demo:", "--memory", "much"], "'much'", ""),
        (["demo:", "--memory", "24GB"], "--memory: ", ""),
        (["demo:", "--device", "cpu", "--memory", "24GB"], "--memory: ", ""),
        (["-f", "no.yaml"], "no.yaml: No such file or directory", ""),
        (["cr.yaml"], "cr.yaml is no model", "a resource's file is -f cr.yaml"),
        (["-f", "a.yaml", "demo:"], "two ways", "give -f cr.yaml, or MODEL"),
        (["-f", "a.yaml", "--memory", "1Gi"], "--memory: the file of -f says it", "set it there"),
        (["-f", "a.yaml", "--num-blocks", "9"], "--num-blocks: the file of -f", "set it there"),
        (["./no", "--memory", "1Gi"], "./no: no such directory", ""),
        (["demo:", "--memry", "1Gi"], "unrecognized arguments", "did you mean --memory?"),
        (["demo:", "--memory", "1Gi", "--config", "no.json"], "no.json: No such file", ""),
    ],
)
def test_a_refusal_is_one_line_that_names_what_is_wrong(
    arguments: list[str], message: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 2
    [line] = capsys.readouterr().err.splitlines()
    words = json.loads(line)
    assert message in words["message"]
    assert hint in words["hint"]


def test_a_second_resource_of_a_file_is_not_ignored_in_silence(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = {"resources": {"accelerator": {"memory": "24Gi"}}}
    other = body(**gpu)
    other["metadata"] = {**other["metadata"], "name": "second"}
    file = tmp_path / "two.yaml"
    file.write_text(yaml.safe_dump_all([body(**gpu), other]))
    assert main(["-f", str(file), "--config", config]) == 0
    assert "holds 2 of kind InferenceDeployment: the first is used, not second" in (
        capsys.readouterr().err
    )


def test_a_model_that_is_too_large_for_a_card_may_be_taken_in_four_bits(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["a/b", "--memory", "512Mi", "--config", config]
    assert main(small) == 1
    assert "4-bit checkpoint" in capsys.readouterr().out
    assert main([*small, "--device", "cpu"]) == 1
    assert "4-bit checkpoint" not in capsys.readouterr().out
