"""The sampling values that a model's makers advise: those of its ``generation_config.json``.

Owns which of them count, and their check. ``do_sample`` and lengths are not read.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairlead_runtime.models.files import GENERATION_CONFIG, has_file, read_json
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.request.sequence import RequestError, SamplingParams

NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_defaults(path: Path) -> Mapping[str, Any]:
    """The values of NAMES that the file sets, for requests that leave them out; empty without the
    file. Raises ModelError for a value that no request may have.
    """
    if not has_file(path, GENERATION_CONFIG):
        return {}
    settings = read_json(path, GENERATION_CONFIG)
    values = {name: settings[name] for name in NAMES if settings.get(name) is not None}
    if values.get("top_k") == -1:
        values["top_k"] = 0  # both switch the filter off
    try:
        SamplingParams(**values)
    except RequestError as error:
        raise ModelError(
            "BadModelFiles",
            f"{GENERATION_CONFIG}: {error}",
            "correct the file, or start with --generation-config none",
        ) from None
    return values
