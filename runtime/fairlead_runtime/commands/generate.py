"""`fairlead generate MODEL --prompt TEXT`: complete one prompt and print the text.

Writes each piece of text as soon as it is generated.
"""

import argparse
import dataclasses
import sys

from fairlead_runtime.commands.parser import Parser
from fairlead_runtime.processes import termination
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig, add_arguments


def main(argv: list[str]) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        _generate(options)
    except Exception as error:
        from fairlead_runtime.commands.refusals import refusal_for

        refusal = refusal_for(error)
        if refusal is None:
            raise
        line = termination.json_line(refusal.code, refusal.message, refusal.hint)
        print(line, file=sys.stderr)  # noqa: T201 - an error
        return refusal.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="fairlead generate", description="Complete one prompt and print the text.")
    parser.add_argument(
        "model", metavar="MODEL", help="demo:, owner/name, hf://owner/name, a path or file:///path"
    )
    parser.add_argument(
        "--prompt",
        required=True,
        metavar="TEXT",
        help="completed without a template unless --chat is given",
    )
    parser.add_argument(
        "--chat", action="store_true", help="wrap the prompt in the model's chat template"
    )
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="(default: 256)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0: greedy (default: 0)"
    )
    add_arguments(parser)
    return parser


def _generate(options: argparse.Namespace) -> None:
    from fairlead_runtime.llm import LLM
    from fairlead_runtime.models import chat
    from fairlead_runtime.outputs import Submission
    from fairlead_runtime.request.sequence import FinishReason, RequestError, SamplingParams

    if options.max_tokens < 1:
        raise ConfigError("max_tokens", f"{options.max_tokens} is below the smallest allowed, 1")
    params = SamplingParams(
        temperature=options.temperature, max_tokens=options.max_tokens, seed=options.seed
    )
    config = EngineConfig.from_namespace(options)
    with LLM(options.model, **dataclasses.asdict(config)) as llm:
        tokenizer = llm.built_engine.tokenizer
        if options.chat:
            text = chat.render_chat(tokenizer, [{"role": "user", "content": options.prompt}])
            ids = chat.encode_chat(tokenizer, text)
        else:
            ids = chat.encode(tokenizer, options.prompt)
        for _, output in llm.stream([Submission(prompt=tuple(ids), params=params)]):
            sys.stdout.write(output.text)
            sys.stdout.flush()
            if output.finish_reason is FinishReason.ERROR:
                raise RequestError("prompt", str(output.failure))
        sys.stdout.write("\n")
