"""What loading resolves: types, limits, end tokens, identity; and chats in the model's own
template.
"""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from fairlead_runtime.models import chat, files, loading
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.models.tokenizer_files import load_tokenizer
from fairlead_runtime.request.sequence import RequestError
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from support import tiny, tiny_any
from support.hostile_models import edit

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(
        tiny.build("llama", num_hidden_layers=2), tmp_path_factory.mktemp("good") / "model"
    )


@pytest.fixture
def model(good: Path, tmp_path: Path) -> Path:
    shutil.copytree(good, tmp_path / "model")
    return tmp_path / "model"


def identity(path: Path, **settings: Any) -> bytes:
    return loading.load(path, config=EngineConfig(**settings)).identity


def test_auto_keeps_the_checkpoints_type_and_a_setting_overrides_it(model: Path) -> None:
    save_file({k: v.bfloat16() for k, v in load_file(model / WEIGHTS).items()}, model / WEIGHTS)
    edit(model, "config.json", dtype="bfloat16")
    loaded = loading.load(model)
    assert loaded.dtype == torch.bfloat16
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    forced = loading.load(model, config=EngineConfig(dtype="float32"))
    assert {p.dtype for p in forced.model.parameters()} == {torch.float32}


# What transformers keeps in float32 in a model of 16 bits: biases and matrices of routers, and
# in float16 norms.
KEPT = {"mimo_v2_flash": "e_score_correction_bias"} | dict.fromkeys(
    ("ernie4_5_moe", "beam"), "gate.weight"
)


@pytest.mark.parametrize(
    ("family", "dtype", "kept"),
    [
        *((family, torch.bfloat16, kept) for family, kept in KEPT.items()),
        ("mimo_v2_flash", torch.float16, KEPT["mimo_v2_flash"]),
        ("gpt_oss", torch.float16, "input_layernorm.weight"),
    ],
    ids=str,
)
def test_what_transformers_keeps_in_float32_stays_so(
    family: str, dtype: torch.dtype, kept: str, tmp_path: Path
) -> None:
    build = tiny.build if family in tiny.FAMILIES + tiny.SIZED else tiny_any.build
    saved = tiny.save(build(family), tmp_path)
    tensors = load_file(saved / WEIGHTS)
    wide = {name for name in tensors if kept in name}
    stored = {name: x if name in wide else x.to(dtype) for name, x in tensors.items()}
    # Such that 16 bits would round two of them to one.
    for name in wide:
        stored[name] = 1 + torch.arange(stored[name].numel()).view(stored[name].shape) / 4096
    save_file(stored, saved / WEIGHTS, {"format": "pt"})
    edit(saved, "config.json", dtype=str(dtype).removeprefix("torch."))
    factory: Any = AutoModelForCausalLM
    expected = factory.from_pretrained(saved, dtype=dtype).state_dict()
    held = loading.load(saved).model.state_dict()
    assert held.keys() == expected.keys()
    for name, tensor in expected.items():
        assert held[name].dtype == tensor.dtype, name
        assert torch.equal(held[name], tensor), name
    assert wide
    assert all(torch.equal(held[name], stored[name]) for name in wide)


def test_a_few_numbers_of_another_type_do_not_decide_on_the_models(tmp_path: Path) -> None:
    saved = tiny.save(tiny.build("mimo_v2_flash"), tmp_path)
    config = json.loads((saved / "config.json").read_text())
    del config["dtype"]
    (saved / "config.json").write_text(json.dumps(config))
    tensors = {
        name: x if "e_score" in name else x.bfloat16()
        for name, x in load_file(saved / WEIGHTS).items()
    }
    first = next(name for name in tensors if "e_score" in name)
    (saved / WEIGHTS).unlink()
    save_file({first: tensors.pop(first)}, saved / "model-00001-of-00002.safetensors")
    save_file(tensors, saved / "model-00002-of-00002.safetensors")
    places = dict.fromkeys(tensors, "model-00002-of-00002.safetensors")
    places[first] = "model-00001-of-00002.safetensors"
    index = json.dumps({"metadata": {}, "weight_map": places})
    (saved / "model.safetensors.index.json").write_text(index)
    assert loading.inspect(saved).dtype is torch.bfloat16


