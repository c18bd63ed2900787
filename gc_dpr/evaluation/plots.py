"""Figures of results. Drawn on matplotlib's Figure alone: no window, no global state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gc_dpr.artifacts import atomic_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart with any colour vision; the two palest hues are left out.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#000000")
_DASHES = ("-", "--", "-.", ":")
_INK = "#222222"
_FAINT = "#6b6b6b"
_TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_LABEL_GAP = 0.062  # least distance between two labels, as a share of the axis height


def plot_accuracy_over_k(
    accuracies: Mapping[str, Sequence[float] | npt.NDArray[np.float64]],
    path: str | Path,
    *,
    title: str,
    subtitle: str = "",
) -> Path:
    """Draw top-k accuracy over k, one line per run, and save it as PNG (or what the name says).

    Args:
        accuracies: Name → top-1, top-2, … accuracy as shares, as `TopKAccuracy.accuracy` holds it.
        path: The image file; written atomically.
        title: What is shown.
        subtitle: Data set, pool size and match mode belong here.

    Returns:
        The absolute path.

    Raises:
        ValueError: Nothing to draw, or a value outside 0 to 1.
    """
    curves = {name: np.asarray(values, dtype=np.float64) for name, values in accuracies.items()}
    if not curves or any(values.size == 0 for values in curves.values()):
        raise ValueError("accuracies is empty: expected at least one accuracy for each name")
    for name, values in curves.items():
        if not ((values >= 0) & (values <= 1)).all():
            raise ValueError(f"accuracies[{name!r}] is not within 0 and 1 (shares, not percent)")

    ticks = _ticks(max(values.size for values in curves.values()))
    figure, (axes,) = _new_figure(1, title=title, subtitle=subtitle)
    for position, (name, values) in enumerate(curves.items()):
        axes.plot(
            np.arange(1, values.size + 1),  # k from 1
            values * 100,
            color=_COLOURS[position % len(_COLOURS)],
            linestyle=_DASHES[position // len(_COLOURS) % len(_DASHES)],
            linewidth=2.2,
            marker="o",
            markersize=4.5,
            markevery=[tick - 1 for tick in ticks if tick <= values.size],
            solid_capstyle="round",
            label=name,
        )
    _log_axis(axes, ticks)
    lowest = min(float(values.min()) for values in curves.values()) * 100
    axes.set_ylim(max(0.0, np.floor((lowest - 2) / 10) * 10), 101)
    axes.yaxis.set_major_formatter("{x:.0f} %")
    axes.set_xlabel("k: passages looked at per question", color=_FAINT)
    _label_ends(axes, curves)
    return _save(figure, path)


def plot_training_curve(
    steps: Sequence[int],
    loss: Sequence[float],
    path: str | Path,
    *,
    accuracy: Sequence[float] | None = None,
    learning_rate: Sequence[float] | None = None,
    title: str = "Training",
    subtitle: str = "",
) -> Path:
    """Draw what happened at each logged step: loss, in-batch accuracy, learning rate.

    Args:
        steps: Optimizer steps, ascending.
        loss: Loss at each of them.
        path: The image file; written atomically.
        accuracy: In-batch accuracy as shares; None leaves the panel out. It is the accuracy among
            the passages of the batch, not retrieval accuracy.
        learning_rate: Learning rate at each step; None leaves the panel out.
        title: What is shown.
        subtitle: Model, data, batch size.

    Returns:
        The absolute path.

    Raises:
        ValueError: No step, or series of different length.
    """
    panels: list[tuple[str, Sequence[float]]] = [("loss", loss)]
    if accuracy is not None:
        panels.append(("in-batch accuracy", [value * 100 for value in accuracy]))
    if learning_rate is not None:
        panels.append(("learning rate", learning_rate))
    for name, values in panels:
        if not steps or len(values) != len(steps):
            raise ValueError(f"{name} has {len(values)} values for {len(steps)} steps, need ≥ 1")

    figure, all_axes = _new_figure(len(panels), title=title, subtitle=subtitle)
    for axes, colour, (name, values) in zip(all_axes, _COLOURS, panels, strict=False):
        _draw_series(axes, steps, values, colour=colour, smooth=name != "learning rate")
        axes.set_title(name, loc="left", fontsize=10, color=_INK, pad=5)
        axes.set_xlim(min(steps), max(max(steps), min(steps) + 1))
        axes.tick_params(labelbottom=axes is all_axes[-1])
    if accuracy is not None:
        all_axes[1].set_ylim(top=101)
        all_axes[1].yaxis.set_major_formatter("{x:.0f} %")
    if learning_rate is not None:
        all_axes[-1].set_ylim(bottom=0)
        all_axes[-1].yaxis.set_major_formatter("{x:g}")
    all_axes[-1].set_xlabel("optimizer step", color=_FAINT)
    return _save(figure, path)


def _draw_series(
    axes: Axes, steps: Sequence[int], values: Sequence[float], *, colour: str, smooth: bool
) -> None:
    """The values; where they are many also a moving average, as single batches are noisy."""
    array = np.asarray(values, dtype=np.float64)
    window = max(1, len(array) // 25)
    if not smooth or window < 3:
        marker = "o" if len(array) == 1 else None
        axes.plot(steps, array, color=colour, linewidth=1.8, marker=marker)
        return
    axes.plot(steps, array, color=colour, linewidth=0.8, alpha=0.3)
    kernel = np.ones(window)
    mean = np.convolve(array, kernel, "same") / np.convolve(np.ones(len(array)), kernel, "same")
    axes.plot(steps, mean, color=colour, linewidth=2.0, label=f"mean of {window} steps")
    axes.legend(loc="best", frameon=False, fontsize=8.5, labelcolor=_FAINT)


def _new_figure(panels: int, *, title: str, subtitle: str) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure  # half a second to import, needed only to draw

    height = 4.6 if panels == 1 else 1.4 + 1.75 * panels
    figure = Figure(figsize=(7.4, height), dpi=150, facecolor="white", layout="constrained")
    heading = 0.62 if subtitle else 0.38  # inches
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(rect=(0.01, 0.01, 0.98, 0.98 - heading / height), h_pad=0.06)  # type: ignore[call-arg]
    figure.text(
        0.02, 1 - 0.16 / height, title, fontsize=13, fontweight="bold", color=_INK, va="top"
    )
    figure.text(0.02, 1 - 0.42 / height, subtitle, fontsize=9.5, color=_FAINT, va="top")
    all_axes = [figure.add_subplot(panels, 1, row + 1) for row in range(panels)]
    for axes in all_axes:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_color("#bbbbbb")
        axes.tick_params(colors=_FAINT, labelsize=9, length=3, color="#bbbbbb")
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
    return figure, all_axes


def _ticks(depth: int) -> list[int]:
    """Round numbers up to ``depth`` and ``depth`` itself, unless they would touch."""
    return [tick for tick in _TICKS if tick <= depth * 0.8] + [depth]


def _log_axis(axes: Axes, ticks: Sequence[int]) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    if ticks[-1] > 1:
        axes.set_xscale("log")
        axes.set_xlim(0.96, ticks[-1] * 1.04)  # room for the first and last dot
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:.0f}")


def _label_ends(axes: Axes, curves: Mapping[str, npt.NDArray[np.float64]]) -> None:
    """Write each name at the end of its line, moved apart where the ends meet."""
    low, high = axes.get_ylim()
    gap = (high - low) * _LABEL_GAP
    order = sorted(curves, key=lambda name: -float(curves[name][-1]))
    height = high + gap
    colours = {line.get_label(): line.get_color() for line in axes.lines}
    for name in order:
        values = curves[name] * 100
        height = min(height - gap, float(values[-1]))
        axes.annotate(
            f"{name}  {values[-1]:.1f} %",
            xy=(1.0, height),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9.5,
            color=colours[name],
            annotation_clip=False,
        )


def _save(figure: Figure, path: str | Path) -> Path:
    path = Path(path)
    with atomic_file(path, "wb") as handle:
        figure.savefig(handle, format=path.suffix.lstrip(".") or "png")
    return path.absolute()
