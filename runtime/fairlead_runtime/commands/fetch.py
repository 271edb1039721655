"""`fairlead fetch MODEL [--revision R]`: download and check a model, so that a later start needs no
network.
"""

import argparse
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from fairlead_runtime.commands.parser import Parser
from fairlead_runtime.config import ConfigError
from fairlead_runtime.start import termination


def main(argv: list[str], environ: Mapping[str, str] = os.environ) -> int:
    """0: the model lies in the cache and is one that is served; 2: not, and why, as a JSON line."""
    options = _parser(environ).parse_args(argv)
    # After the arguments: --help needs no client of the hub.
    from fairlead_runtime.commands.refusals import refusal

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    try:
        path = _fetch(options, environ)
    except Exception as error:
        refused = refusal(error)
        if refused is None:
            raise
        termination.report(refused.code, refused.message, refused.hint, environ)
        return refused.exit_code
    print(path)  # noqa: T201 - the answer
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
        "--host", default="127.0.0.1", help="address of the admin port (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--admin-port",
        type=int,
        default=9000,
        metavar="PORT",
        help="serves /progress and /model/config.json meanwhile (default: 9000; 0: any free port)",
    )
    return parser


def _fetch(options: argparse.Namespace, environ: Mapping[str, str]) -> Path:
    from fairlead_runtime.hub.download_progress import show_progress
    from fairlead_runtime.hub.fetch import Progress
    from fairlead_runtime.hub.fetch_server import FetchServer
    from fairlead_runtime.hub.source import check_revision, parse, resolve
    from fairlead_runtime.models import architecture, files

    if not 0 <= options.admin_port <= 65535:
        raise ConfigError("admin_port", f"{options.admin_port} is no port", "use 0 to 65535")
    source = parse(options.model)
    check_revision(source, options.revision)
    with (
        FetchServer(str(source), options.host, options.admin_port) as server,
        show_progress(str(source)) as show,
    ):

        def report(progress: Progress) -> None:
            server.report(progress)
            show(progress)

        resolved = resolve(options.model, revision=options.revision, environ=environ, report=report)
        server.set_path(resolved.path)
        found = files.check(resolved.path)
        architecture.check(found.config, files.auto_maps(resolved.path))
    return resolved.path
