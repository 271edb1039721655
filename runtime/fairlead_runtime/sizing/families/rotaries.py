"""What transformers' classes read of the settings of rotary embeddings, where families differ.

Owns the table, by model_type; a test holds it against the classes. ``family_table`` has the types
that a class takes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Rotary:
    """What one class reads. ``by_type``: settings stand under the names of types of layers; "each":
    that of each type, "raw": the same as they stand, with all that each needs, or ``rope_scaling``
    in their place, "added": ``rope_scaling`` is added to those of full attention, "both": to those
    of either type, "never": its class has no tables for them, "": the names mean nothing.
    ``defaults``: of "raw", its class has some where nothing says any, and adds nothing to those
    that are said; ``nulls``: a type may have none. ``theta``: the model's setting, "" for none.
    ``share``: what of a head is rotated where nothing says it (in scaled embeddings of "raw" all of
    it), ``share_name`` the setting that does, "" for none, ``width_name`` one that says its
    elements; ``needs_share``: null is none. ``reads_share``: unscaled embeddings have a share,
    which must be all of it where its layers rotate ``whole_heads``. ``strict``: its class checks
    what others take. ``scaled``: they are scaled where nothing says it. ``shares``: those of full
    and of sliding layers, where nothing says any. ``thetas``: the setting that lists one for each
    layer, each with embeddings of its own. ``grows``: its layers multiply queries by what grows
    with their positions, by numbers that settings must have, if there are any. ``sections``:
    settings may say how many of a head's pairs each axis of positions has, "all" of them together,
    or of three "interleaved" axes any; ``own_sections``: of "all", its class's own where settings
    say none. ``absent``: it has no embeddings; ``switch``: none where this setting has another
    value; ``null_theta``: none where theta is null. ``even_width``: its layers cut off a share of a
    head that must be pairs; others cut off what their tables have.
    """

    by_type: str = ""
    theta: str = "rope_theta"
    sliding_theta: str = ""
    share: float = 1.0
    share_name: str = "partial_rotary_factor"
    reads_share: bool = False
    strict: bool = False
    scaled: bool = False
    defaults: bool = True
    nulls: bool = False
    whole_heads: bool = False
    width_name: str = ""
    needs_share: bool = False
    shares: tuple[float, float] = (1.0, 1.0)
    thetas: str = ""
    grows: bool = False
    sections: str = ""
    own_sections: tuple[int, ...] = ()
    absent: bool = False
    switch: tuple[str, str] = ("", "")
    null_theta: bool = False
    even_width: bool = False


_NEVER = Rotary(by_type="never")
_EACH = Rotary(by_type="each", share_name="")
_RAW = Rotary(by_type="raw", theta="", share_name="")
_ADDED = Rotary(by_type="added")
_PART = Rotary(reads_share=True)
_HALF = replace(_PART, share=0.5)
_ABSENT = Rotary(absent=True, null_theta=True)

ROTARIES: Mapping[str, Rotary] = {
    **dict.fromkeys(("afmoe", "cohere2", "cohere2_moe", "dots1", "exaone4"), _NEVER),
    **dict.fromkeys(("exaone_moe", "falcon_h1", "flint", "gemma2"), _NEVER),
    **dict.fromkeys(("granite_swa", "granitemoe_swa"), replace(_NEVER, thetas="layer_rope_theta")),
    "granitemoehybrid": replace(_NEVER, switch=("position_embedding_type", "rope")),
    **dict.fromkeys(("kolibri1", "lfm2", "minimax"), _NEVER),
    "olmo_hybrid": replace(_NEVER, null_theta=True),
    **dict.fromkeys(("ministral", "qwen2", "qwen2_moe", "qwen3", "smollm3"), _NEVER),
    "vaultgemma": _NEVER,
    **dict.fromkeys(
        ("qwen2_vl_text", "qwen2_5_vl_text"),
        replace(_NEVER, sections="all", own_sections=(16, 24, 24)),
    ),
    **dict.fromkeys(("qwen3_vl_text", "qwen3_vl_moe_text"), Rotary(sections="interleaved")),
    **dict.fromkeys(("falcon_mamba", "jamba", "mamba2", "nemotron_h"), _ABSENT),
    "lfm3": _EACH,
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _RAW),
    "laguna": replace(_RAW, reads_share=True, shares=(0.5, 1.0)),
    "mimo_v2_flash": replace(_RAW, reads_share=True, share=0.334, shares=(0.334, 0.334)),
    "beam": replace(_RAW, nulls=True, shares=(0.0, 1.0)),
    "mellum": replace(_RAW, reads_share=True, whole_heads=True),
    "cohere_compass_text": replace(_RAW, defaults=False, nulls=True),
    **dict.fromkeys(
        ("gemma3_text", "gemma3n_text"), replace(_ADDED, sliding_theta="rope_local_base_freq")
    ),
    "olmo3": _ADDED,
    "modernbert-decoder": Rotary("both", "global_rope_theta", "local_rope_theta"),
    **dict.fromkeys(("glm", "glm4", "glm4_moe"), _HALF),
    "nemotron": replace(_HALF, needs_share=True),
    **dict.fromkeys(("persimmon", "phi"), replace(_HALF, needs_share=True, even_width=True)),
    "glm4v_text": replace(_PART, sections="all", own_sections=(8, 12, 12)),
    "solar_open": replace(_PART, whole_heads=True),
    "minimax_m3_vl_text": replace(_PART, by_type="never"),
    "qwen3_next": replace(_PART, by_type="never", share=0.25),
    **dict.fromkeys(
        ("qwen3_5_moe_text", "qwen3_5_text"),
        Rotary("never", share=0.25, reads_share=True, sections="interleaved"),
    ),
    **dict.fromkeys(("cwm", "gpt_oss"), replace(_NEVER, scaled=True)),
    "apertus": Rotary(scaled=True),
    "ministral3": Rotary(scaled=True, grows=True),
    "bamba": replace(_HALF, by_type="never", share_name=""),
    "gpt_neox": Rotary("", "rotary_emb_base", "", 0.25, "rotary_pct", True, True),
    "minimax_m2": replace(_PART, width_name="rotary_dim"),
    **dict.fromkeys(("phi3", "phi4_multimodal"), replace(_PART, strict=True)),
    "stablelm": replace(_PART, share=0.25, strict=True, even_width=True),
}
