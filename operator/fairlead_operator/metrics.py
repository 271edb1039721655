"""The operator's own figures, `fairlead_operator_*`, in a registry of their own."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """One set per process; tests make their own."""

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
            "Requests to the API server by verb and status code (0: no answer); kopf's watches not counted",
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
            "Times kopf's watches were started again",
            registry=self.registry,
        )
