"""`fairlead fetch MODEL [--revision R]`: download a model and check it.

A later start then needs no network.
"""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from fairlead_runtime.commands.parser import Parser
from fairlead_runtime.processes import logs, termination
from fairlead_runtime.settings.engine_config import ConfigError


def main(argv: list[str], environ: Mapping[str, str] = os.environ) -> int:
    """Returns 0 when the model is in the cache and supported, else 2 after one refusal."""
    options = _parser(environ).parse_args(argv)
    # Imported after parsing: --help needs no hub client.
    from fairlead_runtime.commands.refusals import refusal_for

    logs.configure("info", options.log_format)
    try:
        path = _fetch(options, environ)
    except Exception as error:
        refusal = refusal_for(error)
        if refusal is None:
            raise
        termination.report(refusal.code, refusal.message, refusal.hint, environ)
        return refusal.exit_code
    print(path)  # noqa: T201 - the result
    return 0


def _parser(environ: Mapping[str, str]) -> Parser:
    parser = Parser(
        environ=environ,
        prog="fairlead fetch",
        description="Download a model into HF_HOME and check it. Prints its directory.",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="demo:, owner/name, hf://owner/name, a path or file:///path"
    )
    parser.add_argument(
        "--revision", default="", metavar="R", help="commit, tag or branch (default: main)"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address of the admin port; :: is every address, IPv4 and IPv6 (default: 127.0.0.1)",
    )
    parser.add_argument(
        "--admin-port",
        type=int,
        default=9000,
        metavar="PORT",
        help="serves /progress and /model/config.json during the download "
        "(default: 9000; 0: any free port)",
    )
    return parser


def _fetch(options: argparse.Namespace, environ: Mapping[str, str]) -> Path:
    from fairlead_runtime.hub.download_progress import show_progress
    from fairlead_runtime.hub.fetch import Progress
    from fairlead_runtime.hub.fetch_server import FetchServer
    from fairlead_runtime.hub.source import (
        check_revision,
        parse,
        resolve,
        warn_of_moving_revision,
    )
    from fairlead_runtime.models import architecture, files

    if not 0 <= options.admin_port <= 65535:
        raise ConfigError("admin_port", f"{options.admin_port} is not a port", "use 0 to 65535")
    source = parse(options.model)
    check_revision(source, options.revision)
    with (
        FetchServer(str(source), options.host, options.admin_port) as server,
        show_progress(str(source)) as show,
    ):

        def report(progress: Progress) -> None:
            server.report(progress)
            show(progress)

        local = resolve(options.model, revision=options.revision, environ=environ, report=report)
        warn_of_moving_revision(local, options.revision)
        server.set_path(local.path)
        model_files = files.check(local.path)
        architecture.check(model_files.config, files.auto_maps(local.path))
    return local.path
