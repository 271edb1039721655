"""A real Kubernetes control plane on one address, loopback by default: etcd, kube-apiserver,
controller-manager and scheduler.

Owns the processes, their folder, their ports and their certificates. Nothing outlives ``stop``; if
the test process is killed, the kernel ends the children.
"""

import contextlib
import ctypes
import itertools
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import yaml

from cluster.harness import binaries
from cluster.harness.apiclient import Api

# Test workers share these ports: 1,500 for each of up to eight (pytest-xdist counts from gw0).
FIRST_PORT, PORTS = 20_000, 1_500
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
_port_numbers = itertools.count(secrets.randbelow(PORTS))

# Go's collector runs at five times the live heap in place of two: a tenth of the processors' time.
GARBAGE = {"GOGC": "400"}
USERS = {  # token file: user → groups
    "admin": "system:masters",
    "system:kube-controller-manager": "",
    "system:kube-scheduler": "",
}


class ControlPlaneError(RuntimeError):
    """A part of the control plane did not come up; the message holds the end of its log."""


@dataclass(slots=True)
class Part:
    """One running program, the command that started it, and its log."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    command: Sequence[str]
    environ: Mapping[str, str] | None

    def tail(self, characters: int = 3000) -> str:
        return self.log.read_text(errors="replace")[-characters:]


@dataclass(slots=True)
class ControlPlane:
    """Started by ``with ControlPlane() as plane``; a fresh, empty cluster each time.

    ``more_users`` get a token each, ``more_arguments`` follow a program's own; of a flag that is
    given twice, the last counts.
    """

    home: Path = field(
        default_factory=lambda: Path(tempfile.mkdtemp(prefix="fairlead-controlplane-"))
    )
    address: str = "127.0.0.1"
    more_users: Mapping[str, str] = field(default_factory=dict)  # user → groups
    more_arguments: Mapping[str, Sequence[str]] = field(default_factory=dict)
    port: int = 0
    parts: list[Part] = field(default_factory=list)
    tokens: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = {user: secrets.token_hex(16) for user in {**USERS, **self.more_users}}

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"https://{self.address}:{self.port}"

    @property
    def ca(self) -> Path:
        return self.home / "certs" / "apiserver.crt"

    def api(self, token: str = "") -> Api:
        """A client; the administrator's unless a token is given."""
        return Api(self.url, token or self.tokens["admin"], str(self.ca))

    def start(self) -> None:
        """Start everything: etcd and API server together, controllers once they answer."""
        etcd_port, peer_port, self.port = free_ports(3)
        self._make_keys()
        self._start_etcd(etcd_port, peer_port)
        self._start_apiserver(etcd_port)
        self.wait_ready()
        # Only now: controllers that find no API server wait for minutes.
        self._start_controllers()

    def kubeconfig(self, user: str = "admin", token: str = "", server: str = "") -> Path:
        """A kubeconfig file of a user, or of a bearer token; ``server`` names another address (a
        proxy).
        """
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": server or self.url}}],
            "users": [{"name": "test", "user": {"token": token or self.tokens[user]}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }
        if not server.startswith("http://"):
            config["clusters"][0]["cluster"]["certificate-authority"] = str(self.ca)  # type: ignore[index]
        path = self.home / f"kubeconfig-{secrets.token_hex(4)}"
        path.write_text(yaml.safe_dump(config))
        path.chmod(0o600)
        return path

    def spawn(
        self,
        name: str,
        arguments: Sequence[str],
        program: Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Part:
        """Start one program of the cluster; ``stop`` ends it with the others."""
        command = [
            str(program or binaries.program(name)),
            *arguments,
            *self.more_arguments.get(name, ()),
        ]
        log = self.home / f"{name}.log"
        part = Part(name, self._run(command, log, environ), log, command, environ)
        self.parts.append(part)
        return part

    def restart(self, name: str) -> None:
        """Start a part again, with the same command, after it was killed."""
        part = self.part(name)
        part.process.wait()
        part.process = self._run(part.command, part.log, part.environ)

    def remove(self, name: str) -> None:
        """End a part that others do not need."""
        part = self.part(name)
        end(part.process, patience=3)
        self.parts.remove(part)

    def _run(
        self, command: Sequence[str], log: Path, environ: Mapping[str, str] | None
    ) -> "subprocess.Popen[bytes]":
        with log.open("ab") as out:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self.home,
                env={**(os.environ if environ is None else environ), **GARBAGE},
                start_new_session=True,
                preexec_fn=end_with_parent(os.getpid()),  # noqa: PLW1509 - two system calls, no lock taken
            )

    def part(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)

    def stop(self) -> None:
        """End all parts, last started first: without etcd the API server would hang on SIGTERM."""
        for part in reversed(self.parts):
            end(part.process, patience=3)
        self.parts.clear()
        shutil.rmtree(self.home, ignore_errors=True)

    def _make_keys(self) -> None:
        keys = self.home / "certs"
        keys.mkdir(parents=True, exist_ok=True)
        for command in (
            ["genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", "sa.key"],
            ["pkey", "-in", "sa.key", "-pubout", "-out", "sa.pub"],
        ):
            subprocess.run(["openssl", *command], cwd=keys, check=True, capture_output=True)
        users = {**USERS, **self.more_users}
        lines = [f'{self.tokens[user]},{user},{user},"{groups}"' for user, groups in users.items()]
        (self.home / "tokens.csv").write_text("\n".join(lines) + "\n")

    def _start_etcd(self, port: int, peer: int) -> None:
        self.spawn(
            "etcd",
            [
                f"--data-dir={self.home / 'etcd'}",
                "--unsafe-no-fsync",
                f"--listen-client-urls=http://127.0.0.1:{port}",
                f"--advertise-client-urls=http://127.0.0.1:{port}",
                f"--listen-peer-urls=http://127.0.0.1:{peer}",
                f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
                f"--initial-cluster=default=http://127.0.0.1:{peer}",
                "--log-level=warn",
            ],
        )

    def _start_apiserver(self, etcd: int) -> None:
        certs = self.home / "certs"
        self.spawn(
            "kube-apiserver",
            [
                f"--etcd-servers=http://127.0.0.1:{etcd}",
                f"--bind-address={self.address}",
                f"--advertise-address={self.address}",
                f"--secure-port={self.port}",
                # it signs its own certificate there; that file is the clients' CA
                f"--cert-dir={certs}",
                f"--token-auth-file={self.home / 'tokens.csv'}",
                "--authorization-mode=Node,RBAC",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={certs / 'sa.pub'}",
                f"--service-account-signing-key-file={certs / 'sa.key'}",
                "--service-cluster-ip-range=10.96.0.0/16",
                "--disable-admission-plugins=TaintNodesByCondition",
                "--allow-privileged=true",
                "--max-requests-inflight=1000",
                "--max-mutating-requests-inflight=500",
            ],
        )

    def _start_controllers(self) -> None:
        ports = free_ports(2)
        manager = self.kubeconfig("system:kube-controller-manager")
        self.spawn(
            "kube-controller-manager",
            [
                f"--kubeconfig={manager}",
                "--use-service-account-credentials=true",
                "--leader-elect=false",
                f"--service-account-private-key-file={self.home / 'certs' / 'sa.key'}",
                f"--root-ca-file={self.ca}",
                "--allocate-node-cidrs=false",
                "--bind-address=127.0.0.1",
                f"--secure-port={ports[0]}",
                f"--cert-dir={self.home / 'kcm'}",
                "--node-monitor-period=1s",
                # the default client throttling delays the controllers by 5 s
                "--kube-api-qps=500",
                "--kube-api-burst=1000",
                # an HPA is first evaluated one period after its creation
                "--horizontal-pod-autoscaler-sync-period=1s",
                "--concurrent-deployment-syncs=20",
                "--concurrent-service-endpoint-syncs=20",
            ],
        )
        scheduler = self.kubeconfig("system:kube-scheduler")
        self.spawn(
            "kube-scheduler",
            [
                f"--kubeconfig={scheduler}",
                "--leader-elect=false",
                "--bind-address=127.0.0.1",
                f"--secure-port={ports[1]}",
                f"--cert-dir={self.home / 'scheduler'}",
                "--kube-api-qps=500",
                "--kube-api-burst=1000",
            ],
        )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            for part in self.parts:
                if part.process.poll() is not None:
                    raise ControlPlaneError(
                        f"{part.name} ended with {part.process.returncode}:\n{part.tail()}"
                    )
            if self.answers():
                return
            time.sleep(0.05)
        raise ControlPlaneError(
            f"the API server is not ready after 120 s:\n{self.part('kube-apiserver').tail()}"
        )

    def answers(self) -> bool:
        """Whether /readyz answers "ok"; reads the body, as another program may have the port."""
        if not self.ca.is_file():
            return False
        request = urllib.request.Request(
            self.url + "/readyz", headers={"Authorization": f"Bearer {self.tokens['admin']}"}
        )
        try:
            context = ssl.create_default_context(cafile=str(self.ca))
            with urllib.request.urlopen(request, timeout=2, context=context) as answer:
                return bool(answer.read() == b"ok")
        except (urllib.error.URLError, OSError, ssl.SSLError):
            return False


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on, all different, and different from those of other test workers.

    They lie below the range from which the kernel takes ports of outgoing connections, and no call
    returns one twice before all others of the worker's share have been tried.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = FIRST_PORT + WORKER * PORTS + next(_port_numbers) % PORTS
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            ports.append(port)
    return ports


def end(process: subprocess.Popen[bytes], patience: float) -> None:
    """SIGTERM, then SIGKILL; always reaped."""
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)  # a stopped process would not see SIGTERM
        process.terminate()
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


_LIBC = ctypes.CDLL(None, use_errno=True)


def end_with_parent(parent: int) -> Callable[[], None]:
    """A preexec_fn: the child ends when its parent ends or is killed (PR_SET_PDEATHSIG)."""

    def arrange() -> None:
        if _LIBC.prctl(1, signal.SIGKILL, 0, 0, 0) or os.getppid() != parent:
            os._exit(127)

    return arrange
