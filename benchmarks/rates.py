"""How long a step takes against the rate of the link: `two_hosts` at several rates, and a plot of it.

At a slow link no order hides all of the exchanges, at a fast one hardly any order is needed; schedules differ most
where exchanges take about as long as compute does. The bound is drawn as a line, measured at each rate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fxoverlap.benchmarks import two_hosts
from fxoverlap.benchmarks.workload import Settings
from fxoverlap.errors import ConfigError

_UNITS = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}

_LABELS = {
    "eager": "eager",
    "sequential": "sequential",
    "megatron": "megatron",
    "auto": "auto",
    "auto_pair": 'auto, ramp="pair"',
}


def run(rates: Sequence[str], settings: Settings, plots: Sequence[str]) -> dict[str, Any]:
    """Measure at each rate and write the plots.

    Args:
        rates: as `tc` writes them, such as `500mbit` or `1gbit`.
        settings: of every run but the rate.
        plots: files to write, each of a format that its name ends in, such as `.svg` or `.png`.

    Returns:
        Under `rates` the figures of `two_hosts.run` for each, and whether all were bitwise equal.

    Raises:
        ConfigError: a rate has another form, or there is nothing to plot with.
    """
    for rate in rates:
        mbit(rate)
    if plots:
        formats = _pyplot().figure().canvas.get_supported_filetypes()
        for path in plots:
            if Path(path).suffix[1:].lower() not in formats:
                raise ConfigError(
                    f"plot is {path!r}; expected a name that ends in one of {', '.join(sorted(formats))}."
                )
    figures = [two_hosts.run(dataclasses.replace(settings, rate=rate)) for rate in rates]
    for path in plots:
        plot(figures, path)
    return {"rates": figures, "bitwise_equal": all(each["bitwise_equal"] for each in figures)}


def mbit(rate: str) -> float:
    """A rate in Mbit/s. Raises ConfigError if it is not a number with one of tc's units kbit, mbit, gbit."""
    number, unit = rate[:-4], rate[-4:].lower()
    try:
        value = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"rate is {rate!r}; expected a number above 0 with kbit, mbit or gbit, such as 500mbit.")
    return value


def plot(figures: Sequence[dict[str, Any]], path: str) -> None:
    """Write step time against link rate, both on logarithmic axes."""
    pyplot = _pyplot()
    rates = [mbit(each["rate"]) for each in figures]
    drawing, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    axes.plot(rates, [each["bound_ms"] for each in figures], color="black", linestyle="--", label="bound")
    for name, label in _LABELS.items():
        axes.plot(rates, [each[f"{name}_ms"] for each in figures], marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="link rate (Mbit/s)", ylabel="step (ms)")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates], minor=False)
    axes.minorticks_off()
    low, high = axes.get_ylim()
    ticks = [digit * power for power in (10, 100, 1000, 10_000, 100_000) for digit in range(1, 10)]
    axes.set_yticks([tick for tick in ticks if low <= tick <= high], minor=False)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend()
    drawing.savefig(Path(path), metadata={"Date": None} if path.endswith(".svg") else None)
    pyplot.close(drawing)


def text(figures: dict[str, Any]) -> str:
    """Format the figures of `run` for a person: milliseconds, and how far from the bound."""
    names = tuple(_LABELS)
    lines = ["".join([f"{'rate':>10}", *(f"{name:>18}" for name in names), f"{'bound':>10}"])]
    for each in figures["rates"]:
        cells = [f"{each[f'{name}_ms']:9.1f} ({each[f'{name}_ms'] / each['bound_ms']:.3f})" for name in names]
        lines.append("".join([f"{each['rate']:>10}", *(f"{cell:>18}" for cell in cells), f"{each['bound_ms']:10.1f}"]))
    lines.append(f"bitwise equal: {'yes' if figures['bitwise_equal'] else 'NO'}")
    return "\n".join(lines)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("A plot needs matplotlib, which is not installed: pip install 'fxoverlap[plot]'.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
