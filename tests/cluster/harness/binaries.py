"""The control plane's programs: from the folder ``KUBEBUILDER_ASSETS``, else built once from Go
modules.

Owns the cache of built programs, one folder per hash of the pinned modules and the Go toolchain.
Never downloads a ready-made program and never skips: with neither assets nor Go it raises.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from support.warm import warm_folder

MODULES = Path(__file__).parent / "gomodules"
KUBERNETES = "v1.36.3"


@dataclass(frozen=True, slots=True)
class Program:
    """One command: its name, the pinned module folder it is built in, its Go package."""

    name: str
    module: str
    package: str


PROGRAMS = {
    program.name: program
    for program in (
        Program("etcd", "controlplane", "go.etcd.io/etcd/server/v3"),
        Program("kube-apiserver", "controlplane", "k8s.io/kubernetes/cmd/kube-apiserver"),
        Program(
            "kube-controller-manager",
            "controlplane",
            "k8s.io/kubernetes/cmd/kube-controller-manager",
        ),
        Program("kube-scheduler", "controlplane", "k8s.io/kubernetes/cmd/kube-scheduler"),
        Program("kubectl", "controlplane", "k8s.io/kubernetes/cmd/kubectl"),
        Program("kubelet", "controlplane", "k8s.io/kubernetes/cmd/kubelet"),
        Program("kube-proxy", "controlplane", "k8s.io/kubernetes/cmd/kube-proxy"),
        Program("coredns", "coredns", "."),
        Program("pause", "pause", "."),
        Program("deviceplugin", "deviceplugin", "."),
        Program(
            "kube-router", "kuberouter", "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router"
        ),
        Program("kwok", "kwok", "sigs.k8s.io/kwok/cmd/kwok"),
        Program("helm", "helm", "helm.sh/helm/v4/cmd/helm"),
        Program("helm3", "helm3", "helm.sh/helm/v3/cmd/helm"),
    )
}


class NoControlPlaneError(RuntimeError):
    """Neither ready-made programs nor a Go toolchain exist: the tests cannot run."""


def program(name: str) -> Path:
    """The path of one program, built first if needed (minutes, once per version)."""
    return build([name])[name]


def build(names: Iterable[str]) -> dict[str, Path]:
    """Build what neither the assets nor the cache have; one process at a time, the others wait for
    its result.
    """
    wanted = {name: _asset(name) or _home(PROGRAMS[name].module) / name for name in names}
    if all(path.is_file() for path in wanted.values()):
        return wanted
    if shutil.which("go") is None:
        raise NoControlPlaneError(
            "the tests need a real Kubernetes control plane: install Go 1.26 or newer "
            "(the programs are then built once from pinned modules), "
            "or point KUBEBUILDER_ASSETS at a folder with " + ", ".join(sorted(wanted))
        )
    for name, path in wanted.items():
        if path.is_file():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.is_file():
                _compile(PROGRAMS[name], path)
    return wanted


def _asset(name: str) -> Path | None:
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    path = Path(assets) / name if assets else None
    return path if path and path.is_file() else None


def _home(module: str) -> Path:
    digest = hashlib.sha256()
    for file in sorted((MODULES / module).iterdir()):
        digest.update(file.read_bytes())
    return warm_folder(f"{module}-{digest.hexdigest()[:12]}")


def _compile(program: Program, path: Path) -> None:
    _say(
        f"building {program.name} from Go modules "
        "(once; the whole control plane takes about 15 minutes)"
    )
    began = time.monotonic()
    stamp = "-X k8s.io/component-base/version.git"
    flags = (
        f"-s -w {stamp}Version={KUBERNETES} {stamp}Major=1 {stamp}Minor={KUBERNETES.split('.')[1]}"
    )
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        target = Path(folder) / program.name
        done = subprocess.run(
            ["go", "build", "-trimpath", f"-ldflags={flags}", "-o", str(target), program.package],
            cwd=MODULES / program.module,
            env={**os.environ, "CGO_ENABLED": "0", "GOWORK": "off"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise NoControlPlaneError(f"go could not build {program.name}:\n{done.stderr[-4000:]}")
        target.rename(path)  # atomic: a killed build leaves no partial program
    _say(f"built {program.name} in {time.monotonic() - began:.0f} s")


def _say(text: str) -> None:
    print(f"[controlplane] {text}", file=sys.__stderr__, flush=True)


if __name__ == "__main__":
    for made in build(sys.argv[1:] or PROGRAMS).values():
        print(made)
