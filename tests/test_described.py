"""Chunks made from a model's figures: like captured ones, with costs that the figures imply, legal for any policy."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from toys import batches, toy

import fxoverlap as fxo
from fxoverlap.benchmarks import models
from fxoverlap.benchmarks.described import Setup, described, distinct, sent_bytes
from fxoverlap.benchmarks.models import Grouped, Latent, Model
from fxoverlap.config import Recompute
from fxoverlap.errors import ConfigError
from fxoverlap.hardware import PRESETS, Hardware
from fxoverlap.ir import ChunkGraph, CostTable, Lane, Phase, Round, Slot
from fxoverlap.schedule import build_plan
from fxoverlap.schedule.memory import peak_bytes

DOCS = Path(__file__).parent.parent / "docs" / "simulate.md"
H100 = PRESETS["h100"]
ALL = Recompute("uniform")
DEEPSEEK, QWEN = (models.PRESETS[name] for name in ("deepseek-v3", "qwen3-30b-a3b"))
SMALL = Model("small", 4, 64, Grouped(4, 2, 16), 8, 2, 32, 100, shared_experts=1)
HYBRID = replace(SMALL, name="hybrid", dense_layers=1, dense_dim=128, mtp_depths=2)


def flops(chunk: ChunkGraph, phase: Phase, *slots: Slot) -> float:
    wanted = [n for n in chunk.nodes if n.phase is phase and (not slots or n.slot in slots)]
    return sum(chunk.costs[node.name].flops for node in wanted)


# --- the nodes --------------------------------------------------------------------------------------------------


def edges(chunk: ChunkGraph) -> dict[str, set[str]]:
    """By node, the nodes whose values it reads."""
    made = {value: node.name for node in chunk.nodes for value in node.writes}
    return {node.name: {made[value] for value in node.reads if value in made} for node in chunk.nodes}


def test_nodes_and_their_order_are_those_of_a_captured_chunk(group: dist.ProcessGroup) -> None:
    model = toy("[*E][*E]", group, shared_dim=8)
    overlapped = fxo.transform(model, fxo.OverlapConfig("[*E][*E]"), example_inputs=batches(1)[0])
    captured = overlapped.plan("FB").chunks["F"]
    made = described(replace(SMALL, layers=2), H100, Setup(2, 8))
    ours, theirs = edges(made), edges(captured)
    # The router's scores are computed before the dispatch here, and their gradient with that of the attention.
    assert set(theirs) - set(ours) == {"L0.post_combine.W", "L1.post_combine.W"} and set(ours) <= set(theirs)
    for node in made.nodes:
        assert node.lane is next(n.lane for n in captured.nodes if n.name == node.name)
    exact = {
        f"L{i}.{each}"
        for i in range(2)
        for each in (
            *("counts.F", "permute.F", "dispatch.F", "experts.F", "combine.F", "shared.F", "post_combine.F"),
            *("combine.B", "experts.B", "experts.W", "dispatch.B", "shared.W"),
        )
    }
    for name in exact:
        assert ours[name] <= theirs[name], name
        # Values that stand in another place there: the order of the rows, and the gradient of the layer's result.
        assert theirs[name] - ours[name] <= {f"{name[:2]}.permute.F", "L1.pre_dispatch.B", "post_process.B"}, name


@pytest.mark.parametrize("schedule", ["sequential", "megatron", "auto"])
@pytest.mark.parametrize("recompute", [None, ALL], ids=["kept", "recompute"])
@pytest.mark.parametrize(
    ("model", "layers"), [(SMALL, None), (SMALL, 2), (HYBRID, None), (replace(SMALL, shared_experts=0), None)]
)
def test_every_policy_places_every_node(
    model: Model, layers: int | None, recompute: Recompute | None, schedule: str
) -> None:
    chunk = described(model, H100, Setup(2, 64, layers, recompute))
    config, costs = fxo.OverlapConfig(schedule=schedule), CostTable(chunk.costs, H100, "described")
    for f, b in ((chunk, chunk), (chunk, None), (None, chunk)):
        plan = build_plan(f, b, config, costs)  # raises where the order is not legal
        phases = {Phase.F} if b is None else set(Phase) - ({Phase.F} if f is None else set())
        assert len(plan.order) == sum(node.phase in phases for node in chunk.nodes)


def test_a_stage_has_no_ends_and_a_depth_is_a_layer_with_a_head() -> None:
    stage = described(HYBRID, H100, Setup(2, 64, layers=2))
    assert stage.layers == 2 and all(node.layer is not None for node in stage.nodes)
    whole = described(HYBRID, H100, Setup(2, 64))
    assert whole.layers == 4 + 2
    heads = [node.name for node in whole.nodes if node.slot is Slot.MTP_POST and node.phase is Phase.F]
    assert heads == ["MTP0.mtp_post.F", "MTP1.mtp_post.F"]
    names = edges(whole)
    # The trunk's last layer gets the gradients of its head and of the first depth; that depth those of both heads.
    assert {"post_process.B", "MTP0.pre_dispatch.B"} < names["L3.post_combine.B"]
    assert {"MTP0.mtp_post.B", "MTP1.pre_dispatch.B"} < names["MTP0.post_combine.B"]
    assert not any("dispatch.F" in name or "counts" in name for name in names if name.startswith("L0.")) or (
        "L0.pre_dispatch.F" in names and "L0.dispatch.F" not in names
    )


def test_a_replay_comes_before_the_backward_of_its_layer_without_counts() -> None:
    chunk = described(SMALL, H100, Setup(2, 64, recompute=ALL))
    names = [node.name for node in chunk.nodes]
    for layer in range(4):
        replayed = [node for node in chunk.nodes if node.layer == layer and node.phase is Phase.R]
        exchanges = [node.slot for node in replayed if node.lane is Lane.COMM]
        assert exchanges == [Slot.DISPATCH, Slot.COMBINE]
        position = names.index(f"L{layer}.post_combine.B")
        assert all(names.index(node.name) < position for node in replayed)
        if layer < 3:
            assert all(names.index(node.name) > names.index(f"L{layer + 1}.pre_dispatch.B") for node in replayed)
    without = described(SMALL, H100, Setup(2, 64))
    assert flops(chunk, Phase.R) == flops(without, Phase.F) - flops(without, Phase.F, Slot.POST_PROCESS)


# --- costs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "activated"),
    [(replace(DEEPSEEK, mtp_depths=0), 37e9), (QWEN, 3.3e9)],  # model cards; with the head, without the embedding
)
def test_operations_are_those_of_the_activated_parameters(model: Model, activated: float) -> None:
    """Two a parameter and token; at 16 tokens attention itself adds nothing that counts."""
    chunk = described(model, H100, Setup(2, 16))
    # Qwen's figure has its embedding of 0.31 G parameters in it, which multiplies nothing; DeepSeek's has not.
    looked_up = model.vocab * model.hidden if model is QWEN else 0
    assert flops(chunk, Phase.F) / 32 == pytest.approx(activated - looked_up, rel=0.03)


def test_operations_of_a_small_model_by_hand() -> None:
    attention = 64 * (64 + 32 + 32) + 64 * 64
    moe = 64 * 8 + (2 + 1) * 3 * 64 * 32  # router, two experts and the shared one
    head = 64 * 100
    parameters = 4 * attention + 3 * moe + 3 * 64 * 128 + head
    parameters += 2 * (2 * 64 * 64 + attention + moe + head)  # two MTP depths
    chunk = described(HYBRID, H100, Setup(2, 32))
    core = 6 * 32**2 * 4 * (16 + 16)
    assert flops(chunk, Phase.F) == 2 * 32 * parameters + core
    assert flops(chunk, Phase.W) == 2 * 32 * parameters
    assert flops(chunk, Phase.B) == 2 * 32 * parameters + 2.5 * core


def test_backward_costs_twice_the_forward_but_for_attention() -> None:
    short, long = (described(QWEN, H100, Setup(16, seq, layers=1)) for seq in (16, 4096))
    assert flops(short, Phase.B) == pytest.approx(flops(short, Phase.F), rel=0.01)
    assert flops(long, Phase.W) == pytest.approx(256 * flops(short, Phase.W), rel=0.01)
    core = 4096**2 * 32 * (128 + 128)
    assert flops(long, Phase.B) - flops(long, Phase.F) == pytest.approx(1.5 * core, rel=1e-3)
    latent = described(DEEPSEEK, H100, Setup(16, 4096, layers=1))
    core = 4096**2 * 128 * (128 + 64 + 128)
    assert flops(latent, Phase.B) - flops(latent, Phase.F) == pytest.approx(1.5 * core, rel=1e-3)


def test_time_is_at_least_the_roofline_of_the_whole_node() -> None:
    chunk = described(DEEPSEEK, H100, Setup(64, 4096, layers=1))
    for node in chunk.nodes:
        cost = chunk.costs[node.name]
        if node.lane is Lane.COMPUTE:
            least = max(cost.flops / H100.flops_per_s, cost.bytes_moved / H100.memory_bytes_per_s) / H100.efficiency
            assert least * (1 - 1e-9) <= cost.seconds <= 2 * least, node.name


def test_exchanges_of_a_layer_by_hand() -> None:
    """4096 tokens x 8 experts x 7168 x 2 bytes, 7/8 of it over a network of 50 GB/s."""
    chunk = described(DEEPSEEK, H100, Setup(64, 4096, layers=1))
    given = 4096 * 8 * 7168 * 2
    for name in ("L0.dispatch.F", "L0.combine.F", "L0.combine.B", "L0.dispatch.B"):
        cost = chunk.costs[name]
        assert (cost.bytes_sent, cost.ranks) == (given, 64)
        assert cost.seconds == pytest.approx(H100.latency_s + given * 7 / 8 / 50e9 / H100.efficiency)
    halved = described(replace(DEEPSEEK, dispatch_bytes=1), H100, Setup(64, 4096, layers=1))
    sent = {n.name: halved.costs[n.name].bytes_sent for n in halved.nodes if n.lane is Lane.COMM}
    half = [name for name, each in sent.items() if each == given // 2]
    assert half == ["L0.dispatch.F", "L0.combine.B"]  # what goes to experts; what comes back is summed


@pytest.mark.parametrize("limit", [0, 2])
def test_distinct_groups_by_enumeration(limit: int) -> None:
    """All ways to choose 3 of 12 experts in 4 groups, or of the 6 experts of each 2 groups."""
    model = replace(SMALL, experts=12, top_k=3)
    allowed = itertools.combinations(range(4), limit) if limit else [range(4)]
    found = [
        len({expert // 3 for expert in chosen})
        for groups in allowed
        for chosen in itertools.combinations([e for e in range(12) if e // 3 in groups], 3)
    ]
    assert distinct(4, model, limit) == pytest.approx(sum(found) / len(found))
    assert distinct(1, model) == 1


def test_once_a_node_sends_less_over_the_network() -> None:
    def sent(dispatcher: str, model: Model = DEEPSEEK, ep: int = 64, hardware: Hardware = H100) -> tuple[float, ...]:
        token = model.hidden * 2
        setup = Setup(ep, 1, dispatcher=dispatcher)
        return tuple(each / token for each in sent_bytes(model, hardware, setup, 2))

    assert sent("alltoall") == pytest.approx((8, 7 * 8 / 64, 56 * 8 / 64))
    _, inside, outside = sent("once-a-node")
    # 8 experts among those of 4 nodes are in 3.6 of them, and one in 8 of those is the rank's own.
    assert outside == pytest.approx(3.6 * 7 / 8, rel=0.01)
    assert inside == pytest.approx(7.36 * 7 / 8, rel=0.01)  # on 7.36 of 32 ranks, one in 8 of which is itself
    assert sent("once-a-node", replace(DEEPSEEK, node_limit=0))[2] == pytest.approx(5.3 * 7 / 8, rel=0.01)
    assert sent("once-a-node", hardware=PRESETS["gb200"])[2] == 0  # one domain


# --- memory -----------------------------------------------------------------------------------------------------


def test_recompute_keeps_a_layers_input_and_its_routing() -> None:
    """What F leaves alive, of a stage of two layers: their inputs, the result, and routing."""
    tokens, hidden = 4096, 4096 * 2048 * 2

    def alive(layers: int, recompute: Recompute | None) -> int:
        chunk = described(QWEN, H100, Setup(16, tokens, layers, recompute))
        read_later = {v for node in chunk.nodes if node.phase is not Phase.F for v in node.reads}
        made = {v for node in chunk.nodes if node.phase is Phase.F for v in node.writes}
        return sum(chunk.buffers[v][1] for v in made & read_later)

    assert alive(2, ALL) - alive(1, ALL) == hidden + tokens * 8 * 12 + 128 * 8
    # Attention: normed input, q, k, v, result, sums, with residual; router; experts: input, gate, up, product; back.
    attention = 2 * hidden + tokens * 2 * (4096 + 2 * 512) + tokens * 2 * 4096 + tokens * 32 * 4
    router = hidden + tokens * 128 * 4
    experts = 8 * tokens * 2 * (2048 + 3 * 768) + 8 * hidden
    assert alive(2, ALL) < alive(2, Recompute("block")) < alive(2, None)
    assert alive(2, None) - alive(2, Recompute("block")) == attention + router + experts
    assert alive(2, None) - alive(2, ALL) == 2 * (attention + router + experts)


@pytest.mark.parametrize("recompute", [None, ALL, Recompute("block", 2)])
def test_nothing_is_kept_that_nobody_reads(recompute: Recompute | None) -> None:
    chunk = described(HYBRID, H100, Setup(2, 64, recompute=recompute))
    read = {value for node in chunk.nodes for value in node.reads}
    assert set(chunk.buffers) <= read
    stage = described(HYBRID, H100, Setup(2, 64, layers=2, recompute=recompute))
    read = {value for node in stage.nodes for value in node.reads}
    assert set(stage.buffers) - read == {"x2", "dx0"}  # what goes to the other stages


def test_peak_of_a_step_with_recompute_is_smaller() -> None:
    peaks = []
    for recompute in (None, ALL):
        chunk = described(QWEN, H100, Setup(16, 4096, 8, recompute))
        config = fxo.OverlapConfig(schedule="sequential")
        forward, backward = build_plan(chunk, None, config), build_plan(None, chunk, config)
        peaks.append(peak_bytes([Round(forward, {"F": 0}), Round(backward, {"B": 0})]))
    assert peaks[1] < peaks[0] / 3


# --- descriptions -----------------------------------------------------------------------------------------------


def write(folder: Path, given: Any) -> Path:
    path = folder / "model.json"
    path.write_text(given if isinstance(given, str) else json.dumps(given))
    return path


@pytest.mark.parametrize("model", [DEEPSEEK, QWEN, HYBRID])
def test_a_model_is_what_its_json_says(tmp_path: Path, model: Model) -> None:
    assert models.read(write(tmp_path, asdict(model))) == model


def test_fields_with_a_default_may_be_left_out(tmp_path: Path) -> None:
    given = {"attention": asdict(SMALL.attention), **{k: v for k, v in asdict(SMALL).items() if k != "attention"}}
    short = {k: v for k, v in given.items() if not k.startswith(("dense", "mtp", "node")) and "bytes" not in k}
    assert models.read(write(tmp_path, short)) == SMALL


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    (example,) = re.findall(r"```json\n(.*?)```", DOCS.read_text(), re.DOTALL)
    model = models.read(write(tmp_path, example))
    assert described(model, H100, Setup(8, 64)).layers == 32
    assert not {each.name for each in fields(Model)} - set(re.findall(r"\w+", DOCS.read_text()))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer": 3}, "model has layer; allowed are name, layers"),
        ({"hidden": None}, "hidden is None; expected an integer of at least 1"),
        ({"experts": "8"}, "experts is '8'"),
        ({"top_k": True}, "top_k is True"),
        ({"top_k": 9}, "top_k is 9; expected at most the number of experts, 8"),
        ({"dispatch_bytes": 0}, "dispatch_bytes is 0"),
        ({"dense_layers": 4}, "dense_layers is 4 of 4"),
        ({"dense_layers": 1}, "dense_layers without dense_dim"),
        ({"attention": 3}, "attention is 3; expected an object"),
        ({"attention": {"heads": 4}}, "attention has no kv_heads, head_dim"),
        ({"attention": {"kv_rank": 4, "head_dim": 3}}, "attention has head_dim; allowed are heads, q_rank"),
        ({"attention": {"heads": 0, "kv_heads": 1, "head_dim": 2}}, "attention: heads is 0"),
    ],
    ids=str,
)
def test_a_field_that_is_wrong_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = write(tmp_path, asdict(SMALL) | changes)
    with pytest.raises(ConfigError) as caught:
        models.read(path)
    assert said in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize(("given", "said"), [("{", "expected JSON"), ("[1]", "expected an object"), ("{}", "has no")])
def test_a_file_that_is_no_model(tmp_path: Path, given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        models.read(write(tmp_path, given))


@pytest.mark.parametrize(
    ("setup", "said"),
    [
        (Setup(1, 64), "ep is 1; expected a divisor of the 8 experts"),
        (Setup(3, 64), "ep is 3"),
        (Setup(2, 64, layers=4), "layers is 4; expected 1 to 3"),
        (Setup(2, 64, layers=0), "layers is 0"),
    ],
    ids=str,
)
def test_a_setup_that_the_model_does_not_have(setup: Setup, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        described(HYBRID, H100, setup)
    assert said in str(caught.value)


def test_attention_must_be_described() -> None:
    with pytest.raises(ConfigError, match="expected a Grouped or a Latent"):
        replace(SMALL, attention=None)
    assert isinstance(DEEPSEEK.attention, Latent)
