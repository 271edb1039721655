"""Status, scaling and rollout as functions: what they report, when it changes, and who decides the
count.
"""

import copy
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fairlead_operator.decide.children.manifests import SURGE, render
from fairlead_operator.decide.pods import drains
from fairlead_operator.decide.pods.blockers import blocker
from fairlead_operator.decide.pods.load import Load, Sample, ServedRequests
from fairlead_operator.decide.pods.observed import Snapshot
from fairlead_operator.decide.pods.probe_results import ProbeResults
from fairlead_operator.decide.scale.autoscale import TICK
from fairlead_operator.decide.scale.scaling import (
    LOAD_SECONDS,
    Scaling,
    load_of,
    scale,
    supply_of,
)
from fairlead_operator.decide.scale.state import ScalingMemory, awaits_probes
from fairlead_operator.decide.status import (
    Capacity,
    Findings,
    invalid_status,
    is_progress,
    status_of,
)
from fairlead_operator.memory import Memory
from fairlead_operator.resource.resource import InferenceDeployment
from fairlead_operator.resource.settings import Settings
from fairlead_runtime.sizing.traffic import public_connections
from support.operator_bodies import (
    Object,
    deployment,
    pod,
    resource,
    resource_body,
    unscheduled,
)

NOW = datetime(2026, 1, 1, 0, 10, tzinfo=UTC)
GPU: Object = {"resources": {"accelerator": {"count": 1}}}
SCALED: Object = {"autoscaling": {"minReplicas": 1, "maxReplicas": 8, "targetPerReplica": 10}}


def seen(*pods: Object, live: Object | None = None, quotas: tuple[Object, ...] = ()) -> Snapshot:
    ready = [
        {"conditions": {"ready": True}, "targetRef": {"uid": p["metadata"]["uid"]}}
        for p in pods
        if any(c["type"] == "Ready" for c in p["status"]["conditions"])
    ]
    children = (live,) if live else ()
    return Snapshot(children, pods, ({"endpoints": ready},), quotas, ())


def findings(**given: Any) -> Findings:
    return Findings(
        **{"desired": 1, "revision": "new", "strategy": "Surge", "rollout_message": "", **given}
    )


def conditions(status: Object) -> dict[str, tuple[str, str]]:
    return {c["type"]: (c["status"], c["reason"]) for c in status["conditions"]}


def canaries(*pods: Object) -> frozenset[str]:
    return frozenset(p["metadata"]["uid"] for p in pods)


def test_ready_needs_an_endpoint_of_the_current_revision_and_a_token() -> None:
    new, old = pod(ready=True), pod("chat-0", revision="old", ready=True)
    both = status_of(resource(), seen(new), findings(canaries=canaries(new)), {}, NOW)
    assert conditions(both)["Ready"] == ("True", "Serving")
    no_token = status_of(resource(), seen(new), findings(), {}, NOW)
    assert conditions(no_token)["Ready"][0] == "False"
    stale = status_of(resource(), seen(old), findings(canaries=canaries(old)), {}, NOW)
    assert conditions(stale)["Ready"][0] == "False", "old pods being up is not Ready"
    assert conditions(stale)["Available"][0] == "True"
    no_endpoints = Snapshot((), (new,), (), (), ())
    unlisted = status_of(resource(), no_endpoints, findings(canaries=canaries(new)), {}, NOW)
    assert conditions(unlisted)["Ready"][0] == "False"


def test_the_first_blocker_is_readys_reason_with_its_hint() -> None:
    why = [
        blocker("QuotaExceeded", "Deployment/chat", "exceeded quota: q"),
        blocker("Starting", "Pod/x", "m"),
    ]
    status = status_of(resource(), seen(), findings(blockers=why), {}, NOW)
    ready = next(c for c in status["conditions"] if c["type"] == "Ready")
    assert ready["reason"] == "QuotaExceeded"
    assert ready["message"].startswith("exceeded quota: q (Free some")
    assert [b["code"] for b in status["blockers"]] == ["QuotaExceeded", "Starting"]