def test_an_id_of_padding_without_a_row_is_none(model: Path) -> None:
    """No text needs it; transformers' classes do not build such an embedding."""
    edit(model, "config.json", pad_token_id=tiny.VOCAB)
    assert loading.load(model).config.pad_token_id is None


def test_without_a_type_in_the_settings_the_stored_one_counts(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    del config["dtype"]
    (model / "config.json").write_text(json.dumps(config))
    save_file({k: v.half() for k, v in load_file(model / WEIGHTS).items()}, model / WEIGHTS)
    assert loading.inspect(model).dtype == torch.float16


def test_the_longest_sequence_is_the_models_own_or_the_configured_shorter_one(good: Path) -> None:
    assert loading.inspect(good).max_model_len == tiny.CONTEXT
    assert loading.inspect(good, EngineConfig(max_model_len=100)).max_model_len == 100
    with pytest.raises(ConfigError, match=r"--max-model-len.*1024"):
        loading.inspect(good, EngineConfig(max_model_len=tiny.CONTEXT + 1))


def test_quantization_is_named_where_it_is_not_supported(good: Path) -> None:
    with pytest.raises(ConfigError, match="--quantization"):
        loading.inspect(good, EngineConfig(quantization="fp8", device="cpu"))


def test_cached_keys_of_quantized_weights_are_others(model: Path) -> None:
    plain, int8 = (
        loading.load(model, config=EngineConfig(quantization=method)).identity
        for method in ("none", "int8")
    )
    assert plain != int8


def test_every_id_that_ends_a_text_counts_once_and_only_inside_the_vocabulary(model: Path) -> None:
    edit(model, "generation_config.json", eos_token_id=[7, 9, 10**6])
    assert loading.load(model).eos_ids == {2, 7, 9}  # 2 is the tokenizer's


def test_equal_models_have_one_identity_in_any_directory(good: Path, model: Path) -> None:
    edit(model, "config.json", transformers_version="0.0.0", _name_or_path="elsewhere")
    assert identity(good) == identity(model)
    assert len(identity(good)) == 32


@pytest.mark.parametrize(
    "change",
    [
        lambda path: edit(path, "config.json", rms_norm_eps=1e-5),
        lambda path: edit(
            path, "config.json", rope_parameters={"rope_type": "default", "rope_theta": 5e5}
        ),
        lambda path: save_file(
            {k: v + 1e-3 for k, v in load_file(path / WEIGHTS).items()},
            path / WEIGHTS,
            {"format": "pt"},
        ),
        lambda path: save_file(
            {
                k: v + 1e-3 if "layers.1.mlp.up" in k else v
                for k, v in load_file(path / WEIGHTS).items()
            },
            path / WEIGHTS,
            {"format": "pt"},
        ),
    ],
    ids=["epsilon", "rope", "all weights", "one matrix"],
)
def test_changes_of_keys_and_values_change_the_identity(
    good: Path, model: Path, change: Any
) -> None:
    change(model)
    assert identity(model) != identity(good)


def test_the_types_and_the_longest_sequence_are_part_of_the_identity(good: Path) -> None:
    identities = {
        identity(good),
        identity(good, dtype="bfloat16"),
        identity(good, max_model_len=512),
        identity(good, cache_dtype="fp8"),
    }
    assert len(identities) == 4


def test_weights_in_several_files_load_like_one(good: Path, tmp_path: Path) -> None:
    whole = loading.load(good)
    whole.model.save_pretrained(tmp_path / "parts", max_shard_size="200KB")
    tiny.tokenizer().save_pretrained(tmp_path / "parts")
    assert len(files.check(tmp_path / "parts").weights) > 1
    parts = loading.load(tmp_path / "parts")
    for (name, a), b in zip(
        whole.model.state_dict().items(), parts.model.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name


def test_a_model_without_a_tokenizer_is_refused(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        loading.load(model)


def test_chats_are_rendered_by_the_models_own_template() -> None:
    tokenizer = tiny.tokenizer()
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi 🙂"}]
    text = chat.render_chat(tokenizer, messages)
    assert text == "<|begin|><|system|>Be kind.<|end|><|user|>Hi 🙂<|end|><|assistant|>"
    ids = chat.encode_chat(tokenizer, text)
    assert tokenizer.decode(ids) == text
    assert ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "at least one"),
        ([{"role": "robot", "content": "x"}], "roles are system, user, assistant and tool"),
        ([{"role": "user"}], "content must be text"),
        ([{"role": "user", "content": 7}, {"role": ["user"]}], "refuses"),
    ],
)
def test_messages_that_a_template_refuses_are_a_request_error(messages: Any, expected: str) -> None:
    with pytest.raises(RequestError, match=expected) as error:
        chat.render_chat(tiny.tokenizer(), messages)
    assert error.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch executed') }}",
        "{% for i in range(999999999) %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_hostile_template_gets_no_access(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(RequestError, match="messages"):
        chat.render_chat(tokenizer, [{"role": "user", "content": "x"}])
    assert not list(tmp_path.iterdir())


