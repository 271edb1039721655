"""One operator process survives nine kinds of error at every write, and at the list and the watch
of every kind.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

import pytest

from cluster.harness.apiclient import Api, eventually
from cluster.harness.case_selection import offset, share
from cluster.harness.controlplane import ControlPlane
from cluster.harness.faultproxy import ERRORS, Call, Fault, FaultProxy
from cluster.harness.operators import OperatorProcess
from cluster.harness.resource_lifecycle import Key, Lifecycle
from support.full import LONG_FORM

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crd")]
KINDS = (
    "inferencedeployments",
    "deployments",
    "services",
    "poddisruptionbudgets",
    "networkpolicies",
    "pods",
    "endpointslices",
    "resourcequotas",
    "events",
)
AT_ONCE = 54  # resources at the same time
LASTING_SECONDS = 8.0


def assert_no_tight_loop(calls: Iterable[Call]) -> float:
    """At most 2 requests/s for any object, averaged over 10 s; returns the highest rate."""
    times = defaultdict(list)
    for call in calls:
        if call.about_objects and (call.writes or call.verb == "get"):
            times[call.path.split("?")[0], call.resource].append(call.at)
    worst = 0
    for about, at in times.items():
        most = max(sum(begin <= t < begin + 10 for t in at) for begin in at)
        assert most <= 20, (about, most)
        worst = max(worst, most)
    return worst / 10


def only_budgets_deleted(calls: Iterable[Call]) -> bool:
    """Scaling down to one replica deletes the budget; nothing else may be deleted."""
    return {call.plural for call in calls if call.verb == "delete"} <= {"poddisruptionbudgets"}


def sorted_lines(snapshot: str) -> list[str]:
    return sorted(snapshot.splitlines())


@pytest.mark.timeout(3600)
def test_the_process_survives_every_kind_of_error_at_any_write(
    plane: ControlPlane, api: Api, namespace: str
) -> None:
    """One operator; one resource per point of failure, and one per error whose writes all fail
    for a while.
    """
    planned_faults: dict[str, tuple[int, Fault]] = {}
    lasting = {f"lasting-{error}": error for error in ERRORS}
    began: dict[str, float] = {}
    writes, injected = Counter[str](), Counter[str]()

    def choose_fault(call: Call) -> Fault:
        if not (call.writes and call.about_objects):
            return "pass"
        name = call.resource
        writes[name] += 1
        if name in lasting:
            is_over = call.at - began.setdefault(name, call.at) > LASTING_SECONDS
            injected[name] += not is_over
            return "pass" if is_over else lasting[name]
        at, error = planned_faults.get(name, (-1, "pass"))
        if writes[name] - 1 != at:
            return "pass"
        injected[name] += 1
        return error

    with (
        FaultProxy(plane, choose_fault) as proxy,
        OperatorProcess(plane, (namespace,), server=proxy.url) as operator,
    ):
        first = operator.process

        def alive() -> None:
            assert operator.process is first
            assert first is not None
            assert first.poll() is None, operator.tail()

        [wanted] = (
            Lifecycle(api, [(namespace, "undisturbed")], 20, alive, operator.tail).run().values()
        )
        points = [(at, error) for at in range(writes["undisturbed"]) for error in ERRORS]
        chosen = {f"at-{at}-{error}": (at, error) for at, error in share(points, 20)}
        planned_faults.update(chosen)
        names = [*lasting, *chosen]
        slowest = 0.0
        for begin in range(0, len(names), AT_ONCE):
            lifecycle = Lifecycle(
                api,
                [(namespace, name) for name in names[begin : begin + AT_ONCE]],
                30,
                alive,
                operator.tail,
            )
            for key, snapshot in lifecycle.run().items():
                assert sorted_lines(snapshot) == sorted_lines(wanted), key
            slowest = max(slowest, lifecycle.slowest)
        assert not operator.tracebacks()
    assert all(injected[name] for name in lasting)
    reached = sum(injected[name] > 0 for name in chosen)
    assert reached >= 0.8 * len(chosen)
    assert only_budgets_deleted(proxy.calls)
    rate = assert_no_tight_loop(proxy.calls)
    print(
        f"{writes['undisturbed']} writes; {reached} of {len(chosen)} points reached; "
        f"a step took at most {slowest:.1f} s; at most {rate:.1f} requests/s for an object"
    )


@pytest.fixture
def namespaces(api: Api, namespace: str) -> Iterator[list[str]]:
    """One for each error that a kind may meet; a short run has one, chosen by the commit."""
    names = [
        f"{namespace}-{shift}"[-60:].strip("-")
        for shift in (range(9) if LONG_FORM else [offset(9)])
    ]
    for name in names:
        api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    yield names
    for name in names:
        api.delete("Namespace", "", name)


@pytest.mark.timeout(900)
def test_the_process_survives_every_kind_of_error_at_the_list_and_the_watch_of_any_kind(
    plane: ControlPlane, api: Api, namespaces: list[str]
) -> None:
    """In each namespace every kind meets a different error, at start-up and after all watches are
    cut.
    """
    shifts = {name: int(name.rsplit("-", 1)[1]) for name in namespaces}
    pending_faults: dict[tuple[str, str, str], Fault] = {}

    def plan_faults() -> None:
        for name, shift in shifts.items():
            for number, kind in enumerate(KINDS):
                for verb in ("list", "watch"):
                    pending_faults[name, kind, verb] = ERRORS[(number + shift) % len(ERRORS)]

    def choose_fault(call: Call) -> Fault:
        return pending_faults.pop((call.namespace, call.plural, call.verb), "pass")

    keys: list[Key] = [(name, "chat") for name in namespaces]
    plan_faults()
    with (
        FaultProxy(plane, choose_fault) as proxy,
        OperatorProcess(plane, tuple(namespaces), server=proxy.url, wait=False) as operator,
    ):

        def alive() -> None:
            assert operator.process is not None
            assert operator.process.poll() is None, operator.tail()

        def all_injected() -> None:
            eventually(lambda: not pending_faults, 30, "every fault was injected")

        lifecycle = Lifecycle(api, keys, 30, alive, operator.tail)
        began = time.monotonic()
        lifecycle.create()
        created = time.monotonic() - began
        all_injected()
        plan_faults()
        proxy.cut_connections()
        lifecycle.change()
        all_injected()  # without a resource, our own kind alone is listed
        lifecycle.delete()
        # kopf logs a traceback when it ends, before it is restarted.
        assert not [
            line for line in operator.tracebacks() if '"logger": "fairlead_operator' in line
        ]
    assert only_budgets_deleted(proxy.calls)
    assert_no_tight_loop(proxy.calls)
    print(
        f"{len(keys) * len(KINDS) * 2} lists and watches failed twice; "
        f"created after {created:.1f} s, a step took at most {lifecycle.slowest:.1f} s"
    )
