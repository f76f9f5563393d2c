"""Draws results.json as an SVG: throughput and the server's memory over the number of workers. Needs matplotlib.

    plot.py RESULTS.json OUT.svg
"""

import json
import sys

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "starwire"  # equal numbers make equal files
matplotlib.rcParams["svg.fonttype"] = "none"
import matplotlib.pyplot as plt  # noqa: E402

COLOURS = {"grpc": "#888888", "grpc++": "#2a6f97", "star_server": "#e07a5f", "star_server_lite": "#81b29a"}


def draw(results, path):
    figure, (rates, memory) = plt.subplots(1, 2, figsize=(9, 3.6))
    for protocol in results["protocols"]:
        measured = results["results"][protocol]
        counts = sorted(int(n) for n in measured)
        colour = COLOURS.get(protocol, "#333333")
        line(rates, counts, [measured[str(n)]["steps_per_s"] for n in counts], 1, protocol, colour)
        line(memory, counts, [measured[str(n)]["server"]["rss_peak"] for n in counts], 2**-20, protocol, colour)
    for axes, title in ((rates, "steps per second"), (memory, "server's memory at the peak, MiB")):
        axes.set_xscale("log")
        axes.set_xlabel("simulated workers", fontsize=9)
        axes.set_ylim(bottom=0)
        axes.set_title(title, fontsize=10)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    rates.legend(frameon=False, fontsize=9)
    machine = results["machine"]
    note = f"{results['model']}; {machine['cores']} cores, Linux {machine['kernel']}, TensorFlow {machine['tensorflow']}; server and workers share the cores; line: median, bars: min … max"
    figure.text(0.01, 0.01, note, fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, metadata={"Date": None})


def line(axes, counts, spreads, factor, label, colour):
    middle = [spread["median"] * factor for spread in spreads]
    below = [(spread["median"] - spread["min"]) * factor for spread in spreads]
    above = [(spread["max"] - spread["median"]) * factor for spread in spreads]
    axes.errorbar(counts, middle, yerr=[below, above], label=label, color=colour, marker="o", markersize=4, capsize=3)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with open(sys.argv[1]) as file:
        draw(json.load(file), sys.argv[2])
