"""What a start needs of a tokenizer: one process of a pod reads that, the others are told."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextFacts:
    """What a start needs of a model's tokenizer, whichever process reads that: the ids that end a
    text, and the ``sample`` of one that the self-test computes. ``definition``: the JSON of its
    Rust part, ``size``: the number of its ids; "" and 0 where nobody has asked for them.
    """

    eos_ids: tuple[int, ...]
    sample: tuple[int, ...]
    definition: str = ""
    size: int = 0
