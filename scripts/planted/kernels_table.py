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
    PackageBug(
        "a decode's padding reads beyond its row",
        f"{KERNELS}/torch_plan.py",
        "at = np.minimum(wanted, last)",
        "at = np.minimum(wanted, last.max())",
        ("unit/device/test_attention_kernels.py",),
    ),
    PackageBug(
        "a decode's window hides its first key",
        f"{KERNELS}/torch_plan.py",
        "np.maximum(0, position - ragged.window + 1)",
        "np.maximum(0, position - ragged.window + 2)",
        ("unit/device/test_attention_kernels.py",),
    ),
    PackageBug(
        "a strip's keys begin one too late",
        f"{KERNELS}/torch_plan.py",
        "self.position + at - self.window + 1 - self.first_key",
        "self.position + at - self.window + 2 - self.first_key",
        ("unit/device/test_attention_kernels.py",),
    ),
    PackageBug(
        "a window of a prompt sees one key more",
        f"{KERNELS}/torch_plan.py",
        "hidden |= key <= query - row.window",
        "hidden |= key < query - row.window",
        ("unit/device/test_attention_kernels.py",),
    ),
    PackageBug(
        "a window just shorter than its prompt is ignored",
        f"{KERNELS}/torch_plan.py",
        "self.window >= count)",
        "self.window >= count - 1)",
        ("unit/device/test_attention_kernels.py",),
    ),
    PackageBug(
        "the strips of a row share one mask",
        f"{KERNELS}/torch_plan.py",
        "row.masks[self.begin, dtype] = mask",
        "row.masks[0, dtype] = mask",
        ("unit/device/test_attention_kernels.py",),
    ),
    PackageBug(
        "a row's blocks are consecutive when its ends are",
        f"{KERNELS}/torch_plan.py",
        "(np.diff(blocks) == 1).all()",
        "(np.diff(blocks) == 1).any()",
        ("unit/device/test_attention_kernels.py",),
    ),
    PackageBug(
        "a block larger than the staging buffer is not copied",
        f"{KERNELS}/copy_blocks.py",
        "part = max(1, STAGING_BYTES * source.shape[dim] // source.nbytes)",
        "part = STAGING_BYTES * source.shape[dim] // source.nbytes",
        ("unit/device/test_attention_kernels.py",),
    ),
    PackageBug(
        "tokens that tie with the cut are lost",
        f"{KERNELS}/sample.py",
        "total.masked_fill_(scores < cut[:, None], -math.inf)",
        "total.masked_fill_(scores <= cut[:, None], -math.inf)",
        ("unit/device/test_sample_kernels.py",),
    ),
    PackageBug(
        "of equal sums the largest id wins",
        f"{KERNELS}/sample.py",
        'tokens[won], "amin")',
        'tokens[won], "amax")',
        ("unit/device/test_sample_kernels.py",),
    ),
    PackageBug(
        "half of a row's key is left out of its noise",
        f"{KERNELS}/sample.py",
        ".mul_(_MUL1).bitwise_xor_(high)",
        ".mul_(_MUL1)",
        ("unit/device/test_sample_kernels.py",),
    ),
    PackageBug(
        "noise can be infinite",
        f"{KERNELS}/sample.py",
        ".clamp_(min=2.0**-24 - 1)",
        "",
        ("unit/device/test_sample_kernels.py",),
    ),
)
