"""The stand-in of flashinfer's wrappers refuses what the package would compute wrongly."""

from typing import Any

import pytest
import torch

from support import flashinfer_standin as standin

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 8, 4
WORKSPACE = torch.zeros(64, dtype=torch.uint8)


def vector(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# Two rows: 3 queries over 2 pages with 6 keys, 1 query over a page with 4 keys.
BLOCKS = {
    "qo_indptr": vector(0, 3, 4),
    "paged_kv_indptr": vector(0, 2, 3),
    "paged_kv_indices": vector(4, 0, 2),
    "paged_kv_last_page_len": vector(2, 4),
}
SIZES = {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim_qk": DIM, "page_size": PAGE}
OPTIONS = {"causal": True, "q_data_type": torch.float32}


def prefill() -> standin.BatchPrefillWithPagedKVCacheWrapper:
    return standin.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", backend="fa2")


def planned(**changes: Any) -> standin.BatchPrefillWithPagedKVCacheWrapper:
    wrapper = prefill()
    arguments: dict[str, Any] = {**BLOCKS, **SIZES, **OPTIONS, **changes}
    wrapper.plan(**arguments)
    return wrapper


def tensors(**changes: Any) -> dict[str, Any]:
    pages = torch.zeros(5, PAGE, KV_HEADS, DIM)
    return {"q": torch.zeros(4, HEADS, DIM), "paged_kv_cache": (pages, pages)} | changes


def test_it_runs_what_is_right() -> None:
    assert planned().run(**tensors()).shape == (4, HEADS, DIM)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qo_indptr": torch.tensor([0, 3, 4])}, "qo_indptr must be a contiguous vector of int32"),
        ({"qo_indptr": vector(0, 3, 3)}, "each row needs at least 1"),
        ({"qo_indptr": vector(1, 3, 4)}, "must begin with 0"),
        ({"qo_indptr": BLOCKS["qo_indptr"].to("meta")}, "plan would wait for the device"),
        ({"qo_indptr": vector(0, 7, 8)}, "more queries than keys"),
        ({"paged_kv_indptr": vector(0, 3)}, "paged_kv_indptr has 2 values, expected 3"),
        ({"paged_kv_indptr": vector(0, 2, 4)}, "paged_kv_indices has 3 values, expected 4"),
        ({"paged_kv_indices": torch.tensor([4, 0, 1])}, "paged_kv_indices must be a contiguous"),
        ({"paged_kv_last_page_len": vector(0, 4)}, "must be 1 to 4"),
        ({"paged_kv_last_page_len": vector(2, 5)}, "must be 1 to 4"),
        ({"num_kv_heads": 3}, "should be divisible"),
        ({"window_left": -2}, "out of range"),
        ({"q_data_type": torch.float64}, "no kernel takes queries in torch.float64"),
        ({"kv_data_type": torch.float16}, "no kernel takes queries in torch.float32 and keys"),
        ({"kv_data_type": torch.float8_e5m2}, "no kernel takes queries in torch.float32 and keys"),
        ({"pos_encoding_mode": "ALIBI"}, "does not model pos_encoding_mode"),
    ],
)
def test_a_wrong_plan_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, IndexError, KeyError, NotImplementedError), match=message):
        planned(**changes)


def test_no_plan_reads_a_page_and_a_run_refuses_one_that_is_not_there() -> None:
    for pages, message in ((vector(4, 0, -1), "a negative page"), (vector(5, 0, 1), "has 5 pages")):
        wrapper = planned(paged_kv_indices=pages)
        with pytest.raises(IndexError, match=message):
            wrapper.run(**tensors())


def test_keys_may_be_8_bit_floats_where_the_plan_says_so_and_no_kernel_has_sinks_then() -> None:
    torch.manual_seed(0)
    keys, values = (torch.randn(5, PAGE, KV_HEADS, DIM).to(torch.float8_e4m3fn) for _ in range(2))
    cache = {"paged_kv_cache": (keys, values)}
    given = tensors(**cache, q=torch.randn(4, HEADS, DIM))
    wide = {**given, "paged_kv_cache": (keys.float(), values.float())}
    got = planned(kv_data_type=torch.float8_e4m3fn).run(**given)
    assert torch.equal(got, planned().run(**wide))
    with pytest.raises(ValueError, match=r"dtype of k torch.float8_e4m3fn does not match"):
        planned().run(**given)
    with pytest.raises(ValueError, match="by the type of queries alone"):
        standin.BatchAttentionWithAttentionSinkWrapper(
            WORKSPACE, "NHD", backend="fa2", kv_data_type=torch.float8_e4m3fn
        )


