"""Status, scaling and rollout as functions: what they report, when it changes, and who decides the
count.
"""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fairlead_operator.decide.children.manifests import render
from fairlead_operator.decide.children.rollout import choose
from fairlead_operator.decide.pods import drains
from fairlead_operator.decide.pods.blockers import blocker
from fairlead_operator.decide.pods.load import Load, Sample
from fairlead_operator.decide.pods.observed import Observed
from fairlead_operator.decide.scale.autoscale import TICK
from fairlead_operator.decide.scale.scaling import LOAD_SECONDS, load_of, scale, supply_of
from fairlead_operator.decide.scale.state import Known, Memory
from fairlead_operator.decide.status import Capacity, Findings, invalid, status_of
from fairlead_operator.resource.settings import Settings
from support.operator_bodies import Object, deployment, pod, resource, unscheduled

NOW = datetime(2026, 1, 1, 0, 10, tzinfo=UTC)
GPU: Object = {"resources": {"accelerator": {"count": 1}}}
SCALED: Object = {"autoscaling": {"minReplicas": 1, "maxReplicas": 8, "targetPerReplica": 10}}


def seen(*pods: Object, live: Object | None = None, quotas: tuple[Object, ...] = ()) -> Observed:
    ready = [
        {"conditions": {"ready": True}, "targetRef": {"uid": p["metadata"]["uid"]}}
        for p in pods
        if any(c["type"] == "Ready" for c in p["status"]["conditions"])
    ]
    children = (live,) if live else ()
    return Observed(children, pods, ({"endpoints": ready},), quotas, ())


def findings(**given: Any) -> Findings:
    return Findings(**{"desired": 1, "revision": "new", "strategy": "Surge", "why": "", **given})


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
    no_endpoints = Observed((), (new,), (), (), ())
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
        objects = render(one, Settings(runtime_image="registry.test/r:1"), 1, "Surge")
        pods = [o["spec"]["template"] for o in objects if o["kind"] == "Deployment"]
        values = [
            o["metadata"]["labels"].get("serving.fairlead.dev/remote-code")
            for o in (*objects, *pods)
        ]
        assert values == [label] * len(values)


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
    counts = drains.read(ended(line))
    assert counts == (3, 1)
    known = Known("uid-1")
    known.begin({"targetRevision": "new", "rollout": {"drained": 4, "aborted": 0}}, 0.0)
    known.end("a", counts)
    known.end("a", counts)
    assert known.drained_since("new") == (7, 1)
    rollout = status_of(resource(), seen(), findings(drained=known.drained_since("new")), {}, NOW)[
        "rollout"
    ]
    assert (rollout["drained"], rollout["aborted"]) == (7, 1)
    assert known.drained_since("newer") == (0, 0)
    known.end("b", counts)
    assert known.drained_since("newer") == (3, 1)


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
    status = invalid(
        2, blocker("InvalidSpec", "InferenceDeployment/chat", "spec.x: no such field"), before, NOW
    )
    assert status["readyReplicas"] == 1
    assert conditions(status) == {"Ready": ("False", "InvalidSpec")}


# -- who decides the count


def scaled(known: Known, live: Object | None, clock: float, *pods: Object, **spec: Any) -> Any:
    return scale(resource(**spec), seen(*pods, live=live), known, None, NOW, clock)


def test_without_autoscaling_or_with_an_external_one_the_spec_decides() -> None:
    live = deployment(replicas=5)
    assert scaled(Known("u"), live, 0.0, replicas=3).replicas == 3
    external = {"autoscaling": {"managedBy": "external"}, "replicas": 4}
    assert scaled(Known("u"), live, 0.0, **external).replicas == 4


def test_the_count_starts_at_the_specs_clamped_and_then_lives_in_the_deployment() -> None:
    assert scaled(Known("u"), None, 0.0, replicas=20, **SCALED).replicas == 8
    assert scaled(Known("u"), deployment(replicas=3), 0.0, replicas=20, **SCALED).replicas == 3
    assert scaled(Known("u"), deployment(replicas=0), 0.0, replicas=20, **SCALED).replicas == 1


def test_between_ticks_nothing_is_decided_however_often_a_pass_runs() -> None:
    known, one = Known("u"), pod(ready=True)
    known.samples[one["metadata"]["uid"]] = Sample(Load(10, 25), 100.0)
    first = scaled(known, deployment(replicas=1), 100.0, one, **SCALED)
    assert first.replicas == 4
    assert first.status["limitedBy"] == ""
    again = scaled(known, deployment(replicas=4), 101.0, one, **SCALED)
    assert again.replicas == 4
    assert len(known.history.raws) == 1
    scaled(known, deployment(replicas=4), 100.0 + TICK, one, **SCALED)
    assert len(known.history.raws) == 2


def test_without_data_it_holds_and_the_condition_says_so() -> None:
    known, one = Known("u"), pod(ready=True)
    scaling = scaled(known, deployment(replicas=3), 100.0, one, **SCALED)
    assert scaling.replicas == 3
    assert scaling.condition[:2] == ("False", "StaleMetrics")


def test_a_paused_resource_decides_nothing() -> None:
    known, one = Known("u"), pod(ready=True)
    known.samples[one["metadata"]["uid"]] = Sample(Load(10, 900), 100.0)
    assert scaled(known, deployment(replicas=2), 100.0, one, paused=True, **SCALED).replicas == 2


