"""The store believes the newest version, whatever order news arrives in."""

import json
import random

from fairlead_operator.cluster.cache import TOMBSTONE_SECONDS, Store
from fairlead_operator.resource.kinds import DEPLOYMENT, EVENT, POD, Object


def child(name: str, version: int, **labels: str) -> Object:
    meta = {"name": name, "namespace": "ns", "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {"metadata": {**meta, "labels": {"serving.fairlead.dev/name": "chat", **labels}}}


def version(store: Store, name: str) -> int | None:
    body = store.get(DEPLOYMENT, ("ns", name))
    return int(body["metadata"]["resourceVersion"]) if body else None


def test_an_older_version_changes_nothing() -> None:
    store = Store()
    assert store.put(DEPLOYMENT, child("a", 5))
    assert not store.put(DEPLOYMENT, child("a", 4))
    assert not store.put(DEPLOYMENT, child("a", 5))
    assert version(store, "a") == 5


def test_a_late_event_does_not_bring_back_what_was_deleted() -> None:
    store = Store()
    store.put(DEPLOYMENT, child("a", 5))
    assert store.remove(DEPLOYMENT, child("a", 7))
    assert not store.put(DEPLOYMENT, child("a", 6))
    assert version(store, "a") is None
    assert store.put(DEPLOYMENT, child("a", 8)), "made anew"


def test_a_replayed_deletion_does_not_remove_the_object_made_since() -> None:
    store = Store()
    store.put(DEPLOYMENT, child("a", 9))
    assert not store.remove(DEPLOYMENT, child("a", 7))
    assert version(store, "a") == 9


def test_a_list_removes_what_it_lacks_but_nothing_newer_and_nothing_elsewhere() -> None:
    store = Store()
    elsewhere = child("other", 3)
    elsewhere["metadata"]["namespace"] = "ns2"
    for body in (child("gone", 4), child("kept", 5), child("newer", 11), elsewhere):
        store.put(DEPLOYMENT, body)
    changed = store.replace(DEPLOYMENT, "ns", [child("kept", 5), child("fresh", 10)], 10)
    assert {b["metadata"]["name"] for b in changed} == {"gone", "fresh"}
    assert {b["metadata"]["name"] for b in store.all(DEPLOYMENT)} == {
        "kept",
        "newer",
        "fresh",
        "other",
    }


def test_only_what_is_not_held_as_new_differs_from_a_list_of_versions() -> None:
    store = Store()
    store.replace(DEPLOYMENT, "", [child("same", 5), child("newer", 6), child("held", 9)], 10)
    listed = {("ns", name): at for name, at in (("same", 5), ("newer", 7), ("held", 8), ("new", 8))}
    assert store.stale_keys(DEPLOYMENT, "", listed, 11) == [("ns", "newer"), ("ns", "new")]
    assert store.stale_keys(DEPLOYMENT, "", listed, 9) is None, "an older list is read whole"


def test_deletions_are_remembered_for_a_while_only() -> None:
    now = 0.0
    store = Store(clock=lambda: now)
    store.put(DEPLOYMENT, child("a", 5))
    store.remove(DEPLOYMENT, child("a", 7))
    now = TOMBSTONE_SECONDS
    store.replace(DEPLOYMENT, "", [], 20)
    assert not store.put(DEPLOYMENT, child("a", 6))
    now += 1
    store.replace(DEPLOYMENT, "", [], 21)
    assert store.put(DEPLOYMENT, child("a", 6))


def test_a_replayed_old_list_is_dropped() -> None:
    store = Store()
    store.replace(DEPLOYMENT, "", [child("a", 8)], 10)
    assert store.replace(DEPLOYMENT, "", [], 9) == []
    assert version(store, "a") == 8


def test_what_is_forgotten_of_a_namespace_comes_back_from_no_older_list() -> None:
    store = Store()
    store.replace(POD, "ns", [child("a", 8)], 10)
    store.replace(DEPLOYMENT, "ns", [child("a", 8)], 10)
    store.replace(POD, "kept", [], 10)
    store.keep_only([POD], {"kept"})
    assert (store.all(POD), version(store, "a")) == ([], 8)
    assert [store.has_list(POD, name) for name in ("ns", "kept")] == [False, True]
    assert store.has_list(DEPLOYMENT, "ns")
    assert store.replace(POD, "ns", [child("a", 8)], 9) == []
    assert not store.has_list(POD, "ns")
    assert len(store.replace(POD, "ns", [child("a", 8)], 11)) == 1
    assert store.has_list(POD, "ns")


def test_deletions_where_nothing_is_listed_are_remembered_for_a_while_only() -> None:
    now = 0.0
    store = Store(clock=lambda: now)
    store.remove(POD, child("a", 7))
    now = TOMBSTONE_SECONDS
    store.keep_only([POD], ())
    assert not store.put(POD, child("a", 6))
    now += 1
    store.keep_only([POD], ())
    assert store.put(POD, child("a", 6))


def test_after_a_minute_of_older_lists_etcd_was_restored_and_the_list_counts() -> None:
    now = 0.0
    store = Store(clock=lambda: now)
    store.replace(DEPLOYMENT, "", [child("a", 80), child("gone", 90)], 100)
    store.mark_deleted(DEPLOYMENT, child("b", 95))
    restored = [child("a", 8), child("b", 9)]
    for at in (1.0, 20.0, 60.0):
        now = at
        assert store.replace(DEPLOYMENT, "", restored, 10) == []
    now = 61.0
    changed = store.replace(DEPLOYMENT, "", restored, 12)
    assert {body["metadata"]["name"] for body in changed} == {"a", "b", "gone"}
    assert [version(store, name) for name in ("a", "b", "gone")] == [8, 9, None]
    assert store.put(DEPLOYMENT, child("a", 13))
    assert store.replace(DEPLOYMENT, "", [], 11) == [], "older ones are dropped again"


def test_one_newer_list_among_older_ones_proves_that_versions_did_not_go_back() -> None:
    now = 0.0
    store = Store(clock=lambda: now)
    for at, listed in ((0.0, 10), (1.0, 9), (50.0, 11), (70.0, 9), (110.0, 9)):
        now = at
        store.replace(DEPLOYMENT, "", [child("a", 8)] if listed > 9 else [], listed)
    assert version(store, "a") == 8


def test_what_we_deleted_does_not_come_back_from_the_list_it_was_in() -> None:
    store = Store()
    store.replace(DEPLOYMENT, "", [child("a", 8)], 10)
    store.mark_deleted(DEPLOYMENT, child("a", 8))
    assert version(store, "a") is None
    assert store.replace(DEPLOYMENT, "", [child("a", 8)], 10) == []
    assert version(store, "a") is None
    store.mark_deleted(DEPLOYMENT, child("a", 8))
    assert store.put(DEPLOYMENT, child("a", 12)), "made anew, or kept by somebody's finalizer"
    store.mark_deleted(DEPLOYMENT, child("a", 8))
    assert version(store, "a") == 12, "the answer to an old deletion"


def test_what_is_read_by_its_name_exists_though_a_newer_list_lacks_it() -> None:
    """It lost our label, by which lists select; unless it was deleted after it was asked for."""
    now = 0.0
    store = Store(clock=lambda: now)
    store.put(DEPLOYMENT, child("a", 5))
    store.replace(DEPLOYMENT, "", [], 10)
    assert not store.put(DEPLOYMENT, child("a", 8)), "an event, which may be late"
    now = 1.0
    assert store.take(DEPLOYMENT, child("a", 8), asked_at=store.now())
    assert version(store, "a") == 8
    assert not store.put(DEPLOYMENT, child("a", 7))
    asked_at, now = store.now(), 2.0
    store.mark_deleted(DEPLOYMENT, child("a", 9))
    assert not store.take(DEPLOYMENT, child("a", 9), asked_at)
    assert version(store, "a") is None


def test_children_are_found_by_their_label_and_follow_its_changes() -> None:
    store = Store()
    store.put(DEPLOYMENT, child("a", 1))
    store.put(DEPLOYMENT, child("b", 2))
    assert [b["metadata"]["name"] for b in store.children(DEPLOYMENT, ("ns", "chat"))] == ["a", "b"]
    moved = child("a", 3)
    moved["metadata"]["labels"]["serving.fairlead.dev/name"] = "other"
    store.put(DEPLOYMENT, moved)
    assert [b["metadata"]["name"] for b in store.children(DEPLOYMENT, ("ns", "chat"))] == ["b"]
    assert [b["metadata"]["name"] for b in store.children(DEPLOYMENT, ("ns", "other"))] == ["a"]


def test_events_are_found_by_the_uid_of_their_object() -> None:
    store = Store()
    event = child("e", 1)
    event["involvedObject"] = {"uid": "uid-p", "kind": "Pod", "name": "p", "namespace": "ns"}
    store.put(EVENT, event)
    store.put(POD, child("p", 2))
    assert len(store.events_about(["uid-p", "uid-q"])) == 1
    assert store.pods_about(event)[0][1]["metadata"]["name"] == "p"
    store.remove(EVENT, child("e", 5))
    assert store.events_about(["uid-p"]) == []


def test_what_no_decision_reads_is_not_kept() -> None:
    store = Store()
    body = child("p", 1)
    body["metadata"]["managedFields"] = [{}]
    body["spec"] = {"containers": [], "schedulerName": "x", "priorityClassName": "p"}
    store.put(POD, body)
    kept = store.get(POD, ("ns", "p"))
    assert kept is not None
    assert "managedFields" not in kept["metadata"]
    assert kept["spec"] == {"containers": [], "priorityClassName": "p"}
    assert kept["kind"] == "Pod"


def test_any_order_of_the_same_news_ends_in_the_same_state() -> None:
    history = [
        ("put", 1),
        ("put", 3),
        ("remove", 4),
        ("put", 6),
        ("put", 7),
        ("remove", 8),
        ("put", 9),
    ]
    for seed in range(300):
        news = history * 2
        random.Random(seed).shuffle(news)
        store = Store()
        for what, at in news:
            if what == "put":
                store.put(DEPLOYMENT, child("a", at))
            else:
                store.remove(DEPLOYMENT, child("a", at))
        assert version(store, "a") == 9, seed


def test_objects_share_their_texts() -> None:
    store = Store()
    for name in ("a", "b"):
        # Not literals of this file, which Python shares by itself.
        store.put(POD, json.loads(json.dumps(child(name, 5, app="".join(["ch", "at", name[:0]])))))
    one, other = (body["metadata"]["labels"] for body in store.all(POD))
    assert one["app"] == "chat"
    assert one["app"] is other["app"]
    assert [id(key) for key in one] == [id(key) for key in other]
