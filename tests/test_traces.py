"""The artifacts of TORCH_TRACE: graphs before and after each pass, in order, and nothing of it without TORCH_TRACE."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from toys import batches, toy

import fxoverlap as fxo
from fxoverlap import dumps
from fxoverlap.launch import one_rank_group
from fxoverlap.pipeline import CHUNK_PASSES, JOINT_PASSES, PLAN_PASSES, default_passes
from fxoverlap.report.golden import golden

LENGTHS = (4, 6)


def run_steps(group: dist.ProcessGroup) -> fxo.OverlappedModel:
    """Steps over microbatches of two lengths, so that there are two captures and programs of both."""
    overlapped = fxo.transform(toy("[*E]", group))
    for tokens in LENGTHS:
        overlapped.step(batches(2, tokens=tokens))
    return overlapped


def fail(graph: object) -> str:
    raise AssertionError("a text was made, and nobody reads it")


def in_a_new_process(what: str, folder: Path | None) -> subprocess.CompletedProcess[str]:
    """Run a part of this file where torch looks at TORCH_TRACE anew."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCH_TRACE")}
    if folder is not None:
        environment["TORCH_TRACE"] = str(folder)
    command = [sys.executable, __file__, what]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


class Artifact:
    """One artifact of a log: its name and its text."""

    def __init__(self, name: str, payload: str) -> None:
        self.name, self.text = name, payload


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> list[Artifact]:
    """Those of fxoverlap that `run_steps` leaves in its log; all of the log must parse."""
    folder = tmp_path_factory.mktemp("trace")
    done = in_a_new_process("steps", folder)
    assert done.returncode == 0, done.stderr
    [path] = folder.iterdir()
    found = []
    # A record is a line, its payload the lines behind it that begin with a tab.
    for block in path.read_text().removesuffix("\n").split("\nV"):
        line, *rest = block.split("\n")
        record = json.loads(line[line.index("] {") + 2 :])
        payload = "\n".join(each.removeprefix("\t") for each in rest)
        if "artifact" in record and record["artifact"]["name"].startswith("fxoverlap_"):
            assert record["artifact"]["encoding"] == "string"
            assert all(each.startswith("\t") or not each for each in rest)
            assert hashlib.md5(payload.encode()).hexdigest() == record["has_payload"], record
            found.append(Artifact(record["artifact"]["name"], payload))
    return found


def around(stage: str, passes: tuple) -> list[str]:
    return [f"fxoverlap_{stage}_{each.__name__}_{when}" for each in passes for when in ("before", "after")]


def programs(*kinds: str) -> list[str]:
    names = [*around("plan", PLAN_PASSES), "fxoverlap_plan_verify_before", "fxoverlap_plan_verify_after"]
    return [name for k in kinds for name in [*names, f"fxoverlap_plan_{k}", f"fxoverlap_golden_{k}"]]


def test_names_come_in_the_order_of_passes_for_each_capture(artifacts: list[Artifact]) -> None:
    captured = [*around("joint", JOINT_PASSES), *around("chunk", CHUNK_PASSES)]
    a_length = [*captured, *programs("F", "FB", "B")]
    assert [each.name for each in artifacts] == a_length * len(LENGTHS)
    assert {"fxoverlap_joint_exchanges_before", "fxoverlap_chunk_cut_after", "fxoverlap_plan_fuse_after"} < set(
        a_length
    )


def of_name(artifacts: list[Artifact], name: str) -> list[str]:
    return [each.text for each in artifacts if each.name == f"fxoverlap_{name}"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("joint_exchanges", "role=<Role.DISPATCH"),
        ("joint_layers", "layer 1: layers.1"),
        ("chunk_cut", "L0.experts.F: compute"),
        ("chunk_wgrad", "L0.experts.W: compute"),
        ("chunk_bytes", "NodeCost(flops="),
        ("chunk_extract", ", module of L0.experts.F"),
        ("plan_fuse", "class FusedGraph"),
        ("plan_lifetime", "  frees "),
    ],
)
def test_what_a_pass_adds_is_in_its_text(artifacts: list[Artifact], name: str, words: str) -> None:
    for before, after in zip(of_name(artifacts, f"{name}_before"), of_name(artifacts, f"{name}_after"), strict=True):
        assert words not in before and words in after


def test_what_passes_hand_on_is_the_same_text(artifacts: list[Artifact]) -> None:
    for first, second in itertools.pairwise(artifacts):
        if first.name.endswith("_after") and second.name.endswith("_before") and "_fuse_" not in second.name:
            assert first.text == second.text


def test_plans_and_golden_texts_are_those_of_the_api(artifacts: list[Artifact], group: dist.ProcessGroup) -> None:
    overlapped = run_steps(group)
    for kind in ("F", "FB", "B"):
        plan = overlapped.plan(kind)
        assert of_name(artifacts, f"plan_{kind}")[-1] == str(plan)
        assert of_name(artifacts, f"golden_{kind}")[-1] == golden(plan.forward or plan.backward, plan)
    assert of_name(artifacts, "golden_FB")[-1] == overlapped.golden()


def test_no_text_is_made_without_a_log() -> None:
    done = in_a_new_process("no text", None)
    assert done.returncode == 0, done.stderr


def test_passes_of_the_user_have_artifacts(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr("fxoverlap.compat.trace_artifact", lambda name, text: names.append(name) or text())

    def mine(graph: object, config: fxo.OverlapConfig) -> object:
        return graph

    mine.stage = "chunk"  # type: ignore[attr-defined]
    passes = [*default_passes(), mine]
    fxo.transform(toy("[*E]", group), fxo.OverlapConfig(passes=passes), example_inputs=batches(1)[0])
    last = names.index("fxoverlap_chunk_extract_after")
    assert names[last + 1 : last + 3] == ["fxoverlap_chunk_mine_before", "fxoverlap_chunk_mine_after"]


def test_graphs_of_any_model_have_texts(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutated buffers, symbols, several outputs; what a pass returns wrongly is no reason to fail here."""
    texts: list[str] = []
    monkeypatch.setattr("fxoverlap.compat.trace_artifact", lambda name, text: texts.append(text()))

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = toy("[*E]-", group, selection_bias=True, dropout=0.5)
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.steps.add_(1)
            loss = self.model(tokens, targets)
            return loss, loss.detach() * self.steps

    fxo.transform(Counts(), fxo.OverlapConfig(layers="model.layers.*"), example_inputs=batches(1)[0])
    assert any("mutation " in text and "\noutput " in text for text in texts)
    assert any("effects of " in text for text in texts)
    assert dumps.text(None) == "None\n"


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = in_a_new_process("steps", tmp_path / "file")
    assert f"CaptureError: TORCH_TRACE is '{tmp_path}/file', expected a folder that can be written" in done.stderr


if __name__ == "__main__":
    if sys.argv[1] == "no text":
        dumps.text = fail
    with one_rank_group() as one:
        run_steps(one)
