"""Flags in combination: each one that exists builds and gives the bits of eager; empty ones mean none, never all."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch.distributed as dist
from pairwise import pairwise_rows
from toys import batches, toy, train_both

import fxoverlap as fxo
from fxoverlap.ir import Phase
from fxoverlap.pipeline import default_passes

pytestmark = pytest.mark.usefixtures("shared_captures")


def in_place(f: Any, b: Any, costs: Any, config: Any) -> list[Any]:
    """A policy: forward first, then backward, each in its own order."""
    order = [(node, "F") for node in f.nodes if node.phase is Phase.F] if f else []
    return order + ([(node, "B") for node in b.nodes if node.phase is not Phase.F] if b else [])


def flags(group: dist.ProcessGroup) -> dict[str, tuple[Any, ...]]:
    """Every flag that a schedule can be built with today, and what it may be; the first is the default."""
    return {
        "schedule": ("auto", "megatron", "sequential", in_place),
        "delay_wgrad": (True, False),
        "hooks": ("refuse", "trace"),
        "pattern": (None, "[*E]", "*E"),
        "process_group": (None, group, group.group_name),
        "passes": (None, default_passes()),
        "ramp": ("none", "pair"),
        "early_release": (False, True),
        "memory_budget": (None, 1 << 30),
        "recompute": (None, fxo.Recompute("uniform")),
    }


def check(group: dist.ProcessGroup, config: dict[str, Any]) -> None:
    """Losses and gradients of an odd number of microbatches, then of one, are those of eager.

    Where dropout is, no pair may be.
    """
    model = toy("[*E]", group, shared_dim=12, tied=True, dropout=0.1 if config["ramp"] == "none" else 0.0)
    overlapped = fxo.transform(model, fxo.OverlapConfig(**config), example_inputs=batches(1)[0])
    assert train_both(overlapped, lambda step: batches(3 - 2 * step, seed=step), steps=2) == [], config
    assert (overlapped._planner.rounds(3)[0] == {"F0": 0, "F1": 1}) == (config["ramp"] == "pair")


def test_b79_b94_b95_every_pair_of_flags_builds_and_gives_the_same_bits(group: dist.ProcessGroup) -> None:
    for row in pairwise_rows(flags(group)):
        check(group, row)


@pytest.mark.slow
def test_b79_b94_b95_the_whole_product_builds_and_gives_the_same_bits(group: dist.ProcessGroup) -> None:
    choices = flags(group)
    for name in ("memory_budget", "recompute"):
        del choices[name]  # in pairs with every other flag above
    for values in itertools.product(*choices.values()):
        check(group, dict(zip(choices, values, strict=True)))


@pytest.mark.parametrize("delay_wgrad", [True, False])
@pytest.mark.parametrize("flag", [{"compile": "inductor"}, {"opaque": ("layers.*.attention",)}])
def test_b79_flags_that_are_not_built_are_refused_by_name(flag: dict[str, Any], delay_wgrad: bool) -> None:
    with pytest.raises(fxo.UnsupportedError, match=f"OverlapConfig.{next(iter(flag))} is .*cannot do it yet"):
        fxo.OverlapConfig(delay_wgrad=delay_wgrad, **flag)


# --- empty ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["layers", "mtp_layers", "opaque"])
def test_b93_empty_tuple_is_none(group: dist.ProcessGroup, field: str) -> None:
    overlapped = fxo.transform(toy("[*E]", group), fxo.OverlapConfig(**{field: ()}), example_inputs=batches(1)[0])
    physical = overlapped.plan("FB").forward.joint.physical
    assert [layer.fqn for layer in physical] == ([] if field == "layers" else ["layers.0", "layers.1"])
    assert train_both(overlapped, lambda step: batches(2, seed=step), steps=1) == []


def test_b93_empty_tuple_of_what_is_needed_is_refused_when_built() -> None:
    with pytest.raises(fxo.ConfigError, match=r"OverlapConfig\.passes is \(\); allowed"):
        fxo.OverlapConfig(passes=())
    with pytest.raises(fxo.ConfigError, match=r"Recompute\.modules is empty"):
        fxo.Recompute("selective", modules=())
    assert fxo.Recompute("uniform", keep=()).keep == fxo.Recompute("uniform", modules=()).modules == ()


@pytest.mark.parametrize(
    "ignored", [{"method": "uniform"}, {"method": "block"}, {"method": "selective", "num_layers": 2}]
)
def test_fields_that_a_recompute_method_would_ignore_are_refused(ignored: dict[str, Any]) -> None:
    with pytest.raises(fxo.ConfigError, match=r"Recompute\.\w+ is .*; method '\w+' takes \w+, so leave it out"):
        fxo.Recompute(modules=("norm",), **ignored)
