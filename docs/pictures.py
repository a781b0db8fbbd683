"""The pictures of the documentation: steps of a small model, drawn from their trace.

    python docs/pictures.py FOLDER

``make docs`` runs it.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import lockstep
from lockstep.observe.records import RankSpans, Span
from lockstep.observe.trace_files import read_folder

LINE, GAP, LABEL, WIDTH, NUM_STEPS = 20, 8, 96, 760, 6
COLORS = {
    "data": "#d4874d",
    "forward": "#3d94b8",
    "backward": "#8a76c9",
    "wait": "#d9534f",
    "optimizer": "#4a9a62",
    "bucket": "#c77ba6",
    "all-reduce": "#b5623a",
}
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #333 }
.in { fill: #fff; font-size: 11px }
@media (prefers-color-scheme: dark) { text { fill: #ccc } }
"""


def train(world: lockstep.World, folder: str, late_seconds: float) -> None:
    """Take some steps, of which rank 1 sleeps in each forward, and trace them."""
    torch.manual_seed(world.rank)
    net = nn.Sequential(*[nn.Linear(400, 400) for _ in range(6)])
    model = lockstep.parallelize(net, bucket_cap_mb=1.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(256, 400)
    with lockstep.trace(folder):
        for _ in range(NUM_STEPS):
            if world.rank == 1:
                time.sleep(late_seconds)
            lockstep.mean(model(x).square()).backward()
            optimizer.step()
            optimizer.zero_grad()


def last_step(ranks: list[RankSpans]) -> tuple[int, int]:
    """The begin and the end of the last step."""
    starts = [s.stop for r in ranks for s in r.spans if (s.name, s.step) == ("optimizer", 4)]
    ends = [s.stop for r in ranks for s in r.spans if (s.name, s.step) == ("optimizer", 5)]
    return min(starts), max(ends)


def drawn(ranks: list[RankSpans]) -> str:
    """The last step of all ranks, as SVG."""
    begin, end = last_step(ranks)
    scale = (WIDTH - LABEL - 8) / (end - begin)
    parts, top = [], GAP

    def box(start: int, stop: int, name: str, text: str) -> None:
        x, width = LABEL + (start - begin) * scale, (stop - start) * scale
        title = f"<title>{text}: {(stop - start) / 1e6:.2f} ms</title>"
        parts.append(
            f'<rect x="{x:.1f}" y="{top}" width="{max(1, width):.1f}" height="{LINE - 3}" '
            f'fill="{COLORS[name]}">{title}</rect>'
        )
        if width > 7 * len(text):
            parts.append(f'<text class="in" x="{x + 4:.1f}" y="{top + 12}">{text}</text>')

    def label(text: str) -> None:
        parts.append(f'<text x="0" y="{top + 12}">{text}</text>')

    def of_step(span: Span) -> bool:
        return begin <= span.start and span.stop <= end and span.thread == 0

    for rank in ranks:
        label(f"rank {rank.rank}")
        for span in rank.spans:
            if of_step(span) and span.name in ("data", "forward", "backward", "optimizer"):
                box(span.start, span.stop, span.name, span.name)
        top += LINE
        label("waits")
        for span in rank.spans:
            if of_step(span) and span.name == "wait":
                box(span.start, span.stop, "wait", "wait")
        top += LINE
        for bucket in rank.buckets:
            if begin <= bucket.ready and bucket.done <= end:
                label(f"bucket {bucket.number}")
                box(bucket.ready, bucket.done, "bucket", "ready")
                box(bucket.launched, bucket.done, "all-reduce", "all-reduce")
                top += LINE
        top += GAP
    parts.append(f'<text x="{LABEL}" y="{top + 12}">one step: {(end - begin) / 1e6:.1f} ms</text>')
    size = f'viewBox="0 0 {WIDTH} {top + LINE}" width="{WIDTH}" height="{top + LINE}"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>\n{body}\n</svg>\n'
    )


def main(folder: Path) -> None:
    """Write the pictures into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, late_seconds in ("step", 0.0), ("late", 0.02):
        with tempfile.TemporaryDirectory() as trace:
            lockstep.launch(train, 2, (trace, late_seconds), num_threads=1)
            (folder / f"{name}.svg").write_text(drawn(read_folder(Path(trace))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
