"""Published tokenizers as a server has them."""

import functools
import json
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from fairlead_runtime.api.routes.tokenize import tokenize
from fairlead_runtime.api.state.state import Backend
from fairlead_runtime.grammar.compile import TokenizerFacts
from fairlead_runtime.models.tokenizer_files import load_tokenizer
from fairlead_runtime.serving.detokenize import vocabulary_of
from fairlead_runtime.serving.prompt_encoder import PromptEncoder
from support.api_harness import MODEL, FakeService, backend_of
from support.real_tokenizers import Tokenizer


@functools.cache
def loaded(published: Tokenizer) -> PreTrainedTokenizerBase:
    return load_tokenizer(published.folder())


def facts_of(tokenizer: PreTrainedTokenizerBase) -> TokenizerFacts:
    facts = TokenizerFacts.of(tokenizer, len(tokenizer), {tokenizer.eos_token_id})
    assert facts is not None
    return facts


def backend(tokenizer: PreTrainedTokenizerBase, encoder: PromptEncoder) -> Backend:
    service = FakeService(max_model_len=1 << 20)
    return replace(backend_of(service), encoder=encoder, vocabulary=vocabulary_of(tokenizer))


def ids_of(served: Backend, body: dict[str, Any]) -> list[int]:
    """Token ids of a body of ``/tokenize``."""
    answer, _ = tokenize(json.dumps({"model": MODEL, **body}).encode(), MODEL, served)
    tokens: list[int] = answer["tokens"]
    return tokens
