"""A loss curve as an SVG file, written by hand so that training needs no plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 760, 400, 60, 44, 28, 16
COLORS = ("#1f6feb", "#d1652a", "#2a8f4b")

Curve = Sequence[tuple[int, float]]


def loss_svg(curves: Mapping[str, Curve], title: str) -> str:
    """Loss by step, the losses on a logarithmic axis. Each curve is [(step, loss), …]."""
    steps = [step for curve in curves.values() for step, _ in curve]
    losses = [max(loss, 1e-6) for curve in curves.values() for _, loss in curve]
    low, high = math.floor(math.log10(min(losses)) * 2) / 2, math.ceil(math.log10(max(losses)) * 2) / 2
    high = max(high, low + 0.5)
    last = max(steps)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last

    def y(exponent: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - exponent) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="18" text-anchor="middle" font-size="14">{title}</text>',
    ]
    for tick in range(round((high - low) * 2) + 1):
        exponent = low + tick / 2
        parts.append(_line(LEFT, y(exponent), WIDTH - RIGHT, y(exponent), "#dddddd"))
        parts.append(f'<text x="{LEFT - 6}" y="{y(exponent) + 4:.1f}" text-anchor="end">{10**exponent:.3g}</text>')
    for tick in range(6):
        step = last * tick / 5
        parts.append(_line(x(step), HEIGHT - BOTTOM, x(step), HEIGHT - BOTTOM + 5, "#888888"))
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step:.0f}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">step</text>')
    for index, (name, curve) in enumerate(curves.items()):
        color = COLORS[index % len(COLORS)]
        points = " ".join(f"{x(step):.1f},{y(math.log10(max(loss, 1e-6))):.1f}" for step, loss in curve)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts.append(
            f'<text x="{WIDTH - RIGHT - 8}" y="{TOP + 18 + 16 * index}" text-anchor="end" fill="{color}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _line(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"/>'
