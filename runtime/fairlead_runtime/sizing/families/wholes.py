"""Models of several parts: those that are tested as a whole, and those that the self-test judges.

Owns the rows of the latter, by the model_type of the whole.
Tests hold each row against transformers' class on the meta device.
"""

from collections.abc import Mapping

from fairlead_runtime.sizing.family import NO_EMBEDDING, NO_RMS, Parts
from fairlead_runtime.sizing.family_table import PARTS

_NO_TIE = NO_EMBEDDING | {"glm4v_text", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"}
_NO_ACT = NO_RMS | {"gemma2", "gemma3_text", "gemma4_unified_text"}  # without hidden_act
# Their classes take the head for the embedding where nothing says it; published files, of which
# most say nothing, go by the text. So does the plan, which then has room for either.
TRIED: Mapping[str, Parts] = {
    "cosmos3_omni": Parts("qwen3_vl_text", tied=False, any_text=True),
    "deepseek_vl": Parts("llama", any_text=True),
    "deepseek_vl_hybrid": Parts("llama", any_text=True),
    "exaone4_5": Parts("exaone4", tied=False, any_text=True, formerly="exaone4_5_text"),
    "fuyu": Parts("persimmon", tied=False, flat=True, any_text=True),
    "glm46v": Parts("glm4v_text", tied=False, any_text=True),
    "glmga": Parts("glm4v_text", tied=False, any_text=True),
    "hyperclovax_vision_v2": Parts("hyperclovax", any_text=True),
    "idefics2": Parts("mistral", tied=False, any_text=True, never=_NO_ACT),
    "janus": Parts("llama", any_text=True),
    "lfm3_vl": Parts("lfm3", any_text=True),
    "lighton_ocr": Parts("qwen3", any_text=True, never=NO_RMS),
    "llava": Parts("llama", either=True, any_text=True, never=_NO_TIE),
    "llava_next": Parts("llama", tied=False, any_text=True),
    "llava_next_video": Parts("llama", either=True, any_text=True, never=_NO_TIE),
    "llava_onevision": Parts("qwen2", either=True, any_text=True, never=_NO_TIE),
    "minicpm_ocr": Parts("qwen3_5_text", any_text=True),
    "minicpmv4_6": Parts("qwen3_5_text", tied=False, any_text=True),
    "minicpmv4_7": Parts("qwen3_5_text", tied=False, any_text=True),
    "ovis2": Parts("qwen2", any_text=True, head={"hidden_size": 1536, "vocab_size": 151643}),
    "qianfan_ocr": Parts("qwen3", tied=False, any_text=True),
    "video_llama_3": Parts("qwen2", either=True, any_text=True, never=_NO_TIE),
    "video_llava": Parts("llama", tied=False, any_text=True),
    "vipllava": Parts("llama", tied=False, any_text=True),
}
WHOLES: Mapping[str, Parts] = {**PARTS, **TRIED}
