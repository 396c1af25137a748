"""What the report and `explain` say of how much is hidden, and that figures find the launch behind every wait."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from toys import RawMoE, batches, toy, train_both

import fxoverlap as fxo
from fxoverlap import cli
from fxoverlap.passes import op_facts

pytestmark = pytest.mark.usefixtures("shared_captures")

REASONS: dict[str, tuple[list[str], list[str]]] = {
    "nothing wrong": (["--tokens", "64", "64", "64"], []),
    "one microbatch, no delay": (["--tokens", "64", "--no-delay-wgrad"], ["one microbatch", "delay_wgrad=False"]),
    "one token each": (["--tokens", "1", "1"], ["few tokens"]),
    "63 + 1 tokens": (["--tokens", "63", "1"], ["uneven microbatches"]),
    "1 + 63 tokens": (["--tokens", "1", "63"], ["uneven microbatches"]),
    "no lane beside another": (["--schedule", "sequential"], ["no cover"]),
}
"""Arguments of `explain`, and the reasons that it names."""


@pytest.mark.parametrize("case", REASONS)
def test_b107_explain_names_each_reason(capsys: pytest.CaptureFixture[str], case: str) -> None:
    arguments, expected = REASONS[case]
    assert cli.main(["explain", "--pattern", "[*E]", *arguments, "--json", "-"]) == 0
    printed = capsys.readouterr().out.splitlines()
    report = json.loads(printed[-1])["report"]
    assert [text.split(":")[0] for text in report["little_hidden"]] == expected
    assert all(f"why little is hidden: {text}" in printed for text in report["little_hidden"])
    done, planned = report["exchanges_covered"], report["exchanges_planned"]
    assert f"{done} of {planned} exchanges have real work beside them" in printed


def covered(group: dist.ProcessGroup, count: int, **config: Any) -> tuple[int, int]:
    overlapped = fxo.transform(toy("[*E]", group), fxo.OverlapConfig(**config))
    overlapped.step(batches(count))
    report = overlapped.report()
    return report.exchanges_covered, report.exchanges_planned


def test_b107_fewer_exchanges_have_cover_where_less_is_there_to_cover_them(group: dist.ProcessGroup) -> None:
    full, planned = covered(group, 4)
    assert planned == 4 * 5
    assert full > planned / 2
    assert covered(group, 4, delay_wgrad=False)[0] < full
    assert covered(group, 4, schedule="sequential", delay_wgrad=False) == (0, planned)
    alone, of_one = covered(group, 1)
    assert of_one == 5 and alone / of_one < full / planned


def test_b107_model_without_exchanges() -> None:
    report = fxo.transform(toy("*-"), example_inputs=batches(1)[0]).report()
    assert [text.split(":")[0] for text in report.little_hidden] == ["no exchange"]
    assert "why little is hidden: no exchange" in str(report)


# --- launches and waits -------------------------------------------------------------------------------------------


class Other(nn.Module):
    """A MoE of fixed capacity on collectives of another namespace."""

    def __init__(self, group: dist.ProcessGroup, wait: Any) -> None:
        super().__init__()
        self.linear, self.name, self.wait = nn.Linear(16, 16), group.group_name, wait

    def send(self, x: Tensor) -> Tensor:
        launch = torch.ops._c10d_functional_autograd.all_to_all_single
        return self.wait(launch(x, [x.shape[0]], [x.shape[0]], self.name))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.send(self.linear(self.send(x.flatten(0, 1)))).view_as(x)


class Metrics(nn.Module):
    """Sums two figures over the ranks in one collective, whose results come through `getitem`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.linear = group.group_name, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mean, spread = funcol.all_reduce_coalesced([x.mean(), x.std()], "sum", self.group)
        return x + torch.tanh(self.linear((x - mean) / spread))


class Net(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers, self.head = nn.Embedding(32, 16), nn.ModuleList(blocks), nn.Linear(16, 32)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def trained(net: Net) -> fxo.OverlappedModel:
    overlapped = fxo.transform(net)
    assert train_both(overlapped, lambda step: batches(3, seed=step), steps=2) == []
    return overlapped


@pytest.mark.parametrize(
    "wait", [torch.ops._c10d_functional.wait_tensor, torch.ops.c10d_functional.wait_tensor], ids=["new", "old"]
)
def test_b81_collectives_of_the_other_namespace_are_found(group: dist.ProcessGroup, wait: Any) -> None:
    overlapped = trained(Net(Other(group, wait), Other(group, wait)))
    assert overlapped.report().exchanges_per_microbatch == 2 * 4
    assert "L1.combine.B" in str(overlapped.plan("FB"))


def test_b81_getitem_between_launch_and_wait(group: dist.ProcessGroup) -> None:
    overlapped = trained(Net(Metrics(group), RawMoE(16, 4, group)))
    assert overlapped.report().exchanges_per_microbatch == 5
    waits = [
        (op_facts.is_wait(n), n.args[0].name)
        for i in overlapped.plan("F").order
        for n in overlapped.plan("F").forward.modules[i.node.name].graph.nodes
        if op_facts.is_wait(n) and "getitem" in n.args[0].name
    ]
    assert len(waits) == 2


@pytest.mark.parametrize("field", ["layers", "mtp_layers"])
def test_layers_that_match_nothing_are_a_warning(field: str, group: dist.ProcessGroup) -> None:
    named = fxo.transform(toy("[*E]", group), fxo.OverlapConfig(**{field: "blocks.*"}), example_inputs=batches(1)[0])
    assert f"OverlapConfig.{field}='blocks.*' matches no module" in " ".join(named.report().warnings)
    default = fxo.transform(toy("[*E]", group), example_inputs=batches(1)[0])
    assert "matches no module" not in " ".join(default.report().warnings)


@pytest.mark.parametrize(("field", "other"), [("layers", "layers.*"), ("mtp_layers", "mtp.*")])
def test_one_of_several_globs_that_matches_nothing_is_a_warning(
    field: str, other: str, group: dist.ProcessGroup
) -> None:
    config = fxo.OverlapConfig(**{field: (other, "blocks.*")})
    warnings = fxo.transform(toy("[*E]/[*E]", group), config, example_inputs=batches(1)[0]).report().warnings
    assert [each for each in warnings if "but 'blocks.*' matches no module" in each] == list(warnings)
    assert len(warnings) == 1


def test_name_of_no_process_group_is_refused(group: dist.ProcessGroup) -> None:
    overlapped = fxo.transform(toy("*-"), fxo.OverlapConfig(process_group="nope"))
    with pytest.raises(fxo.ConfigError, match=rf"process_group is 'nope'.*{group.group_name}.*group_name"):
        overlapped.step(batches(1))
