"""The prober replaces a resource's results probe by probe, and wakes it for news alone."""

import asyncio
from typing import Any, cast

import pytest

from fairlead_operator.cluster.cache import Store
from fairlead_operator.decide.children.podtemplate import pod_template
from fairlead_operator.decide.pods.downloads import Download
from fairlead_operator.decide.pods.load import Load
from fairlead_operator.decide.pods.probe_results import ProbeResults
from fairlead_operator.decide.scale.autoscale import TICK
from fairlead_operator.memory import Memory
from fairlead_operator.probe.canaries import RETRY_SECONDS as CANARY_RETRY_SECONDS
from fairlead_operator.probe.canaries import Canaries, PodKey
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
from fairlead_runtime.settings.metric_names import RUNNING, WAITING
from support.operator_bodies import SETTINGS, Object, deployment, pod, resource, resource_body

KEY: Key = ("ns", "chat")
METRICS = f'{RUNNING}{{model_name="chat"}} 3\n{WAITING}{{model_name="chat"}} 2\n'


class PlayedPods:
    """Answers of the pods, the same of each; an empty one is an error, and a scrape of a hung
    pod answers once ``released``.
    """

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {"metrics": METRICS, "memory": {"weights": 1}}
        self.requests: list[str] = []
        self.hung: set[str] = set()  # addresses
        self.answered = asyncio.Event()  # a pod that does not hang
        self.released = asyncio.Event()
        self.unresponsive: list[str] = []  # addresses scraped as pods that did not answer last

    def _answer(self, name: str) -> Any:
        self.requests.append(name)
        if (answer := self.answers.get(name)) is None:
            raise ScrapeError(f"/{name}: status 503")
        return answer

    async def canary(self, address: str) -> None:
        self._answer("canary")

    async def metrics(self, address: str, *, unresponsive: bool = False) -> str:
        self.unresponsive += [address] if unresponsive else []
        if address in self.hung:
            await self.released.wait()
            raise ScrapeError("/metrics: TimeoutError")
        self.answered.set()
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
        self.due: list[PodKey] = []  # canaries
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
            self.due.append,
            lambda: self.clock,
        )
        self.canaries = Canaries(
            self.store, self.memory, cast("Pods", self.pods), self.woken.append
        )

    def put(self, kind: Kind, body: Object) -> Object:
        self.version += 1
        body = {**body, "metadata": body["metadata"] | {"resourceVersion": str(self.version)}}
        self.store.put(kind, body)
        return body

    def serve(self, *names: str) -> None:
        """These pods are ready, and in the Service's endpoints."""
        for number, name in enumerate(names, 1):
            body = pod(name, ready=True, revision=self.revision)
            body["status"]["podIP"] = f"10.0.0.{number}"
            self.put(POD, body)
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
        self.due.clear()
        again = asyncio.run(cast("Any", self.probe(KEY)))
        return again, self.results, len(self.woken)

    def send_canaries(self) -> list[float | None]:
        """Those that are due: the seconds after which each is due again."""
        self.woken.clear()
        return [asyncio.run(cast("Any", self.canaries(one))) for one in self.due]

    @property
    def results(self) -> ProbeResults:
        return self.memory.get(KEY, "uid-1") or ProbeResults()


def test_a_round_of_probes_fills_the_results_and_wakes_once_for_news() -> None:
    rig = Rig()
    again, empty, woken = rig.step()
    assert (again, empty.complete, woken) == (IDLE_SECONDS, True, 1)
    assert empty.config_error == ("ConfigUnavailable", "no config")
    assert rig.step()[2] == 0
    rig.serve("chat-1")
    again, results, woken = rig.step()
    assert (again, woken) == (IDLE_SECONDS, 1)
    assert results.canaries_due == {"uid-of-chat-1"}
    assert (rig.send_canaries(), len(rig.woken)) == ([CANARY_RETRY_SECONDS], 1)
    assert rig.results.canary_failures == {"uid-of-chat-1": "/canary: status 503"}
    assert rig.results.canaries_due == frozenset()
    assert results.samples["uid-of-chat-1"].load == Load(3, 2)
    assert (results.measured, results.measured_of) == ({"weights": 1}, "uid-of-chat-1")
    assert rig.step()[2] == 0
    assert (rig.send_canaries(), rig.woken) == ([CANARY_RETRY_SECONDS], []), "no news"
    rig.pods.answers |= {"canary": 5, "model_config": {"model_type": "llama"}}
    again, _, woken = rig.step()
    assert (again, woken) == (IDLE_SECONDS, 1)
    assert (rig.send_canaries(), len(rig.woken)) == ([None], 1)
    later = rig.results
    assert later.canaries == {"uid-of-chat-1"}
    assert later.canary_failures == {}
    assert later.config == {"model_type": "llama"}
    assert results.canaries == frozenset(), "a value that was read does not change"