def test_times_say_since_when_and_equal_knowledge_gives_an_equal_status() -> None:
    why = [blocker("Starting", "Pod/chat-1", "the model is loaded")]
    first = status_of(resource(), seen(pod()), findings(blockers=why), {}, NOW)
    later = status_of(
        resource(), seen(pod()), findings(blockers=why), first, NOW + timedelta(minutes=5)
    )
    assert later == first
    one = pod(ready=True)
    over = status_of(
        resource(), seen(one), findings(canaries=canaries(one)), first, NOW + timedelta(minutes=6)
    )
    since = {c["type"]: c["lastTransitionTime"] for c in over["conditions"]}
    assert since["Ready"] == "2026-01-01T00:16:00Z"
    assert since["Planned"] == "2026-01-01T00:10:00Z"


def test_trust_in_a_models_own_code_is_seen_on_the_resource_and_on_every_object() -> None:
    trusting, plain = resource(model={"trustRemoteCode": True}), resource()
    status = status_of(trusting, seen(), findings(), {}, NOW)
    assert conditions(status)["RemoteCode"] == ("True", "Trusted")
    assert "RemoteCode" not in conditions(status_of(plain, seen(), findings(), {}, NOW))
    for one, label in ((trusting, "trusted"), (plain, None)):
        objects = render(one, Settings(runtime_image="registry.test/r:1"), 1, SURGE)
        pods = [o["spec"]["template"] for o in objects if o["kind"] == "Deployment"]
        values = [
            o["metadata"]["labels"].get("serving.fairlead.dev/remote-code")
            for o in (*objects, *pods)
        ]
        assert values == [label] * len(values)


def test_fields_of_a_newer_definition_are_ignored_in_the_cluster_and_named() -> None:
    newer = resource_body(
        engine={"dtype": "float32", "lookahead": 7, "cudaGraphs": {"lazy": True}},
        tracing={"rate": 1},
        podTemplate={"tolerations": [{"operator": "Exists", "weight": 1}]},
    )
    parsed = InferenceDeployment.from_body(newer, stored=True)
    assert parsed.engine.dtype == "float32"
    names = ("tracing", "podTemplate.tolerations[0].weight", "engine.lookahead")
    assert parsed.unknown == tuple(f"spec.{n}" for n in (*names, "engine.cudaGraphs.lazy"))
    status = status_of(parsed, seen(), findings(), {}, NOW)
    assert conditions(status)["SpecUnderstood"] == ("False", "UnknownFields")
    assert "spec.engine.lookahead" in str(status["conditions"])
    assert "SpecUnderstood" not in conditions(status_of(resource(), seen(), findings(), {}, NOW))


def test_counts_tell_new_old_ready_and_draining_pods_apart() -> None:
    pods = [
        pod(ready=True),
        pod("chat-2"),
        pod("chat-3", revision="old", ready=True),
        pod("chat-4", deleting=True),
    ]
    status = status_of(resource(), seen(*pods), findings(desired=3), {}, NOW)
    counts = {
        k: status[k]
        for k in (
            "replicas",
            "readyReplicas",
            "updatedReplicas",
            "drainingReplicas",
            "desiredReplicas",
        )
    }
    assert counts == {
        "replicas": 3,
        "readyReplicas": 2,
        "updatedReplicas": 2,
        "drainingReplicas": 1,
        "desiredReplicas": 3,
    }
    assert status["rollout"]["phase"] == "Rolling"


@pytest.mark.parametrize(
    ("capacity", "wanted"),
    [
        (Capacity(), ("Unknown", "ConfigUnavailable")),
        (Capacity({"fits": True, "message": "m"}), ("True", "Fits")),
        (Capacity({"fits": False, "message": "m"}), ("False", "DoesNotFit")),
        (
            Capacity({"measured": {"numBlocks": 7}}, "AcceleratorMemoryUnknown", "m"),
            ("Unknown", "AcceleratorMemoryUnknown"),
        ),
    ],
)
def test_planned_follows_the_capacity(capacity: Capacity, wanted: tuple[str, str]) -> None:
    status = status_of(resource(), seen(), findings(capacity=capacity), {}, NOW)
    assert conditions(status)["Planned"] == wanted


