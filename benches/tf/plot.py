"""Draws results.json as an SVG: the speed of each column relative to the first one; with several wires (benches/wire), a panel for each. Needs matplotlib.

    plot.py RESULTS.json OUT.svg
"""

import json
import sys

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "starwire"  # equal numbers make equal files
matplotlib.rcParams["svg.fonttype"] = "none"
import matplotlib.pyplot as plt


COLOURS = ["#2a6f97", "#e07a5f", "#3d9970", "#8e6c8a", "#c9a227"]


def draw(results, path):
    base, *others = results["columns"]
    panels = results.get("wires", [results])
    rows = max(len(panel["cases"]) for panel in panels)
    figure, all_axes = plt.subplots(1, len(panels), squeeze=False, figsize=(8.5 * len(panels), 1.2 + 0.5 * rows * max(1, 0.6 * len(others))))
    for axes, panel in zip(all_axes[0], panels):
        _draw_panel(axes, base, others, list(panel["cases"].values()))
        if "title" in panel:
            axes.set_title(panel["title"], fontsize=10)
    machine = results["machine"]
    figure.text(0.01, 0.005, f"{machine['cores']} cores, Linux {machine['kernel']}, TensorFlow {machine['tensorflow']}; ps and workers share the cores; results checked against numpy", fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(path, metadata={"Date": None})


def _draw_panel(axes, base, others, cases):
    height = 0.8 / max(1, len(others))
    widest = 1.0
    for index, name in enumerate(others):
        for row, case in enumerate(cases):
            ratio = case["columns"][name]["ratio"]["steps_per_s"]
            widest = max(widest, ratio["max"])
            y = row + (index - (len(others) - 1) / 2) * height
            axes.barh(y, ratio["median"], height * 0.9, color=COLOURS[index % len(COLOURS)], label=name if row == 0 else None, zorder=2)
            axes.plot([ratio["min"], ratio["max"]], [y, y], color="#222222", linewidth=1.2, zorder=3)
            axes.text(ratio["max"] + 0.06, y, f"{ratio['median']:.1f}×", va="center", fontsize=9)
    label = "bare sockets, pull and push at the same time"
    border = widest * 1.12
    for row, case in enumerate(cases):
        if "wire+overlap" in case["bare"]:
            limit = case["bare"]["wire+overlap"]["steps_per_s"]["median"] / case["columns"][base]["steps_per_s"]["median"]
            # Where the computation takes most of the time, this limit is far out: a number at the border says where.
            if limit > border:
                axes.text(border, row - 0.42, f"{limit:.0f}× →", va="center", ha="right", fontsize=7)
                continue
            axes.plot([limit, limit], [row - 0.42, row + 0.42], color="#111111", linewidth=1.6, label=label, zorder=4)
            label = None
    axes.axvline(1.0, color="#888888", linewidth=1, linestyle="--", zorder=1)
    axes.set_yticks(range(len(cases)), [f"{case['title']}\n({base}: {_absolute(case['columns'][base])})" for case in cases], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, border)
    axes.set_xlabel(f"steps per second, times stock {base} (bar: median of the turns, line: min … max)", fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if others:
        axes.legend(frameon=False, fontsize=9, loc="lower right")


def _absolute(column):
    if "examples_per_s" in column:
        return f"{column['examples_per_s']['median']:,.0f} examples/s"
    return f"{column['steps_per_s']['median']:,.3g} steps/s" if column["steps_per_s"]["median"] < 1000 else f"{column['steps_per_s']['median']:,.0f} steps/s"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with open(sys.argv[1]) as file:
        draw(json.load(file), sys.argv[2])
