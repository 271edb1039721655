"""A model's ``config.json``, read key by key: every value is typed and bounded before it is used.

Owns the verdict on the family, one for the plan, which has this file alone, and for the pod; what
of the file describes the text of a model of several parts; the errors that name a key, the limits,
and the defaults of a family beneath the file's own values. The values are untrusted. Reads one
mapping; never a file or a network.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from fairlead_runtime.sizing.declared import problem_of, problem_of_kinds
from fairlead_runtime.sizing.families.judged import SIZED
from fairlead_runtime.sizing.families.makers import nearest, working_of
from fairlead_runtime.sizing.families.other_names import OTHER_NAMES
from fairlead_runtime.sizing.families.refusals import (
    ENCODER_DECODER,
    INNER,
    NO_TEXT,
    NO_WHOLE,
    OWN_INPUTS,
    REFUSED,
)
from fairlead_runtime.sizing.families.wholes import WHOLES
from fairlead_runtime.sizing.families.with_states import WITH_STATES
from fairlead_runtime.sizing.family import Family, Parts
from fairlead_runtime.sizing.family_table import FAMILIES, JUDGED, TEXTS

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
LARGEST = {
    "num_hidden_layers": 1 << 12,
    **dict.fromkeys(("num_local_experts", "num_experts"), 1 << 14),
    "vocab_size": 1 << 26,
}
LARGEST_OTHER = 1 << 24
# The most of what transformers' classes build modules, or entries of lists, for: by a word of the
# setting's name. A tower of a million layers takes hours, on the meta device, too.
LARGEST_COUNTS: Mapping[str, int] = {
    **dict.fromkeys(
        ("layer", "layers", "blocks", "depth", "depths", "stages", "repeats", "cycles", "flows"),
        1 << 12,
    ),
    **dict.fromkeys(
        (
            *("head", "heads", "experts", "groups", "channels", "levels", "inputs"),
            *("codebooks", "quantizers", "networks", "conditions", "functions"),
        ),
        1 << 14,
    ),
    "labels": 1 << 16,
}
_WIDTHS = frozenset(("size", "sizes", "dim", "dims"))
CAUSAL_TEXT = ("vision",)  # bidirectional attention of images: texts are causal beside them
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
# The settings that most families share, by the names that transformers gives them.
STANDARD = (
    *(
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "ffn_dim",
        "num_hidden_layers",
        "max_position_embeddings",
        "rope_parameters",
    ),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings"),
    *("use_bidirectional_attention", "num_experts_per_tok", *EXPERTS),
)

TEXT = "text_config"
# Other keys for the text's settings: no model of these is served.
OTHER_TEXTS = ("llm_config", "language_config", "thinker_config")
# transformers takes what stands there for the text, of whatever model.
STRAY_TEXTS = ("decoder", "generator", "text_encoder")
_TIED = "tie_word_embeddings"


class ShapeError(ValueError):
    """A config.json that cannot be sized. ``field`` names the key, the message what it must be."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"config.json: {field}: {message}")
        self.field = field


class UnknownFamilyError(ShapeError):
    """A family that is not in the table: config.json alone does not give its size."""

    def __init__(self, name: str) -> None:
        super().__init__(
            "model_type",
            f"{name[:100]!r} is not in the table of families: its weights' size is known once the "
            "files are downloaded; a pod loads such a model, runs the self-test and measures it"
            + nearest_family(name[:100]),
        )


def check_counts(config: Mapping[str, Any]) -> None:
    """Raise ShapeError for a count beyond any model's, of any part: transformers' classes build as
    many modules, or lists of that length. A list of counts has as many as its sum.
    """
    for key, value in config.items():
        words = str(key).split("_")
        parts = list(value) if isinstance(value, list | tuple) else [value]
        numbers = []
        for part in parts:  # grows by the lists in it
            if isinstance(part, Mapping):
                check_counts(part)
            elif isinstance(part, list | tuple):
                parts += part
            elif isinstance(part, int):
                numbers.append(part)
        limits = [LARGEST_COUNTS[word] for word in words if word in LARGEST_COUNTS]
        if not limits or not numbers or not _WIDTHS.isdisjoint(words):
            continue
        # A list of layers without "num" has their numbers.
        count = max(numbers) if words[-1] == "layers" and "num" not in words else sum(numbers)
        if count > min(limits):
            raise ShapeError(str(key)[:100], f"{_digits(count)} is more than {min(limits)}")


def _digits(value: int) -> str:
    """The number, or its first digits: Python writes only so many."""
    return f"{value:.3g}" if value < 10**300 else "a number of hundreds of digits"