def ended(message: str, *, deleted: bool = True) -> Object:
    body = pod("chat-7")
    body["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleted else {}
    body["status"]["containerStatuses"] = [
        {"name": "runtime", "state": {"terminated": {"exitCode": 0, "message": message}}}
    ]
    return body


def test_what_a_pod_drained_is_counted_once_and_for_the_revision_of_its_time() -> None:
    line = '{"code": "Drained", "message": "m", "hint": "", "finished": 3, "aborted": 1}\n'
    found = drains.read(ended(line))
    assert found == (3, 1)
    counts = drains.DrainCounts.of_status(
        {"targetRevision": "new", "rollout": {"drained": 4, "aborted": 0}}
    )
    counts = counts.plus("a", found).plus("a", found).since("new")
    assert counts.total == (7, 1)
    rollout = status_of(resource(), seen(), findings(drained=counts.total), {}, NOW)["rollout"]
    assert (rollout["drained"], rollout["aborted"]) == (7, 1)
    counts = counts.since("newer")
    assert counts.total == (0, 0)
    counts = counts.plus("a", found)
    assert counts.total == (0, 0), "the pod was counted for its revision"
    counts = counts.plus("b", found).of_pods(frozenset())
    assert (counts.total, counts.pods) == ((3, 1), frozenset())


@pytest.mark.parametrize(
    "body",
    [
        ended('{"code": "Drained", "finished": 1, "aborted": 0}', deleted=False),
        ended('{"code": "Drained", "finished": -1, "aborted": 0}'),
        ended('{"code": "Drained", "finished": true, "aborted": 0}'),
        ended('{"code": "Drained", "finished": 1e99, "aborted": 0}'),
        ended('{"code": "Drained", "finished": 1}'),
        ended('{"code": "BadWeights", "finished": 1, "aborted": 0}'),
        ended("[1]"),
        ended("killed"),
        ended(""),
        pod("chat-8"),
    ],
)
def test_only_a_runtimes_own_drain_report_is_counted(body: Object) -> None:
    assert drains.read(body) is None


def test_a_resource_with_an_invalid_spec_keeps_its_previous_status() -> None:
    before = status_of(resource(), seen(pod(ready=True)), findings(), {}, NOW)
    status = invalid_status(
        2, blocker("InvalidSpec", "InferenceDeployment/chat", "spec.x: no such field"), before, NOW
    )
    assert status["readyReplicas"] == 1
    assert conditions(status) == {"Ready": ("False", "InvalidSpec")}


# -- who decides the count


FIRST = ScalingMemory.first({}, -100.0)
NOTHING = ProbeResults()


def loaded(running: float, waiting: float, at: float = 100.0) -> ProbeResults:
    """The results of a pod with this load."""
    return ProbeResults(samples={"uid-of-chat-1": Sample(Load(running, waiting), at)})


def scaled(
    live: Object | None,
    clock: float,
    *pods: Object,
    memory: ScalingMemory = FIRST,
    results: ProbeResults = NOTHING,
    **spec: Any,
) -> Scaling:
    return scale(resource(**spec), seen(*pods, live=live), memory, results, 0, NOW, clock)


def test_without_autoscaling_or_with_an_external_one_the_spec_decides() -> None:
    live = deployment(replicas=5)
    assert scaled(live, 0.0, replicas=3).replicas == 3
    external: Object = {"autoscaling": {"managedBy": "external"}, "replicas": 4}
    assert scaled(live, 0.0, **external).replicas == 4


def test_the_count_starts_at_the_specs_clamped_and_then_lives_in_the_deployment() -> None:
    assert scaled(None, 0.0, replicas=20, **SCALED).replicas == 8
    assert scaled(deployment(replicas=3), 0.0, replicas=20, **SCALED).replicas == 3
    assert scaled(deployment(replicas=0), 0.0, replicas=20, **SCALED).replicas == 1


def test_a_deleted_deployment_returns_with_the_count_it_had() -> None:
    one, results = pod(ready=True), loaded(10, 25)
    first = scaled(deployment(replicas=1), 100.0, one, results=results, **SCALED)
    assert scaled(None, 101.0, memory=first.memory, replicas=1, **SCALED).replicas == 4
    restarted = ScalingMemory.first({"autoscaling": first.status}, 200.0)
    assert scaled(None, 201.0, memory=restarted, replicas=1, **SCALED).replicas == 4


def test_between_ticks_nothing_is_decided_however_often_a_pass_runs() -> None:
    one, results = pod(ready=True), loaded(10, 25)
    first = scaled(deployment(replicas=1), 100.0, one, results=results, **SCALED)
    assert first.replicas == 4
    assert first.status is not None
    assert first.status["limitedBy"] == ""
    again = scaled(
        deployment(replicas=4), 101.0, one, memory=first.memory, results=results, **SCALED
    )
    assert again.replicas == 4
    assert len(again.memory.history.raws) == 1
    later = scaled(
        deployment(replicas=4), 100.0 + TICK, one, memory=again.memory, results=results, **SCALED
    )
    assert len(later.memory.history.raws) == 2


def test_a_decision_changes_nothing_that_it_was_given() -> None:
    one, memory, results = pod(ready=True), ScalingMemory.first({}, -100.0), loaded(10, 25)
    body = seen(one, live=deployment(replicas=1))
    before = copy.deepcopy((memory, results, body))
    first = scale(resource(**SCALED), body, memory, results, 0, NOW, 100.0)
    assert (memory, results, body) == before
    assert scale(resource(**SCALED), body, memory, results, 0, NOW, 100.0) == first


def test_without_data_it_holds_and_the_condition_says_so() -> None:
    held = scaled(deployment(replicas=3), 100.0, pod(ready=True), **SCALED)
    assert held.replicas == 3
    assert held.condition[:2] == ("False", "StaleMetrics")


def test_the_typical_request_is_measured_by_the_pods_and_kept_when_they_are_replaced() -> None:
    one = pod(ready=True)
    sample = Sample(Load(10, 0), 100.0, ServedRequests(200, 200 * 512))
    old = ProbeResults(samples={"uid-of-chat-1": sample})
    body, spec = seen(one, live=deployment(replicas=1)), resource(autoscaling={})
    first = scale(spec, body, FIRST, old, 10_240, NOW, 100.0)
    later = scale(spec, body, first.memory, loaded(10, 0, 110.0), 10_240, NOW, 110.0)
    assert first.memory.typical == later.memory.typical == 512
    entry = (first.status or {})["decisions"][0]
    assert (entry["target"], entry["typicalFrom"]) == (16, "measured")


def test_a_pod_that_is_full_up_to_its_safety_margin_asks_for_another() -> None:
    """Of 100 typical requests that its tokens hold, 80 start; 16 wait, and it refuses the next."""
    spec = resource(autoscaling={"targetPerReplica": 120}, scheduler={"maxQueue": 16})
    body = seen(pod(ready=True), live=deployment(replicas=1))
    assert scale(spec, body, FIRST, loaded(80, 16), 102_400, NOW, 100.0).replicas == 2


@pytest.mark.parametrize("queue", [1, 1024])
@pytest.mark.parametrize("target", [None, 4096, 100_000])
@pytest.mark.parametrize("tokens", [0, 10_000_000])
@pytest.mark.parametrize("connections", [0, 2048])
def test_a_full_pod_of_many_requests_asks_for_another(
    queue: int, target: int | None, tokens: int, connections: int
) -> None:
    """One choice a request, so no pod has more requests than connections."""
    scheduler = {"maxRequests": 4096, "maxQueue": queue}
    spec = resource(autoscaling={"targetPerReplica": target}, scheduler=scheduler)
    takes = connections or public_connections(spec.engine).most
    full = loaded(min(takes, 4096), max(0, min(takes - 4096, queue)))
    body = seen(pod(ready=True), live=deployment(replicas=1))
    assert scale(spec, body, FIRST, full, tokens, NOW, 100.0, connections).replicas > 1


def test_a_target_that_no_pod_reaches_is_lowered_and_the_decision_says_so() -> None:
    spec = resource(autoscaling={"targetPerReplica": 5000})
    body = seen(pod(ready=True), live=deployment(replicas=1))
    first = scale(spec, body, FIRST, loaded(256, 1024), 0, NOW, 100.0)
    entry = (first.status or {})["decisions"][0]
    assert entry["target"] == 1105.4
    assert "0.95 of the 1280 requests that a pod takes at most ÷ 1.1" in entry["why"]


def test_a_paused_resource_decides_nothing() -> None:
    live, one = deployment(replicas=2), pod(ready=True)
    results = loaded(10, 900)
    assert scaled(live, 100.0, one, results=results, paused=True, **SCALED).replicas == 2


def test_a_change_of_owner_and_a_scale_without_effect_get_events() -> None:
    memory = FIRST

    def events(count: int, clock: float, **spec: Any) -> list[tuple[str, str]]:
        nonlocal memory
        result = scaled(deployment(replicas=count), clock, memory=memory, **spec)
        memory = result.memory
        return [(note.reason, note.message) for note in result.events]

    assert events(2, 0.0, replicas=2) == []
    ((reason, message),) = events(2, 10.0, replicas=2, **SCALED)
    assert reason == "ScalingTakenOver"
    assert "from the 2 existing pods; spec.replicas (2)" in message
    ((reason, message),) = events(2, 20.0, replicas=6, **SCALED)
    assert reason == "ScaleIgnored"
    assert message.startswith(
        "spec.replicas 2 → 6 has no effect while spec.autoscaling is set: set autoscaling."
    )
    assert events(5, 30.0, replicas=6) == [
        ("ScalingHandedOver", "5 → 6 pods: autoscaling is off, spec.replicas counts")
    ]
    assert events(6, 40.0, replicas=6) == []


def test_a_decision_that_changes_the_count_gets_an_event_with_its_reason() -> None:
    one, results = pod(ready=True), loaded(0, 900)
    result = scaled(deployment(replicas=1), 100.0, one, results=results, **SCALED)
    (note,) = result.events
    assert (note.reason, note.kind) == ("ScaledUp", "Normal")
    assert note.message.startswith(f"1 → {result.replicas} pods: 900 requests at ")


def test_pods_that_crash_or_are_late_are_not_supply() -> None:
    crashing = pod("chat-2", container={"name": "runtime", "restartCount": 5})
    waiting = pod("chat-3", conditions=unscheduled("Insufficient nvidia.com/gpu"))
    now = datetime(2026, 1, 1, 0, 0, 30, tzinfo=UTC)
    supply = supply_of(seen(pod(ready=True), crashing, waiting, pod("chat-4")), 4, 60.0, now)
    assert (len(supply.ready), supply.starting) == (1, 2), "one that waits for a node counts"
    late = supply_of(seen(waiting, pod("chat-4")), 2, 60.0, now + timedelta(minutes=2))
    assert late.starting == 0


RUNS: Object = {"name": "runtime", "state": {"running": {}}}


def test_a_running_pod_past_its_start_is_demand_ready_or_not() -> None:
    hanging = pod("chat-2", container={**RUNS, "started": True})
    loading = pod("chat-3", container={**RUNS, "started": False})
    ended = pod("chat-4", container={"name": "runtime", "state": {"waiting": {}}})
    leaving = pod("chat-5", ready=True, deleting=True)
    now = datetime(2026, 1, 1, 0, 0, 30, tzinfo=UTC)
    body = seen(pod(ready=True), hanging, loading, ended, leaving)
    supply = supply_of(body, 4, 60.0, now)
    assert (supply.ready, supply.unready) == (("uid-of-chat-1",), ("uid-of-chat-2",))
    assert (supply.starting, supply.pods) == (2, 3)
    names = [p["metadata"]["name"] for p in body.running_pods()]
    assert names == ["chat-1", "chat-2", "chat-3"], "each is scraped"


def test_full_pods_that_are_not_ready_grow_the_fleet() -> None:
    full = pod(container={**RUNS, "started": True})
    result = scaled(deployment(replicas=1), 100.0, full, results=loaded(256, 1024), **SCALED)
    assert (result.replicas, result.condition[1]) == (5, "Deciding")


def test_the_load_in_the_status_moves_rarely_and_only_by_much() -> None:
    written = float("-inf")

    def at(clock: float, running: float, waiting: float, before: Object) -> Any:
        nonlocal written
        results = loaded(running, waiting, clock)
        load, written = load_of(results, written, [pod(ready=True)], before, clock)
        return load

    first = at(100, 10, 0, {})
    assert first == {"running": 10, "waiting": 0}
    assert at(101, 90, 9, {"load": first}) == first, "too soon"
    assert at(101 + LOAD_SECONDS, 11, 0, {"load": first}) == first, "too little"
    moved = at(102 + LOAD_SECONDS, 12, 3, {"load": first})
    assert moved == {"running": 12, "waiting": 3}
    assert at(200 + LOAD_SECONDS, 0, 0, {"load": {"running": 1, "waiting": 0}}) == {
        "running": 0,
        "waiting": 0,
    }


def test_a_pod_that_does_not_answer_counts_with_its_last_load() -> None:
    silent, answering = Sample(Load(20, 0), 100), Sample(Load(10, 0), 200)
    results = ProbeResults(samples={"uid-of-chat-1": silent, "uid-of-chat-2": answering})
    pods = [pod(ready=True), pod("chat-2", ready=True)]
    before = {"load": {"running": 1, "waiting": 0}}
    assert load_of(results, 0, pods, before, 200)[0] == {"running": 30, "waiting": 0}
    assert load_of(results, 0, pods, before, 300)[0] == before["load"], "both are silent"


START: Object = {
    "observedGeneration": 1,
    "readyReplicas": 1,
    "desiredReplicas": 2,
    "targetRevision": "new",
    "rollout": {"phase": "Rolling", "strategyChosen": "Surge", "drained": 0},
    "blockers": [{"code": "RollingOut", "object": "", "message": "wait"}],
    "conditions": [{"type": "Ready", "status": "True", "reason": "Serving", "message": "1 of 2"}],
    "autoscaling": {"desired": 2, "supply": 1, "limitedBy": ""},
}
STEPS: list[Object] = [
    {"readyReplicas": 2, "replicas": 3, "updatedReplicas": 1, "drainingReplicas": 1},
    {"currentRevision": "new", "startup": {"weights": 1.5}},
    {"rollout": {**START["rollout"], "drained": 7, "aborted": 1}},
    {"blockers": [{"code": "Starting", "object": "Pod/chat-2", "message": "loads"}]},
    {"blockers": []},
    {"conditions": [{**START["conditions"][0], "message": "2 of 2"}]},
    {"autoscaling": {"desired": 2, "supply": 2, "limitedBy": "windowFilling"}},
]
MILESTONES: list[Object] = [
    {"observedGeneration": 2},
    {"desiredReplicas": 3},
    {"targetRevision": "newer"},
    {"rollout": {**START["rollout"], "phase": "Complete"}},
    {"rollout": {**START["rollout"], "strategyChosen": "OneByOne"}},
    {"blockers": [*START["blockers"], {"code": "CrashLoop", "object": "Pod/chat-2"}]},
    {"conditions": [{**START["conditions"][0], "status": "False"}]},
    {"conditions": [{**START["conditions"][0], "observedGeneration": 2}]},
    {"autoscaling": {"desired": 3, "supply": 1, "limitedBy": ""}},
    {"load": {"running": 1, "waiting": 0}},
    {"capacity": {"fits": False}},
    {"aFieldOfALaterRelease": 1},
]


@pytest.mark.parametrize(
    ("change", "expected"), [(s, True) for s in STEPS] + [(m, False) for m in MILESTONES]
)
def test_what_each_step_of_a_rollout_changes_is_told_from_its_milestones(
    change: Object, *, expected: bool
) -> None:
    assert is_progress(START, START | change) is expected


def test_a_recreated_resource_starts_with_no_memory() -> None:
    memory: Memory[str] = Memory()
    memory.put(("ns", "chat"), "1", "value")
    assert memory.get(("ns", "chat"), "1") == "value"
    assert memory.get(("ns", "chat"), "2") is None
    memory.forget(("ns", "chat"))
    assert memory.get(("ns", "chat"), "1") is None


def test_an_operator_that_has_just_started_waits_for_its_first_probes_for_a_while() -> None:
    status = {"desired": 3, "decisions": [{"to": 3}]}
    memory = ScalingMemory.first({"autoscaling": status}, 100.0)
    assert memory.status == status, "taken over"
    waits = [awaits_probes(memory, NOTHING, at) for at in (100.0, 112.9, 113.0)]
    assert waits == [True, True, False]
    early = scaled(deployment(replicas=3), 101.0, memory=memory, **SCALED)
    assert (early.replicas, early.status) == (3, status), "nothing is decided from nothing"
    assert not awaits_probes(memory, ProbeResults(complete=True), 101.0)
    asked = ProbeResults(complete=True, canaries_due=frozenset({"uid-of-chat-1"}))
    assert awaits_probes(memory, asked, 101.0), "a canary waits behind the pod's requests"
