"""How long `fxoverlap.transform` takes on a model of so many layers: once a run, in seconds, on one rank."""

import time
from typing import Any

import fxoverlap as fxo
from fxoverlap.benchmarks.workload import Settings
from fxoverlap.errors import ConfigError
from fxoverlap.launch import one_rank_group


def run(layers: int) -> dict[str, Any]:
    """Transform `[*E]` as often as gives `layers` physical layers; return `layers`, `transform_s` and `nodes`.

    `nodes` counts schedule nodes. Raises ConfigError if `layers` is no positive even number.
    """
    if layers < 2 or layers % 2:
        raise ConfigError(f"layers: expected a positive even number, as each [*E] has two, got {layers}")
    settings = Settings(pattern="[*E]" * (layers // 2), microbatches=1)
    example = settings.batches(0)[0]
    with one_rank_group() as group:
        model = settings.model(group)
        began = time.perf_counter()
        overlapped = fxo.transform(model, fxo.OverlapConfig(settings.pattern), example_inputs=example)
        seconds = time.perf_counter() - began
        nodes = len(overlapped.report().nodes)
    return {
        "layers": layers,
        "logical_layers": layers // 2,
        "transform_s": seconds,
        "seconds_a_logical_layer": seconds / (layers // 2),
        "nodes": nodes,
    }


def text(figures: dict[str, Any]) -> str:
    """Format the figures of `run` for a person."""
    return (
        f"{figures['layers']} layers in {figures['logical_layers']} logical ones: {figures['transform_s']:.2f} s, "
        f"{figures['seconds_a_logical_layer']:.2f} s each, {figures['nodes']} schedule nodes"
    )