def has_parts(config: Mapping[str, Any]) -> bool:
    """Whether the model has parts beside its text, as for images; no pod loads them."""
    name = config.get("model_type")
    return isinstance(config.get(TEXT), Mapping) or (isinstance(name, str) and name in WHOLES)


def family_of(config: Mapping[str, Any]) -> tuple[Family, Mapping[str, Any]]:
    """The family of a model's text, and the settings of that text: ``config`` itself unless the
    model has several parts.

    Raises UnknownFamilyError for a family that is not in the table, ShapeError for one that is not
    served.
    """
    name = config.get("model_type")
    if not isinstance(name, str):
        raise _refused("model_type", str(name), "it is not a name")
    if name in REFUSED:
        raise _refused("model_type", name, REFUSED[name])
    _check_texts(name, config)
    check_counts(config)
    if has_parts(config):
        return _family_of_text(name, config)
    if name in TEXTS:
        raise _refused("model_type", name, INNER)
    family = family_named(name)
    if family is None:
        raise UnknownFamilyError(name)
    return _meant(family, name, config)


def _meant(
    family: Family, kind: str, settings: Mapping[str, Any]
) -> tuple[Family, Mapping[str, Any]]:
    settings = _by_one_name(kind, settings)
    layers = family.aliases.get("num_hidden_layers", "num_hidden_layers")
    count = settings.get(layers, family.defaults.get("num_hidden_layers"))
    _check_declared(kind, settings)
    if kinds := problem_of_kinds(settings, count):
        raise ShapeError(*kinds)
    return family.variant(family, settings) if family.variant else (family, settings)


def _check_declared(kind: str, settings: Mapping[str, Any], place: str = "") -> None:
    """Raise ShapeError for the first of the settings at ``place`` that the class of this model_type
    refuses.
    """
    if refusal := problem_of(kind, settings):
        field, problem = refusal
        raise ShapeError(place + field, problem)


