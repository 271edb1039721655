"""What the process remembers between passes."""

import pytest

from fairlead_operator.cluster.cache import Store
from fairlead_operator.memory import Memo
from fairlead_operator.resource.fields import ResourceError
from fairlead_operator.resource.kinds import RESOURCE, Object
from support.operator_bodies import resource_body

CHAT, OTHER = ("ns", "chat"), ("ns", "other")


def test_a_value_is_computed_again_for_other_arguments_of_its_resource_alone() -> None:
    asked: list[tuple[str, int]] = []

    def compute(text: str, number: int) -> str:
        asked.append((text, number))
        return text * number

    memo: Memo[str] = Memo(compute)
    assert [memo(CHAT, "a", 2), memo(CHAT, "a", 2), memo(OTHER, "b", 2)] == ["aa", "aa", "bb"]
    assert asked == [("a", 2), ("b", 2)]
    assert [memo(CHAT, "a", 3), memo(CHAT, "a", 2), memo(OTHER, "b", 2)] == ["aaa", "aa", "bb"]
    assert asked[2:] == [("a", 3), ("a", 2)]
    memo.forget(CHAT)
    memo(CHAT, "a", 2)
    assert asked[4:] == [("a", 2)]


def test_an_error_is_raised_each_time() -> None:
    memo: Memo[int] = Memo(int)
    for _ in range(2):
        with pytest.raises(ValueError, match="invalid literal"):
            memo(CHAT, "x")
    assert memo(CHAT, "1") == 1


def body(version: int, **change: object) -> Object:
    made = resource_body(replicas=2)
    made["metadata"] |= {"resourceVersion": str(version)}
    return made | change


def test_a_resource_is_parsed_once_while_only_its_status_changes() -> None:
    store = Store()
    first = store.resource(body(1))
    assert store.resource(body(2, status={"replicas": 2})) is first
    assert first.spec.replicas == 2


def test_a_resource_is_parsed_again_for_another_spec_or_object() -> None:
    store = Store()
    first = store.resource(body(1))
    # Of the same generation: etcd was restored from a backup.
    other = store.resource(resource_body(replicas=3))
    assert (first.spec.replicas, other.spec.replicas) == (2, 3)
    created_again = resource_body(replicas=3)
    created_again["metadata"]["uid"] = "uid-2"
    assert store.resource(created_again).uid == "uid-2"
    with pytest.raises(ResourceError, match=r"spec\.replicas"):
        store.resource(resource_body(replicas=-1))


def test_a_resource_that_is_gone_is_not_kept() -> None:
    store = Store()
    store.put(RESOURCE, body(1))
    first = store.resource(body(1))
    store.remove(RESOURCE, body(2))
    assert store.resource(body(1)) is not first
