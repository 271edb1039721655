"""The kubelet's patience with a pod, which the operator sets, against the runtime's own drain."""

from typing import Any

import pytest

from fairlead_operator.decide.children.podtemplate import pod_template
from fairlead_runtime.settings.engine_config import EngineConfig
from support.operator_bodies import SETTINGS, resource


@pytest.mark.parametrize("rollout", [{}, {"drainTimeoutSeconds": 0}, {"drainTimeoutSeconds": 900}])
def test_a_pod_is_killed_ten_seconds_after_the_longest_drain_of_its_runtime(
    rollout: dict[str, Any],
) -> None:
    pod = pod_template(resource(rollout=rollout), SETTINGS)["spec"]
    flags = [arg for arg in pod["containers"][0]["args"][2:] if not arg.startswith("--host=")]
    runtime = EngineConfig.from_args(flags)
    assert runtime.drain_timeout == rollout.get("drainTimeoutSeconds", 300)
    longest = runtime.drain_grace + runtime.drain_timeout
    assert pod["terminationGracePeriodSeconds"] == longest + 10