def _by_one_name(kind: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings without other names for them. Raises ShapeError for one that is given by two
    names with two values: which of them a class takes is its own affair. Also for null by another
    name: a class that makes a number of its own name's null sets null in its place.
    """
    names = {other: name for other, name in OTHER_NAMES.get(kind, {}).items() if other in settings}
    for other, name in names.items():
        if settings[other] is None:
            problem = f"must not be null, which only {name}, the same setting, may be: remove it"
            raise ShapeError(other, problem)
        if name in settings and settings[name] != settings[other]:
            given, taken = (str(settings[key])[:40] for key in (other, name))
            problem = f"is {given} where {name}, the same setting, is {taken}: remove one of them"
            raise ShapeError(other, problem)
    kept = {name: value for name, value in settings.items() if name not in names}
    return kept | {name: settings[other] for other, name in names.items()}


def family_named(name: str) -> Family | None:
    """The family of a model of one part, None where the table has none."""
    return FAMILIES.get(name) or WITH_STATES.get(name) or SIZED.get(name)


def _check_texts(name: str, config: Mapping[str, Any]) -> None:
    """Raise ShapeError where the whole or its text encodes, too, or has settings of a text under
    another key.
    """
    text = config.get(TEXT)
    for part in (config, text) if isinstance(text, Mapping) else (config,):
        if part.get("is_encoder_decoder"):  # as a pod has it: a text is true
            raise _refused("is_encoder_decoder", name, ENCODER_DECODER)
        strays = STRAY_TEXTS if part is config else (*STRAY_TEXTS, TEXT)
        for key in (*OTHER_TEXTS, *strays):
            value = part.get(key)
            if isinstance(value, Mapping) or (value is not None and key in strays):
                raise _refused(key, name, f"settings of its text are served as {TEXT} alone")
    if text is not None and not isinstance(text, Mapping):
        raise ShapeError(TEXT, "must be an object with the settings of the text")
    if text is not None and name not in WHOLES:
        raise _refused(TEXT, name, NO_WHOLE)


def of_the_maker(name: str) -> str:
    """What works of the maker of a refused family, to end a message with; "" for nothing known."""
    works = working_of(name)
    return f"; of the same maker {works}" if works else ""


def nearest_family(name: str) -> str:
    """A served family with nearly that name, to end a message with; "" for none."""
    near = nearest(name, {**FAMILIES, **WITH_STATES, **SIZED, **WHOLES})
    return f"; the nearest name that is served is {near!r}" if near else ""


def _refused(field: str, name: str, reason: str) -> ShapeError:
    supported = ", ".join(sorted({**FAMILIES, **WITH_STATES, **WHOLES}))
    return ShapeError(
        field,
        f"{name[:100]!r} is not supported: {reason}{of_the_maker(name)}; supported are "
        f"{supported}, and ordinary decoders that pass the self-test",
    )


def _family_of_text(name: str, config: Mapping[str, Any]) -> tuple[Family, Mapping[str, Any]]:
    parts = WHOLES[name]
    _check_declared(name, config)
    if config.get("rope_scaling") and not isinstance(config["rope_scaling"], Mapping):
        raise ShapeError("rope_scaling", "must be an object or null, of the whole, too")
    text = _text_settings(config, parts)
    kind = str(text.get("model_type"))
    # A text with states is served in the whole that is published with it.
    served = {*FAMILIES, *JUDGED, parts.text}
    family = TEXTS.get(kind) or (family_named(kind) if kind in served else None)
    if family is None:
        raise _refused(f"{TEXT}.model_type", kind, REFUSED.get(kind, NO_TEXT))
    if not parts.any_text and kind != parts.text:
        raise _refused(f"{TEXT}.model_type", kind, f"the text of {name!r} is {parts.text!r}")
    if kind in parts.never:
        raise _refused(f"{TEXT}.model_type", kind, f"{name!r} reads what such a text has not")
    for key, default in parts.head.items():
        if config.get(key, default) != text.get(key, family.defaults.get(key)):
            raise ShapeError(key, f"must be that of {TEXT}: the head of {name!r} has this size")
    if family.layer_inputs and kind != parts.text:
        raise _refused(f"{TEXT}.model_type", kind, OWN_INPUTS)
    if _TIED in text:  # that of the whole may be taken in its place
        _check_declared(kind, {_TIED: text[_TIED]}, f"{TEXT}.")
    # The head is the whole's, which has no bias.
    row = replace(family, head_bias=False, framed=parts.framed)
    return _meant(row, kind, _with_outer(text, config, parts))


def _text_settings(config: Mapping[str, Any], parts: Parts) -> Mapping[str, Any]:
    """The text's own settings, with its model_type."""
    text = config.get(TEXT)
    if isinstance(text, Mapping):
        if parts.formerly and "model_type" not in text:
            raise ShapeError(f"{TEXT}.model_type", f"must be {parts.text!r} or {parts.formerly!r}")
        kind = text.get("model_type", parts.text)
        return {**text, "model_type": parts.text if kind == parts.formerly else kind}
    if not parts.flat:
        raise ShapeError(TEXT, "must be an object with the settings of the text")
    return {**config, "model_type": parts.text}


def _with_outer(
    text: Mapping[str, Any], config: Mapping[str, Any], parts: Parts
) -> Mapping[str, Any]:
    """The text's settings, with its type and the tie of its head where the whole says them."""
    outer = {key: config[key] for key in ("dtype", "torch_dtype") if config.get(key) is not None}
    own = text.get(_TIED)
    tied = config.get(_TIED, own if parts.tied is None else parts.tied)
    # transformers compares the two where the text denies it, and may hold both.
    if own is False or (own and parts.either):
        tied = own or (parts.either and tied)
    dropped = {_TIED, *(("dtype", "torch_dtype") if outer else ())}
    settings = {key: value for key, value in text.items() if key not in dropped}
    return settings | outer | ({} if tied is None else {_TIED: tied})


def with_stored_head(config: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """The config of a model of WHOLES with what the names of its tensors say of the head: it is the
    embedding where none is stored. Another config as it is.
    """
    text = config.get(TEXT, {})
    if str(config.get("model_type")) not in WHOLES or not isinstance(text, Mapping):
        return config
    tied = {_TIED: not any(name.endswith("lm_head.weight") for name in names)}
    return {**config, **tied} | ({TEXT: {**text, **tied}} if text else {})


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the configuration alone says that the head is the embedding."""
    try:
        family, settings = family_of(config)
    except UnknownFamilyError:
        return config.get(_TIED) is True
    return settings.get(_TIED, family.defaults.get(_TIED)) is True


class ConfigReader:
    """A config over its family's defaults: every read checks the type and the bounds."""

    def __init__(self, config: Mapping[str, Any], family: Family) -> None:
        self._config = config
        self.family = family
        self.heads = self.integer("num_attention_heads")
        for name in family.needs:
            if not isinstance(self.get(name), float):
                # Windows are judged where layers slide.
                self.integer(name, low=-1 if name == "sliding_window" else 1)
        kv_heads = self.own("num_key_value_heads") if family.reads_kv_heads else None
        one = bool(family.one_kv_head_if) and self.flag(family.one_kv_head_if)
        self.kv_heads = 1 if one else kv_heads or self.heads
        self.head_dim = self._head_dim()

    def _head_dim(self) -> int:
        hidden, reads = self.integer("hidden_size"), self.family.reads_kv_heads
        if (self.family.even_heads or not reads) and hidden % self.heads:
            problem = f"{self.heads} heads do not divide the hidden size, {hidden}"
            raise ShapeError("num_attention_heads", problem)
        width = self.own("head_dim") if reads and self.family.reads_head_dim else None
        return width or max(1, hidden // self.heads)

    def get(self, name: str) -> Any:
        key = self.family.aliases.get(name, name)
        return self._config[key] if key in self._config else self.family.defaults.get(name)

    def says(self, name: str) -> bool:
        """Whether the file itself has the setting, if only as null."""
        return self.family.aliases.get(name, name) in self._config

    def optional(self, name: str, low: int = 1) -> int | None:
        return None if self.get(name) is None else self.integer(name, low)

    def own(self, name: str) -> int | None:
        """A setting that its class may make of others, None for that. Where the class has a number
        for it, it does not take null for one.
        """
        made = name in self.family.made or self.family.defaults.get(name) is None
        return self.optional(name) if made else self.integer(name)

    def of_layer(self, name: str, index: int) -> int | None:
        """A setting that may be a list with an entry per layer."""
        value, layers = self.get(name), self.integer("num_hidden_layers")
        if not isinstance(value, list | tuple):
            return self.own(name)
        if len(value) != layers:
            raise ShapeError(name, f"must be a number, or a list of {layers}, one per layer")
        return self.checked(name, value[index])

    def integer(self, name: str, low: int = 1) -> int:
        return self.checked(name, self.get(name), low)

    def checked(self, name: str, value: object, low: int = 1) -> int:
        high = LARGEST.get(name, LARGEST_OTHER)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ShapeError(
                name, f"must be a whole number from {low} to {high}, not {str(value)[:40]}"
            )
        return value

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if value is None and name in self.family.made:
            return False
        if not isinstance(value, bool):
            raise ShapeError(name, f"must be true or false, not {str(value)[:40]}")
        return value

    def flag_or_constant(self, value: bool | str) -> bool:
        """``value`` itself, or the setting that it names."""
        return self.flag(value) if isinstance(value, str) else value


def check_traits(s: ConfigReader) -> None:
    """Raise ShapeError for a setting that paged attention does not support."""
    if s.get("use_bidirectional_attention") not in (None, False, *CAUSAL_TEXT):
        raise ShapeError(
            "use_bidirectional_attention", "such a model encodes text and does not generate any"
        )
    if s.get("per_layer_config") and not s.family.full_dim:
        raise ShapeError("per_layer_config", "layers of different sizes are not supported")
    _check_own(s, s.family)


def _check_own(s: ConfigReader, family: Family) -> None:
    """Raise ShapeError for settings that the family's class refuses, or its layers cannot run."""
    if family.exact_heads and s.heads * s.head_dim != s.integer("hidden_size"):
        problem = f"{s.heads} heads of {s.head_dim} are not the hidden size"
        raise ShapeError("head_dim", f"{problem}, {s.integer('hidden_size')}, as its layers need")
    if family.same and s.flag(family.same[0]) is not s.flag(family.same[1]):
        raise ShapeError(family.same[0], f"must be what {family.same[1]} is")
    for name in family.never:
        if s.get(name) not in (None, False):
            raise ShapeError(name, "is not supported in this family: remove it")
    for name, bound in family.less:
        if s.integer(name, low=0) >= s.integer(bound):
            raise ShapeError(name, f"must be less than {bound}, {s.integer(bound)}")
    for name, bound in family.at_most:
        if s.integer(name) > s.integer(bound):
            raise ShapeError(name, f"must be at most {bound}, {s.integer(bound)}")


def dtype_of(config: Mapping[str, Any]) -> str | None:
    """The checkpoint's own type, None when the config does not name one."""
    value = config.get("dtype")
    if value is None:
        value = config.get("torch_dtype")  # the older key
    if value is None:
        return None
    name = str(value)[:40].removeprefix("torch.")
    if name not in DTYPE_BYTES:
        problem = f"{name!r} is not supported; supported are {', '.join(DTYPE_BYTES)}"
        raise ShapeError("dtype", problem)
    return name
