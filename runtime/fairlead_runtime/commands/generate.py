"""`fairlead generate MODEL --prompt TEXT`: complete one prompt and print the text.

Writes each piece of text as soon as it is generated. Without --prompt it reads stdin.
"""

import argparse
import dataclasses
import os
import sys
from typing import TYPE_CHECKING

from fairlead_runtime.settings import terminal
from fairlead_runtime.settings.arguments import ArgumentParser
from fairlead_runtime.settings.engine_config import (
    SERVER_ONLY,
    ConfigError,
    EngineConfig,
    add_arguments,
)

if TYPE_CHECKING:
    from fairlead_runtime.request.sequence import SamplingParams


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
        terminal.refuse(refusal.code, refusal.message, refusal.hint)
        return refusal.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="fairlead generate",
        usage="fairlead generate MODEL --prompt TEXT [--chat] [settings]",
        description="Complete one prompt and print the text.",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="demo:, owner/name, hf://owner/name, a path or file:///path"
    )
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        help="completed without a template unless --chat is given (default: what stdin has)",
    )
    parser.add_argument(
        "--chat", action="store_true", help="wrap the prompt in the model's chat template"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=256, metavar="N", help="longest text (default: 256)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0: greedy (default: 0.0)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the most probable tokens that have this probability (default: 1.0)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="draw from the K most probable tokens; 0: from all (default: 0)",
    )
    add_arguments(parser, without=SERVER_ONLY)
    return parser


def _generate(options: argparse.Namespace) -> None:
    from fairlead_runtime.build.first_checks import ENGINE, check_model, check_tokenizer, require
    from fairlead_runtime.request.sequence import FinishReason, RequestError

    params = _params(options)
    config = EngineConfig.from_namespace(options)
    require(*ENGINE)
    shape = check_model(options.model, config)
    check_tokenizer(options.model)
    longest = 0 if shape is None else config.max_model_len or shape.max_len
    if 0 < longest <= options.max_tokens:
        problem = f"{options.max_tokens} leave no room for a prompt: the most is {longest} tokens"
        raise RequestError("max_tokens", f"{problem} for both")
    prompt = _prompt(options.prompt)
    # Imported after all that can be refused without torch.
    from fairlead_runtime.processes.lean_imports import leave_compiler_out

    leave_compiler_out()
    from fairlead_runtime.llm import LLM
    from fairlead_runtime.models import chat
    from fairlead_runtime.outputs import Submission

    with LLM(options.model, **dataclasses.asdict(config)) as llm:
        tokenizer = llm.get_tokenizer()
        if options.chat:
            text = chat.render_chat(tokenizer, [{"role": "user", "content": prompt}])
            ids = chat.encode_chat(tokenizer, text)
        else:
            ids = chat.encode(tokenizer, prompt)
        for _, output in llm.stream([Submission(prompt=tuple(ids), params=params)]):
            sys.stdout.write(terminal.harmless(output.text))
            sys.stdout.flush()
            if output.finish_reason is FinishReason.ERROR:
                raise RequestError("prompt", str(output.failure))
        sys.stdout.write("\n")


def _params(options: argparse.Namespace) -> "SamplingParams":
    """Raises ConfigError or RequestError."""
    from fairlead_runtime.request.sequence import SamplingParams

    if options.max_tokens < 1:
        problem = f"{options.max_tokens} is below the smallest allowed, 1"
        raise ConfigError("max_tokens", problem, "set at least 1")
    return SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        max_tokens=options.max_tokens,
        seed=options.seed,
    )


def _prompt(text: str | None) -> str:
    """--prompt, else all of stdin without the line end of its last line. Raises ConfigError."""
    if text is not None:
        return text
    try:
        text = "" if sys.stdin.isatty() else sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        raise ConfigError("prompt", "stdin is not UTF-8", "convert it") from None
    text = text.removesuffix(os.linesep)
    if not text:  # before a model is loaded for nothing
        raise ConfigError("prompt", "is missing", "give --prompt TEXT, or the text on stdin")
    return text
