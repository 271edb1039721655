"""`fairlead chat [MODEL | --url URL]`: chat with a model in the terminal.

Owns the conversation and what a person types; ``chat_client`` has the server. Reads one message a
line where its input is no terminal.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fairlead_runtime.commands.chat_client import ChatError, Endpoint, OwnServer
from fairlead_runtime.settings import terminal
from fairlead_runtime.settings.arguments import ArgumentParser
from fairlead_runtime.settings.engine_config import SERVER_ONLY, EngineConfig, add_arguments
from fairlead_runtime.settings.terminal import CYAN, DIM, paint

DEMO = "demo:"
KEY = "FAIRLEAD_API_KEY"
HELP = """\
/help   show this
/reset  begin a new conversation
/quit   end, as Ctrl-D does
Ctrl-C  stop the answer"""
# Of a server's settings, those that change what a chat shows.
WITHOUT = SERVER_ONLY - {"reasoning_parser", "generation_config", "chat_template"}


def main(argv: Sequence[str]) -> int:
    """Exit code 0: the chat was ended; 2: the server cannot be used or refuses."""
    parser = _parser()
    options = parser.parse_args(list(argv))
    if options.url and options.source:
        parser.refuse("--url: MODEL starts a server of its own", "give one of both")
    try:
        with contextlib.ExitStack() as running:
            endpoint = _endpoint(options, running)
            body: dict[str, Any] = {"model": options.model or endpoint.model()}
            for name in ("temperature", "max_tokens"):
                if (value := getattr(options, name)) is not None:
                    body[name] = value
            _Chat(endpoint, body, options.system).run()
    except ChatError as error:
        terminal.refuse("ChatFailed", str(error), error.hint)
        return 2
    except KeyboardInterrupt:  # before the first message
        sys.stderr.write("\n")
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="fairlead chat",
        usage="fairlead chat [MODEL [settings] | --url URL [--model NAME]]",
        description="Chat with a model: with one that this command serves itself, or with a server "
        f"at --url. A key for the server is read from {KEY}.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source",
        nargs="?",
        metavar="MODEL",
        help=f"as of `fairlead serve` (default: {DEMO})",
    )
    parser.add_argument("--url", metavar="URL", help="any server with OpenAI's API")
    parser.add_argument(
        "--model", metavar="NAME", help="name of the model there (default: the first one)"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message (default: none)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="0: greedy (default: the server's)"
    )
    add_arguments(parser, without=WITHOUT)
    return parser


def _endpoint(options: argparse.Namespace, running: contextlib.ExitStack) -> Endpoint:
    """The server at --url, or a new one that ends with ``running``."""
    key = os.environ.get(KEY, "").strip()  # also that of a server of its own, which inherits it
    if options.url:
        return Endpoint(options.url, key)
    flags = EngineConfig.from_namespace(options).to_args()
    server = running.enter_context(OwnServer(options.source or DEMO, flags))
    url = ""
    with terminal.live_line("starting …") as show:
        for url in server.lines():
            show(url)
    return Endpoint(url, key, local=True)


class _Chat:
    """One conversation after another. ``body`` is of every request, beside its messages."""

    def __init__(self, endpoint: Endpoint, body: Mapping[str, Any], system: str | None) -> None:
        self._endpoint = endpoint
        self._body = body
        self._system = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, str]] = []
        self._person = sys.stdin.isatty()

    def run(self) -> None:
        """Until the end of the input. Raises ChatError where the input is no terminal."""
        if self._person:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - gives the line that input() reads its keys
            model = terminal.printable(str(self._body["model"]))
            words = f"Chat with {model}   (/help shows the commands, Ctrl-D ends)"
            sys.stdout.write(paint(words, DIM, sys.stdout) + "\n")
        while (line := self._read()) is not None:
            command = line.strip()
            if not command:
                continue
            if command == "/quit":
                return
            if command == "/reset":
                self._messages = []
                self._say("a new conversation begins")
            elif command == "/help":
                self._say(HELP)
            elif self._person and command.startswith("/") and " " not in command:
                self._say(f"{command} is not a command\n{HELP}")
            else:
                self._exchange(line)

    def _say(self, text: str) -> None:
        """A word of this program, which is no part of any answer."""
        print(paint(text, DIM), file=sys.stderr, flush=True)  # noqa: T201 - to the person

    def _read(self) -> str | None:
        """The next line; None at the end of the input."""
        if not self._person:
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        while True:
            try:
                return input(_prompt())
            except EOFError:
                sys.stdout.write("\n")
                return None
            except KeyboardInterrupt:
                self._say("\nCtrl-D ends")

    def _exchange(self, text: str) -> None:
        """Send a message and write its answer. One that fails leaves the conversation as it was;
        of one that is stopped the conversation has what came.
        """
        asked = [*self._messages, {"role": "user", "content": text}]
        body = {**self._body, "messages": [*self._system, *asked]}
        answer: list[str] = []
        pieces = self._endpoint.stream(body)
        thinking = False
        try:
            for piece in pieces:
                if piece.reasoning and self._person:
                    thinking = True
                    self._write(paint(terminal.harmless(piece.reasoning), DIM, sys.stdout))
                if piece.text:
                    answer.append(piece.text)  # first: what was read is part of the conversation
                    self._write("\n\n" * thinking + terminal.harmless(piece.text))
                    thinking = False
                if piece.finish == "length":
                    self._say("\n(the answer is cut: it has reached its longest length)")
        except KeyboardInterrupt:
            if not self._person:
                raise
            self._say("\n(stopped)")
        except ChatError as error:
            if not self._person:
                raise
            self._write("\n")
            terminal.refuse("ChatFailed", str(error), error.hint)
            return
        finally:
            pieces.close()
        self._write("\n")
        self._messages = [*asked, {"role": "assistant", "content": "".join(answer)}]

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _prompt() -> str:
    """The prompt of input(); readline must know which characters take no room."""
    coloured = paint("> ", CYAN, sys.stdout)
    return "> " if coloured == "> " else f"\x01\x1b[{CYAN}m\x02> \x01\x1b[0m\x02"
