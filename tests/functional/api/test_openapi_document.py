"""The OpenAPI document is true: schemathesis sends what it allows, and what it does not, to a real
server, and finds neither a 500 nor an answer that the document does not describe.
"""

import json
import subprocess
from importlib.resources import files
from pathlib import Path

from support.environments import environment
from support.full import LONG_FORM
from support.serve_process import serve

SCHEMATHESIS = "schemathesis==4.32.5"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
)
# A small model length makes every answer short.
FLAGS = (
    "--served-name=tiny",
    "--max-model-len=64",
    "--num-blocks=256",
    "--block-size=8",
    "--public-metrics",
)
EXAMPLES = 1000 if LONG_FORM else 10


def of_the_served_model() -> str:
    """The document with the only model name that gets further than a 404."""
    document = json.loads((files("fairlead_runtime.api.ports") / "openapi.json").read_bytes())
    for schema in document["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"type": "string", "enum": ["tiny"]}
    return json.dumps(document)


def test_no_answer_is_a_500_or_undocumented(tmp_path: Path) -> None:
    program = environment(SCHEMATHESIS) / "schemathesis"
    (tmp_path / "openapi.json").write_text(of_the_served_model())
    with serve("demo:", *FLAGS) as server:
        server.until_logged("serving")
        command = [str(program), "run", "openapi.json", "--url", server.ports["public"]]
        command += ["--checks", ",".join(CHECKS), "--max-examples", str(EXAMPLES)]
        command += ["--phases", "examples,coverage,fuzzing", "--continue-on-failure", "--no-color"]
        command += ["--generation-deterministic"]
        command += ["--suppress-health-check", "all", "--request-timeout", "300", "--no-shrink"]
        found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout + found.stderr
        with server.client() as client:
            assert client.get("/readyz").status_code == 200
            body = {"model": "tiny", "prompt": "hello", "max_tokens": 1}
            assert client.post("/v1/completions", json=body).status_code == 200
