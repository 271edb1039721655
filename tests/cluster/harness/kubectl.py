"""kubectl with the arguments that a user types."""

import subprocess

from cluster.harness import binaries
from cluster.harness.controlplane import ControlPlane


def kubectl(plane: ControlPlane, *arguments: str) -> str:
    """Its standard output; a failure fails the test."""
    command = [str(binaries.program("kubectl")), f"--kubeconfig={plane.kubeconfig()}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
