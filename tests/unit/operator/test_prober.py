"""The prober replaces a resource's results probe by probe, and wakes it for news alone."""

import asyncio
from typing import Any, cast

from fairlead_operator.cluster.cache import Store
from fairlead_operator.decide.children.podtemplate import pod_template
from fairlead_operator.decide.pods.downloads import Download
from fairlead_operator.decide.pods.load import Load
from fairlead_operator.decide.pods.probe_results import ProbeResults
from fairlead_operator.decide.scale.autoscale import TICK
from fairlead_operator.memory import Memory
from fairlead_operator.probe.hub import Hub, HubError
from fairlead_operator.probe.pod_client import Pods, ScrapeError
from fairlead_operator.probe.prober import IDLE_SECONDS, RETRY_SECONDS, Prober
from fairlead_operator.resource.kinds import (
    DEPLOYMENT,
    NAME_LABEL,
    POD,
    RESOURCE,
    REVISION_LABEL,
    SLICE,
    Key,
    Kind,
)
from fairlead_runtime.metric_names import RUNNING, WAITING
from support.operator_bodies import SETTINGS, Object, deployment, pod, resource, resource_body

KEY: Key = ("ns", "chat")
METRICS = f'{RUNNING}{{model_name="chat"}} 3\n{WAITING}{{model_name="chat"}} 2\n'


class PlayedPods:
    """Answers of the pods, the same of each; an empty one is an error."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {"metrics": METRICS, "memory": {"weights": 1}}
        self.requests: list[str] = []

    def _answer(self, name: str) -> Any:
        self.requests.append(name)
        if (answer := self.answers.get(name)) is None:
            raise ScrapeError(f"/{name}: status 503")
        return answer

    async def canary(self, address: str) -> None:
        self._answer("canary")

    async def metrics(self, address: str) -> str:
        return cast("str", self._answer("metrics"))

    async def memory(self, address: str) -> Object:
        return cast("Object", self._answer("memory"))

    async def progress(self, address: str) -> Object:
        return cast("Object", self._answer("progress"))

    async def model_config(self, address: str) -> Object:
        return cast("Object", self._answer("model_config"))


class PlayedHub:
    async def config(self, source: object, revision: str) -> Object:
        raise HubError("no config")


class Rig:
    """A prober of one resource, whose pods play their answers."""

    def __init__(self, **spec: Any) -> None:
        self.store, self.pods, self.clock, self.version = Store(), PlayedPods(), 100.0, 0
        self.memory: Memory[ProbeResults] = Memory()
        self.woken: list[Key] = []
        template = pod_template(resource(**spec), SETTINGS)
        self.revision = template["metadata"]["labels"][REVISION_LABEL]
        self.put(RESOURCE, resource_body(**spec))
        live = deployment(self.revision)
        live["metadata"]["labels"] = {NAME_LABEL: "chat"}
        self.put(DEPLOYMENT, live)
        self.probe = Prober(
            self.store,
            self.memory,
            SETTINGS,
            cast("Pods", self.pods),
            cast("Hub", PlayedHub()),
            self.woken.append,
            lambda: self.clock,
        )

    def put(self, kind: Kind, body: Object) -> Object:
        self.version += 1
        body = {**body, "metadata": body["metadata"] | {"resourceVersion": str(self.version)}}
        self.store.put(kind, body)
        return body

    def serve(self, *names: str) -> None:
        """These pods are ready, and in the Service's endpoints."""
        for name in names:
            self.put(POD, pod(name, ready=True, revision=self.revision))
        endpoints = [
            {"conditions": {"ready": True}, "targetRef": {"uid": f"uid-of-{name}"}}
            for name in names
        ]
        labels = {"serving.fairlead.dev/name": "chat"}
        meta = {"name": "slice", "namespace": "ns", "labels": labels}
        self.put(SLICE, {"metadata": meta, "endpoints": endpoints})

    def step(self) -> tuple[float | None, ProbeResults, int]:
        """One round: seconds until the next, the results, and how often the resource was woken."""
        self.woken.clear()
        again = asyncio.run(cast("Any", self.probe(KEY)))
        return again, self.memory.get(KEY, "uid-1") or ProbeResults(), len(self.woken)


