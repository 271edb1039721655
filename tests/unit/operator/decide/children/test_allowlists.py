"""What the chart's allow-lists permit, field by field; a refusal names the field and the chart's
value.
"""

from dataclasses import replace
from typing import Any

import pytest

from fairlead_operator.decide.children.allowlists import allowlist_blockers
from support.operator_bodies import SETTINGS, resource

OPEN = replace(
    SETTINGS,
    allowed_images=("other:1",),
    allowed_service_accounts=("reader",),
    allowed_priority_classes=("high",),
    allowed_labels=("tier", r"example\.com/.*"),
    allowed_annotations=(r"example\.com/.*",),
    allow_remote_code=True,
    create_model_cache=True,
)
CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("engine.image", "allow.images", {"engine": {"image": "other:1"}}),
    (
        "podTemplate.serviceAccountName",
        "allow.serviceAccounts",
        {"podTemplate": {"serviceAccountName": "reader"}},
    ),
    (
        "podTemplate.priorityClassName",
        "allow.priorityClasses",
        {"podTemplate": {"priorityClassName": "high"}},
    ),
    (
        "podTemplate.labels",
        "allow.labels",
        {"podTemplate": {"labels": {"tier": "x", "example.com/app": "y"}}},
    ),
    (
        "podTemplate.annotations",
        "allow.annotations",
        {"podTemplate": {"annotations": {"example.com/a": "y"}}},
    ),
    ("model.trustRemoteCode", "allow.remoteCode", {"model": {"trustRemoteCode": True}}),
    (
        "modelCache.size",
        "modelCache.create",
        {"model": {"source": "a/b"}, "modelCache": {"type": "PVC", "size": "1Gi"}},
    ),
)


@pytest.mark.parametrize(("path", "chart_value", "spec"), CASES, ids=[case[0] for case in CASES])
def test_a_field_needs_its_allow_list(path: str, chart_value: str, spec: dict[str, Any]) -> None:
    (refusal,) = allowlist_blockers(resource(**spec), SETTINGS)
    assert refusal.code == "NotAllowed"
    assert refusal.message.startswith(f"spec.{path}: ")
    assert f"({chart_value})" in refusal.message
    assert allowlist_blockers(resource(**spec), OPEN) == []


@pytest.mark.parametrize(
    "key", ["team", "example.org/owner", "cost-center", "app.kubernetes.io/part-of"]
)
def test_keys_for_bookkeeping_need_no_list(key: str) -> None:
    assert (
        allowlist_blockers(
            resource(podTemplate={"labels": {key: "x"}, "annotations": {key: "x"}}), SETTINGS
        )
        == []
    )


@pytest.mark.parametrize(
    "key",
    [
        "app",
        "k8s-app",
        "role",
        "Team",
        "teams",
        "team/app",
        "cnpg.io/cluster",
        "tier2",
        "a/example.com/b",
    ],
)
def test_a_key_that_selectors_may_use_needs_a_list_that_matches_it_whole(key: str) -> None:
    (refusal,) = allowlist_blockers(resource(podTemplate={"labels": {key: "x", "team": "y"}}), OPEN)
    assert f"spec.podTemplate.labels: {key} is not allowed" in refusal.message


def test_an_annotation_list_allows_no_label() -> None:
    settings = replace(SETTINGS, allowed_annotations=("app",))
    assert allowlist_blockers(resource(podTemplate={"annotations": {"app": "x"}}), settings) == []
    assert len(allowlist_blockers(resource(podTemplate={"labels": {"app": "x"}}), settings)) == 1
    assert (
        len(allowlist_blockers(resource(podTemplate={"labels": {"description": "x"}}), settings))
        == 1
    )


def test_a_resource_without_these_fields_is_allowed() -> None:
    assert allowlist_blockers(resource(), SETTINGS) == []
