"""Ask the server at argv[1] with lm-evaluation-harness, whose tokenizer is in argv[2]: score each
[context, continuation] of argv[3], and generate. Print what it understood.
"""

import json
import sys
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

base, tokenizer, pairs = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
common: dict[str, Any] = {"model": "tiny", "max_retries": 1}
completions = LocalCompletionsAPI(
    base_url=f"{base}/completions",
    tokenizer=tokenizer,
    tokenizer_backend="huggingface",
    num_concurrent=4,
    **common,
)
chat = LocalChatCompletion(base_url=f"{base}/chat/completions", **common)


def instances(kind: str, arguments: list[Any]) -> list[Instance]:
    return [Instance(kind, {}, tuple(each), place) for place, each in enumerate(arguments)]


generate = {"until": ["@@"], "max_gen_toks": 12, "temperature": 0}
asked = chat.apply_chat_template([{"role": "user", "content": "Tell me about the sea."}])
found = {
    "scores": completions.loglikelihood(instances("loglikelihood", pairs)),
    "text": completions.generate_until(
        instances("generate_until", [["Once upon a time", dict(generate)]])
    ),
    "chat": chat.generate_until(instances("generate_until", [[asked, dict(generate)]])),
}
print(json.dumps(found))
