"""Bugs of the kernels."""

from planted.bug import PackageBug

KERNELS = "kernels/fairlead_kernels"
TORCH_ATTENTION, CACHE_WRITE, SAMPLE = (
    f"{KERNELS}/{name}.py" for name in ("torch_attention", "cache_write", "sample")
)

BUGS = (
    PackageBug(
        "scratch memory keeps the dtype of its first read",
        TORCH_ATTENTION,
        "            or self._buffer.dtype != flat.dtype\n",
        "",
        ("unit/device/test_attention_kernels.py",),
    ),
    PackageBug(
        "explicit scores are normalised in their own dtype",
        TORCH_ATTENTION,
        "    scores = scores.float()\n",
        "",
        ("unit/device/test_attention_kernels.py",),
        "the same result: torch sums a half-precision softmax in float32 and rounds as we do",
    ),
    PackageBug(
        "values are written in their own dtype",
        CACHE_WRITE,
        "value.to(value_cache.dtype)",
        "value",
        ("unit/device/test_attention_kernels.py",),
    ),
    PackageBug(
        "the draw's bound is too tight",
        SAMPLE,
        "bound = lead - (GUMBEL_MAX + SLACK)",
        "bound = lead - (GUMBEL_MAX / 2 + SLACK)",
        ("unit/device/test_sample_kernels.py",),
    ),
)
