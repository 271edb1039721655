"""The alerts and the dashboard of the chart ask for series that the products export, and each alert
fires when it should and at no other time.
"""

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fairlead_operator.metrics import Metrics
from fairlead_runtime.engine.engine import Bounds, Engine
from fairlead_runtime.scheduling.scheduler import Scheduler
from fairlead_runtime.serving.measurements import EngineReport, RequestMetrics
from fairlead_runtime.serving.metrics import EngineMetrics
from support.fake_engine import FULL, Clock, FakeRunner, limits

FILES = Path(__file__).parents[2] / "charts" / "fairlead" / "files"
GROUPS: list[dict[str, Any]] = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
RULES: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for group in GROUPS for rule in group["rules"]
}
DASHBOARD: dict[str, Any] = json.loads((FILES / "dashboard.json").read_text())
# Set by Prometheus from the target, as the chart's PodMonitors say.
OF_THE_TARGET = {"namespace", "pod", "serving_fairlead_dev_name"}
PROMTOOL = shutil.which("promtool") or ""
needs_promtool = pytest.mark.skipif(
    not PROMTOOL, reason="promtool is not installed: it is in Debian's package prometheus"
)


@functools.cache
def exported() -> Mapping[str, set[str]]:
    """The labels of every series of a runtime and of an operator, by name, as in a scrape."""
    bounds = limits()
    engine = Engine(
        lambda: Scheduler(bounds, FULL),
        FakeRunner(),
        Bounds.of(bounds, max_queue=1, queue_timeout=60.0),
        now=Clock(),
    )
    operator = Metrics()
    operator.reconciles.labels("ok").inc()
    operator.errors.labels("list").inc()
    operator.calls.labels("get", "200").inc()
    runtime = EngineMetrics("m").exposition(
        EngineReport(engine.snapshot(), RequestMetrics().read())
    )
    series: dict[str, set[str]] = {}
    for scrape in (runtime, generate_latest(operator.registry)):
        for family in text_string_to_metric_families(scrape.decode()):
            for sample in family.samples:
                series.setdefault(sample.name, set()).update(sample.labels)
    return series


