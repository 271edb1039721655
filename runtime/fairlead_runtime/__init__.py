"""The runtime: scheduler, paged cache, model execution and the HTTP server.

Importing this package imports no torch: ``LLM``, which needs it, is imported at its first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fairlead_runtime.llm import LLM
    from fairlead_runtime.outputs import Submission
    from fairlead_runtime.request.sequence import SamplingParams

__all__ = ["LLM", "SamplingParams", "Submission"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        try:
            from fairlead_runtime.llm import LLM
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("fairlead_"):
                raise
            fix = f"{error.name} is not installed: pip install 'fairlead[runtime]'"
            raise ModuleNotFoundError(fix, name=error.name) from None
        return LLM
    if name == "SamplingParams":
        from fairlead_runtime.request.sequence import SamplingParams

        return SamplingParams
    if name == "Submission":
        from fairlead_runtime.outputs import Submission

        return Submission
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
