"""Families that are refused by name, each with its reason.

Owns the table and the words. A type that is in no table is judged by its class in transformers
(``models/families.py``); the census (``scripts/census.py``) holds both against all types that
transformers has.
"""

# Families that do not work on a paged cache, and would generate wrong text without an error.
STATE = "it keeps a recurrent state of a kind that is not served yet"
OLD = "its attention does not go through transformers' attention interface"
LATENT = "its latent attention has keys and values of different sizes"
_INDEX = "its attention reads keys that an index chooses"
DRAFTS = "it drafts tokens for another model"
ENCODER_DECODER = "it is an encoder-decoder"
BIDIRECTIONAL = "its attention is bidirectional: it encodes text and does not generate any"
_CHUNKED = "its chunked attention is neither full nor a sliding window"
_SOUND = "transformers has no class of it for text with images, only for sound"
_IMAGES = "it writes no text without an image"
_PACKAGES = "transformers builds its other parts with packages that the runtime has not"
_PREFIX = "its prompts are attended in both directions"
NO_TEXT = "no model of several parts is served for such a text yet"
NO_WHOLE = "it is no model of several parts that is served"
OWN_INPUTS = "the inputs of its layers are made of ids, which only a whole of its own hands on"
INNER = "it is the text of a model of several parts and no model of its own"

REFUSED: dict[str, str] = {
    **dict.fromkeys(
        [
            *("rwkv", "mamba", "xlstm", "zamba", "zamba2", "kimi_linear", "recurrent_gemma"),
            *("bailing_hybrid", "inkling_text", "inkling2_text", "zaya"),
        ],
        STATE,
    ),
    **dict.fromkeys(
        [
            "bloom",
            "mpt",
            "falcon",
            "gptj",
            "codegen",
            "gpt_neo",
            "gpt_neox_japanese",
            "xglm",
            "rembert",
            "roformer",
            "big_bird",
            "cpmant",
            "openai-gpt",
            "xlnet",
            "xlm",
            "flaubert",
            "prophetnet",
            "megatron-bert",
            "got_ocr2",
            "pp_chart2table",
            "git",
        ],
        OLD,
    ),
    **dict.fromkeys(["gemma4_assistant", "gemma4_unified_assistant"], DRAFTS),
    **dict.fromkeys(["llama4", "llama4_text"], _CHUNKED),
    **dict.fromkeys(
        [
            *("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "glm4_moe_lite", "axk1"),
            *("minicpm3", "mistral4", "longcat_flash", "youtu"),
        ],
        LATENT,
    ),
    **dict.fromkeys(
        [
            *("axk2", "deepseek_v32", "deepseek_v4", "dots3_note_text", "glm_moe_dsa", "hy_v4"),
            "qwen4_exp_text",
        ],
        _INDEX,
    ),
    "diffllama": "its attention is the difference of two, not a sum over one set of scores",
    "doge": "each of its layers makes a mask of its own",
    "hrm_text": "it runs its layers several times for each token",
    **dict.fromkeys(
        [
            *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart"),
            *("musicgen", "musicgen_melody", "mvp", "pegasus", "plbart", "t5gemma2", "udop"),
            *("vision-encoder-decoder", "whisper", "t5"),
        ],
        ENCODER_DECODER,
    ),
    **dict.fromkeys(
        [
            *("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie"),
            *("evolla", "reformer", "roberta", "roberta-prelayernorm", "roc_bert", "trocr"),
            *("xlm-roberta", "xlm-roberta-xl", "xmod"),
        ],
        BIDIRECTIONAL,
    ),
    **dict.fromkeys(["blt", "chameleon", "idefics", "pi0"], "it is no decoder of text alone"),
    **dict.fromkeys(
        [
            *("audioflamingo3", "fun_asr_nano", "glmasr", "granite_speech", "granite_speech_plus"),
            *("moss_transcribe_diarize", "musicflamingo", "qwen2_audio", "qwen3_asr"),
            *("vibevoice", "vibevoice_asr", "voxtral"),
        ],
        _SOUND,
    ),
    **dict.fromkeys(["blip-2", "instructblip", "instructblipvideo"], _IMAGES),
    **dict.fromkeys(["fast_vlm", "perception_lm"], _PACKAGES),
    **dict.fromkeys(["colpali", "colqwen2", "shieldgemma2"], "it writes no text"),
    "paligemma": _PREFIX,
    "nemotron_h_omni": NO_WHOLE,
}
