"""The documentation lists exactly the condition and Event reasons that the operator can write."""

import ast
import re
from pathlib import Path

from fairlead_operator.decide.pods.blockers import CODES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
SOURCES = (
    "decide/status",
    "decide/release",
    "decide/scale/scaling",
    "decide/scale/state",
    "decide/children/capacity",
    "decide/children/claims",
    "decide/pods/events",
    "probe/hub",
)
CONDITIONS = {
    *("Ready", "Planned", "Progressing", "Available", "AutoscalingActive"),
    *("RemoteCode", "SpecUnderstood", "ClaimShared"),
}
# Words of the same form in these modules that are not reasons.
OTHERS = {
    *("True", "False", "Unknown", "Normal", "Warning", "PodScheduled", "Gi", "Surge"),
    *("ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"),
}


def reasons_in_code() -> set[str]:
    """Every string constant of those modules that has the form of a reason."""
    trees = [
        ast.parse((ROOT / "operator" / "fairlead_operator" / f"{name}.py").read_text())
        for name in SOURCES
    ]
    words = {
        node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)
    }
    form = re.compile("[A-Z][a-z]+([A-Z][a-z]+)*")
    return {word for word in words if isinstance(word, str) and form.fullmatch(word)} - OTHERS


def reasons_in_docs(heading: str) -> set[str]:
    """Every name in the table under a heading."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return {name for row in rows for name in re.findall(r"`([A-Z][A-Za-z]+)`", row)}


def test_every_reason_is_documented_and_every_documented_reason_exists() -> None:
    documented = reasons_in_docs("Conditions") | reasons_in_docs("Events")
    assert documented <= reasons_in_code() | CODES.keys() | CONDITIONS | {"NoOperator"}
    assert reasons_in_code() <= documented | CODES.keys()
    assert len(documented) > 20


def test_the_conditions_are_those_of_the_definition() -> None:
    definition = (ROOT / "crds" / "inferencedeployments.yaml").read_text()
    assert (
        "Ready, Planned, Progressing, Available, AutoscalingActive; "
        "where they apply RemoteCode, SpecUnderstood, ClaimShared" in definition
    )
    assert reasons_in_docs("Conditions") >= CONDITIONS
