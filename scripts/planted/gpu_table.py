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
        "the busy share is given for the idle one",
        f"{BENCHMARK}/bounds.py",
        "return 1 - busy / whole",
        "return busy / whole",
        PARTS,
    ),
    PackageBug(
        "only one thread's work counts as the device's",
        f"{BENCHMARK}/bounds.py",
        "profile_all_threads=not on_gpu",
        "profile_all_threads=False",
        PARTS,
    ),
    PackageBug(
        "sampling is measured greedy",
        f"{BENCHMARK}/__main__.py",
        "ours.decode(*case, steps, **SAMPLING[name])",
        "ours.decode(*case, steps, **GREEDY)",
        PARTS,
    ),
    PackageBug(
        "transformers samples among its 50 likeliest where ours has all",
        f"{BENCHMARK}/__main__.py",
        '{"top_k": 0, **params}',
        "dict(params)",
        PARTS,
    ),
    PackageBug(
        "theirs is written in seconds beside ours in TFLOP/s",
        f"{BENCHMARK}/__main__.py",
        "row.theirs.append(operations / side.prefill",
        "row.theirs.append(side.prefill",
        PARTS,
    ),
    PackageBug(
        "transformers samples with its own settings, not the fastest",
        f"{BENCHMARK}/__main__.py",
        "self.their_settings, **THEIR_SAMPLING[name]",
        "{}, **THEIR_SAMPLING[name]",
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