def test_a_new_load_is_no_news_and_a_bad_one_leaves_the_last() -> None:
    rig = Rig()
    rig.pods.answers |= {"canary": 5, "model_config": {}}
    rig.serve("chat-1")
    rig.step()
    rig.send_canaries()
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
    assert rig.send_canaries() == [None, None]
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


def test_a_hung_pod_delays_no_scrape_of_another_and_is_asked_as_a_silent_one() -> None:
    rig = Rig()
    names = [f"chat-{number}" for number in range(1, 10)]
    rig.serve(*names)
    rig.pods.hung = {f"10.0.0.{number}" for number in range(1, 9)}

    async def round_with_hung_pods() -> None:
        rig.pods.answered, rig.pods.released = asyncio.Event(), asyncio.Event()
        probing = asyncio.ensure_future(cast("Any", rig.probe(KEY)))
        await rig.pods.answered.wait()
        assert rig.results.samples.keys() == {"uid-of-chat-9"}, "while eight still hang"
        assert not probing.done()
        rig.pods.released.set()
        await probing

    asyncio.run(round_with_hung_pods())
    assert rig.results.unresponsive == {f"uid-of-chat-{number}" for number in range(1, 9)}
    assert rig.pods.unresponsive == []
    rig.pods.hung = set()
    assert len(rig.step()[1].samples) == 9
    assert len(rig.pods.unresponsive) == 8
    assert rig.results.unresponsive == frozenset()


def test_a_running_pod_is_scraped_ready_or_not() -> None:
    rig = Rig()
    runs = {"name": "runtime", "state": {"running": {}}, "started": True}
    rig.put(POD, pod(container=runs, revision=rig.revision))
    assert rig.step()[1].samples["uid-of-chat-1"].load == Load(3, 2)


def test_no_canary_goes_to_a_pod_that_is_gone_or_answered_already() -> None:
    rig = Rig()
    rig.pods.answers["canary"] = 5
    rig.serve("chat-1")
    rig.step()
    assert rig.send_canaries() == [None]
    assert rig.send_canaries() == [None]
    assert rig.pods.requests.count("canary") == 1
    rig.due.append((KEY, "uid-of-another"))
    assert rig.send_canaries() == [None, None]
    assert rig.pods.requests.count("canary") == 1


@pytest.mark.parametrize(
    ("spec", "seconds"),
    [
        ({"autoscaling": {"minReplicas": 1, "maxReplicas": 8}}, TICK),
        (
            {"autoscaling": {"minReplicas": 1, "maxReplicas": 8, "managedBy": "external"}},
            IDLE_SECONDS,
        ),
        ({}, IDLE_SECONDS),
    ],
)
def test_what_this_operator_scales_is_probed_at_each_tick(spec: Object, seconds: float) -> None:
    assert Rig(**spec).step()[0] == seconds


def test_the_config_of_another_model_is_not_kept() -> None:
    rig = Rig(model={"source": "hf://owner/name"})
    rig.pods.answers["model_config"] = {"model_type": "llama"}
    rig.serve("chat-1")
    assert rig.step()[1].config == {"model_type": "llama"}
    rig.pods.answers["model_config"] = {"model_type": "gpt2"}
    assert rig.step()[1].config == {"model_type": "llama"}, "a model does not change"
    other: Object = {"model": {"source": "hf://owner/other"}}
    rig.put(RESOURCE, resource_body(**other))
    assert rig.step()[1].config == {"model_type": "gpt2"}
    rig.pods.answers["model_config"] = None
    rig.put(RESOURCE, resource_body(**other, engine={"dtype": "float32"}))
    assert rig.step()[1].config == {"model_type": "gpt2"}
    rig.put(RESOURCE, resource_body(model={"source": "hf://owner/other", "revision": "v1"}))
    assert rig.step()[1].config is None


def test_a_canary_that_failed_is_asked_for_again_without_being_due() -> None:
    """What is due keeps a pod from counting as ready; its failure says more."""
    rig = Rig()
    rig.serve("chat-1")
    assert rig.step()[1].canaries_due == {"uid-of-chat-1"}
    rig.send_canaries()
    assert rig.step()[1].canaries_due == frozenset()
    assert rig.due == [(KEY, "uid-of-chat-1")]
