"""Model directories as an attacker or a broken disk would leave them.

Every case gets a directory that loads (config.json, tokenizer, model.safetensors) and spoils it.
The Python files and pickles that cases add create a file when anything runs them.
"""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

Spoil = Callable[[Path], None]
WEIGHTS = "model.safetensors"


def mark(path: Path) -> Path:
    """The file that exists only after code of the model has run."""
    return path.parent / "executed"


class _Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.target,))


def plant_code(path: Path) -> None:
    """Add a Python file of every usual name, and a pickle; each creates the mark when it runs."""
    for name in (
        "modeling_evil.py",
        "configuration_evil.py",
        "tokenization_evil.py",
        "custom_generate.py",
    ):
        (path / name).write_text(f"from pathlib import Path\nPath({str(mark(path))!r}).touch()\n")
    (path / "pytorch_model.bin").write_bytes(pickle.dumps(_Bomb(mark(path))))


def edit(path: Path, name: str, **changes: Any) -> None:
    content = json.loads((path / name).read_text())
    content.update(changes)
    (path / name).write_text(json.dumps(content))


def _settings(*changes: tuple[str, dict[str, Any]]) -> Spoil:
    def spoil(path: Path) -> None:
        for name, values in changes:
            edit(path, name, **values)

    return spoil


def _config(**changes: Any) -> Spoil:
    return _settings(("config.json", changes))


def _write(name: str, content: bytes) -> Spoil:
    def spoil(path: Path) -> None:
        (path / name).write_bytes(content)

    return spoil


def _only(name: str) -> Spoil:
    """Replace the weights by another format: a pickle that creates the mark when it runs."""

    def spoil(path: Path) -> None:
        (path / WEIGHTS).unlink()
        (path / name).write_bytes(pickle.dumps(_Bomb(mark(path))))

    return spoil


def _header(change: Callable[[dict[str, Any]], object]) -> Spoil:
    """Rewrite the header's entries and keep the data."""

    def spoil(path: Path) -> None:
        raw = (path / WEIGHTS).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        entries = json.loads(raw[8 : 8 + length])
        entries.pop("__metadata__", None)
        changed = change(entries)
        text = json.dumps(entries if changed is None else changed).encode()
        (path / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])

    return spoil


def _raw_header(text: bytes, length: int | None = None, data: bytes = b"") -> Spoil:
    size = len(text) if length is None else length
    return _write(WEIGHTS, size.to_bytes(8, "little") + text + data)


def _edit_first_entry(entries: dict[str, Any], **changes: Any) -> None:
    entries[min(entries)].update(changes)


def _overlap(entries: dict[str, Any]) -> None:
    a, b = sorted(entries.values(), key=lambda entry: entry["data_offsets"])[:2]
    size = b["data_offsets"][1] - b["data_offsets"][0]
    b["data_offsets"] = [a["data_offsets"][0], a["data_offsets"][0] + size]


def _gap(entries: dict[str, Any]) -> None:
    last = max(entries.values(), key=lambda entry: entry["data_offsets"])
    last["data_offsets"] = [offset + 64 for offset in last["data_offsets"]]


def _truncated(path: Path) -> None:
    raw = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(raw[:-1000])


def _append_bytes(path: Path) -> None:
    with (path / WEIGHTS).open("ab") as file:
        file.write(b"\0" * 64)


def _index(weight_map: Any, **more: Any) -> Spoil:
    """Add an index; the single weight file becomes its first part."""

    def spoil(path: Path) -> None:
        (path / WEIGHTS).rename(path / "model-00001-of-00001.safetensors")
        (path / (WEIGHTS + ".index.json")).write_text(
            json.dumps({"weight_map": weight_map, **more})
        )

    return spoil


