"""Bugs of the kernels."""

from planted.bug import PackageBug

KERNELS = "kernels/fairlead_kernels"
TORCH_ATTENTION, CACHE_WRITE, SAMPLE = (
    f"{KERNELS}/{name}.py" for name in ("torch_attention", "cache_write", "sample")
)
ATTENTION_C, LAYERS_C, LINEAR_C, NORM_C, PRODUCT_C, ROPE_C, SIMD_C, TEAM_C = (
    f"{KERNELS}/csrc/{name}"
    for name in (
        "attention.cpp",
        "layers.cpp",
        "linear.cpp",
        "norm.h",
        "product.h",
        "rope.h",
        "simd.h",
        "team.cpp",
    )
)
C_OPERATIONS, C_ATTENTION, C_LAYERS = (
    (f"unit/kernels/test_cpu_{name}.py",) for name in ("operations", "attention", "layers")
)

BUGS = (
    PackageBug(
        "a weight's rows are packed one place beside their own",
        LINEAR_C,
        "columns * P + at % P;",
        "columns * P + (at + 1) % P;",
        C_OPERATIONS,
    ),
    PackageBug(
        "the rows of a weight are taken to lie close together",
        LINEAR_C,
        "source + row * stride",
        "source + row * columns",
        C_OPERATIONS,
    ),
    PackageBug(
        "the last columns of a product are left out",
        PRODUCT_C,
        "  for (; k < k_count; k++) step(k);\n",
        "",
        C_OPERATIONS,
    ),
    PackageBug(
        "a product in parts keeps the last part alone",
        f"{KERNELS}/csrc/linear.h",
        "tile, P, from > 0,",
        "tile, P, false,",
        C_OPERATIONS,
    ),
    PackageBug(
        "both halves of a head are turned by the first half's cosines",
        ROPE_C,
        "b * load(cos + half + i)",
        "b * load(cos + i)",
        C_OPERATIONS,
    ),
    PackageBug(
        "a bfloat16 between two is rounded away from zero",
        SIMD_C,
        "0x7fff + (bits >> 16 & 1)",
        "0x8000",
        C_OPERATIONS,
    ),
    PackageBug(
        "a query of a prefill sees the keys after it",
        ATTENTION_C,
        "seen < count ? seen : count",
        "count",
        C_ATTENTION,
    ),
    PackageBug(
        "a prefill's window is one key too wide",
        ATTENTION_C,
        "? 0 : seen - rows.window;",
        "? 0 : seen - rows.window - 1;",
        C_ATTENTION,
    ),
    PackageBug(
        "what was summed before a larger score keeps its weight",
        ATTENTION_C,
        "      if (factor != 1.0f) {",
        "      if (factor > 1.0f) {",
        C_ATTENTION,
    ),
    PackageBug(
        "the parts of a decode are merged with equal weights",
        ATTENTION_C,
        "const float factor = __builtin_expf(maxima[i * size] - maximum);",
        "const float factor = 1.0f;",
        C_ATTENTION,
    ),
    PackageBug(
        "a sink above all scores leaves them their weight",
        ATTENTION_C,
        "total = total * factor + 1.0f;",
        "total = total + 1.0f;",
        C_ATTENTION,
    ),
    PackageBug(
        "the gate of a multi-layer step is multiplied with itself",
        LAYERS_C,
        "multiply_panel(weight, panels + panel, x",
        "multiply_panel(weight, panel, x",
        C_LAYERS,
    ),
    PackageBug(
        "a layer norm divides by the root mean square",
        NORM_C,
        "(v - mean) * (v - mean)",
        "v * v",
        C_OPERATIONS,
    ),
    PackageBug(
        "elements beyond a row's end count in a layer norm's deviation",
        NORM_C,
        "below(i, width) ? map(load_part(x + i, width - i)) : Vec{};",
        "map(load_part(x + i, width - i));",
        C_OPERATIONS,
    ),
    PackageBug(
        "the square of ReLU is ReLU",
        f"{KERNELS}/csrc/activation.h",
        "positive * positive",
        "positive",
        C_OPERATIONS,
    ),
    PackageBug(
        "the MLP of a parallel layer reads the norm before attention",
        LAYERS_C,
        "  if (layer.parallel) settle(team, step, Norm{}, layer.mlp_norm);\n",
        "",
        C_LAYERS,
    ),
    PackageBug(
        "an MLP without a gate activates only the first rows of a panel's results",
        LAYERS_C,
        "float* y = step.gated + (row + i) * weight.rows + first;",
        "float* y = step.gated + i * weight.rows + first;",
        C_LAYERS,
    ),
    PackageBug(
        "no thread waits at a barrier",
        TEAM_C,
        "  if (size == 1) return;\n",
        "  if (size >= 1) return;\n",
        C_LAYERS,
    ),
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