def test_a_round_of_probes_fills_the_results_and_wakes_once_for_news() -> None:
    rig = Rig()
    again, empty, woken = rig.step()
    assert (again, empty.complete, woken) == (IDLE_SECONDS, True, 1)
    assert empty.config_error == ("ConfigUnavailable", "no config")
    assert rig.step()[2] == 0
    rig.serve("chat-1")
    again, results, woken = rig.step()
    assert (again, woken) == (RETRY_SECONDS, 1)
    assert results.canary_failures == {"uid-of-chat-1": "/canary: status 503"}
    assert results.samples["uid-of-chat-1"].load == Load(3, 2)
    assert (results.measured, results.measured_of) == ({"weights": 1}, "uid-of-chat-1")
    assert rig.step()[2] == 0, "the same failure is no news"
    rig.pods.answers |= {"canary": 5, "model_config": {"model_type": "llama"}}
    again, later, woken = rig.step()
    assert (again, woken) == (IDLE_SECONDS, 1)
    assert later.canaries == {"uid-of-chat-1"}
    assert later.canary_failures == {}
    assert later.config == {"model_type": "llama"}
    assert results.canaries == frozenset(), "a value that was read does not change"


def test_a_new_load_is_no_news_and_a_bad_one_leaves_the_last() -> None:
    rig = Rig()
    rig.pods.answers |= {"canary": 5, "model_config": {}}
    rig.serve("chat-1")
    rig.step()
    rig.clock += TICK
    rig.pods.answers["metrics"] = METRICS.replace(" 3", " 9")
    _, results, woken = rig.step()
    sample = results.samples["uid-of-chat-1"]
    assert (sample.load, sample.at, woken) == (Load(9, 2), rig.clock, 0)
    for bad in (None, METRICS.replace(" 3", " NaN"), METRICS.replace("chat", "other")):
        rig.clock += TICK
        rig.pods.answers["metrics"] = bad
        assert rig.step()[1].samples == {"uid-of-chat-1": sample}
    assert rig.pods.requests.count("canary") == rig.pods.requests.count("memory") == 1


def test_the_results_of_pods_that_are_gone_and_of_another_resource_are_dropped() -> None:
    rig = Rig()
    rig.pods.answers["canary"] = 5
    rig.serve("chat-1", "chat-2")
    assert len(rig.step()[1].samples) == 2
    gone = rig.store.get(POD, ("ns", "chat-1"))
    assert gone is not None
    rig.store.remove(POD, gone)
    results = rig.step()[1]
    assert (
        results.canaries == results.samples.keys() == results.startups.keys() == {"uid-of-chat-2"}
    )
    assert rig.memory.get(KEY, "uid-2") is None
    rig.put(RESOURCE, {"metadata": {"name": "chat", "namespace": "ns", "deletionTimestamp": "x"}})
    assert rig.step()[0] is None
    assert rig.memory.get(KEY, "uid-1") is None


def test_a_download_is_followed_while_it_runs() -> None:
    rig = Rig()
    fetch = {"name": "fetch", "state": {"running": {}}}
    rig.put(POD, pod(init=fetch, revision=rig.revision))
    assert rig.step()[0] == RETRY_SECONDS, "no answer yet"
    rig.pods.answers["progress"] = {"done_bytes": 10, "total_bytes": 100}
    again, results, woken = rig.step()
    assert (again, woken) == (TICK, 1)
    assert results.downloads == {"uid-of-chat-1": Download(10, 100)}
    rig.pods.answers["progress"] = {"done_bytes": 90, "total_bytes": 100}
    assert rig.step()[2] == 0, "too soon to be shown"
    rig.clock += 60
    assert rig.step()[1].downloads == {"uid-of-chat-1": Download(90, 100)}
    rig.put(POD, pod(container={"name": "runtime", "state": {"running": {}}}))
    assert rig.step()[1].downloads == {}
