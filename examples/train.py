"""Train a small mixture-of-experts model with overlapped steps.

    torchrun --nproc-per-node 2 examples/train.py
    python examples/train.py                        # starts two ranks by itself

The model is this project's reference model; put your own in its place. Ranks share its experts. Everything else is held
by every rank and trained in data parallel, so its gradients are added up over ranks before the optimizer's step.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxoverlap as fxo
from fxoverlap.launch import launch
from fxoverlap.models import HybridModel

MICROBATCHES, TOKENS, VOCABULARY = 4, 128, 256


def batch(rank: int, step: int) -> list[tuple[Tensor, Tensor]]:
    """One step's microbatches: tokens and targets, int64 [1, TOKENS] each. The task: count on, from anywhere."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(VOCABULARY, (MICROBATCHES, 1, 1), generator=generator)
    ids = (starts + torch.arange(TOKENS + 1)) % VOCABULARY
    return [(microbatch[:, :-1], microbatch[:, 1:]) for microbatch in ids]


def sum_over_ranks(model: nn.Module) -> None:
    """Add up the gradients of what every rank holds. An expert's gradient has every rank's tokens in it already."""
    for name, parameter in model.named_parameters():
        if not name.endswith(("w_gate_up", "w_down")):
            dist.all_reduce(parameter.grad)


def train(rank: int, steps: int) -> None:
    """Train as one rank of the default process group."""
    model = HybridModel(
        "[*E][*E]", dim=64, vocab_size=VOCABULARY, num_experts=8, expert_dim=64, top_k=2, group=dist.group.WORLD, seed=0
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    config = fxo.OverlapConfig(grad_scale=1 / (MICROBATCHES * dist.get_world_size()))
    overlapped = fxo.transform(model, config, example_inputs=batch(rank, 0)[0])
    if rank == 0:
        print(overlapped.golden())
    for step in range(steps):
        result = overlapped.step(batch(rank, step), outputs=False)
        sum_over_ranks(model)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {torch.stack(result.losses).mean():.4f}", flush=True)


def main() -> None:
    """Read the command line, then train under torchrun, or in two ranks started here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        train(dist.get_rank(), steps)
        dist.destroy_process_group()
    else:
        launch(train, 2, steps)


if __name__ == "__main__":
    main()
