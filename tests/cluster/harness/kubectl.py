"""kubectl as a user types it."""

import subprocess

from cluster.harness import binaries
from cluster.harness.controlplane import ControlPlane


def kubectl(plane: ControlPlane, *arguments: str) -> str:
    """What it prints; a failure is the test's."""
    command = [str(binaries.program("kubectl")), f"--kubeconfig={plane.kubeconfig()}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
