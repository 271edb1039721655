"""The table of published models: its sizes are the published ones, and its figures the plan's."""

import sys
from pathlib import Path
from typing import Any

import pytest

from fairlead_operator.decide.children.capacity import plan_of
from fairlead_runtime.sizing.shape import ModelShape

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import model_names

ROOT = Path(__file__).parents[2]

ENTRIES = model_names.entries()
KNOWN = {name: model for name, model in ENTRIES.items() if "parameters" in model}


@pytest.mark.parametrize("name", KNOWN)
def test_a_stored_configuration_has_the_published_number_of_parameters(name: str) -> None:
    assert ModelShape.from_config(KNOWN[name]["config"]).parameters == KNOWN[name]["parameters"]


def test_the_table_has_the_names_that_people_know() -> None:
    assert len(ENTRIES) > 60
    assert len(KNOWN) > 35
    page = (ROOT / "docs" / "models.md").read_text("utf-8")
    for name in ENTRIES:
        assert f"\n| {name} | " in page


LLAMA = ENTRIES["Llama 3.1 8B"]["config"]


def test_a_figure_is_the_longest_context_that_the_plan_fits() -> None:
    most = LLAMA["max_position_embeddings"]
    length = model_names.longest(LLAMA, most, 24)
    assert length == 1 << (length.bit_length() - 1) < most
    assert plan_of(LLAMA, model_names.deployment(24, length)).fits
    assert not plan_of(LLAMA, model_names.deployment(24, 2 * length)).fits
    assert model_names.longest(LLAMA, most, 80) == most
    assert model_names.longest(LLAMA, most, 8) == 0


@pytest.mark.parametrize(
    ("config", "cells"),
    [
        (LLAMA, ("X", "yes", "8.0", "16k", "128k", "128k")),
        ({"model_type": "rwkv"}, ("X", "**no**: it keeps a recurrent state", "", "", "", "")),
        ({"model_type": "llama"}, ("X", "yes", "", "", "", "")),
        ({"model_type": "olmo3"}, ("X", "yes, judged by the self-test", "", "", "", "")),
    ],
)
def test_a_row_says_whether_a_model_is_served_and_where_it_fits(
    config: dict[str, Any], cells: tuple[str, ...]
) -> None:
    row = model_names.row("X", config)
    assert [cell.startswith(start) for cell, start in zip(row, cells, strict=True)] == [True] * 6
    assert [bool(cell) for cell in row] == [bool(cell) for cell in cells]


def test_a_format_that_is_not_served_is_a_no_with_its_name() -> None:
    fp8 = {"quantization_config": {"quant_method": "fp8"}}
    assert "`fp8`" in model_names.refusal(LLAMA | fp8)
