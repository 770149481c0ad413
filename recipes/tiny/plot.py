"""Curves of a training as SVG files, written by hand so that training needs no plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 760, 400, 60, 44, 28, 16
COLORS = ("#1f6feb", "#d1652a", "#2a8f4b")

Curve = Sequence[tuple[int, float]]


def loss_svg(curves: Mapping[str, Curve], title: str) -> str:
    """Loss by step, the losses on a logarithmic axis. Each curve is [(step, loss), …]."""
    exponents = {name: [(step, math.log10(max(loss, 1e-6))) for step, loss in curve] for name, curve in curves.items()}
    found = [exponent for curve in exponents.values() for _, exponent in curve]
    low, high = math.floor(min(found) * 2) / 2, math.ceil(max(found) * 2) / 2
    high = max(high, low + 0.5)
    ticks = [low + tick / 2 for tick in range(round((high - low) * 2) + 1)]
    return _svg(exponents, title, {exponent: f"{10**exponent:.3g}" for exponent in ticks})


def share_svg(curves: Mapping[str, Curve], title: str) -> str:
    """Shares between 0 and 1 by step."""
    return _svg(curves, title, {tick / 5: f"{tick / 5:.1f}" for tick in range(6)})


def _svg(curves: Mapping[str, Curve], title: str, ticks: Mapping[float, str]) -> str:
    """Curves over steps. `ticks` are the labels of heights, from the lowest to the highest."""
    last = max(step for curve in curves.values() for step, _ in curve)
    low, high = min(ticks), max(ticks)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / max(last, 1)

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="18" text-anchor="middle" font-size="14">{title}</text>',
    ]
    for value, label in ticks.items():
        parts.append(_line(LEFT, y(value), WIDTH - RIGHT, y(value), "#dddddd"))
        parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{label}</text>')
    for tick in range(6):
        step = last * tick / 5
        parts.append(_line(x(step), HEIGHT - BOTTOM, x(step), HEIGHT - BOTTOM + 5, "#888888"))
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step:.0f}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">step</text>')
    for index, (name, curve) in enumerate(curves.items()):
        color = COLORS[index % len(COLORS)]
        points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in curve)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts.append(
            f'<text x="{WIDTH - RIGHT - 8}" y="{TOP + 18 + 16 * index}" text-anchor="end" fill="{color}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _line(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"/>'
