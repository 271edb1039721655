"""What transformers' classes read of the settings of rotary embeddings, where families differ.

Owns the table, by model_type; a test holds it against the classes. ``family_table`` has the types
that a class takes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Rotary:
    """What one class reads. ``by_type``: settings stand under the names of types of layers; "each":
    that of each type, "own": the same, without ``rope_scaling``, and where nothing says them there
    are none, unless its class has some (``made``), "added": ``rope_scaling`` is added to those of
    full attention, "both": to those of either type, "never": its class has no tables for them, "":
    the names mean nothing. ``theta``: the model's setting, "" for none; ``own_theta``: each type
    must have its own. ``share``: what of a head is rotated where nothing says it, None where more
    than its own setting tells, and ``share_name`` that setting, "" for none. ``reads_share``:
    unscaled embeddings have a share. ``strict``: its class checks what others take. ``scaled``:
    they are scaled where nothing says it.
    """

    by_type: str = ""
    theta: str = "rope_theta"
    sliding_theta: str = ""
    share: float | None = 1.0
    share_name: str = "partial_rotary_factor"
    reads_share: bool = False
    strict: bool = False
    scaled: bool = False
    own_theta: bool = False
    made: bool = False


_NEVER = Rotary(by_type="never")
_EACH = Rotary(by_type="each", share_name="")
_ADDED = Rotary(by_type="added", share_name="")
_PART = Rotary(reads_share=True)
_HALF = replace(_PART, share=0.5)

ROTARIES: Mapping[str, Rotary] = {
    **dict.fromkeys(("afmoe", "cohere2", "cohere2_moe", "dots1", "exaone4"), _NEVER),
    **dict.fromkeys(("exaone_moe", "falcon_h1", "flint", "gemma2", "granite_swa"), _NEVER),
    **dict.fromkeys(("granitemoe_swa", "granitemoehybrid", "kolibri1", "lfm2", "minimax"), _NEVER),
    **dict.fromkeys(("ministral", "olmo_hybrid", "qwen2", "qwen2_moe", "qwen3", "smollm3"), _NEVER),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "vaultgemma"), _NEVER),
    **dict.fromkeys(("beam", "gemma4_text", "gemma4_unified_text", "lfm3"), _EACH),
    **dict.fromkeys(("mellum", "mimo_v2_flash"), replace(_EACH, reads_share=True)),
    **dict.fromkeys(
        ("gemma3_text", "gemma3n_text"), replace(_ADDED, sliding_theta="rope_local_base_freq")
    ),
    "olmo3": _ADDED,
    "modernbert-decoder": Rotary("both", "global_rope_theta", "local_rope_theta", share_name=""),
    "cohere_compass_text": Rotary("own", "", share_name="", own_theta=True),
    "laguna": Rotary("own", "", share_name="", reads_share=True, own_theta=True, made=True),
    **dict.fromkeys(("glm", "glm4", "glm4_moe", "nemotron", "persimmon", "phi"), _HALF),
    **dict.fromkeys(("glm4v_text", "solar_open"), _PART),
    "minimax_m3_vl_text": replace(_PART, by_type="never"),
    **dict.fromkeys(
        ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
        replace(_PART, by_type="never", share=0.25),
    ),
    **dict.fromkeys(("cwm", "gpt_oss"), replace(_NEVER, scaled=True)),
    **dict.fromkeys(("apertus", "ministral3"), Rotary(scaled=True)),
    "bamba": replace(_HALF, by_type="never", share_name=""),
    "gpt_neox": Rotary("", "rotary_emb_base", "", 0.25, "rotary_pct", True, True),
    "minimax_m2": replace(_PART, share=None),
    **dict.fromkeys(("phi3", "phi4_multimodal"), replace(_PART, strict=True)),
    "stablelm": replace(_PART, share=0.25, strict=True),
}
