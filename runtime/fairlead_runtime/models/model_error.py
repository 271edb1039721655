"""Why a model cannot be served, in words the command line, the termination line and the operator
share.

Owns the codes. The operator turns them into blockers, so a code never changes its meaning.
"""

from typing import Literal

Code = Literal[
    "InvalidSource",  # MODEL is none of the accepted forms
    "ModelNotFound",  # no such repository, revision, directory or file
    "WeightsUnauthorized",  # the hub wants a token, or other rights than the token has
    "HubUnreachable",  # the hub does not answer, or not sensibly
    "NoSpace",  # the cache's volume is too small for the model
    "NoSafetensors",  # there are weights, but in no format that is read
    "BadWeights",  # a safetensors file or its index is damaged or hostile
    "BadModelFiles",  # another file of the model is damaged or hostile
    "RemoteCodeRefused",  # the model needs its own Python code
    "UnsupportedModel",  # the architecture, or a trait of it, is not served
]


class ModelError(Exception):
    """A model that is refused. ``code`` is for machines, ``message`` says what is wrong, ``hint``
    the fix.
    """

    def __init__(self, code: Code, message: str, hint: str = "") -> None:
        super().__init__(message + (f" ({hint})" if hint else ""))
        self.code: Code = code
        self.message = message
        self.hint = hint
