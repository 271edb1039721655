"""One node: containerd, kubelet, kube-proxy and the cluster's DNS, beside a control plane.

Runs only inside a sandbox (sandbox.py): it takes fixed addresses and the machine's usual folders.
All its programs are parts of the control plane object, which ends them, last started first.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families

from cluster.harness import binaries
from cluster.harness.apiclient import Api, eventually
from cluster.harness.controlplane import ControlPlane
from e2e.harness.images import PAUSE, write_archive
from e2e.harness.sandbox import ADDRESS, PLUGINS

LOGS = "FAIRLEAD_E2E_LOGS"  # a folder that keeps the programs' logs after the run
NAME = "node"
SERVICES = "10.96.0.0/16"
PODS = "10.244.0.0/16"
KUBELET = f"system:node:{NAME}"
KUBE_PROXY = "system:kube-proxy"
AMPLE = 16 << 30  # bytes of memory of which images may take four
AWAY = 3  # seconds for which a part of the cluster is missing
FOLLOWED = (  # kinds that serving depends on
    "deployments",
    "endpointslices",
    "inferencedeployments",
    "nodes",
    "poddisruptionbudgets",
    "pods",
    "replicasets",
    "services",
)
MAY_BE_AWAY = ("kubelet", "containerd", "kube-apiserver")
PROGRAMS = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "coredns",
    "deviceplugin",
    "kube-router",
    "pause",
    "kubectl",
    "helm",
)


@dataclass(slots=True)
class Node:
    """A control plane and a node: an empty cluster between ``start`` and ``stop``."""

    home: Path
    plane: ControlPlane = field(init=False)

    def __post_init__(self) -> None:
        keys = self.home / "kubelet-client"
        self.plane = ControlPlane(
            home=self.home / "plane",
            address=ADDRESS,
            more_users={KUBELET: "system:nodes", KUBE_PROXY: ""},
            more_arguments={
                "kube-apiserver": (
                    "--enable-admission-plugins=NodeRestriction",
                    f"--kubelet-client-certificate={keys}.crt",
                    f"--kubelet-client-key={keys}.key",
                    "--kubelet-preferred-address-types=InternalIP",
                ),
            },
        )

    @property
    def socket(self) -> Path:
        return self.home / "containerd.sock"

    def start(self) -> None:
        """Returns when the node is Ready and takes pods."""
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the programs, keep their logs; the sandbox ends the containers and drops mounts and
        devices. Nothing of the cluster is kept, so no program need end in order.
        """
        for part in self.plane.parts:
            part.process.kill()
        if folder := os.environ.get(LOGS):
            Path(folder).mkdir(parents=True, exist_ok=True)
            for log in self.plane.home.glob("*.log"):
                shutil.copy(log, folder)
        self.plane.stop()

    def import_image(self, archive: Path) -> None:
        """Make an image known to the kubelet, from a docker-archive."""
        self._ctr("images", "import", str(archive))

    def tag_image(self, name: str, other: str) -> None:
        """Give an image another name."""
        self._ctr("images", "tag", "--force", name, other)

    def lose(self, part: str, seconds: float) -> None:
        """Kill a part of the cluster and start it again after so many seconds; at the end every
        part follows the API server as before.
        """
        with self.plane.api() as api:
            before = watches(api)
        self.plane.part(part).process.send_signal(signal.SIGKILL)
        time.sleep(seconds)  # the absence is the condition under test, not a wait for an event
        self.plane.restart(part)
        if part == "kube-apiserver":
            self.plane.wait_ready()
        with self.plane.api() as api:
            # Until then pods come and go unseen: the proxy sends requests to those that are gone.
            eventually(lambda: not before - watches(api), 60, "everyone watches again")
            eventually(lambda: node_is_ready(api), 30, "the node is Ready")

    @contextmanager
    def enforcing_policies(self) -> Iterator[None]:
        """NetworkPolicies hold soon after the block begins, by kube-router's firewall; its routing
        and its proxy, which others do here, stay off.
        """
        arguments = [
            f"--kubeconfig={self.plane.kubeconfig()}",
            f"--hostname-override={NAME}",
            f"--service-cluster-ip-range={SERVICES}",
            "--run-firewall=true",
            "--run-router=false",
            "--run-service-proxy=false",
        ]
        self.plane.spawn("kube-router", arguments)
        try:
            yield
        finally:
            self.plane.remove("kube-router")
            # Its own `--cleanup-config` panics. Who else has rules there, the kubelet, writes them
            # again; kube-proxy's are tables of nftables.
            for command in ("iptables --flush", "iptables --delete-chain", "ipset destroy"):
                subprocess.run(command.split(), check=True)

    def _ctr(self, *arguments: str) -> None:
        command = ["ctr", f"--address={self.socket}", "--namespace=k8s.io", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"

    def cpu_and_memory(self) -> dict[str, tuple[float, int]]:
        """CPU seconds so far and resident bytes of each program."""
        figures = {}
        for part in self.plane.parts:
            stat = Path(f"/proc/{part.process.pid}/stat").read_text().rpartition(")")[2].split()
            figures[part.name] = ((int(stat[11]) + int(stat[12])) / 100, int(stat[21]) * 4096)
        return figures

    def _start(self) -> None:
        self.plane.home.mkdir()
        self._make_network()
        self._make_keys()
        self._start_containerd()
        self.plane.start()
        self._start_kubelet()
        self._start_kube_proxy()
        self._start_dns()
        with self.plane.api() as api:
            eventually(lambda: node_is_ready(api), 60, "the node is Ready")
        eventually(_names_resolve, 60, "the cluster's DNS answers")

    def _make_network(self) -> None:
        """The node's address on a bridge without ports, which also takes traffic to Services."""
        for command in (
            "link add flnode0 type bridge",
            f"address add {ADDRESS}/32 dev flnode0",
            "link set flnode0 up",
            f"route add {SERVICES} dev flnode0",
        ):
            subprocess.run(["ip", *command.split()], check=True)
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")

    def _make_keys(self) -> None:
        """The API server's certificate for kubelets, which is its own authority."""
        keys = self.home / "kubelet-client"
        command = "openssl req -x509 -newkey rsa:2048 -nodes -days 30"
        subject = ["-subj", "/O=system:masters/CN=kube-apiserver"]
        files = ["-keyout", f"{keys}.key", "-out", f"{keys}.crt"]
        subprocess.run([*command.split(), *subject, *files], check=True, capture_output=True)

    def _start_containerd(self) -> None:
        images = self.home / "containerd"
        images.mkdir()
        if _available_memory() >= AMPLE:
            # A disk takes most of the time in which images are written, sealed and unpacked.
            command = ["mount", "-t", "tmpfs", "-o", "mode=711", "tmpfs", str(images)]
            subprocess.run(command, check=True)
        config = self.home / "containerd.toml"
        config.write_text(
            CONTAINERD.format(home=self.home, pause=PAUSE, plugins=PLUGINS, socket=self.socket)
        )
        network = self.home / "cni"
        network.mkdir()
        (network / "pods.conflist").write_text(json.dumps(pod_network(self.home)))
        self.plane.spawn("containerd", [f"--config={config}"], Path("/usr/bin/containerd"))
        eventually(self.socket.exists, 20, "containerd listens")
        archive = self.home / "pause.tar"
        write_archive(archive, PAUSE, binaries.program("pause"))
        eventually(lambda: self._answers("version"), 20, "containerd answers")
        self.import_image(archive)

    def _answers(self, *command: str) -> bool:
        done = subprocess.run(
            ["ctr", f"--address={self.socket}", *command], capture_output=True, check=False
        )
        return done.returncode == 0

    def _start_kubelet(self) -> None:
        config = self.home / "kubelet.yaml"
        config.write_text(yaml.safe_dump(kubelet_configuration(self.home, self.socket)))
        self.plane.spawn(
            "kubelet",
            [
                f"--kubeconfig={self.plane.kubeconfig(KUBELET)}",
                f"--config={config}",
                f"--cert-dir={self.home / 'kubelet-certs'}",
                f"--hostname-override={NAME}",
                f"--node-ip={ADDRESS}",
            ],
        )

    def _start_kube_proxy(self) -> None:
        config = self.home / "kube-proxy.yaml"
        kubeconfig = self.plane.kubeconfig(KUBE_PROXY)
        config.write_text(yaml.safe_dump(kube_proxy_configuration(kubeconfig)))
        self.plane.spawn("kube-proxy", [f"--config={config}"])

    def _start_dns(self) -> None:
        config = self.home / "Corefile"
        config.write_text(COREFILE.format(address=ADDRESS, kubeconfig=self.plane.kubeconfig()))
        self.plane.spawn("coredns", [f"-conf={config}"])


def _available_memory() -> int:
    """Bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":") for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def watches(api: Api) -> Counter[str]:
    """How many watches are open at the API server, of each of FOLLOWED."""
    counts: Counter[str] = Counter()
    for family in text_string_to_metric_families(api.call("GET", "/metrics")):
        if family.name == "apiserver_longrunning_requests":
            for sample in family.samples:
                resource = sample.labels["resource"]
                if sample.labels["verb"] == "WATCH" and resource in FOLLOWED:
                    counts[resource] += int(sample.value)
    return counts


def node_is_ready(api: Api) -> bool:
    """Whether the node reports Ready and takes pods."""
    node = api.find("Node", "", NAME) or {}
    conditions = (node.get("status") or {}).get("conditions") or ()
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return ready and not node["spec"].get("taints")


def _names_resolve() -> bool:
    try:
        return bool(socket.gethostbyname("kubernetes.default.svc.cluster.local"))
    except socket.gaierror:
        return False


def pod_network(home: Path) -> dict[str, object]:
    """A routed link to each pod: replies of Services' pods always pass the node's translation."""
    return {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [
            {
                "type": "ptp",
                "ipam": {
                    "type": "host-local",
                    "dataDir": str(home / "addresses"),
                    "ranges": [[{"subnet": PODS}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            }
        ],
    }


def kubelet_configuration(home: Path, socket: Path) -> dict[str, object]:
    empty = home / "resolv.conf"
    empty.write_text("")
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": ADDRESS,
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "oomScoreAdj": 0,
        "authentication": {"x509": {"clientCAFile": str(home / "kubelet-client.crt")}},
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{socket}",
        "clusterDNS": [ADDRESS],
        "clusterDomain": "cluster.local",
        "resolvConf": str(empty),
        "failSwapOn": False,
        # The machine's disk is not the cluster's own.
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
        },
        "imageGCHighThresholdPercent": 100,
    }


def kube_proxy_configuration(kubeconfig: Path) -> dict[str, object]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "clusterCIDR": PODS,
        "hostnameOverride": NAME,
        # Its own settings for connections belong to the whole machine.
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
    }


CONTAINERD = """version = 2
root = "{home}/containerd"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.internal.v1.opt",
  "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs",
]
[grpc]
address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause}"
disable_apparmor = true
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{plugins}"
conf_dir = "{home}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"
default_runtime_name = "runc"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
"""

COREFILE = """. {{
    bind {address}
    errors
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {kubeconfig}
    }}
    cache 5
}}
"""
