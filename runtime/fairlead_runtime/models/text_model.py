"""transformers' class for a model, without the parts beside its text.

Owns which class a configuration has, and what of a model of several parts is left out: all that
lies outside its text model and its head, as towers and projectors of images. It keeps the whole's
own code and names, so that transformers maps the names of published tensors, old and new, to it.
"""

import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils.import_utils import is_mambapy_available

from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.sizing.config_json import CAUSAL_TEXT, TEXT
from fairlead_runtime.sizing.families.wholes import WHOLES

# Kernels of other packages, which transformers' layers with states take where it can import them,
# for tensors on a CPU, too: their results are not those that are tested here.
KERNELS = ("fla", "mamba_ssm", "causal_conv1d", "mambapy")
# What a class without a text of its own has beside it, by its model_type: the module that puts
# embeddings of other parts in the places of tokens.
BESIDE = {"phi4_multimodal": "embed_tokens_extend"}
# It asks users to install them.
logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)


@contextmanager
def without_kernels() -> Iterator[None]:
    """Transformers' code that is imported or built here takes none of ``KERNELS``. A program's own
    import of one works before and after.
    """
    before = {name: sys.modules[name] for name in KERNELS if name in sys.modules}
    sys.modules.update(dict.fromkeys(KERNELS))  # type: ignore[arg-type]
    try:
        is_mambapy_available()  # its code asks at every call, and keeps the first answer
        yield
    finally:
        for name in KERNELS:
            sys.modules.pop(name, None)
        sys.modules.update(before)


def refuse_kernels() -> None:
    """Raise ModelError where one of ``KERNELS`` is imported: transformers' code for layers with
    states may have taken it before.
    """
    loaded = [name for name in KERNELS if sys.modules.get(name) is not None]
    if loaded:
        problem = f"this process has imported {loaded[0]}, whose kernels such a model may take"
        fix = f"load the model in a process that does not import {loaded[0]} before"
        raise ModelError("UnsupportedModel", f"the model's layers keep states: {problem}", fix)


def text_of(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of the text, ``config`` itself unless its class has several parts.

    transformers' own method takes what a file puts there, for a class without parts, too.
    """
    part = getattr(config, TEXT, None) if TEXT in config.sub_configs else None
    return part if isinstance(part, PretrainedConfig) else config


def has_parts(config: PretrainedConfig) -> bool:
    """Whether the model has parts beside its text."""
    return text_of(config) is not config


def class_of(config: PretrainedConfig) -> Any:
    """Transformers' class that generates text, None without one. With parts it is the whole's."""
    if not has_parts(config):
        return _only(MODEL_FOR_CAUSAL_LM_MAPPING, config)
    return _only(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, config)


def config_to_load(folder: Path, config: Mapping[str, Any]) -> PretrainedConfig:
    """The configuration that weights are loaded with: that of the ``folder``, whose config.json is
    ``config``, or of its text where the code of the whole cannot do without its other parts
    (``Parts.alone``): what describes those is not read.
    """
    name = str(config.get("model_type"))
    parts = WHOLES.get(name)
    if parts is None or not parts.alone:
        full = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    else:
        text, whole = dict(config[TEXT]), CONFIG_MAPPING[name]
        tied = config.get("tie_word_embeddings")
        text["tie_word_embeddings"] = whole.tie_word_embeddings if tied is None else tied
        factory: Any = CONFIG_MAPPING[parts.text]  # transformers' classes are untyped
        full = factory.from_dict(text)
    for part in (full, text_of(full)):
        # A pass gives an object with hidden states of its last layer, whatever a file says.
        part.return_dict, part.output_hidden_states = True, False
    _clear(text_of(full))
    return full


def _clear(text: PretrainedConfig) -> None:
    """Take out of a text's configuration what its model cannot be built with and no text needs: an
    id of padding that its embedding has no row for, a width of null that its class has not.
    """
    padding, vocabulary = getattr(text, "pad_token_id", None), getattr(text, "vocab_size", None)
    if isinstance(padding, int) and isinstance(vocabulary, int):
        text.pad_token_id = padding if -vocabulary <= padding < vocabulary else None
    if not hasattr(type(text), "head_dim") and vars(text).get("head_dim", 0) is None:
        del text.head_dim


def text_class_of(config: PretrainedConfig) -> Any:
    """The class whose code makes the masks of the text: of a model of several parts that of its
    text model, None without one.
    """
    if not has_parts(config):
        return class_of(config)
    return _only(MODEL_MAPPING, text_of(config))


def _only(mapping: Any, config: PretrainedConfig) -> Any:
    with without_kernels():  # the first look imports the class's code
        classes = mapping.get(type(config), None)
    return classes[0] if isinstance(classes, list | tuple) else classes


def class_to_load(config: PretrainedConfig) -> Any:
    """The class to load weights with: ``class_of``, which with parts builds the text alone."""
    whole, part = class_of(config), BESIDE.get(config.model_type)
    if not has_parts(config) and part is None:
        return whole

    def init(self: PreTrainedModel, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
        whole.__init__(self, config, *args, **kwargs)
        if part is None:
            drop_other_parts(self)
        else:
            drop_beside(self, part)

    # transformers knows the mapping of names by the name of the class, and reads its module.
    names = {"__init__": init, "__module__": whole.__module__, "__qualname__": whole.__qualname__}
    return type(whole.__name__, (whole,), names)


class _Passed(nn.Module):
    """Leaves the embeddings of a text as they are."""

    def forward(self, _ids: Tensor, embeddings: Tensor, **_: object) -> Tensor:
        return embeddings


def drop_beside(model: PreTrainedModel, name: str) -> None:
    """Let that module of the text model, one of ``BESIDE``, pass what it is given."""
    setattr(model.base_model, name, _Passed())
    prefix = re.escape(f"{model.base_model_prefix}.{name}.")
    model._keys_to_ignore_on_load_unexpected = {rf"^{prefix}"}  # noqa: SLF001 - no public one


def drop_other_parts(model: PreTrainedModel) -> None:
    """Remove what lies outside the text model and the head, from the model's configuration, too."""
    kept = [model.get_decoder(), model.get_output_embeddings()]
    inside = {id(module) for part in kept for module in part.modules()}
    for parent in list(model.modules()):
        if id(parent) in inside or not _holds(parent, kept):
            continue
        for name, child in list(parent.named_children()):
            if not _holds(child, kept):
                setattr(parent, name, None)
        for name, _ in list(parent.named_parameters(recurse=False)):
            setattr(parent, name, None)
    text = text_of(model.config)
    if getattr(text, "use_bidirectional_attention", None) in CAUSAL_TEXT:
        text.use_bidirectional_attention = None  # text has causal masks, without those of images
    for key in model.config.sub_configs:
        if getattr(model.config, key, None) is not text:
            setattr(model.config, key, None)  # transformers warns of a part that it does not find
    names = "|".join(re.escape(n) for n, part in model.named_modules() if part in kept)
    model._keys_to_ignore_on_load_unexpected = {rf"^(?!({names})\.)"}  # noqa: SLF001 - no public one
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def _holds(module: nn.Module, parts: list[nn.Module]) -> bool:
    return any(child is part for child in module.modules() for part in parts)
