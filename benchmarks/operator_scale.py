"""Draws what tests/cluster/test_scale.py measured: who needs the processor in each phase, and how
soon a change of a resource is in its Deployment.

Run: FAIRLEAD_FIGURES=FILE FAIRLEAD_FULL=1 .venv/bin/python -m pytest tests/cluster/test_scale.py -s
     .venv/bin/python benchmarks/operator_scale.py FILE > docs/pictures/scale.svg
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

# By process; the order of the segments.
COLOURS = {
    "operator": "#1f5fbf",
    "kube-apiserver": "#c2410c",
    "kube-controller-manager": "#15803d",
    "etcd": "#7c3aed",
    "pods": "#a16207",
    "kube-scheduler": "#64748b",
    "kwok": "#94a3b8",
}
LEFT, WIDTH, BAR, STEP, CORES = 130, 640, 22, 34, 2.0
TOP, CURVE_HEIGHT, BOUND, SECONDS = 70, 170, 5.0, 6.0
LABELLED = 0.06  # cores; a smaller segment has no room for its figure


def draw(figures: Mapping[str, object]) -> Iterator[str]:
    """Bars of the phases in the order of the file, and the curve of ``latencies`` below them."""
    phases = {name: cores for name, cores in figures.items() if isinstance(cores, dict)}
    latencies = figures["latencies"]
    assert isinstance(latencies, list)
    below = TOP + len(phases) * STEP + 60
    size = f"0 0 {LEFT + WIDTH + 60} {below + CURVE_HEIGHT + 40}"
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" font-family="sans-serif" '
    yield 'font-size="12"><rect width="100%" height="100%" fill="white"/>'
    yield _text(4, 18, "processor time by phase, in % of one core (the machine has two)")
    x = float(LEFT)
    for name, colour in COLOURS.items():
        yield f'<rect x="{x}" y="34" width="10" height="10" fill="{colour}"/>'
        yield _text(x + 14, 43, name)
        x += 24 + 6.6 * len(name)
    for row, (phase, cores) in enumerate(phases.items()):
        yield from _bar(phase, cores, TOP + row * STEP)
    yield _text(4, below - 16, f"share of {len(latencies)} changes that are in their Deployment")
    yield from _curve(sorted(latencies), below)
    yield "</svg>"


def _bar(phase: str, cores: Mapping[str, float], y: int) -> Iterator[str]:
    yield _text(4, y + 15, phase)
    x = float(LEFT)
    for name, colour in COLOURS.items():
        width = cores.get(name, 0.0) * WIDTH / CORES
        rect = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"'
        yield f"<rect {rect}><title>{name} {cores.get(name, 0.0):.0%}</title></rect>"
        if cores.get(name, 0.0) >= LABELLED:
            yield _text(x + 3, y + 15, f"{100 * cores[name]:.0f}", "white")
        x += width
    yield _text(x + 6, y + 15, f"{100 * sum(cores.values()):.0f} %")


def _curve(latencies: Sequence[float], y: int) -> Iterator[str]:
    bottom, longest = y + CURVE_HEIGHT, max(SECONDS, latencies[-1])
    scale = WIDTH / longest
    yield f'<path d="M{LEFT} {y}V{bottom}H{LEFT + WIDTH}" fill="none" stroke="#999"/>'
    at = LEFT + BOUND * scale
    yield f'<path d="M{at:.1f} {y}V{bottom}" stroke="#999" stroke-dasharray="4"/>'
    yield _text(at + 4, bottom - 6, "bound for 99 %")
    for share in (0.0, 0.5, 0.99):
        yield _text(LEFT - 40, bottom - share * CURVE_HEIGHT + 4, f"{share:.0%}")
    points = [f"M{LEFT} {bottom}"]
    for number, seconds in enumerate(latencies, 1):
        height = bottom - CURVE_HEIGHT * number / len(latencies)
        points.append(f"H{LEFT + seconds * scale:.1f}V{height:.1f}")
    colour = COLOURS["operator"]
    yield f'<path d="{"".join(points)}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
    for second in range(int(longest) + 1):
        yield _text(LEFT + second * scale - 3, bottom + 16, f"{second} s")


def _text(x: float, y: float, text: str, colour: str = "black") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}">{text}</text>'


if __name__ == "__main__":
    print("\n".join(draw(json.loads(Path(sys.argv[1]).read_text()))))
