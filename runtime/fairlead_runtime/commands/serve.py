"""`fairlead serve MODEL`: serve a model over HTTP until SIGTERM.

Owns the process: flags, logs, the order of start-up and the exit code. The ports open first, so
that probes and /model/config.json answer while weights load; readiness follows the self-test. 0
after SIGTERM, 1 when the engine gave up, 2 for a bad configuration or a refused model, 3 when the
self-test failed; 2 and 3 leave one JSON line.
"""

import argparse
import os
from collections.abc import Sequence

from fairlead_runtime.commands.parser import Parser
from fairlead_runtime.config import ConfigError, EngineConfig, add_arguments
from fairlead_runtime.start import logs, termination


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    logs.configure(options.log_level)
    try:
        config = EngineConfig.from_namespace(options)
        _check_ports(options)
        # After the arguments: --help and a wrong flag are answered at once.
        from fairlead_runtime.start.serve import run

        return run(options.model, config, options.host, options.port, options.admin_port)
    except Exception as error:
        from fairlead_runtime.commands.refusals import refusal

        refused = refusal(error)
        if refused is None:
            raise
        termination.report(refused.code, refused.message, refused.hint, os.environ)
        return refused.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="fairlead serve",
        description="Serve a model over HTTP: OpenAI's API on --port, probes and metrics on --admin-port.",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="demo:, owner/name, hf://owner/name, a path or file:///path"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address of both ports (default: 127.0.0.1)"
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
                name, f"{getattr(options, name)} is no port", "use 0 (any free one) to 65535"
            )
    if options.port == options.admin_port != 0:
        raise ConfigError(
            "admin_port", f"{options.port} is the public port already", "choose another"
        )
