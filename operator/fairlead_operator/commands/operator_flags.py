"""The flags of `fairlead operator`."""

from collections.abc import Mapping, Sequence

from fairlead_operator.resource.settings import Settings, settings_of
from fairlead_runtime.settings.arguments import ArgumentParser


def read(argv: Sequence[str], environ: Mapping[str, str], hostname: str) -> Settings:
    """Settings from the command line and the environment. Raises SettingsError; the parser says
    what is wrong with a flag and exits by itself.
    """
    parser = ArgumentParser(
        prog="fairlead operator",
        description=(
            "Serve InferenceDeployments until a signal: exit code 0 after it, 2 for a setting that "
            "cannot work. The chart sets the flags and the environment."
        ),
    )
    scope = parser.add_mutually_exclusive_group()
    scope.add_argument(
        "--namespace", action="append", default=[], help="serve this namespace (repeatable)"
    )
    scope.add_argument("--all-namespaces", action="store_true", help="serve the whole cluster")
    parser.add_argument("--lease-namespace", default="", help="namespace of the leader's Lease")
    parser.add_argument(
        "--probe-port", type=int, default=8080, help="/healthz, /readyz, /metrics (default 8080)"
    )
    return settings_of(parser.parse_args(argv), environ, hostname)
