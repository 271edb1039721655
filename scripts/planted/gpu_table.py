"""Bugs of what runs on a GPU before anybody looks: the benchmark, the soak, the Python at hand."""

from planted.bug import PackageBug

BENCHMARK = "benchmarks/gpu"
PARTS = ("unit/benchmarks/test_gpu_parts.py",)
PYTHON = ("functional/gpu_targets/test_gpu_python.py",)
SOAK, GROWTH = "tests/support/soak.py", ("unit/engine/test_growth.py",)

BUGS = (
    PackageBug(
        "the bound of a decode counts the embeddings",
        f"{BENCHMARK}/bounds.py",
        "(self.size.layers + self.size.head) * self.element",
        "self.size.total * self.element",
        PARTS,
    ),
    PackageBug(
        "kernels that overlap count twice as busy",
        f"{BENCHMARK}/bounds.py",
        "stop - max(start, end)",
        "stop - start",
        PARTS,
    ),
    PackageBug(
        "steps in which a row of theirs has ended count",
        f"{BENCHMARK}/theirs.py",
        "if begin <= at <= end]",
        "if begin <= at]",
        PARTS,
    ),
    PackageBug(
        "a rate is compared as a time",
        f"{BENCHMARK}/report.py",
        "ours / theirs if self.more",
        "theirs / ours if self.more",
        PARTS,
    ),
    PackageBug(
        "a part starts that does not fit into the time",
        f"{BENCHMARK}/budget.py",
        "if self.left < needs:",
        "if self.left < 0:",
        PARTS,
    ),
    PackageBug(
        "versions are compared as text",
        "scripts/gpu_python.py",
        "if _numbers(found) < _numbers(wanted):",
        "if found < wanted:",
        PYTHON,
    ),
    PackageBug(
        "growth while caches fill counts",
        SOAK,
        "samples[third : 2 * third]",
        "samples[:third]",
        GROWTH,
    ),
    PackageBug(
        "one high sample is growth",
        SOAK,
        "int(statistics.median(sample[name] for sample in part))",
        "max(sample[name] for sample in part)",
        GROWTH,
    ),
)
