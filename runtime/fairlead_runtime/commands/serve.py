"""`fairlead serve MODEL`: serve a model over HTTP until SIGTERM.

Owns the process: flags, logs and the exit code. What can be refused without torch is, within a
second. The ports open first, so that probes and /model/config.json answer while weights load; the
server is ready after the self-test. Exit code: 0 after SIGTERM or SIGINT, 2 when the configuration
or the model is refused, 3 when the self-test failed, 4 when the engine gave up; 2, 3 and 4 say why
in one refusal.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from fairlead_runtime.commands.parser import Parser
from fairlead_runtime.processes import logs, spawn, termination
from fairlead_runtime.settings import terminal
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig, add_arguments

# Of the extra `runtime`, what only the server needs.
SERVER = ("fastapi", "uvicorn", "h11", "orjson", "msgspec", "prometheus_client")


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    logs.configure(options.log_level, options.log_format)
    try:
        config = EngineConfig.from_namespace(options)
        _check_ports(options)
        # Imported after parsing: --help and wrong flags need none of it.
        from fairlead_runtime.build.first_checks import (
            ENGINE,
            check_model,
            check_tokenizer,
            read_ahead,
            require,
        )
        from fairlead_runtime.child.heap import imports_for_good
        from fairlead_runtime.front.doors import Doors

        require(*ENGINE, *SERVER)
        check_model(options.model, config)
        doors = Doors.open(config, options.host, options.port, options.admin_port)
        with spawn.engine(logging.getLogger().getEffectiveLevel()) as engine:
            check_tokenizer(options.model)  # beside the other process's imports
            read_ahead(options.model)
            with terminal.live_line("Starting: imports"), imports_for_good():
                _leave_torch_out()
                logs.adopt_transformers()
                from fairlead_runtime.processes.http_process import run

            return run(engine, options.model, config, doors)
    except KeyboardInterrupt:  # before there is anything to drain
        return 0
    except Exception as error:
        from fairlead_runtime.commands.refusals import refusal_for

        refusal = refusal_for(error)
        if refusal is None:
            raise
        termination.report(refusal.code, refusal.message, refusal.hint, os.environ)
        return refusal.exit_code


def _leave_torch_out() -> None:
    """Keep torch out of this process, which needs only the tokenizers of transformers: that imports
    torch wherever it can, which takes seconds and half a gigabyte. The engine's process has it.
    """
    if "torch" in sys.modules:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # makes every import of it fail
    quiet = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    had, os.environ[quiet] = os.environ.get(quiet), "1"
    import transformers  # noqa: F401 - it warns that torch is missing

    if had is None:
        del os.environ[quiet]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="fairlead serve",
        usage="fairlead serve MODEL [--port PORT] [settings]",
        epilog="Begin with:    fairlead serve demo:\nEvery setting: docs/runtime.md",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Serve a model over HTTP: OpenAI's API on --port, "
        "probes and metrics on --admin-port.",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="demo:, owner/name, hf://owner/name, a path or file:///path"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address of both ports; :: is every address, IPv4 and IPv6 (default: 127.0.0.1)",
    )
    parser.add_argument("--port", type=int, default=8000, help="the public port (default: 8000)")
    parser.add_argument(
        "--admin-port", type=int, default=9000, help="probes, metrics, operations (default: 9000)"
    )
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="(default: info)",
    )
    add_arguments(parser)
    return parser


def _check_ports(options: argparse.Namespace) -> None:
    for name in ("port", "admin_port"):
        if not 0 <= getattr(options, name) <= 65535:
            raise ConfigError(
                name,
                f"{getattr(options, name)} is not a port",
                "use 1 to 65535, or 0 for any free port",
            )
    if options.port == options.admin_port != 0:
        raise ConfigError(
            "admin_port", f"{options.port} is already the value of --port", "choose another port"
        )
