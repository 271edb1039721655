"""The reason why a model cannot be served: the error that the command line, the termination message
and the operator share.

Owns the codes. The operator turns them into blockers, so a code never changes its meaning.
"""

from typing import Literal

from fairlead_runtime.sizing.config_json import ShapeError
from fairlead_runtime.sizing.stored import QuantizedError

Code = Literal[
    "InvalidSource",  # MODEL has none of the accepted forms
    "ModelNotFound",  # no such repository, revision, directory or file
    "WeightsUnauthorized",  # the hub needs a token, or one with other rights
    "HubUnreachable",  # the hub does not answer, or answers with an error
    "NoSpace",  # the cache's volume is too small for the model
    "NoSafetensors",  # the weights are in a format that is never read
    "BadWeights",  # a safetensors file or its index is damaged or hostile
    "BadModelFiles",  # another file of the model is damaged or hostile
    "RemoteCodeRefused",  # the model needs its own Python code
    "NoAccelerator",  # --device cuda, on a host where torch finds none
    "OutOfMemory",  # the weights do not fit into the memory that is free
    "UnsupportedModel",  # the architecture, or a property of it, is not served
]


class ModelError(Exception):
    """A model that is refused. ``code`` is for programs, ``message`` says what is wrong, ``hint``
    the fix.
    """

    def __init__(self, code: Code, message: str, hint: str = "") -> None:
        super().__init__(message + (f" ({hint})" if hint else ""))
        self.code: Code = code
        self.message = message
        self.hint = hint


class SelfTestError(Exception):
    """The engine's forward pass does not give the logits of transformers."""


class CanaryError(SelfTestError):
    """A request's logits depend on the batch although ``deterministic`` is set."""


def first_line(error: Exception) -> str:
    """The error's type and the first line of its text, for a message about it."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]


def unsupported_shape(error: ShapeError) -> ModelError:
    """The refusal of a config.json that cannot be sized, with what to do."""
    quantized = isinstance(error, QuantizedError)
    fix = "use the unquantized checkpoint" if quantized else "serve one of the supported families"
    return ModelError("UnsupportedModel", str(error), fix)
