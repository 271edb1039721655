"""The exceptions that end a command: exception → (exit code, code, message, hint).

Owns this table. Exit code 2: the configuration, model or request is refused; 3: the self-test
failed; 4: the engine gave up. Any other exception is a bug and keeps its traceback.
"""

from typing import NamedTuple

from fairlead_runtime.child.process import OUT_OF_MEMORY
from fairlead_runtime.models.model_error import CanaryError, ModelError, SelfTestError
from fairlead_runtime.outputs import EngineDead
from fairlead_runtime.request.sequence import RequestError
from fairlead_runtime.settings.engine_config import ConfigError, flag_of

# What the kernel, the loader of libraries and Python say of it.
SHORT_OF_MEMORY = (
    OUT_OF_MEMORY,
    "failed to map segment",
    "Cannot allocate memory",
    "MemoryError",
    "can't allocate memory",
)


class Refusal(NamedTuple):
    exit_code: int
    code: str
    message: str
    hint: str


def refusal_for(error: Exception) -> Refusal | None:
    """The refusal that people and the operator read for ``error``; None if it is not a refusal."""
    match error:
        case ConfigError():
            message = f"{flag_of(error.field)}: {error.message}"
            return Refusal(2, "InvalidConfig", message, error.hint)
        case ModelError():
            return Refusal(2, error.code, error.message, error.hint)
        case EngineDead():
            return Refusal(4, "EngineDead", str(error), _hint_for_death(str(error)))
        case RequestError():
            return Refusal(2, "InvalidRequest", str(error), "")
        case CanaryError():
            hint = "report the model and the machine; without --deterministic it can be served"
            return Refusal(3, "SelfTestFailed", str(error), hint)
        case SelfTestError():
            hint = (
                "try --dtype float32, which passes if only rounding differs; "
                "docs/trying-a-model.md says what else to try, and what to report"
            )
            return Refusal(3, "SelfTestFailed", str(error), hint)
    return None


def _hint_for_death(reason: str) -> str:
    """The fix by how the engine has ended: the kernel ends what takes too much memory."""
    if any(words in reason for words in SHORT_OF_MEMORY):
        return (
            "lower --num-blocks, --max-model-len or --max-memory-percent, or use a machine with "
            "more memory"
        )
    return "read the log; if every start ends so, the device or the driver is at fault"
