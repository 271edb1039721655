"""What the walk through the README takes of it, and how it compares."""

import re
from contextlib import ExitStack
from pathlib import Path

from first_minute import DEMO, ROOT, SET_UP, Block, Walk, blocks, missing

PAGE = """
```
$ make demo
Ready in 5 s: http://127.0.0.1:41233

...
FITS: 4.5 GiB
```

```yaml
kind: X
```

```
curl -s URL \\
  -d x
kubectl get idep                  # READY
fairlead plan -f chat.yaml        # does it fit?
```

```python
print(1)
```
"""


def test_blocks_are_commands_shown_output_and_programs() -> None:
    shown, typed, program = blocks(PAGE)
    assert shown.commands == ("make demo",)
    assert shown.output == ("Ready in 5 s: http://127.0.0.1:41233", "FITS: 4.5 GiB")
    assert typed.commands == ("curl -s URL    -d x", "fairlead plan -f chat.yaml")
    assert not typed.output
    assert program.program == "print(1)\n"


def test_what_is_said_is_compared_but_for_numbers_and_what_was_written_over() -> None:
    shown = ("Ready in 5 s: http://127.0.0.1:8000", "an answer.")
    ready = "\x1b[1mReady in 31.2 s:\x1b[0m http://127.0.0.1:41"
    said = f"\r\x1b[KStarting 2.1 s\r\x1b[K{ready}\r\nan answer.\r\n"
    assert missing(shown, said) == []
    assert missing(shown[::-1], said) == [shown[0]], "in another order"
    assert missing((*shown[:1], "an an…"), said) == []
    assert missing(("an on…",), said) == ["an on…"]
    assert missing(("an answer!",), said) == ["an answer!"]


def test_every_block_of_the_readme_is_walked() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    found = list(blocks(readme))
    assert sum(bool(block.output) for block in found) == 3, "three commands with their output"
    fences = re.findall(r"^```(.*)$", readme, re.MULTILINE)[::2]  # those that open a block
    assert len(found) == sum(language in ("", "python") for language in fences) > 7
    assert {*fences} == {"", "python", "yaml"}
    assert all(block.commands or block.program for block in found)


def test_the_demo_has_a_row_for_its_set_up_and_one_for_its_first_answer(tmp_path: Path) -> None:
    said = ("packages", SET_UP, "> What is it?", "An answer.", "the end")
    lines = "".join(f"\t@echo '{line.replace('$', '$$')}'\n" for line in said)
    (tmp_path / "Makefile").write_text(f"demo:\n{lines}")
    walk = Walk(tmp_path)
    with ExitStack() as servers:
        walk.run(Block((DEMO,), ("An answer.",)), servers)
    assert [(row[0], row[3]) for row in walk.rows] == [
        (DEMO, "set-up"),
        (DEMO, "first answer"),
        (DEMO, "end"),
    ]
    assert walk.rows[0][1] <= walk.rows[1][1] <= walk.rows[2][1]
    assert not walk.faults


def test_the_table_has_a_row_for_each_command() -> None:
    walk = Walk(Path())
    walk.rows = [("make demo", 2.04, 12, "end"), ("“What?”", 0.5, 0, "first answer")]
    assert walk.table().splitlines()[2:] == [
        "| `make demo` | end | 2.0 | 12 |",
        "| “What?” | first answer | 0.5 |  |",
    ]