def _duplicate_tensors(path: Path) -> None:
    raw = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).unlink()
    names = [
        name
        for name in json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        if name[0] != "_"
    ]
    for part in ("a", "b"):
        (path / f"{part}.safetensors").write_bytes(raw)
    weight_map = {name: f"{'ab'[i % 2]}.safetensors" for i, name in enumerate(names)}
    (path / (WEIGHTS + ".index.json")).write_text(json.dumps({"weight_map": weight_map}))


def _link(name: str, target: str) -> Spoil:
    def spoil(path: Path) -> None:
        outside = path.parent / "outside"
        outside.mkdir(exist_ok=True)
        (path / name).rename(outside / name)
        (path / name).symlink_to(target.format(outside=outside, name=name))

    return spoil


def _pipe(name: str) -> Spoil:
    def spoil(path: Path) -> None:
        (path / name).unlink()
        os.mkfifo(path / name)

    return spoil


def _without(name: str) -> Spoil:
    return lambda path: (path / name).unlink()


def _sparse(path: Path) -> None:
    """A header of 4 GB in a sparse file of that size."""
    with (path / WEIGHTS).open("wb") as file:
        file.write((4_000_000_000).to_bytes(8, "little") + b"{")
        file.truncate(4_000_000_100)


def _huge_json(path: Path) -> None:
    with (path / "tokenizer.json").open("wb") as file:
        file.write(b"{")
        file.truncate(100 << 20)


AUTO_MAP = {
    "AutoConfig": "configuration_evil.Config",
    "AutoModelForCausalLM": "modeling_evil.Model",
}
OWN_CODE = {"model_type": "evil", "auto_map": AUTO_MAP}
_DEEP_JSON = b'{"a":' * 3000 + b"1" + b"}" * 3000
_UNCLOSED_JSON = b'{"a":' * 200_000


# name → (expected code, how to spoil the directory)
def _linked_templates(path: Path) -> None:
    outside = path.parent / "outside"
    outside.mkdir()
    (outside / "tool_use.jinja").write_text("{{ tools }}")
    (path / "additional_chat_templates").symlink_to(outside)


