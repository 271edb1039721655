"""How pods are replaced and whose turn it is: the choice and the turns as functions."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fairlead_operator.decide.children.podtemplate import Deadlines
from fairlead_operator.decide.children.rollout import ONE_BY_ONE, RECREATE, Choice, choose
from fairlead_operator.decide.children.upgrade import (
    DEFAULTS_MARK,
    TURN_MARK,
    Member,
    deadlines_of,
    decide_turn,
    member_of,
    spec_hash,
)
from fairlead_operator.decide.pods.observed import Snapshot
from support.operator_bodies import Object, deployment, event, pod, resource, unscheduled

NOW = datetime(2026, 1, 1, 0, 10, tzinfo=UTC)
GPU: Object = {"resources": {"accelerator": {"count": 1}}}
NO_ROOM = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."


def seen(*pods: Object, live: Object | None = None, **more: Any) -> Snapshot:
    parts: Any = {"slices": (), "quotas": (), "events": (), **more}
    return Snapshot(children=(live,) if live else (), pods=pods, **parts)


def quota(hard: str, used: str) -> Object:
    return {
        "status": {
            "hard": {"requests.nvidia.com/gpu": hard},
            "used": {"requests.nvidia.com/gpu": used},
        }
    }


def waiting(seconds: float, message: str = NO_ROOM) -> Object:
    since = (NOW - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
    (condition,) = unscheduled(message)
    return pod("chat-2", conditions=[{**condition, "lastTransitionTime": since}])


def rolling(*pods: Object, replicas: int = 4, **more: Any) -> Snapshot:
    old = pod(revision="old", ready=True)
    return seen(old, *pods, live=deployment("new", replicas=replicas), **more)


def chosen(found: Snapshot, status: Object | None = None, **spec: Any) -> Choice:
    replicas = 1 if found.deployment is None else found.deployment["spec"]["replicas"]
    return choose(resource(**{**GPU, **spec}), found, "new", replicas, status or {}, NOW)


def test_an_extra_pod_comes_first_and_gets_a_minute_to_find_room() -> None:
    for wait in (0, 59):
        choice = chosen(rolling(waiting(wait)))
        assert (choice.strategy, choice.replacement.max_surge) == ("Surge", 1)
    late = chosen(rolling(waiting(60)))
    assert late.strategy == "OneByOne"
    assert late.message == "pod chat-2 found no room for 60 s: one pod is replaced at a time"


def test_the_status_announces_the_fallback_before_it_happens() -> None:
    first = chosen(rolling(waiting(60)))
    assert first.announced_only
    assert first.replacement.max_surge == 1, "nothing has changed yet"
    status = {
        "targetRevision": "new",
        "rollout": {"strategyChosen": first.strategy, "why": first.message},
    }
    second = chosen(rolling(waiting(61)), status)
    assert (second.replacement, second.message) == (ONE_BY_ONE, first.message)
    room_again = chosen(rolling(pod(ready=True)), status)
    assert room_again.replacement == ONE_BY_ONE, "kept to the end of the rollout"
    done = seen(pod(ready=True), live=deployment("new"))
    assert chosen(done, status).strategy == "Surge"
    stale = chosen(rolling(waiting(61)), {**status, "targetRevision": "older"})
    assert stale.announced_only, "the next revision is announced anew"


def test_one_replica_without_room_is_named_an_interruption() -> None:
    assert "interrupts the service" in chosen(rolling(waiting(60), replicas=1)).message


def test_a_rollout_that_becomes_an_interruption_says_so_before_it_goes_on() -> None:
    first = chosen(rolling(waiting(60)))
    status: Object = {
        "targetRevision": "new",
        "rollout": {"strategyChosen": first.strategy, "why": first.message},
    }
    assert "one pod is replaced at a time" in first.message
    scaled = chosen(rolling(waiting(90), replicas=1), status)
    assert scaled.announced_only
    shortage = first.message.partition(": ")[0]
    assert scaled.message == f"{shortage}: this interrupts the service, it has one replica"
    status["rollout"]["why"] = scaled.message
    assert chosen(rolling(waiting(90), replicas=1), status).replacement == ONE_BY_ONE


def test_a_node_that_is_coming_is_waited_for() -> None:
    new = waiting(300)
    for reason in ("TriggeredScaleUp", "Nominated"):
        found = rolling(new, events=(event(new, reason, "pod triggered scale-up"),))
        assert chosen(found).strategy == "Surge"
        assert chosen(found, rollout={"progressDeadlineSeconds": 240}).strategy == "OneByOne"
    other = rolling(new, events=(event(new, "FailedScheduling", "no"),))
    assert chosen(other).strategy == "OneByOne"
    late = waiting(600)
    found = rolling(late, events=(event(late, "Nominated", "nominated"),))
    assert chosen(found).strategy == "OneByOne"


def test_fewer_old_pods_are_no_help_to_a_pod_that_fits_no_node() -> None:
    message = "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector."
    assert chosen(rolling(waiting(3600, message))).strategy == "Surge"


def test_old_pods_stay_where_no_node_has_what_the_new_ones_want() -> None:
    """The scheduler says on how many nodes no other pod's end would help."""
    told = (
        "0/2 nodes are available: 2 Insufficient example.com/npu. no new claims to deallocate, "
        "preemption: 0/2 nodes are available: {} Preemption is not helpful for scheduling."
    )
    assert chosen(rolling(waiting(3600, told.format("2")))).strategy == "Surge"
    one_is_full = told.format("1 No preemption victims found for incoming pod, 1")
    assert chosen(rolling(waiting(3600, one_is_full))).strategy == "OneByOne"
    other_order = told.format("1")[:-1] + ", 1 No preemption victims found for incoming pod."
    assert chosen(rolling(waiting(3600, other_order))).strategy == "OneByOne"


