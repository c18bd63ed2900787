"""Bar charts of a benchmark's figures. Drawn on matplotlib's Figure alone: no window."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gc_dpr.artifacts import atomic_file

_OURS, _OTHERS = "#0072B2", "#b8b8b8"
_INK, _FAINT = "#222222", "#6b6b6b"


def plot_bars(
    bars: Mapping[str, float],
    path: str | Path,
    *,
    title: str,
    subtitle: str,
    label: str,
    ours: str,
    form: str = "{:,.2f}",
) -> Path:
    """Draw one horizontal bar per name, from top to bottom, and save it as PNG.

    Args:
        bars: Name to value, at least 0.
        path: The image file; written atomically.
        title: What is shown.
        subtitle: The setting.
        label: Of the axis, with the unit.
        ours: Bars whose name begins so have a colour of their own.
        form: How the value beside a bar is written.

    Returns:
        The absolute path.
    """
    from matplotlib.figure import Figure  # half a second to import, needed only to draw

    height = 1.5 + 0.36 * len(bars)  # inches
    figure = Figure(figsize=(7.4, height), dpi=150, facecolor="white", layout="constrained")
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(rect=(0.01, 0.01, 0.98, 0.98 - 0.62 / height))  # type: ignore[call-arg]
    top = 1 - 0.16 / height
    figure.text(0.02, top, title, fontsize=13, fontweight="bold", color=_INK, va="top")
    below = 1 - 0.42 / height
    figure.text(0.02, below, subtitle, fontsize=8.5, color=_FAINT, va="top")
    axes = figure.add_subplot()
    names, values = list(bars), list(bars.values())
    drawn = axes.barh(
        range(len(names)),
        values,
        height=0.66,
        color=[_OURS if name.startswith(ours) else _OTHERS for name in names],
    )
    axes.bar_label(drawn, [form.format(v) for v in values], padding=4, fontsize=9, color=_INK)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, max(values) * 1.12)
    axes.set_xlabel(label, color=_FAINT)
    axes.tick_params(colors=_FAINT, labelsize=9, length=0)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color("#bbbbbb")
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    path = Path(path)
    with atomic_file(path, "wb") as handle:
        figure.savefig(handle, format="png")
    return path.absolute()
