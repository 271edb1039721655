"""Keep torch's compiler out of a process that compiles nothing.

transformers and torch import it, and with it a computer algebra system, for a few decorators, for
checks of sizes that are plain numbers, and for features that the engine does not use: two fifths of
the processor time until the demo model is loaded, and 150 MB.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

# By these transformers decides whether to import distributed tensors and flex attention.
_UNUSED = ("is_torch_distributed_available", "is_torch_flex_attn_available")


def _equal(first: object, second: object) -> bool:
    if isinstance(first, tuple | list) and isinstance(second, tuple | list):
        return len(first) == len(second) and all(map(_equal, first, second))
    return first == second


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return type(value) in (bool, int, float)


class LazyModule(ModuleType):
    """Stands for a module until somebody needs more than ``known`` of it, or a submodule that
    ``install`` did not import: then the real one takes its place.
    """

    def __init__(self, name: str, known: Mapping[str, Any]) -> None:
        super().__init__(name)
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        self.__spec__, self.__file__ = spec, spec.origin
        self._folders = spec.submodule_search_locations
        self.__dict__.update(known)

    def install(self, submodules: Sequence[str] = ()) -> None:
        """Let imports find it, unless the real module is there."""
        if self.__name__ in sys.modules:
            return
        sys.modules[self.__name__] = self
        if submodules:
            self.__path__ = self._folders or []
            for submodule in submodules:
                importlib.import_module(f"{self.__name__}.{submodule}")
            del self.__path__  # whoever imports another submodule asks for it

    def __getattr__(self, name: str) -> Any:
        # Who looks through all modules asks for such names, an import of a submodule for the path.
        if name.startswith("__") and (name != "__path__" or self._folders is None):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


class SymbolicShapes(LazyModule):
    """``torch.fx.experimental.symbolic_shapes``, which torch asks about each size of a tensor
    without memory: what it says of plain numbers, without the machinery for symbols.
    """

    PLAIN: ClassVar[dict[str, Callable[..., Any]]] = {
        "is_nested_int": lambda _: False,
        "has_guarding_hint": lambda _: True,
        "sym_eq": _equal,
        "sym_and": lambda *values: all(values),
        "sym_or": lambda *values: any(values),
        **dict.fromkeys(
            (
                "expect_true",
                "guard_or_false",
                "guard_or_true",
                "guard_size_oblivious",
                "guarding_hint_or_throw",
                "statically_known_true",
            ),
            lambda value: value,
        ),
    }

    def __init__(self, name: str) -> None:
        checks = {check: self._unless_symbolic(check) for check in self.PLAIN}
        super().__init__(name, checks)

    def _unless_symbolic(self, check: str) -> Callable[..., Any]:
        def of(*values: Any) -> Any:
            if all(map(_is_plain, values)):
                return self.PLAIN[check](*values)
            return self.__getattr__(check)(*values)

        return of


def leave_compiler_out() -> None:
    """Call it before transformers' models are imported, in a process of our own: transformers then
    takes this torch for one without ``torch.distributed``.
    """
    import transformers.utils

    for name in _UNUSED:
        for module in (transformers.utils, transformers.utils.import_utils):
            setattr(module, name, lambda: False)
    decorators = ("disable", "allow_in_graph", "assume_constant_result")
    LazyModule("sympy", {"Basic": NoSymbol}).install()
    SymbolicShapes("torch.fx.experimental.symbolic_shapes").install()
    compiler = LazyModule("torch._dynamo", dict.fromkeys(decorators, leave_as_it_is))
    # transformers' masks have a class of this submodule.
    compiler.install(submodules=("_trace_wrapped_higher_order_op",))


def leave_as_it_is(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:
    """The compiler's decorators, for functions that are not compiled."""
    return leave_as_it_is if function is None else function


class NoSymbol:
    """``sympy.Basic``, of which no value is an instance while nothing is traced."""
