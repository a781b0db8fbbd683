"""The picture of ``benchmarks/history.jsonl``: how long a step took, by date.

    python docs/history.py FOLDER

``make docs`` runs it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, LABELS = 760, 260, 40, 170
COLORS = ("#3d94b8", "#d4874d", "#4a9a62", "#8a76c9", "#d9534f", "#c77ba6")
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #333 }
.axis { stroke: #999; stroke-width: 1 }
@media (prefers-color-scheme: dark) { text { fill: #ccc } }
"""


def drawn(lines: list[dict], pair: str) -> str:
    """A curve for each model; a point for each run, from left to right, labelled at its end."""
    models = list(lines[-1]["ratios"])
    highest = max(ratio[pair] for line in lines for ratio in line["ratios"].values())
    right = WIDTH - LABELS

    def x(number: int) -> float:
        return LEFT + (number + 0.5) * (right - LEFT) / len(lines)

    def y(ratio: float) -> float:
        return HEIGHT - 30 - ratio * (HEIGHT - 50) / highest

    parts = [f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{y(1)}" y2="{y(1)}"/>']
    parts += [f'<text x="0" y="{y(ratio) + 4:.0f}">{ratio:.1f}</text>' for ratio in (0, 1, highest)]
    ends = sorted(models, key=lambda model: lines[-1]["ratios"][model][pair])
    for color, model in zip(COLORS, models, strict=False):
        points = [
            (x(number), y(line["ratios"][model][pair]))
            for number, line in enumerate(lines)
            if model in line["ratios"]
        ]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{color}"/>' for a, b in points]
        last, label_y = lines[-1]["ratios"][model][pair], HEIGHT - 40 - 17 * ends.index(model)
        parts.append(f'<text x="{right + 8}" y="{label_y}" style="fill: {color}">{last:.2f} ')
        parts.append(f"{model}</text>")
    for number in sorted({0, len(lines) - 1}):
        date = lines[number]["date"]
        parts.append(
            f'<text x="{x(number):.0f}" y="{HEIGHT - 8}" text-anchor="middle">{date}</text>'
        )
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>\n{body}\n</svg>\n'
    )


def main(folder: Path) -> None:
    """Write the pictures into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    file = Path(__file__).parents[1] / "benchmarks" / "history.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for name, pair in ("ddp", "DDP / lockstep"), ("alone", "lockstep / no communication"):
        (folder / f"{name}.svg").write_text(drawn(lines, pair))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