def test_a_change_of_owner_and_a_scale_without_effect_get_events() -> None:
    known = Known("u")

    def new_events() -> list[tuple[str, str]]:
        notes, known.untold = known.untold, []
        return [(note.reason, note.message) for note in notes]

    scaled(known, deployment(replicas=2), 0.0, replicas=2)
    scaled(known, deployment(replicas=2), 10.0, replicas=2, **SCALED)
    ((reason, message),) = new_events()
    assert reason == "ScalingTakenOver"
    assert "from the 2 pods there are; spec.replicas (2)" in message
    scaled(known, deployment(replicas=2), 20.0, replicas=6, **SCALED)
    ((reason, message),) = new_events()
    assert reason == "ScaleIgnored"
    assert message.startswith(
        "spec.replicas 2 → 6 has no effect while spec.autoscaling is set: set autoscaling."
    )
    scaled(known, deployment(replicas=5), 30.0, replicas=6)
    assert new_events() == [
        ("ScalingHandedOver", "5 → 6 pods: autoscaling is off, spec.replicas counts")
    ]
    scaled(known, deployment(replicas=6), 40.0, replicas=6)
    assert new_events() == []


def test_a_decision_that_changes_the_count_gets_an_event_with_its_reason() -> None:
    known, one = Known("u"), pod(ready=True)
    known.samples[one["metadata"]["uid"]] = Sample(Load(0, 900), 100.0)
    result = scaled(known, deployment(replicas=1), 100.0, one, **SCALED)
    (note,) = known.untold
    assert (note.reason, note.kind) == ("ScaledUp", "Normal")
    assert note.message.startswith(f"1 → {result.replicas} pods: 900 requests at ")


def test_pods_that_crash_or_are_late_are_not_supply() -> None:
    crashing = pod("chat-2", container={"name": "runtime", "restartCount": 5})
    waiting = pod("chat-3", conditions=unscheduled("Insufficient nvidia.com/gpu"))
    now = datetime(2026, 1, 1, 0, 0, 30, tzinfo=UTC)
    supply = supply_of(seen(pod(ready=True), crashing, waiting, pod("chat-4")), 4, 60.0, now)
    assert (len(supply.ready), supply.starting, supply.unschedulable) == (1, 2, 1)
    late = supply_of(seen(pod("chat-4")), 1, 60.0, now + timedelta(minutes=2))
    assert late.starting == 0


def test_the_load_in_the_status_moves_rarely_and_only_by_much() -> None:
    known, one = Known("u"), pod(ready=True)

    def at(clock: float, running: float, waiting: float, before: Object) -> Any:
        known.samples[one["metadata"]["uid"]] = Sample(Load(running, waiting), clock)
        return load_of(known, [one], before, clock)

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


# -- surge or recreate


def quota(hard: str, used: str) -> Object:
    return {
        "status": {
            "hard": {"requests.nvidia.com/gpu": hard},
            "used": {"requests.nvidia.com/gpu": used},
        }
    }


def test_auto_recreates_where_the_quota_leaves_no_accelerator_and_says_why() -> None:
    full = seen(live=deployment("old"), quotas=(quota("4", "4"), quota("9", "1")))
    strategy, why = choose(resource(**GPU), full, "new", "")
    assert strategy == "Recreate"
    assert why == "the quota leaves 0 nvidia.com/gpu, a surge needs 1"
    free = seen(live=deployment("old"), quotas=(quota("4", "3"),))
    assert choose(resource(**GPU), free, "new", "")[0] == "Surge"


def test_auto_recreates_when_the_surge_pod_finds_no_accelerator_and_keeps_to_it() -> None:
    stuck = pod("chat-2", conditions=unscheduled("0/1 nodes: 1 Insufficient nvidia.com/gpu."))
    rolling = seen(pod(revision="old", ready=True), stuck, live=deployment("new"))
    assert choose(resource(**GPU), rolling, "new", "")[0] == "Recreate"
    after = seen(pod(ready=True), live=deployment("new", strategy="Recreate"))
    assert choose(resource(**GPU), after, "new", "because") == ("Recreate", "because")


def test_a_chosen_strategy_is_kept_and_a_cpu_always_surges() -> None:
    fixed = resource(rollout={"strategy": "Recreate"})
    assert choose(fixed, seen(), "new", "")[0] == "Recreate"
    assert choose(resource(), seen(quotas=(quota("0", "0"),)), "new", "")[0] == "Surge"


def test_a_recreated_resource_starts_with_no_memory() -> None:
    memory = Memory()
    memory.of(("ns", "chat"), "1").canaries.add("p")
    assert memory.of(("ns", "chat"), "1").canaries == {"p"}
    assert memory.of(("ns", "chat"), "2").canaries == set()


def test_a_started_operator_decides_nothing_until_it_asked_or_waited() -> None:
    known = Known("u")
    known.begin({"autoscaling": {"desired": 3, "decisions": [{"to": 3}]}}, 100.0)
    known.begin({"autoscaling": {"desired": 9}}, 101.0)
    assert known.autoscaled == {"desired": 3, "decisions": [{"to": 3}]}, "taken over once"
    assert [known.in_the_dark(at) for at in (100.0, 104.9, 105.0)] == [True, True, False]
    dark = scaled(known, deployment(replicas=3), 101.0, **SCALED)
    assert (dark.replicas, dark.status) == (3, known.autoscaled), "nothing is decided from nothing"
    known.asked = True
    assert not known.in_the_dark(101.0)
