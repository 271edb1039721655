"""Blockers for what the chart's allow-lists do not permit. Pure. While a resource has one, the
operator writes none of its children.
"""

from collections.abc import Callable, Iterable

from fairlead_operator.decide.children.manifests import creates_claim
from fairlead_operator.decide.pods.blockers import Blocker, blocker
from fairlead_operator.resource.kinds import RESOURCE
from fairlead_operator.resource.resource import InferenceDeployment
from fairlead_operator.resource.settings import Settings


def allowlist_blockers(resource: InferenceDeployment, settings: Settings) -> list[Blocker]:
    """One blocker per refused field; each names the field, the value and the chart's value that
    would allow it.
    """
    extra, about = resource.spec.pod_template, f"{RESOURCE.name}/{resource.name}"
    account, priority = extra.service_account_name, extra.priority_class_name
    remote_code = resource.spec.model.trust_remote_code
    checks = (
        (
            "model.trustRemoteCode",
            "true",
            settings.allow_remote_code or not remote_code,
            "allow.remoteCode",
        ),
        ("engine.image", resource.image, settings.allows_image(resource.image), "allow.images"),
        (
            "modelCache.size",
            "a new claim",
            settings.create_model_cache or not creates_claim(resource),
            "modelCache.create",
        ),
        (
            "podTemplate.serviceAccountName",
            account,
            settings.allows_service_account(account),
            "allow.serviceAccounts",
        ),
        (
            "podTemplate.priorityClassName",
            priority,
            settings.allows_priority_class(priority),
            "allow.priorityClasses",
        ),
        *_keys("podTemplate.labels", "allow.labels", extra.labels, settings.allows_label),
        *_keys(
            "podTemplate.annotations",
            "allow.annotations",
            extra.annotations,
            settings.allows_annotation,
        ),
        *_keys(
            "service.annotations",
            "allow.serviceAnnotations",
            resource.spec.service.annotations,
            settings.allows_service_annotation,
        ),
    )
    return [
        blocker(
            "NotAllowed",
            about,
            f"spec.{path}: {value} is not allowed by this installation ({chart_value})",
        )
        for path, value, allowed, chart_value in checks
        if not allowed
    ]


def _keys(
    field: str, chart_value: str, keys: Iterable[str], allows: Callable[[str], bool]
) -> list[tuple[str, str, bool, str]]:
    """The check of a mapping's keys: foreign selectors match pods by their labels, and agents act
    on annotations.
    """
    refused_keys = ", ".join(key[:80] for key in sorted(keys) if not allows(key))
    return [(field, refused_keys, not refused_keys, chart_value)]
