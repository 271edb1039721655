"""What ends a command before it can do its work: exceptions → (exit code, code, message, hint).

Owns the table. 2: cannot be done as asked; 3: the self-test failed. Anything else is a bug and
keeps its traceback.
"""

from typing import NamedTuple

from fairlead_runtime.config import ConfigError
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.request import RequestError


class Refusal(NamedTuple):
    exit_code: int
    code: str
    message: str
    hint: str


def refusal(error: Exception) -> Refusal | None:
    """How ``error`` is told to people and to the operator; None for one that is no refusal."""
    match error:
        case ConfigError(hint=hint):
            return Refusal(2, "InvalidConfig", str(error).removesuffix(f" ({hint})"), hint)
        case ModelError():
            return Refusal(2, error.code, error.message, error.hint)
        case RequestError():
            return Refusal(2, "InvalidRequest", str(error), "")
    # Here and not above: it brings torch, which the refusals before it did not need.
    from fairlead_runtime.device.selftest import SelfTestError

    if isinstance(error, SelfTestError):
        hint = "report the model; --dtype float32 tells a rounding from a wrong result"
        return Refusal(3, "SelfTestFailed", str(error), hint)
    return None
