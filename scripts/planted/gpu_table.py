"""Bugs of what runs on a GPU before anybody looks: the benchmark, the soak, the Python at hand."""

from planted.bug import PackageBug

PARTS = ("unit/benchmarks/test_gpu_parts.py",)
PYTHON = ("functional/gpu_targets/test_gpu_python.py",)
GROWTH = ("unit/engine/test_growth.py",)

BUGS = (
    PackageBug(
        "the bound of a decode counts the embeddings",
        "benchmarks.gpu.bounds:Work.decode_bytes",
        "(self.size.layers + self.size.head) * self.element",
        "self.size.total * self.element",
        PARTS,
    ),
    PackageBug(
        "kernels that overlap count twice as busy",
        "benchmarks.gpu.bounds:covered",
        "stop - max(start, end)",
        "stop - start",
        PARTS,
    ),
    PackageBug(
        "steps in which a row of theirs has ended count",
        "benchmarks.gpu.theirs:steps_together",
        "if begin <= at <= end]",
        "if begin <= at]",
        PARTS,
    ),
    PackageBug(
        "a rate is compared as a time",
        "benchmarks.gpu.report:Row.ratio",
        "ours / theirs if self.more",
        "theirs / ours if self.more",
        PARTS,
    ),
    PackageBug(
        "the busy share is given for the idle one",
        "benchmarks.gpu.bounds:idle",
        "return 1 - busy / whole",
        "return busy / whole",
        PARTS,
    ),
    PackageBug(
        "only one thread's work counts as the device's",
        "benchmarks.gpu.bounds:idle",
        "profile_all_threads=not on_gpu",
        "profile_all_threads=False",
        PARTS,
    ),
    PackageBug(
        "sampling is measured greedy",
        "benchmarks.gpu.__main__:Run._sampled",
        "_decode, ours, *case, steps, **SAMPLING[name])",
        "_decode, ours, *case, steps)",
        PARTS,
    ),
    PackageBug(
        "transformers samples among its 50 likeliest where ours has all",
        "benchmarks.gpu.__main__:",
        '{"top_k": 0, **params}',
        "dict(params)",
        PARTS,
    ),
    PackageBug(
        "seconds are written as TFLOP/s",
        "benchmarks.gpu.__main__:Run._prefill",
        "return self.work.prefill_operations(prompts, length) / 1e12 / side",
        "return side",
        PARTS,
    ),
    PackageBug(
        "transformers samples with its own settings, not the fastest",
        "benchmarks.gpu.__main__:Run._their_sampler",
        "self.their_settings, **THEIR_SAMPLING[name]",
        "{}, **THEIR_SAMPLING[name]",
        PARTS,
    ),
    PackageBug(
        "a figure is kept until the end of the run",
        "benchmarks.gpu.report:Report.add",
        "if self.figures is not None:",
        "if False:",
        PARTS,
    ),
    PackageBug(
        "one engine's failure drops the figures of the other",
        "benchmarks.gpu.__main__:Run.figure",
        'value = self.budget.run(f"{row.name}, {side}", needs, work)',
        "value = work()",
        PARTS,
    ),
    PackageBug(
        "a ratio pairs the first round of ours with the first of theirs",
        "benchmarks.gpu.report:Row.ratio",
        "zip(reversed(self.ours), reversed(self.theirs), strict=False)",
        "zip(self.ours, self.theirs, strict=False)",
        PARTS,
    ),
    PackageBug(
        "a part starts that does not fit into the time",
        "benchmarks.gpu.budget:Budget.run",
        "if self.left < needs:",
        "if self.left < 0:",
        PARTS,
    ),
    PackageBug(
        "versions are compared as text",
        "gpu_python:missing",
        "if _numbers(found) < _numbers(wanted):",
        "if found < wanted:",
        PYTHON,
    ),
    PackageBug(
        "growth while caches fill counts",
        "support.soak:growth",
        "samples[third : 2 * third]",
        "samples[:third]",
        GROWTH,
    ),
    PackageBug(
        "one high sample is growth",
        "support.soak:growth",
        "int(statistics.median(sample[name] for sample in part))",
        "max(sample[name] for sample in part)",
        GROWTH,
    ),
)
