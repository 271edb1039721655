"""The table of published models by the names that people know: whether each is served, and the
longest context with which it fits an accelerator, both by `fairlead plan`.

Owns the rows of docs/models.md that are made of docs/published_models.json, which has of each
model's config.json what decides the verdict and the sizes.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairlead_operator.decide.children.capacity import PlanError, plan_of
from fairlead_operator.resource.kinds import RESOURCE
from fairlead_operator.resource.resource import InferenceDeployment
from fairlead_runtime.sizing.config_json import TEXT, family_of
from fairlead_runtime.sizing.families.judged import SIZED
from fairlead_runtime.sizing.shape import ModelShape

PUBLISHED = Path(__file__).parents[1] / "docs" / "published_models.json"
MEMORY = (24, 48, 80)  # GiB of one accelerator
SHORTEST = 2048  # tokens of the shortest context that is worth a row's figure


def entries() -> dict[str, dict[str, Any]]:
    """Of each name its ``config``, and its published number of ``parameters`` where it is known."""
    models: dict[str, dict[str, Any]] = json.loads(PUBLISHED.read_text())
    return models


def table() -> str:
    """One row for each name, in the order of the file."""
    head = ("model", "served", "billion parameters", *(f"on {size} GiB" for size in MEMORY))
    rows = [head, ("---",) * len(head)]
    rows += [row(name, model["config"]) for name, model in entries().items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def row(name: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of one model."""
    refused = refusal(config)
    if refused or not has_sizes(config):
        return (name, refused or served(config), "", *("" for _ in MEMORY))
    shape = ModelShape.from_config(config)
    lengths = [shape.max_len]
    for size in reversed(MEMORY):  # less memory never holds more
        lengths.append(lengths[-1] and longest(config, lengths[-1], size))
    fits = map(tokens, reversed(lengths[1:]))
    return (name, served(config), f"{shape.parameters / 1e9:.1f}", *fits)


def has_sizes(config: Mapping[str, Any]) -> bool:
    """Whether the file has the model's sizes, and not its type alone."""
    return any("num_hidden_layers" in part for part in (config, config.get(TEXT) or {}))


def served(config: Mapping[str, Any]) -> str:
    """How it is served: by the table of families that are tested as a whole, or judged."""
    _, text = family_of(config)
    judged = str(text["model_type"]) in SIZED
    words = "yes, judged by the self-test" if judged else "yes"
    return f"{words}; its text" if config.get(TEXT) else words


def refusal(config: Mapping[str, Any]) -> str:
    """Why the plan refuses it on an accelerator; "" where it does not."""
    try:
        plan_of(config, deployment(MEMORY[-1], SHORTEST))
    except PlanError as error:
        words = str(error).partition("config.json: ")[2] or str(error)
        reason = words.partition("is not supported: ")[2] if "supported are" in words else words
        return f"**no**: {reason.partition('; supported are')[0]}".replace("'", "`")
    return ""


def longest(config: Mapping[str, Any], most: int, memory: int) -> int:
    """The longest context with which it fits, a power of two or all of it; 0 where none does."""
    lengths = [most]
    while lengths[-1] > SHORTEST:
        lengths.append(1 << (lengths[-1] - 1).bit_length() - 1)
    fitting = (n for n in lengths if plan_of(config, deployment(memory, n)).fits)
    return next(fitting, 0)


def tokens(count: int) -> str:
    """A number of tokens in thousands of 1,024."""
    return f"{count / 1024:.0f}k" if count else "no"


def deployment(memory: int, length: int) -> InferenceDeployment:
    """A deployment on one accelerator with this memory in GiB, else with the defaults."""
    accelerator = {"count": 1, "memory": f"{memory}Gi"}
    return InferenceDeployment.from_body(
        {
            "apiVersion": RESOURCE.api_version,
            "kind": RESOURCE.name,
            "metadata": {"name": "model", "namespace": "default"},
            "spec": {
                "model": {"source": "file:///model"},
                "engine": {"maxModelLen": length},
                "resources": {"memory": "64Gi", "accelerator": accelerator},
            },
        }
    )
