"""Count which of transformers' types of text models are admitted, against the list beside it.

    python scripts/census.py           prints the counts; exits with 1 where the list is out of date
    python scripts/census.py --write   writes the list

Each type is judged by the configuration that its class has by default: ``plan`` sizes it, or a pod
``tries`` it and measures it, or both refuse it, with the reason. The list is ``census.json``; its
diff shows a family that was lost, and one that was won.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from fairlead_runtime.sizing.config_json import ShapeError, UnknownFamilyError, family_of
from fairlead_runtime.sizing.families.wholes import WHOLES

LIST = Path(__file__).with_name("census.json")
PLANNED, TRIED, REFUSED = "plan", "tries", "refused: "
ADMITTED = (PLANNED, TRIED)


def stored() -> dict[str, str]:
    """The verdicts of the list."""
    verdicts: dict[str, str] = json.loads(LIST.read_text())
    return verdicts


def types() -> list[str]:
    """All of transformers' types of causal and of image-text models."""
    mappings: Iterable[Mapping[str, Any]] = (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    return sorted({name for mapping in mappings for name in mapping})


def config_of(name: str) -> dict[str, Any]:
    """A config.json that says the type, and the type of its text where it has several parts."""
    parts = getattr(CONFIG_MAPPING[name], "sub_configs_defaults", None) or {}
    if "text_config" not in parts and name not in WHOLES:
        return {"model_type": name}
    kind = WHOLES[name].text if name in WHOLES else parts["text_config"].model_type
    sizes = dict(WHOLES[name].head) if name in WHOLES else {}
    return {"model_type": name, "text_config": {"model_type": kind, **sizes}}


def planned(name: str) -> str:
    """The verdict of the plan."""
    try:
        family_of(config_of(name))
    except UnknownFamilyError:
        return TRIED
    except ShapeError as error:
        return REFUSED + reason(str(error))
    return PLANNED


def reason(message: str) -> str:
    """The reason that a refusal gives, without the names beside it."""
    words = message.partition("is not supported: ")[2] or message
    words = words.partition("cannot be served: ")[2] or words
    return words.split("; ")[0]


def served(name: str) -> str:
    """The verdict of the pod on its configuration, which imports the model's code."""
    from fairlead_runtime.models import architecture
    from fairlead_runtime.models.model_error import ModelError

    verdict = planned(name)
    if verdict != TRIED:
        return verdict
    try:
        architecture.check(config_of(name))
    except ModelError as error:
        return REFUSED + reason(error.message)
    return TRIED


def report(verdicts: Mapping[str, str]) -> str:
    """The counts, and of the refused types those by reason."""
    admitted = [name for name, verdict in verdicts.items() if verdict in ADMITTED]
    tried = sum(verdicts[name] == TRIED for name in admitted)
    reasons = Counter(v.removeprefix(REFUSED) for v in verdicts.values() if v.startswith(REFUSED))
    planned_alone = len(admitted) - tried
    head = f"{len(admitted)} of {len(verdicts)} types are admitted"
    lines = [
        f"{head}: {planned_alone} planned from config.json, {tried} tried",
        *(f"{count:4} refused: {words}" for words, count in reasons.most_common()),
    ]
    return "\n".join(lines)


def changes(before: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Each type whose verdict is not the stored one."""
    names = sorted({*before, *found})
    return [
        f"{name}: {before.get(name, 'new')} -> {found.get(name, 'gone')}"
        for name in names
        if before.get(name) != found.get(name)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the list")
    found = {name: served(name) for name in types()}
    if parser.parse_args().write:
        LIST.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")
    print(report(found))
    different = changes(stored(), found)
    print(*different, sep="\n", file=sys.stderr)
    return 1 if different else 0


if __name__ == "__main__":
    raise SystemExit(main())
