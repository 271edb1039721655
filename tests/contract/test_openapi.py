"""The OpenAPI document is generated from the types of the bodies, and has the routes that exist."""

import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from fairlead_runtime.api.ports.app import DOCUMENT, public_app
from fairlead_runtime.api.state.state import ServerState
from fairlead_runtime.front.limits import PromptPool

ROOT = Path(__file__).parents[2]


def test_the_document_is_current() -> None:
    command = [sys.executable, "scripts/make_openapi.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_document_has_every_route_of_the_public_port_and_no_other() -> None:
    pool = PromptPool()
    app: Any = public_app(ServerState(name="tiny", public_metrics=True), pool)
    pool.close()
    while not isinstance(app, FastAPI):
        app = app._app
    routes: list[Any] = list(app.router.routes)
    served = {
        (route.path.replace(":path", ""), method.lower())
        for route in routes
        for method in route.methods
    }
    document = json.loads((files("fairlead_runtime.api.ports") / DOCUMENT).read_bytes())
    described = {(path, method) for path, item in document["paths"].items() for method in item}
    assert described == served