def test_the_packages_defaults_are_not_causal_and_float16() -> None:
    """Whoever forgets them sees it."""
    wrapper = prefill()
    arguments: dict[str, Any] = {**BLOCKS, **SIZES}
    wrapper.plan(**arguments)
    with pytest.raises(ValueError, match=r"dtype of q torch.float32 does not match torch.float16"):
        wrapper.run(**tensors())
    values = torch.randn(5, PAGE, KV_HEADS, DIM)
    cache = {"paged_kv_cache": (torch.zeros_like(values), values)}
    assert not torch.equal(
        planned(causal=False).run(**tensors(**cache)), planned().run(**tensors(**cache))
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(3, HEADS, DIM)}, r"q.shape \(3, 4, 8\) does not match"),
        ({"q": torch.zeros(4, HEADS, DIM).half()}, "dtype of q"),
        ({"q": torch.zeros(4, DIM, HEADS).transpose(1, 2)}, "last dimension of q"),
        ({"paged_kv_cache": (torch.zeros(5, 8, KV_HEADS, DIM),) * 2}, "pages of shape"),
        ({"paged_kv_cache": (torch.zeros(4, PAGE, KV_HEADS, DIM),) * 2}, "the cache has 4 pages"),
        ({"out": torch.zeros(4, HEADS, DIM).half()}, "out must be"),
        ({"sinks": torch.zeros(HEADS)}, "does not model sinks"),
    ],
)
def test_a_run_that_does_not_match_its_plan_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    wrapper = planned()
    with pytest.raises((ValueError, IndexError, NotImplementedError), match=message):
        wrapper.run(**tensors(**changes))


def test_a_run_without_a_plan_is_refused() -> None:
    with pytest.raises(RuntimeError, match="plan was not called"):
        prefill().run(**tensors())


def test_metadata_that_changes_between_plan_and_run_is_noticed() -> None:
    starts = vector(0, 3, 4)
    wrapper = planned(qo_indptr=starts)
    starts[1] = 2
    with pytest.raises(RuntimeError, match="qo_indptr changed between plan and run"):
        wrapper.run(**tensors())


def test_a_plan_while_the_last_ones_copy_may_be_under_way_is_refused() -> None:
    arguments: dict[str, Any] = {**BLOCKS, **SIZES, **OPTIONS}
    wrapper, before, behind = prefill(), standin.Event(), standin.Event()
    before.record()
    wrapper.plan(**arguments)
    behind.record()
    before.synchronize()
    with pytest.raises(RuntimeError, match="overwritten"):
        wrapper.plan(**arguments)
    behind.synchronize()
    wrapper.plan(**arguments)


def test_the_decode_wrappers_arguments_after_page_size_have_names() -> None:
    wrapper = standin.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NHD", backend="fa2")
    blocks = vector(0, 2, 3), vector(4, 0, 2), vector(2, 4)
    with pytest.raises(TypeError, match="by their names"):
        wrapper.plan(*blocks, *SIZES.values(), "NONE")
    wrapper.plan(*blocks, *SIZES.values(), q_data_type=torch.float32)
    assert wrapper.run(**tensors(q=torch.zeros(2, HEADS, DIM))).shape == (2, HEADS, DIM)


def test_without_tensor_cores_some_ratios_of_heads_have_no_kernel() -> None:
    blocks = vector(0, 2, 3), vector(4, 0, 2), vector(2, 4)
    for tensor_cores in (False, True):
        wrapper = standin.BatchDecodeWithPagedKVCacheWrapper(
            WORKSPACE, "NHD", use_tensor_cores=tensor_cores, backend="fa2"
        )
        if tensor_cores:
            wrapper.plan(*blocks, 5, 1, DIM, PAGE)
        else:
            with pytest.raises(RuntimeError, match="Unsupported group_size: 5"):
                wrapper.plan(*blocks, 5, 1, DIM, PAGE)


def sinks_wrapper(**options: Any) -> standin.BatchAttentionWithAttentionSinkWrapper:
    sizes = {"head_dim_qk": DIM, "head_dim_vo": DIM, "q_data_type": torch.float32}
    options = {**sizes, "kv_data_type": torch.float32, **options}
    return standin.BatchAttentionWithAttentionSinkWrapper(
        WORKSPACE, "NHD", backend="fa2", **options
    )


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        ({"head_dim_qk": 16}, {}),
        ({"q_data_type": torch.bfloat16}, {}),
        ({}, {"window_left": 3}),
        ({}, {"logits_soft_cap": 2.0}),
    ],
)
def test_the_sinks_module_must_be_that_of_the_plan(
    options: dict[str, Any], plan: dict[str, Any]
) -> None:
    arguments: dict[str, Any] = {**BLOCKS, **SIZES, **OPTIONS, **plan}
    with pytest.raises(ValueError, match=r"module was made for other|ignores logits_soft_cap"):
        sinks_wrapper(**options).plan(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [(), (torch.zeros(HEADS),), (torch.zeros(HEADS).half(), 0.3), (torch.zeros(2), 0.3)],
)
def test_sinks_come_in_float32_and_with_the_scale(arguments: tuple[Any, ...]) -> None:
    wrapper = sinks_wrapper()
    plan: dict[str, Any] = {**BLOCKS, **SIZES, **OPTIONS}
    wrapper.plan(**plan)
    given = tensors()
    with pytest.raises((TypeError, ValueError), match="sinks"):
        wrapper.run(given["q"], given["paged_kv_cache"], *arguments)