def test_a_model_without_a_template_points_to_completions() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(RequestError, match="/v1/completions"):
        chat.render_chat(tokenizer, [{"role": "user", "content": "x"}])


def test_text_that_is_not_unicode_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="Unicode"):
        chat.encode(tiny.tokenizer(), "lone \ud800 surrogate")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_no_memory_for_the_weights_has_its_own_code(
    good: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", fail)
    with pytest.raises(ModelError) as refused:
        loading.load(good)
    assert refused.value.code == "OutOfMemory"
    assert refused.value.hint


def test_no_memory_on_the_device_has_the_same_code(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.nn.Module, "to", fail)
    with pytest.raises(ModelError) as refused:
        loading.load(good)
    assert refused.value.code == "OutOfMemory"


def test_any_other_failure_of_the_loader_means_damaged_weights(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("sizes differ")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", fail)
    with pytest.raises(ModelError) as refused:
        loading.load(good)
    assert refused.value.code == "BadWeights"


def test_the_template_of_a_whole_model_beside_its_tokenizer_is_read(model: Path) -> None:
    template = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    (model / files.CHAT_TEMPLATE).write_text(json.dumps({"chat_template": template}))
    messages = [{"role": "user", "content": "hi"}]
    own = chat.render_chat(load_tokenizer(model), messages)
    assert own != "<hi>"
    (model / "chat_template.jinja").unlink()
    assert chat.render_chat(load_tokenizer(model), messages) == "<hi>"
    (model / files.CHAT_TEMPLATE).write_text(json.dumps({"chat_template": 5}))
    with pytest.raises(RequestError, match="no chat template"):
        chat.render_chat(load_tokenizer(model), messages)


def test_weights_are_read_ahead_where_the_cache_lacks_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.safetensors", "b.safetensors", "c.bin"):
        (tmp_path / name).write_bytes(bytes(40))
    read: list[tuple[int, int]] = []
    preadv = os.preadv

    def counted(file: int, buffers: Any, at: int) -> int:
        read.append((at, preadv(file, buffers, at)))
        return 0

    monkeypatch.setattr(files, "READ_AHEAD", 16)
    monkeypatch.setattr(files, "_is_cached", lambda _file, at: at == 16)
    monkeypatch.setattr("os.preadv", counted)
    files.read_ahead(tmp_path)
    assert read == 2 * [(0, 16), (32, 8)]
    monkeypatch.undo()
    files.read_ahead(tmp_path / "nothing")
    with (tmp_path / "a.safetensors").open("rb") as file:
        assert not files._is_cached(file.fileno(), 40), "the end is nowhere"
