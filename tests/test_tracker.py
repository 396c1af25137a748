"""The auxiliary losses of each layer are written down once, in the layer's own place, with several layers a depth."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from toys import batches, toy, train_both

import fxoverlap as fxo
from fxoverlap.models import HybridModel, LossTracker, MoE

pytestmark = pytest.mark.usefixtures("shared_captures")

PATTERN = "-E/E-E/E-E"
MOE = [1, 2, 4, 5, 7]
"""The MoE layers among the physical layers of trunk and depths."""


def tracking(group: dist.ProcessGroup | None, **options: object) -> HybridModel:
    return toy(PATTERN, group, track_losses=True, z_loss=0.1, **options)


def tracked(model: HybridModel) -> torch.Tensor:
    assert model.tracker is not None
    return model.tracker.values


def test_each_layer_has_a_column_and_the_losses_sum_to_the_models(group: dist.ProcessGroup) -> None:
    model, plain = tracking(group), toy(PATTERN, group, aux_loss=0.0)
    tokens, targets = batches(1)[0]
    loss = model(tokens, targets)
    values = tracked(model)
    assert values.shape == (2, 8) and values.bool().any(0).nonzero().flatten().tolist() == MOE
    assert [module.layer for module in model.modules() if isinstance(module, MoE)] == MOE
    # fp32 sums of some 12 numbers around 10, in another order.
    torch.testing.assert_close(values.sum(), loss - plain(tokens, targets), rtol=1e-4, atol=1e-5)


RECOMPUTE = [None, fxo.Recompute("uniform", 1), fxo.Recompute("selective", modules=("layers.*",))]


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_a_step_writes_each_loss_once(recompute: fxo.Recompute | None, group: dist.ProcessGroup) -> None:
    model = tracking(group, dropout=0.1)
    config = fxo.OverlapConfig(pattern=PATTERN, recompute=recompute)
    overlapped = fxo.transform(model, config, example_inputs=batches(1)[0])
    assert train_both(overlapped, lambda step: batches((1, 3)[step], seed=step), steps=2) == []
    assert bool(tracked(model)[:, MOE].all())


def test_evaluation_writes_nothing(group: dist.ProcessGroup) -> None:
    model = tracking(group).eval()
    model(*batches(1)[0])
    assert not tracked(model).any()


def test_sums_stay_in_fp32_and_out_of_checkpoints() -> None:
    model = tracking(None).to(torch.bfloat16)
    assert tracked(model).dtype == torch.float32
    assert not [name for name in model.state_dict() if "tracker" in name]


@pytest.mark.parametrize(("kind", "layer"), [("aux", 4), ("aux", -1), ("y", 0)])
def test_losses_of_no_layer_are_refused(kind: str, layer: int) -> None:
    with pytest.raises(ValueError, match=f"of a layer 0 to 3, got '{kind}' of layer {layer}"):
        LossTracker(4).add(kind, layer, torch.ones([]))
