"""The operator's own metrics, `fairlead_operator_*`, in their own registry."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """The metrics of one process; each test creates its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconciles = Counter(
            "fairlead_operator_reconciles",
            "Passes over one resource",
            ["result"],
            registry=self.registry,
        )
        self.duration = Histogram(
            "fairlead_operator_reconcile_seconds",
            "Time of one pass",
            buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10),
            registry=self.registry,
        )
        self.errors = Counter(
            "fairlead_operator_errors",
            "Failures by the part that failed",
            ["part"],
            registry=self.registry,
        )
        self.calls = Counter(
            "fairlead_operator_api_calls",
            "Requests to the API server by verb and status code (0: none), without kopf's watches",
            ["verb", "code"],
            registry=self.registry,
        )
        self.leader = Gauge(
            "fairlead_operator_leader",
            "1 while this process holds the Lease",
            registry=self.registry,
        )
        self.restarts = Counter(
            "fairlead_operator_watch_restarts",
            "Restarts of kopf's watches",
            registry=self.registry,
        )
