"""Models with multi-token prediction as other people write them: each gives eager's bits, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from odd_mtp import DeepSeek, Megatron, Wired, WiredModel, wired
from random_checks import check_all
from toys import train_both
from two_ranks import TwoRanks

import fxoverlap as fxo

pytestmark = pytest.mark.usefixtures("shared_captures")


def outcome(spec: Wired, group: dist.ProcessGroup) -> tuple[list[str], str | None]:
    """What differs from eager, and why the model was refused, if it was."""
    try:
        return train_both(WiredModel(spec, group), spec.data, spec.config(), steps=2), None
    except (fxo.CaptureError, fxo.UnsupportedError) as error:
        return [], str(error)


SHARED = [
    # A depth that runs again is another depth; the norm that it shares with the model, or that is called beside it.
    Wired(module="one", depths=("moe", "moe", "moe"), tied=True),
    Wired(norm="shared", depths=("moe", "dense"), main="last"),
    Wired(module="one", parts=True, norm="shared", loss="reversed"),
    Wired(module="trunk", norm="shared", head="joined", tied=True),
]

HEADS = [
    Wired(head="joined", loss="logsumexp", tied=True),
    Wired(head="inside", loss="reversed", main="between"),
    Wired(head="own", embeds="shifted", main="last", loss="max", outputs=True),
    Wired(parts=True, head="own", main="last", dropout=0.2),
    Wired(head="chunks", loss="learned", dropout=0.2, tied=True),
    Wired(head="cast", embeds="predicted", loss="product", tied=True),
    Wired(head="detached", begins="detached", embeds="detached", tied=True),
    Wired(depths=("dense", "moe"), main="both", loss="distilled"),
    Wired(main="depth", loss="softmax", unread=True, tied=True),
]

BEGINNINGS = [
    Wired(trunk=("dense", "moe"), begins="earlier", reads="trunk", loss="taught"),
    Wired(trunk=(), begins="half", reads="all", schedule="random", tied=True),
    Wired(trunk=("dense",), begins="dropped", dropout=0.2, ramp="pair"),
    Wired(begins="normed", frozen="trunk", main="none", lengths=(5, 1)),
    Wired(trunk=("full",), depths=("full", "starved"), frozen="first", recompute=fxo.Recompute("uniform")),
    Wired(checkpoint="depth", loss="detached", delay_wgrad=False),
    Wired(trunk=("dense",), depths=("dense", "none"), frozen="head", recompute=fxo.Recompute("block")),
]

SPECS = [*SHARED[:2], *HEADS[:4], *BEGINNINGS[:2]]
SLOW = [*SHARED[2:], *HEADS[4:], *BEGINNINGS[2:]]


@pytest.mark.parametrize("spec", [*SPECS, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)], ids=str)
def test_wirings_train_as_eager_does(spec: Wired, group: dist.ProcessGroup) -> None:
    assert outcome(spec, group) == ([], None)


PLACES: list[tuple[type[WiredModel], dict[str, Any], str]] = [
    (Megatron, {"mtp_layers": "mtp.layers.*"}, "L0 MTP0 MTP1"),
    (Megatron, {"mtp_layers": "mtp.layers.*", "pattern": "E/E/E"}, "L0 MTP0 MTP1"),
    (Megatron, {}, "L0 MTP0 MTP0.L0 MTP0.L1"),  # the list is one depth, its head is MTP0
    (DeepSeek, {"mtp_layers": ("layers.1", "layers.2")}, "L0 MTP0 MTP1"),
    (DeepSeek, {"pattern": "EEE"}, "L0 L1 L2"),
]


@pytest.mark.parametrize(("kind", "fields", "places"), PLACES, ids=str)
def test_names_of_other_people_are_found(
    kind: type[WiredModel], fields: dict[str, Any], places: str, group: dist.ProcessGroup
) -> None:
    spec = Wired(lengths=(6,))
    overlapped = fxo.transform(kind(spec, group), fxo.OverlapConfig(**fields), example_inputs=spec.data(0)[0])
    assert " ".join(sorted({each.node.place for each in overlapped.plan("F").order} - {""})) == places


REFUSED: list[tuple[type[WiredModel], dict[str, Any], str]] = [
    (DeepSeek, {"pattern": "E/E/E"}, "needs 2 layers in its MTP parts.*Set OverlapConfig.mtp_layers"),
    (DeepSeek, {"mtp_layers": "layers.0"}, r"waits for a later layer's results.*may be a layer \(mtp_layers\)"),
    (
        WiredModel,
        {"mtp_layers": "absent.*"},
        "outside the layers.*Set OverlapConfig.layers and mtp_layers",
    ),
]


@pytest.mark.parametrize(("kind", "fields", "message"), REFUSED, ids=str)
def test_globs_that_fit_no_model_are_refused(
    kind: type[WiredModel], fields: dict[str, Any], message: str, group: dist.ProcessGroup
) -> None:
    spec = Wired(lengths=(6,))
    with pytest.raises(fxo.UnsupportedError, match=message):
        fxo.transform(kind(spec, group), fxo.OverlapConfig(**fields), example_inputs=spec.data(0)[0])


def on_two_ranks(rank: int) -> list[str]:
    """What differs from eager on this rank, which has tokens and lengths of its own."""
    spec = Wired(module="one", depths=("starved", "starved"), lengths=(6 + rank, 5), tied=True)
    model = WiredModel(spec, dist.group.WORLD)
    return train_both(model, lambda step: spec.data(2 * step + rank), spec.config(), steps=1)


def test_wirings_train_as_eager_does_on_two_ranks(two_ranks: TwoRanks) -> None:
    assert two_ranks.run(on_two_ranks, timeout_s=300) == [[], []]


@pytest.mark.parametrize("count", [3, pytest.param(150, marks=pytest.mark.slow)])
def test_random_wirings_train_as_eager_does_or_are_refused(
    count: int, group: dist.ProcessGroup, record_property: Any
) -> None:
    what = "models with multi-token prediction"
    record_property("summary", check_all(wired(), lambda spec: outcome(spec, group), count, what))
