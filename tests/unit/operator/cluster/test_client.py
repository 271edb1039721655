"""What each call of the operator's client asks of the API server, and what answers it takes."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from fairlead_operator.cluster.cache import Store
from fairlead_operator.cluster.client import APPLY, JSON_PATCH, METADATA, Cluster
from fairlead_operator.errors import ApiError
from fairlead_operator.metrics import Metrics
from fairlead_operator.resource.kinds import DEPLOYMENT, LEASE, POD, RESOURCE, Object

META = {"name": "chat", "namespace": "ns", "uid": "u", "resourceVersion": "7"}
BODY: Object = {"metadata": META, "spec": {}}
Answers = Callable[[Mapping[str, Any]], Object]


class RecordingCluster(Cluster):
    """Keeps each call; ``answer`` makes the answer from it, or raises."""

    def __init__(self, answer: Answers = lambda _: BODY) -> None:
        super().__init__(None, Store(), Metrics())  # type: ignore[arg-type]  # it makes no connection
        self.calls: list[dict[str, Any]] = []
        self._answers = answer

    async def call(
        self,
        verb: str,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "json",
        accept: str = "json",
    ) -> Any:
        call = {
            "verb": verb,
            "method": method,
            "path": path,
            "query": dict(query or {}),
            "body": body,
            "content_type": content_type,
            "accept": accept,
        }
        self.calls.append(call)
        return self._answers(call)


def test_apply_creates_what_must_not_exist_and_forces_only_an_object_of_its_own() -> None:
    cluster = RecordingCluster()
    manifest: Object = {"metadata": {"name": "chat", "namespace": "ns"}}
    asyncio.run(cluster.apply(DEPLOYMENT, manifest, None))
    asyncio.run(cluster.apply(DEPLOYMENT, manifest, "u"))
    first, second = cluster.calls
    assert (first["verb"], first["query"]["force"]) == ("create", "false")
    assert first["body"]["metadata"]["resourceVersion"] == "1", "held by none: it must not exist"
    assert "uid" not in first["body"]["metadata"]
    assert (second["verb"], second["query"]["force"]) == ("apply", "true")
    assert second["body"]["metadata"]["uid"] == "u"
    assert "resourceVersion" not in second["body"]["metadata"]
    assert {first["content_type"], second["content_type"]} == {APPLY}
    assert cluster.store.get(DEPLOYMENT, ("ns", "chat")) is not None, "the answer is in the store"


def test_a_deletion_names_the_version_that_was_read_and_is_seen_at_once() -> None:
    cluster = RecordingCluster()
    cluster.store.put(DEPLOYMENT, BODY)
    asyncio.run(cluster.delete(DEPLOYMENT, BODY))
    (call,) = cluster.calls
    assert call["body"]["preconditions"] == {"uid": "u", "resourceVersion": "7"}
    assert cluster.store.get(DEPLOYMENT, ("ns", "chat")) is None


@pytest.mark.parametrize(("code", "gone"), [(404, True), (409, False), (0, False)])
def test_only_what_the_server_does_not_find_is_deleted_without_its_word(
    code: int, *, gone: bool
) -> None:
    def refuse(_: object) -> Object:
        raise ApiError(code, "reason", "message")

    cluster = RecordingCluster(refuse)
    cluster.store.put(DEPLOYMENT, BODY)
    if gone:
        asyncio.run(cluster.delete(DEPLOYMENT, BODY))
    else:
        with pytest.raises(ApiError):
            asyncio.run(cluster.delete(DEPLOYMENT, BODY))
    assert (cluster.store.get(DEPLOYMENT, ("ns", "chat")) is None) is gone


def test_a_patch_tests_the_version_first() -> None:
    cluster = RecordingCluster()
    operation = {"op": "remove", "path": "/spec/a"}
    asyncio.run(cluster.patch(DEPLOYMENT, BODY, [operation]))
    (call,) = cluster.calls
    version = {"op": "test", "path": "/metadata/resourceVersion", "value": "7"}
    assert (call["body"], call["content_type"]) == ([version, operation], JSON_PATCH)


def test_a_status_is_written_to_the_version_that_was_read() -> None:
    cluster = RecordingCluster()
    asyncio.run(cluster.set_status(BODY, {"replicas": 1}))
    (call,) = cluster.calls
    assert call["path"].endswith("/namespaces/ns/inferencedeployments/chat/status")
    assert call["body"]["metadata"] == META
    assert call["body"]["status"] == {"replicas": 1}


def test_a_status_that_an_older_definition_lacks_a_field_of_is_patched() -> None:
    def answer(call: Mapping[str, Any]) -> Object:
        if call["content_type"] == APPLY:
            raise ApiError(500, "", ".status.new: field not declared in schema")
        return BODY

    cluster = RecordingCluster(answer)
    asyncio.run(cluster.set_status(BODY, {"new": 1}))
    patch = cluster.calls[-1]
    assert patch["content_type"] == JSON_PATCH
    assert patch["body"] == [
        {"op": "test", "path": "/metadata/uid", "value": "u"},
        {"op": "test", "path": "/metadata/resourceVersion", "value": "7"},
        {"op": "add", "path": "/status", "value": {"new": 1}},
    ]


def test_another_error_of_a_status_is_not_hidden() -> None:
    def refuse(_: object) -> Object:
        raise ApiError(409, "Conflict", "changed")

    cluster = RecordingCluster(refuse)
    with pytest.raises(ApiError):
        asyncio.run(cluster.set_status(BODY, {}))
    assert len(cluster.calls) == 1


def page(names: list[str], version: str, more: str = "") -> Object:
    items = [{"metadata": {**META, "name": name, "resourceVersion": "3"}} for name in names]
    return {"items": items, "metadata": {"resourceVersion": version, "continue": more}}


def test_a_list_is_read_page_by_page_and_has_the_version_of_the_first() -> None:
    pages = {"": page(["a", "b"], "10", "next"), "next": page(["c"], "11")}
    cluster = RecordingCluster(lambda call: pages[call["query"].get("continue", "")])
    bodies, version = asyncio.run(cluster.list(POD, "ns"))
    assert ([body["metadata"]["name"] for body in bodies], version) == (["a", "b", "c"], 10)
    assert all(call["query"]["labelSelector"] == POD.labels for call in cluster.calls)
    assert bodies[0]["kind"] == "Pod", "which items of a list lack"


def test_versions_are_read_from_metadata_alone() -> None:
    cluster = RecordingCluster(lambda _: page(["a"], "10"))
    versions, version = asyncio.run(cluster.versions(RESOURCE))
    assert (versions, version) == ({("ns", "a"): 3}, 10)
    assert cluster.calls[0]["accept"] == METADATA
    empty = RecordingCluster(lambda _: {"items": None, "metadata": {"resourceVersion": "5"}})
    assert asyncio.run(empty.versions(RESOURCE)) == ({}, 5)


def test_what_does_not_exist_is_none_and_every_other_error_is_raised() -> None:
    code = 404

    def refuse(_: object) -> Object:
        raise ApiError(code, "reason", "message")

    cluster = RecordingCluster(refuse)
    assert asyncio.run(cluster.get(DEPLOYMENT, ("ns", "chat"))) is None
    code = 503
    with pytest.raises(ApiError):
        asyncio.run(cluster.get(DEPLOYMENT, ("ns", "chat")))


@pytest.mark.parametrize(("version", "method"), [("7", "PUT"), ("", "POST")])
def test_a_lease_is_replaced_where_it_was_read_and_else_created(version: str, method: str) -> None:
    cluster = RecordingCluster()
    lease: Object = {"metadata": {"resourceVersion": version}}
    asyncio.run(cluster.write_lease(LEASE, ("ns", "lease"), lease))
    (call,) = cluster.calls
    assert call["method"] == method
    assert call["path"].endswith("/lease") is (method == "PUT")