def test_a_quota_without_room_counts_at_once() -> None:
    full = seen(live=deployment("old"), quotas=(quota("4", "4"), quota("9", "1")))
    choice = chosen(full)
    assert choice.strategy == "OneByOne"
    assert choice.message.startswith("the quota leaves 0 nvidia.com/gpu, an extra pod needs 1")
    free = seen(live=deployment("old"), quotas=(quota("4", "3"),))
    assert chosen(free).strategy == "Surge"
    live = deployment("new")
    live["status"]["conditions"] = [
        {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: cpu"}
    ]
    refused = seen(pod(revision="old", ready=True), live=live)
    assert chosen(refused).strategy == "OneByOne"


def test_surge_waits_and_recreate_happens_only_where_asked_for() -> None:
    stuck = rolling(waiting(9999))
    assert chosen(stuck, rollout={"strategy": "Surge"}).strategy == "Surge"
    assert chosen(stuck, rollout={"strategy": "Recreate"}).replacement == RECREATE
    limits = chosen(rolling(), rollout={"maxSurge": 2, "maxUnavailable": 1}).replacement
    assert (limits.max_surge, limits.max_unavailable) == (2, 1)


def test_without_an_extra_pod_the_limits_are_the_spec_s_own() -> None:
    choice = chosen(rolling(), rollout={"maxSurge": 0, "maxUnavailable": 2})
    assert choice.strategy == "OneByOne"
    assert choice.message == "rollout.maxSurge is 0: 2 pods are replaced at a time"
    assert not choice.announced_only, "the next pass would come at once, for ever"
    assert choice.replacement.body()["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 2}


def test_once_the_spec_allows_an_extra_pod_none_is_taken_before_it_comes() -> None:
    first = chosen(rolling(), rollout={"maxSurge": 0, "maxUnavailable": 1})
    rollout = {"strategyChosen": first.strategy, "why": first.message}
    second = chosen(rolling(), {"targetRevision": "new", "rollout": rollout})
    assert (second.strategy, second.replacement.max_unavailable) == ("Surge", 0)


def test_what_the_user_asked_for_is_named_an_interruption_too() -> None:
    in_place = chosen(rolling(replicas=1), rollout={"maxSurge": 0, "maxUnavailable": 1})
    assert "interrupts the service" in in_place.message
    assert "interrupts the service" in chosen(rolling(), rollout={"strategy": "Recreate"}).message


def test_an_interruption_is_named_for_one_replica_alone() -> None:
    two = chosen(rolling(waiting(60), replicas=2))
    assert two.message.endswith(": one pod is replaced at a time")


def test_only_a_new_pod_that_stays_unscheduled_shows_a_shortage() -> None:
    scheduled = waiting(3600)
    scheduled["status"]["conditions"][0]["status"] = "True"
    deleting = waiting(3600)
    deleting["metadata"]["deletionTimestamp"] = "2026-01-01T00:01:00Z"
    old = waiting(3600)
    old["metadata"]["labels"]["serving.fairlead.dev/revision"] = "old"
    for one in (scheduled, deleting, old):
        assert chosen(rolling(one)).strategy == "Surge"


def test_a_pod_s_age_is_its_wait_where_its_condition_has_no_time() -> None:
    stuck = waiting(0)
    del stuck["status"]["conditions"][0]["lastTransitionTime"]
    assert chosen(rolling(stuck)).strategy == "OneByOne", "created ten minutes ago"
    del stuck["metadata"]["creationTimestamp"]
    assert chosen(rolling(stuck)).strategy == "Surge"


@pytest.mark.parametrize(
    ("kind", "status", "message"),
    [
        ("Progressing", "True", "exceeded quota: cpu"),
        ("ReplicaFailure", "False", "exceeded quota: cpu"),
        ("ReplicaFailure", "True", "violates PodSecurity restricted"),
    ],
)
def test_only_a_quota_s_refusal_is_a_shortage(kind: str, status: str, message: str) -> None:
    live = deployment("new")
    live["status"]["conditions"] = [{"type": kind, "status": status, "message": message}]
    assert chosen(seen(pod(revision="old", ready=True), live=live)).strategy == "Surge"


def test_a_refusal_of_the_last_revision_says_nothing_of_the_next() -> None:
    live = deployment("old")
    refusal = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: cpu"}
    live["status"]["conditions"] = [refusal]
    assert chosen(seen(pod(revision="old", ready=True), live=live)).strategy == "Surge"


def test_quotas_that_do_not_limit_the_accelerator_or_are_not_needed_say_nothing() -> None:
    other: Object = {"status": {"hard": {"requests.cpu": "1"}, "used": {"requests.cpu": "1"}}}
    unused: Object = {"status": {"hard": {"requests.nvidia.com/gpu": "1"}}}
    for quotas in ((), (other,), (unused,), ({},)):
        assert chosen(seen(live=deployment("old"), quotas=quotas)).strategy == "Surge"
    full = quota("0", "0")
    found = seen(live=deployment("old"), quotas=(full,))
    assert chosen(found).strategy == "OneByOne"
    on_cpu: Object = {"resources": {"accelerator": {"count": 0}}}
    assert choose(resource(**on_cpu), found, "new", 1, {}, NOW).strategy == "Surge"
    taken = seen(pod(revision="old", ready=True), live=deployment("new"), quotas=(full,))
    assert chosen(taken).strategy == "Surge", "the extra pod is there and holds what is used"


def test_a_quota_that_cannot_be_read_is_no_limit_known() -> None:
    huge = quota("1e5000", "0")
    assert chosen(seen(live=deployment("old"), quotas=(huge,))).strategy == "Surge"
    found = seen(live=deployment("old"), quotas=(huge, quota("1", "1")))
    assert chosen(found).strategy == "OneByOne"


def by_class(operator: str, *values: str) -> Object:
    """A quota's scopes: pods with a priority class of these values."""
    scope: Object = {"scopeName": "PriorityClass", "operator": operator, "values": list(values)}
    return {"scopeSelector": {"matchExpressions": [scope]}}


@pytest.mark.parametrize(
    ("scopes", "own", "strategy"),
    [
        ({}, "", "OneByOne"),
        ({"scopes": ["NotTerminating", "NotBestEffort"]}, "", "OneByOne"),
        ({"scopes": ["NotTerminating", "BestEffort"]}, "", "Surge"),
        ({"scopes": ["Terminating"]}, "", "Surge"),
        ({"scopes": ["CrossNamespacePodAffinity"]}, "", "Surge"),
        ({"scopes": ["PriorityClass"]}, "", "Surge"),
        ({"scopes": ["PriorityClass"]}, "batch", "OneByOne"),
        (by_class("In", "batch"), "", "Surge"),
        (by_class("In", "batch", "web"), "web", "OneByOne"),
        (by_class("NotIn", "batch"), "", "OneByOne"),
        (by_class("NotIn", "batch"), "batch", "Surge"),
        (by_class("NotIn", "batch"), "web", "OneByOne"),
        (by_class("Exists"), "", "Surge"),
        (by_class("Exists"), "batch", "OneByOne"),
        (by_class("DoesNotExist"), "", "OneByOne"),
        (by_class("DoesNotExist"), "batch", "Surge"),
        ({"scopes": ["Terminating"]} | by_class("In", "batch"), "batch", "Surge"),
    ],
)
def test_a_quota_counts_only_pods_in_all_its_scopes(
    scopes: Object, own: str, strategy: str
) -> None:
    full = {**quota("1", "1"), "spec": scopes}
    found = seen(pod(revision="old", ready=True), live=deployment("old"), quotas=(full,))
    assert chosen(found, podTemplate={"priorityClassName": own}).strategy == strategy


def test_pods_without_a_priority_class_have_the_clusters_default() -> None:
    full = {**quota("1", "1"), "spec": by_class("In", "default")}
    old, live = pod(revision="old", ready=True), deployment("old")
    old["spec"]["priorityClassName"] = "default"
    assert chosen(seen(old, live=live, quotas=(full,))).strategy == "OneByOne"
    elsewhere = seen(old, live=live, quotas=(full,))
    assert chosen(elsewhere, podTemplate={"priorityClassName": "web"}).strategy == "Surge"
    live["spec"]["template"]["spec"] = {"priorityClassName": "default"}  # it named it itself
    assert chosen(seen(old, live=live, quotas=(full,))).strategy == "Surge"


# -- turns


def one(name: str, **more: Any) -> Member:
    values: Any = {
        "pending": True,
        "takes_turn": False,
        "ready": True,
        "idle": False,
        "failure": "",
        **more,
    }
    return Member(("ns", name), **values)


def allowed(fleet: list[Member], concurrency: int = 1, granted: tuple[str, ...] = ()) -> set[str]:
    given = {("ns", name) for name in granted}
    keys = [m.key for m in fleet if m.pending]
    return {k[1] for k in keys if decide_turn(k, fleet, concurrency, given).allowed}


def test_deployments_roll_one_after_another() -> None:
    fleet = [one("a"), one("b"), one("c")]
    assert allowed(fleet) == {"a"}
    assert allowed(fleet, concurrency=2) == {"a", "b"}
    assert allowed(fleet, concurrency=0) == set()
    assert allowed(fleet, granted=("a",)) == {"a"}, "it has its turn already"
    rolls = [one("a", pending=False, takes_turn=True, ready=False), one("b"), one("c")]
    assert allowed(rolls) == set()
    done = [one("a", pending=False, takes_turn=True), one("b"), one("c")]
    assert allowed(done) == {"b"}


def test_a_turn_that_is_not_seen_in_the_cluster_yet_counts() -> None:
    fleet = [one("a"), one("b")]
    assert decide_turn(("ns", "a"), fleet, 1, ()).allowed
    waits = decide_turn(("ns", "a"), fleet, 1, {("ns", "b")})
    assert (waits.allowed, waits.is_held) == (False, False)
    assert waits.message == "waits for its turn in the upgrade, after ns/b"
    assert decide_turn(("ns", "a"), fleet, 2, {("ns", "b")}).allowed


def test_a_deployment_that_is_not_there_yet_needs_no_turn() -> None:
    rolls = one("a", pending=False, takes_turn=True, ready=False)
    assert decide_turn(("ns", "new"), [rolls], 1, ()).allowed
    assert not decide_turn(("ns", "new"), [rolls], 0, ()).allowed


def test_what_was_not_ready_waits_for_the_ready_ones_that_roll() -> None:
    rolls = one("c", pending=False, takes_turn=True, ready=False)
    waits = decide_turn(("ns", "a"), [one("a", ready=False), rolls], 1, ())
    assert not waits.allowed
    assert waits.message == "waits until the Ready ones are upgraded, now ns/c"


def test_the_first_that_fails_holds_the_rest() -> None:
    failed = one("a", pending=False, takes_turn=True, ready=False, failure="CrashLoop")
    verdict = decide_turn(("ns", "b"), [failed, one("b")], 5, ())
    assert (verdict.allowed, verdict.is_held) == (False, True)
    assert "ns/a failed with the new defaults (CrashLoop)" in verdict.message


def test_what_was_not_ready_or_is_idle_rolls_last_and_holds_nobody() -> None:
    fleet = [one("a", ready=False), one("b", idle=True), one("c")]
    assert allowed(fleet) == {"c"}
    last = [one("a", ready=False), one("b", idle=True), one("c", pending=False, takes_turn=True)]
    assert allowed(last) == {"a", "b"}


def fleet_member(status: Object, **annotations: str) -> Member:
    live = deployment("new")
    live["metadata"]["annotations"] = annotations
    return member_of(live, {"spec": {}, "status": status}, "d1", NOW)


def test_a_deployment_is_judged_by_its_marks_and_its_own_status() -> None:
    ready = {
        "targetRevision": "new",
        "rollout": {"phase": "Complete"},
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    assert fleet_member(ready).pending
    done = fleet_member(ready, **{DEFAULTS_MARK: "d1", TURN_MARK: "d1"})
    assert (done.pending, done.takes_turn, done.ready) == (False, True, True)
    assert not fleet_member({**ready, "targetRevision": "old"}).ready, "a status of before"
    assert fleet_member({**ready, "rollout": {"phase": "Starting"}}).ready, "a pod of it starts"
    assert not fleet_member({**ready, "rollout": {"phase": "Rolling"}}).ready
    assert not fleet_member({**ready, "conditions": []}).ready
    fault = {"code": "CrashLoop", "since": "2026-01-01T00:09:00Z"}
    broken = {**ready, "conditions": [], "blockers": [fault]}
    assert fleet_member(broken).failure == "CrashLoop"
    young = {**fault, "since": "2026-01-01T00:09:01Z"}
    assert not fleet_member({**broken, "blockers": [young]}).failure
    assert not fleet_member({**broken, "targetRevision": "old"}).failure, "a fault of before"
    waits = {**fault, "code": "InsufficientAccelerator"}
    assert not fleet_member({**broken, "blockers": [waits]}).failure, "it waits for room"


def test_a_deployment_without_pods_is_idle_and_so_is_a_paused_one() -> None:
    def idle(spec: Object, replicas: int) -> bool:
        return member_of(deployment(replicas=replicas), {"spec": spec}, "d1", NOW).idle

    assert idle({"paused": True}, 1)
    assert idle({}, 0)
    assert not idle({}, 1)
    unset = deployment()
    del unset["spec"]["replicas"]
    assert not member_of(unset, {"spec": {}}, "d1", NOW).idle, "one by default"


@pytest.mark.parametrize(
    ("kind", "reason", "failure"),
    [
        ("Progressing", "ProgressDeadlineExceeded", "ProgressDeadlineExceeded"),
        ("Progressing", "NewReplicaSetAvailable", ""),
        ("Available", "ProgressDeadlineExceeded", ""),
    ],
)
def test_a_rollout_past_its_deadline_failed_unless_it_is_ready_after_all(
    kind: str, reason: str, failure: str
) -> None:
    live = deployment("new")
    live["status"]["conditions"] = [{"type": kind, "reason": reason, "status": "False"}]
    assert member_of(live, {}, "d1", NOW).failure == failure
    ready = {
        "targetRevision": "new",
        "rollout": {"phase": "Complete"},
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    assert member_of(live, {"status": ready}, "d1", NOW).failure == ""


@pytest.mark.parametrize(
    ("mark", "deadlines"),
    [
        ("60,30", Deadlines(60, 30)),
        ("", None),
        ("60", None),
        ("1,2,3", None),
        ("60,30s", None),
        ("1234567,30", None),
    ],
)
def test_a_mark_of_deadlines_that_says_nothing_is_none(
    mark: str, deadlines: Deadlines | None
) -> None:
    assert deadlines_of(mark) == deadlines


@pytest.mark.parametrize(
    "change",
    [
        {"engine": {"image": "registry.test/other:1"}},
        {"model": {"source": "pvc://weights/a"}},
        {"resources": {"memory": "9Gi"}},
        {"modelCache": {"type": "PVC", "size": "9Gi"}},
        {"security": {"apiKeySecretRef": {"name": "keys", "key": "k"}}},
        {"podTemplate": {"tolerations": [{"key": "gpu", "operator": "Exists"}]}},
        {"podTemplate": {"labels": {"team": "a"}}},
    ],
)
def test_what_a_pod_is_made_of_changes_the_hash_of_a_spec(change: Object) -> None:
    assert spec_hash(resource(**change)) != spec_hash(resource())


def test_values_within_lists_and_maps_change_the_hash_of_a_spec() -> None:
    def of(key: str) -> tuple[str, str]:
        tolerations = [{"key": key, "operator": "Exists"}]
        listed = spec_hash(resource(podTemplate={"tolerations": tolerations}))
        return listed, spec_hash(resource(podTemplate={"labels": {"team": key}}))

    assert not set(of("a")) & set(of("b"))


def test_the_hash_of_a_spec_knows_what_pods_need_and_nothing_else() -> None:
    base = spec_hash(resource())
    assert spec_hash(resource(replicas=3, rollout={"drainTimeoutSeconds": 9})) == base
    assert spec_hash(resource(scheduler={"maxBatchTokens": 8192})) == base, "the default, written"
    assert spec_hash(resource(scheduler={"maxBatchTokens": 512})) != base
    assert spec_hash(resource(podTemplate={"labels": {"team": "a"}})) != base
