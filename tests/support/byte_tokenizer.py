"""Byte-level tokenizers of the demo and tiny models: every byte has an id, so any text can be
encoded.

Owns their construction and their chat template. Tokenizers of other models come from their files.
"""

from collections.abc import Sequence
from typing import Any, cast

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BOS, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("system", "user", "assistant")
SPECIAL = (PAD, BOS, END, *(f"<|{role}|>" for role in ROLES))

# Tools and calls as Hermes writes them.
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- if tools %}"
    "{{- '<|system|>' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content ~ '\\n\\n' }}{%- endif %}"
    "{{- 'You may call these functions:\\n<tools>' }}"
    "{%- for tool in tools %}{{- '\\n' ~ (tool | tojson) }}{%- endfor %}"
    "{{- '\\n</tools>\\nTo call one, answer with its name and arguments:\\n<tool_call>\\n' }}"
    '{{- \'{"name": ..., "arguments": {...}}\\n</tool_call><|end|>\' }}'
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{- raise_exception('roles are system, user, assistant and tool, not ' ~ message.role) }}"
    "{%- endif %}"
    "{%- if message.content is not string %}"
    "{{- raise_exception('content must be text') }}"
    "{%- endif %}"
    "{%- if message.role == 'tool' %}"
    "{{- '<|user|><tool_response>\\n' ~ message.content ~ '\\n</tool_response><|end|>' }}"
    "{%- elif message.tool_calls %}"
    "{{- '<|assistant|>' ~ message.content }}"
    "{%- for call in message.tool_calls %}"
    '{{- \'\\n<tool_call>\\n{"name": "\' ~ call.function.name ~ \'", "arguments": \' }}'
    "{{- (call.function.arguments | tojson) ~ '}\\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|end|>' }}"
    "{%- elif not (tools and loop.first and message.role == 'system') %}"
    "{{- '<|' ~ message.role ~ '|>' ~ message.content ~ '<|end|>' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


def byte_alphabet() -> list[str]:
    """The 256 printable stand-ins for bytes that byte-level BPE uses, in a fixed order."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(
    merges: Sequence[tuple[str, str]], *, max_length: int, chat_template: str = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with ids: special tokens, then 256 bytes, then one per merge in
    order.

    ``merges`` are written in the byte alphabet; both halves of a merge must exist before it.
    """
    pieces = [*SPECIAL, *byte_alphabet(), *(first + second for first, second in merges)]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    if len(vocab) != len(pieces):
        raise ValueError("two merges produce the same piece")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    )
    factory: Any = PreTrainedTokenizerFast  # transformers' classes are untyped
    fast = factory(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat_template
    return cast("PreTrainedTokenizerFast", fast)
