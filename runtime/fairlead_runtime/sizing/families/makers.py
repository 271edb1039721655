"""What works of the maker of a refused model, and the served family with the nearest name.

Owns the table of makers, by what their names of architectures begin with. Tests hold every family
that it names against those that are served.
"""

import difflib
from collections.abc import Iterable, Mapping

_GEMMA = "Gemma 3, 3n and 4 work ('gemma3', 'gemma3_text', 'gemma3n', 'gemma4')"
_QWEN = "Qwen3 and Qwen3-VL work ('qwen3', 'qwen3_moe', 'qwen3_vl', 'qwen3_vl_moe')"
_LLAMA = "Llama 3 works ('llama')"
_DEEPSEEK = "the distilled DeepSeek-R1 models work ('llama', 'qwen2')"
_MISTRAL = "Mistral Small 3 works ('mistral', 'mistral3')"
_FALCON = "Falcon 3 works ('llama')"
_GRANITE = "Granite 3 works ('granite', 'granitemoe')"
_OLMO = "OLMo 2 and 3 work ('olmo2', 'olmo3')"
_PHI = "Phi-3, Phi-4 and Phi-3.5-MoE work ('phi3', 'phimoe')"
_GLM = "GLM-4 and GLM-4.5 work ('glm4', 'glm4_moe', 'glm4v')"
_COHERE = "Command R works ('cohere', 'cohere2')"
_ERNIE = "ERNIE 4.5 works ('ernie4_5', 'ernie4_5_moe')"
_HUNYUAN = "Hunyuan 7B works ('hunyuan_v1_dense')"
_SMOL = "SmolLM works ('llama', 'smollm3', 'smolvlm')"
_PYTHIA = "GPT-NeoX and Pythia work ('gpt_neox')"
_OPT = "OPT and Llama 3 work ('opt', 'llama')"

# By the beginning of a model_type; the first that fits counts.
MAKERS: Mapping[str, str] = {
    **dict.fromkeys(("gemma", "paligemma", "recurrent_gemma", "shieldgemma", "t5gemma"), _GEMMA),
    **dict.fromkeys(("diffusion_gemma", "colpali"), _GEMMA),
    **dict.fromkeys(("qwen", "colqwen"), _QWEN),
    **dict.fromkeys(("llama", "mllama", "muse_"), _LLAMA),
    "deepseek": _DEEPSEEK,
    **dict.fromkeys(("voxtral", "pixtral", "mistral", "ministral"), _MISTRAL),
    "nemotron": "Nemotron 4 and Llama-Nemotron work ('nemotron', 'llama')",
    "falcon": _FALCON,
    **dict.fromkeys(("granite", "bamba"), _GRANITE),
    **dict.fromkeys(("olmo", "molmo"), _OLMO),
    **dict.fromkeys(("phi", "kosmos", "florence"), _PHI),
    **dict.fromkeys(("glm", "got_ocr2"), _GLM),
    "minimax": "MiniMax-M2 works, unquantized ('minimax_m2')",
    **dict.fromkeys(("cohere", "aya"), _COHERE),
    **dict.fromkeys(("ernie", "paddleocr", "pp_"), _ERNIE),
    "exaone": "EXAONE 4 works ('exaone4')",
    **dict.fromkeys(("hunyuan", "hy_"), _HUNYUAN),
    **dict.fromkeys(("smol", "idefics"), _SMOL),
    **dict.fromkeys(("gptj", "gpt_neo"), _PYTHIA),
    "openai": "GPT-2 works ('gpt2')",
    **dict.fromkeys(("xglm", "blenderbot", "bart", "chameleon", "perception_lm"), _OPT),
    "internvl": "InternVL3 works in its -hf form ('internvl')",
    "aria": "the text of Aria works alone ('aria_text')",
    **dict.fromkeys(("axk", "solar"), "Solar Open works ('solar_open')"),
}


def working_of(name: str) -> str:
    """What works of the maker of that architecture; "" where nothing is known to."""
    return next((works for start, works in MAKERS.items() if name.startswith(start)), "")


def nearest(name: str, served: Iterable[str]) -> str:
    """The served family whose name is nearest, for a mistyped one; "" for none."""
    near = difflib.get_close_matches(name, sorted(served), n=1, cutoff=0.8)
    return near[0] if near else ""