def panels() -> Iterator[tuple[str, str]]:
    """Title and expression of each query of the dashboard."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


EXPRESSIONS = [
    *((name, str(rule["expr"])) for name, rule in RULES.items()),
    *panels(),
    *(
        (one["name"], one["query"]["query"])
        for one in DASHBOARD["templating"]["list"]
        if one["type"] == "query"
    ),
]


@pytest.mark.parametrize(("name", "expression"), EXPRESSIONS)
def test_every_series_and_label_that_is_asked_for_is_exported(name: str, expression: str) -> None:
    bare = re.sub(r"\$\w+", "", expression)
    named = set(re.findall(r"\b(?:vllm:|fairlead_)\w+", bare))
    assert named, name
    assert named <= exported().keys()
    known = OF_THE_TARGET | set().union(*(exported()[one] for one in named))
    for clause in re.findall(r"\bby \(([^)]*)\)", bare):
        assert set(clause.replace(" ", "").split(",")) <= known
    matched = re.findall(r"(\w+)\s*=~?\s*\"", " ".join(re.findall(r"\{([^}]*)\}", bare)))
    assert set(matched) - {"__name__"} <= known


def test_the_panels_are_distinct_and_do_not_overlap() -> None:
    titles = [panel["title"] for panel in DASHBOARD["panels"]]
    assert len(set(titles)) == len(titles) > 15
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not taken & cells, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


@pytest.mark.parametrize("alert", RULES)
def test_an_alert_says_what_to_do_and_uses_labels_that_its_result_has(alert: str) -> None:
    rule = RULES[alert]
    assert rule["labels"]["severity"] in {"warning", "critical"}
    kept = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", rule["expr"]))))
    for text in (rule["annotations"]["summary"], rule["annotations"]["description"]):
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= kept, text


POD = 'namespace="ns", serving_fairlead_dev_name="chat", pod="chat-1", model_name="m", engine="0"'
OPERATOR = 'namespace="home", pod="operator-1"'
OF_NAME = {"namespace": "ns", "serving_fairlead_dev_name": "chat"}
OF_POD = OF_NAME | {"pod": "chat-1"}
# For each alert: the labels with which it fires, series that fire it and series just short of it,
# a value a minute in promtool's notation.
CASES: dict[str, tuple[Mapping[str, str], Mapping[str, str], Mapping[str, str]]] = {
    "FairleadQueueIsOld": (
        OF_NAME,
        {f"fairlead_oldest_wait_seconds{{{POD}}}": "31x50"},
        {f"fairlead_oldest_wait_seconds{{{POD}}}": "29x50"},
    ),
    "FairleadQueueTimeouts": (
        OF_NAME,
        {f"fairlead_queue_timeouts_total{{{POD}}}": "0+1x50"},
        {f"fairlead_queue_timeouts_total{{{POD}}}": "7x50"},
    ),
    "FairleadRequestsFail": (
        OF_NAME,
        {
            f"fairlead_failed_total{{{POD}}}": "0+2x50",
            f"fairlead_arrivals_total{{{POD}}}": "0+100x50",
        },
        {
            f"fairlead_failed_total{{{POD}}}": "0+1x50",
            f"fairlead_arrivals_total{{{POD}}}": "0+150x50",
        },
    ),
    "FairleadEngineFaults": (
        OF_POD,
        {f"fairlead_engine_faults_total{{{POD}}}": "0x30 1x20"},
        {f"fairlead_engine_faults_total{{{POD}}}": "3x50"},
    ),
    "FairleadInvariantViolated": (
        OF_POD,
        {f"fairlead_invariant_violations_total{{{POD}}}": "0x30 1x20"},
        {f"fairlead_invariant_violations_total{{{POD}}}": "0x50"},
    ),
    "FairleadCacheIsScarce": (
        OF_NAME,
        {
            f"vllm:kv_cache_usage_perc{{{POD}}}": "0.95x50",
            f"vllm:num_preemptions_total{{{POD}}}": "0+60x50",
        },
        {
            f"vllm:kv_cache_usage_perc{{{POD}}}": "0.95x50",
            f"vllm:num_preemptions_total{{{POD}}}": "0+3x50",
        },
    ),
    "FairleadApiKeyFileBroken": (
        OF_POD,
        {f"fairlead_api_key_file_broken{{{POD}}}": "1x50"},
        {f"fairlead_api_key_file_broken{{{POD}}}": "0x50"},
    ),
    "FairleadCertificateBroken": (
        OF_POD,
        {f"fairlead_certificate_broken{{{POD}}}": "1x50"},
        {f"fairlead_certificate_broken{{{POD}}}": "0x50"},
    ),
    "FairleadNoLeader": (
        {"namespace": "home"},
        {f"fairlead_operator_leader{{{OPERATOR}}}": "0x50"},
        {
            f"fairlead_operator_leader{{{OPERATOR}}}": "0x50",
            'fairlead_operator_leader{namespace="home", pod="operator-2"}': "1x50",
        },
    ),
    "FairleadOperatorIsGone": (
        {},
        {f"fairlead_operator_leader{{{OPERATOR}}}": "1x20 stale"},
        {f"fairlead_operator_leader{{{OPERATOR}}}": "1x50"},
    ),
    "FairleadReconcilesFail": (
        {"namespace": "home"},
        {
            f'fairlead_operator_reconciles_total{{result="error", {OPERATOR}}}': "0+12x50",
            f'fairlead_operator_reconciles_total{{result="ok", {OPERATOR}}}': "0+88x50",
        },
        {
            f'fairlead_operator_reconciles_total{{result="error", {OPERATOR}}}': "0+9x50",
            f'fairlead_operator_reconciles_total{{result="ok", {OPERATOR}}}': "0+91x50",
        },
    ),
}


def test_every_alert_has_a_case() -> None:
    assert CASES.keys() == RULES.keys()


def promtool(*arguments: str) -> None:
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_when_it_should_and_not_just_short_of_it(alert: str, tmp_path: Path) -> None:
    rule = {key: value for key, value in RULES[alert].items() if key != "annotations"}
    rules, tests = tmp_path / "rules.yaml", tmp_path / "tests.yaml"
    rules.write_text(yaml.safe_dump({"groups": [{"name": "one", "rules": [rule]}]}))
    labels, firing, short = CASES[alert]
    fired = [{"exp_labels": {**labels, **rule["labels"]}}]
    cases = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": text} for name, text in series.items()],
            "alert_rule_test": [{"eval_time": "40m", "alertname": alert, "exp_alerts": expected}],
        }
        for series, expected in ((firing, fired), (short, []))
    ]
    tests.write_text(yaml.safe_dump({"rule_files": [rules.name], "tests": cases}))
    promtool("test", "rules", str(tests))


@needs_promtool
def test_prometheus_reads_the_alerts_and_every_query_of_the_dashboard(tmp_path: Path) -> None:
    promtool("check", "rules", str(FILES / "alerts.yaml"))
    queries = [
        {"record": f"query:{number}", "expr": re.sub(r"\$__rate_interval", "5m", expression)}
        for number, (_, expression) in enumerate(panels())
    ]
    rules = tmp_path / "queries.yaml"
    rules.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": queries}]}))
    promtool("check", "rules", str(rules))
