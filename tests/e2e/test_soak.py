"""Changes and faults in a random order for minutes under load: what is lost is explained by a kill,
and nothing grows.
"""

import os
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pytest

from cluster.harness.apiclient import Api, Object, eventually
from e2e.harness.figures import Figures
from e2e.harness.installation import ANY_RUNTIME, NAMESPACE, OPERATOR, Installation
from e2e.harness.load import Client
from e2e.harness.node import AWAY, MAY_BE_AWAY, Node
from e2e.harness.processes import Kill, engine_process, http_process, kill, processes
from e2e.harness.served import SMALL, Served, serving
from support.full import LONG_FORM

pytestmark = pytest.mark.e2e
SEED = "FAIRLEAD_E2E_SEED"  # chooses the same order again
SECONDS = 3600 if LONG_FORM else 0
MORE = 3  # changes and faults after the first look at what the operator holds
MIB = 1 << 20
TRAFFIC = {"new_per_second": 5, "kept": 2, "streams": 2, "tokens": 4, "stream_tokens": 200}


@dataclass(slots=True)
class Soak:
    """The deployment that everything happens to, and the kills so far."""

    chat: Served
    node: Node
    random: random.Random
    kills: list[Kill] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    def change_the_batch(self) -> None:
        size = self.random.randrange(256, 1024)
        self.chat.apply(scheduler={**SMALL["scheduler"], "maxBatchTokens": size})

    def delete_a_pod(self) -> None:
        victim = self.random.choice(sorted(self.chat.names()))
        self.chat.installation.api.delete("Pod", NAMESPACE, victim)
        eventually(lambda: victim not in self.chat.names(), 60, "the pod is gone")

    def kill_a_process(self) -> None:
        pods = sorted(self.chat.pods(), key=lambda pod: str(pod["metadata"]["name"]))
        find = self.random.choice([http_process, engine_process])
        self.kills.append(kill(self.random.choice(pods), find))

    def scale(self) -> None:
        self.chat.apply(replicas=3)
        self.chat.until_rolled_out()
        self.chat.apply(replicas=2)

    def try_a_bad_image(self) -> None:
        self.chat.apply(engine={"image": "docker.io/fairlead/runtime:no-such-version"})
        self.chat.until_blocked_by("ImagePullBackOff", 60)
        self.chat.apply(engine={})

    def lose_a_part_of_the_cluster(self) -> None:
        self.node.lose(self.random.choice(MAY_BE_AWAY), AWAY)

    @property
    def actions(self) -> list[Callable[[], None]]:
        return [
            self.change_the_batch,
            self.delete_a_pod,
            self.kill_a_process,
            self.scale,
            self.try_a_bad_image,
            self.lose_a_part_of_the_cluster,
        ]

    def do(self, action: Callable[[], None]) -> None:
        """Returns when all is as before."""
        print(f"[e2e] soak: {action.__name__}")
        action()
        self.chat.until_rolled_out()
        self.done.append(action.__name__)


@dataclass(frozen=True, slots=True)
class Held:
    """What the processes of pods hold: bytes, open files, threads."""

    memory: int
    files: int
    threads: int

    @classmethod
    def by(cls, pods: list[Object]) -> Self:
        memory = files = threads = 0
        for process in (process for pod in pods for process in processes(pod)):
            folder = Path(f"/proc/{process.pid}")
            status = (folder / "status").read_text().splitlines()
            fields = dict(line.split(":", 1) for line in status)
            memory += int(fields["VmRSS"].split()[0]) * 1024
            threads += int(fields["Threads"])
            files += len(list((folder / "fd").iterdir()))
        return cls(memory, files, threads)

    def assert_at_most(self, other: Self, *, memory: int, files: int = 8, threads: int = 4) -> None:
        """No more than another time, but for so much that varies from one look to the next."""
        assert self.threads <= other.threads + threads, (self, other)
        assert self.files <= other.files + files, (self, other)
        assert self.memory <= other.memory + memory, (self, other)


def test_random_changes_and_faults_lose_nothing_else_and_leave_nothing_behind(
    installation: Installation, client: Client, node: Node, api: Api, figures: Figures
) -> None:
    seed = int(os.environ.get(SEED) or secrets.randbits(32))
    print(f"[e2e] soak: {SEED}={seed}")
    installation.upgrade(*ANY_RUNTIME)
    end = time.monotonic() + SECONDS
    with serving(installation, "soak", **SMALL, replicas=2) as chat:
        soak = Soak(chat, node, random.Random(seed))
        with client.load(chat.service, model=chat.name, **TRAFFIC) as load:
            load.await_more(20, streams=2)
            young = Held.by(chat.pods())
            # Each once: then the operator has done everything.
            for action in soak.random.sample(soak.actions, len(soak.actions)):
                soak.do(action)
            before, least = Held.by(operator(api)), len(soak.done) + MORE
            while len(soak.done) < least or time.monotonic() < end:
                soak.do(soak.random.choice(soak.actions))
                load.await_more(20, streams=2)
        report, lost = load.report, load.report.failed + load.report.cut
        after, old = Held.by(operator(api)), Held.by(chat.pods())
        events = len([e for e in api.items("Event", NAMESPACE) if about(e, chat)])
        sets = api.items("ReplicaSet", NAMESPACE, labelSelector=chat.label)

        grown = (after.memory - before.memory) / MIB
        for name, value in {
            "seconds": round(report.seconds),
            "changes and faults": len(soak.done),
            "requests answered": report.answered,
            "streams served whole": report.streams,
            "processes killed": len(soak.kills),
            "lost by them": len(lost),
            "the operator's memory grew by, MiB": grown,
            "Events": events,
        }.items():
            figures.note("soak", name, value)
        for loss in lost:
            assert any(killed.explains(loss) for killed in soak.kills), (loss, soak.kills)
        assert len(chat.endpoints()) == 2
        after.assert_at_most(before, memory=32 * MIB)
        old.assert_at_most(young, memory=128 * MIB)
        assert events <= 40 * len(soak.done), events
        assert len(sets) <= 11, "the history of a Deployment has a limit"


def operator(api: Api) -> list[Object]:
    return api.items("Pod", NAMESPACE, labelSelector=OPERATOR)


def about(event: Object, served: Served) -> bool:
    return str(event["involvedObject"]["name"]).startswith(served.name)