CASES: dict[str, tuple[str, Spoil]] = {
    # Python code in the model
    "auto_map of an unknown architecture": ("RemoteCodeRefused", _config(**OWN_CODE)),
    "auto_map in text_config": (
        "RemoteCodeRefused",
        _config(model_type="evil", text_config={"auto_map": AUTO_MAP}),
    ),
    "auto_map deep in a list": (
        "RemoteCodeRefused",
        _config(model_type="evil", parts=[{"inner": {"auto_map": AUTO_MAP}}]),
    ),
    "auto_map in tokenizer_config": (
        "RemoteCodeRefused",
        _settings(
            ("config.json", {"model_type": "evil"}),
            (
                "tokenizer_config.json",
                {"auto_map": {"AutoTokenizer": ["tokenization_evil.T", None]}},
            ),
        ),
    ),
    "auto_map in generation_config": (
        "RemoteCodeRefused",
        _settings(
            ("config.json", {"model_type": "evil"}),
            ("generation_config.json", {"auto_map": AUTO_MAP}),
        ),
    ),
    "auto_map to another repository": (
        "RemoteCodeRefused",
        _config(
            model_type="evil", auto_map={"AutoModelForCausalLM": "someone/else--modeling.Model"}
        ),
    ),
    "unknown architecture": ("UnsupportedModel", _config(model_type="evil")),
    # pickles and other formats
    **{
        f"only {name}": ("NoSafetensors", _only(name))
        for name in (
            "pytorch_model.bin",
            "model.pt",
            "model.pth",
            "model.pkl",
            "model.ckpt",
            "model.gguf",
            "tf_model.h5",
            "flax_model.msgpack",
            "weights.npz",
        )
    },
    # safetensors
    "empty file": ("BadWeights", _write(WEIGHTS, b"")),
    "seven bytes": ("BadWeights", _write(WEIGHTS, b"\1\0\0\0\0\0\0")),
    "pickle in disguise": ("BadWeights", _write(WEIGHTS, pickle.dumps({"a": 1}) * 10)),
    "header of 4 GB": ("BadWeights", _sparse),
    "header of 2^64 bytes": ("BadWeights", _raw_header(b"{}", 2**64 - 1)),
    "header longer than the file": ("BadWeights", _raw_header(b"{}", 3)),
    "header is not JSON": ("BadWeights", _raw_header(b"{nonsense}")),
    "header is a list": ("BadWeights", _raw_header(b"[]")),
    "header nested too deeply": ("BadWeights", _raw_header(_UNCLOSED_JSON)),
    "header is not UTF-8": ("BadWeights", _raw_header(b'{"\xff\xfe": 1}')),
    "header with the same tensor twice": (
        "BadWeights",
        _raw_header(
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
            data=b"\0" * 4,
        ),
    ),
    "metadata that is not text": (
        "BadWeights",
        _header(lambda e: e.update(__metadata__={"a": {"b": 1}})),
    ),
    "tensors overlap": ("BadWeights", _header(_overlap)),
    "gap between tensors": ("BadWeights", _header(_gap)),
    "offsets beyond the file": (
        "BadWeights",
        _header(lambda e: _edit_first_entry(e, data_offsets=[0, 2**40])),
    ),
    "offsets reversed": (
        "BadWeights",
        _header(lambda e: _edit_first_entry(e, data_offsets=[64, 0])),
    ),
    "offsets negative": (
        "BadWeights",
        _header(lambda e: _edit_first_entry(e, data_offsets=[-64, 0])),
    ),
    "offsets as floats": (
        "BadWeights",
        _header(lambda e: _edit_first_entry(e, data_offsets=[0.0, 64.0])),
    ),
    "three offsets": (
        "BadWeights",
        _header(lambda e: _edit_first_entry(e, data_offsets=[0, 1, 2])),
    ),
    "unknown dtype": ("BadWeights", _header(lambda e: _edit_first_entry(e, dtype="F31"))),
    "dtype that is a list": ("BadWeights", _header(lambda e: _edit_first_entry(e, dtype=["F32"]))),
    "shape larger than the data": (
        "BadWeights",
        _header(lambda e: _edit_first_entry(e, shape=[2**30, 2**30])),
    ),
    "shape that overflows 64 bits": (
        "BadWeights",
        _header(lambda e: _edit_first_entry(e, shape=[2**40] * 8)),
    ),
    "shape with a negative size": (
        "BadWeights",
        _header(lambda e: _edit_first_entry(e, shape=[-1, -64])),
    ),
    "shape with true": ("BadWeights", _header(lambda e: _edit_first_entry(e, shape=[True]))),
    "shape of a thousand dimensions": (
        "BadWeights",
        _header(lambda e: _edit_first_entry(e, shape=[1] * 1000)),
    ),
    "entry without dtype": ("BadWeights", _header(lambda e: e[min(e)].pop("dtype") and None)),
    "entry that is a number": ("BadWeights", _header(lambda e: e.update({min(e): 3}))),
    "truncated data": ("BadWeights", _truncated),
    "bytes after the last tensor": ("BadWeights", _append_bytes),
    "a tensor renamed": (
        "BadWeights",
        _header(lambda e: {"x" + k if k == min(e) else k: v for k, v in e.items()}),
    ),
    "a tensor of another shape": (
        "BadWeights",
        _header(lambda e: _edit_first_entry(e, shape=list(reversed(e[min(e)]["shape"])))),
    ),
    # the index
    "index names a file outside": ("BadWeights", _index({"a": "../outside/model.safetensors"})),
    "index names an absolute path": ("BadWeights", _index({"a": "/etc/passwd"})),
    "index names a pickle": ("BadWeights", _index({"a": "pytorch_model.bin"})),
    "index names a missing file": ("BadWeights", _index({"a": "model-00002-of-00002.safetensors"})),
    "index promises a missing tensor": (
        "BadWeights",
        _index({"nothing": "model-00001-of-00001.safetensors"}),
    ),
    "index without a map": ("BadWeights", _index(None)),
    "index with a list": ("BadWeights", _index(["model-00001-of-00001.safetensors"])),
    "index of numbers": ("BadWeights", _index({"a": 7})),
    "one tensor in two files": ("BadWeights", _duplicate_tensors),
    # links and special files
    "a folder of templates outside of the model": ("BadModelFiles", _linked_templates),
    "weights are a link that leaves": ("BadModelFiles", _link(WEIGHTS, "{outside}/{name}")),
    "config is a relative link that leaves": (
        "BadModelFiles",
        _link("config.json", "../outside/{name}"),
    ),
    "tokenizer is a link to a secret": ("BadModelFiles", _link("tokenizer.json", "/etc/hostname")),
    "link to nothing": ("BadModelFiles", _link("tokenizer.json", "gone.json")),
    "link to itself": ("BadModelFiles", _link("tokenizer.json", "tokenizer.json")),
    "weights are a pipe": ("BadModelFiles", _pipe(WEIGHTS)),
    "config is a pipe": ("BadModelFiles", _pipe("config.json")),
    "tokenizer is a device": ("BadModelFiles", _link("tokenizer.json", "/dev/zero")),
    # JSON
    "no config": ("ModelNotFound", _without("config.json")),
    "config is not JSON": ("BadModelFiles", _write("config.json", b"{")),
    "config is a list": ("BadModelFiles", _write("config.json", b"[]")),
    "config nested too deeply": ("BadModelFiles", _write("config.json", _DEEP_JSON)),
    "config that is never closed": ("BadModelFiles", _write("config.json", _UNCLOSED_JSON)),
    "config with a key twice": (
        "BadModelFiles",
        _write("config.json", b'{"model_type":"llama","model_type":"evil"}'),
    ),
    "config in another encoding": ("BadModelFiles", _write("config.json", b"\xff\xfe{\0}\0\0")),
    "config with a number of a million digits": (
        "BadModelFiles",
        _write("config.json", b'{"vocab_size":' + b"9" * 1_000_000 + b"}"),
    ),
    "tokenizer of 100 MiB": ("BadModelFiles", _huge_json),
    "tokenizer is not a tokenizer": ("BadModelFiles", _write("tokenizer.json", b'{"model": 3}')),
    "generation config is a list": ("BadModelFiles", _write("generation_config.json", b"[1]")),
    # architectures
    "model_type is a list": ("UnsupportedModel", _config(model_type=["llama"])),
    "a billion layers": ("UnsupportedModel", _config(num_hidden_layers=10**9)),
    "no heads": ("UnsupportedModel", _config(num_attention_heads=0)),
    "hidden size is text": ("UnsupportedModel", _config(hidden_size="64")),
    "more layers than the weights": ("BadWeights", _config(num_hidden_layers=5)),
    "a state-space model": ("UnsupportedModel", _config(model_type="rwkv")),
    "a hybrid model": ("UnsupportedModel", _config(model_type="zamba2")),
    "a model with images whose text is not served": (
        "UnsupportedModel",
        _config(model_type="llama4", text_config={"model_type": "llama4_text"}),
    ),
    "a model with images whose text has other sizes": (
        "BadWeights",
        _config(model_type="internvl", text_config={"num_hidden_layers": 1}),
    ),
    "a model with images whose text is a list": (
        "UnsupportedModel",
        _config(model_type="internvl", text_config=[]),
    ),
    "an encoder-decoder": ("UnsupportedModel", _config(model_type="bart")),
    "quantized weights": (
        "UnsupportedModel",
        _config(quantization_config={"quant_method": "gptq", "bits": 4}),
    ),
    "an adapter": (
        "UnsupportedModel",
        _write("adapter_config.json", b'{"base_model_name_or_path": "o/n"}'),
    ),
}
