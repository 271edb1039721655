"""The memory that a program holds alone, for tests that measure it in a process of its own."""

# Begins a program for ``python -c``: private() is in bytes, after what was freed is given back.
PROGRAM = """
from pathlib import Path
from fairlead_runtime.child.heap import release_memory
def private():
    release_memory()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return 1024 * sum(int(l.split()[1]) for l in lines if l.startswith("Private"))
"""
