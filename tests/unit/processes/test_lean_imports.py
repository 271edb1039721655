"""What the engine's process imports at start, and that the rest can still be had."""

import subprocess
import sys
from pathlib import Path

import fairlead_runtime

DEMO = Path(fairlead_runtime.__file__).parent / "demo"
# The engine's process with a channel that hands it the start message, and then nothing more.
STARTED = """
import sys
from pathlib import Path
from fairlead_runtime.settings.engine_config import EngineConfig
from fairlead_runtime.serving import wire
from fairlead_runtime.processes import engine_process

class Channel:
    def __init__(self, *messages): self.messages = [*messages, None]
    def receive(self): return self.messages.pop(0)
    def send(self, message): self.sent = message

start = wire.Start(sys.argv[1], EngineConfig(), beside=0)
for messages in ([start], [start, wire.Words(None)]):
    channel = Channel(*messages)
    assert engine_process._serve(channel) == 0
    # Without a word of the tokenizer the other process is gone, and nothing is refused.
    assert type(channel.sent) is (wire.Loaded if len(messages) == 2 else wire.Progress)
heavy = ("sympy.core", "torch._inductor", "torch._dynamo.convert_frame", "torch.distributed.tensor")
print([name for name in heavy if name in sys.modules])
"""
# Afterwards: whoever needs the compiler gets it, and it says the same of plain numbers.
COMPILED = """
import torch
from fairlead_runtime.processes.lean_imports import SymbolicShapes
stand_in = sys.modules["torch.fx.experimental.symbolic_shapes"]
assert type(stand_in) is SymbolicShapes
values = {"sym_eq": [(2, 2), (2, 3), ([1, 2], (1, 2)), ((1,), (1, 2))],
          "sym_and": [(True, False), (True, True)], "sym_or": [(False, True), (False, False)],
          "is_nested_int": [(3,)], "has_guarding_hint": [(3,), (True,)]}
said = {check: [getattr(stand_in, check)(*each) for each in values.get(check, [(True,), (False,)])]
        for check in SymbolicShapes.PLAIN}
assert torch.compile(lambda x: 2 * x, backend="eager")(torch.ones(3)).tolist() == [2, 2, 2]
real = sys.modules["torch.fx.experimental.symbolic_shapes"]
assert real is not stand_in
assert said == {check: [getattr(real, check)(*each)
                for each in values.get(check, [(True,), (False,)])] for check in said}
print("sympy.core" in sys.modules)
"""


def test_the_engine_starts_without_the_compiler_which_can_still_be_had() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTED + COMPILED, str(DEMO)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "True"]
