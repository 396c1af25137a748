"""Which layers belong to which depth of multi-token prediction: by globs, by a pattern, and what is refused."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mtp_models import Block, Depth, Predicting
from odd import Attention, Dense, moe
from torch import nn
from toys import batches, toy, train_both

import fxoverlap as fxo
from fxoverlap import cli
from fxoverlap.ir import ChunkGraph, Slot

pytestmark = pytest.mark.usefixtures("shared_captures")


def two(**options: Any) -> Predicting:
    """Two layers and two depths of one layer, without exchanges."""
    torch.manual_seed(0)
    return Predicting([Dense(), Dense()], [Depth([Dense()]), Depth([Dense()])], **options)


def wide() -> Predicting:
    torch.manual_seed(0)
    return Predicting([Dense()], [Depth([Attention(), Dense()]), Depth([Attention(), Dense()])])


def bare() -> Predicting:
    torch.manual_seed(0)
    return Predicting([Dense(), Dense()], [Block(), Block()])


def one_twice() -> Predicting:
    torch.manual_seed(0)
    depth = Depth([Dense()])
    return Predicting([Dense()], [depth, depth])


def transformed(model: torch.nn.Module, **config: Any) -> fxo.OverlappedModel:
    settings = {"schedule": "megatron", **config}
    return fxo.transform(model, fxo.OverlapConfig(**settings), example_inputs=batches(1)[0])


def chunk_of(overlapped: fxo.OverlappedModel) -> ChunkGraph:
    chunk = overlapped.plan("FB").forward
    assert chunk is not None
    return chunk


def physical(overlapped: fxo.OverlappedModel) -> list[tuple[str, int | None]]:
    joint = chunk_of(overlapped).joint
    assert joint is not None
    return [(layer.fqn, layer.depth) for layer in joint.physical]


def steps_are_right(overlapped: fxo.OverlappedModel) -> bool:
    return train_both(overlapped, lambda step: batches((1, 3)[step], seed=step), steps=2) == []


TRUNK = [("layers.0", None), ("layers.1", None)]
INSIDE = [*TRUNK, ("mtp.0.layers.0", 0), ("mtp.1.layers.0", 1)]
WIDE = [("layers.0", None), *((f"mtp.{k}.layers.{i}", k) for k in (0, 1) for i in (0, 1))]
BORROWED = [*TRUNK, ("layers.1", 0), ("mtp.0.layers.0", 0), ("layers.1", 1), ("mtp.1.layers.0", 1)]


@pytest.mark.parametrize(
    ("make", "config", "expected", "ranges"),
    [
        (two, {}, INSIDE, ((2, 3), (3, 4))),
        (two, {"pattern": "--/-/-"}, INSIDE, ((2, 3), (3, 4))),
        (two, {"mtp_layers": "mtp.*.layers.*"}, INSIDE, ((2, 3), (3, 4))),
        (two, {"mtp_layers": ("other.*", "mtp.*")}, INSIDE, ((2, 3), (3, 4))),
        (two, {"layers": "model.layers.*"}, [("mtp.0", 0), ("mtp.1", 1)], ((0, 1), (1, 2))),
        (wide, {}, WIDE, ((1, 3), (3, 5))),
        (wide, {"pattern": "-/[*-]/[*-]"}, WIDE, ((1, 2), (2, 3))),
        (wide, {"pattern": "-/[*-]/[*-]", "mtp_layers": "mtp.*.layers.*"}, WIDE, ((1, 2), (2, 3))),
        (wide, {"pattern": "-/*-/*-", "mtp_layers": "mtp.*.layers.*"}, WIDE, ((1, 3), (3, 5))),
        (bare, {}, [*TRUNK, ("mtp.0", 0), ("mtp.1", 1)], ((2, 3), (3, 4))),
        (bare, {"pattern": "--/-/-"}, [*TRUNK, ("mtp.0", 0), ("mtp.1", 1)], ((2, 3), (3, 4))),
        (bare, {"pattern": "--/*-"}, [*TRUNK, ("mtp.0", 0), ("mtp.1", 0)], ((2, 4),)),
        (functools.partial(two, borrowed=1), {}, BORROWED, ((2, 4), (4, 6))),
        (functools.partial(two, borrowed=1), {"pattern": "--/--/--"}, BORROWED, ((2, 4), (4, 6))),
        (one_twice, {"pattern": "-/-/-"}, [TRUNK[0], ("mtp.0.layers.0", 0), ("mtp.0.layers.0", 1)], ((1, 2), (2, 3))),
        (two, {"mtp_layers": ()}, [(name, None) for name, _ in INSIDE], ()),
    ],
)
def test_depths_and_their_layers(make: Callable[[], Predicting], config: Any, expected: Any, ranges: Any) -> None:
    overlapped = transformed(make(), **config)
    assert physical(overlapped) == expected
    assert chunk_of(overlapped).depths == ranges
    assert steps_are_right(overlapped)
    said = " ".join(overlapped.report().warnings)
    assert ("matches no module" in said) == ("other.*" in config.get("mtp_layers", ()))


def test_globs_of_the_layers_with_a_pattern_make_the_nodes_of_the_depths(group: dist.ProcessGroup) -> None:
    """The nodes are those of a glob of the depth modules; the projection of a depth may be in others of them."""
    named = [
        transformed(toy("E/*E/*E", group), pattern="E/*E/*E", mtp_layers=glob) for glob in ("mtp.*", "mtp.*.layers.*")
    ]
    names = [sorted(node.name for node in chunk_of(each).nodes if node.phase.value == "F") for each in named]
    assert names[0] == names[1]
    assert steps_are_right(named[1])


def test_a_trunk_without_exchanges_stays_in_front_of_the_depths(group: dist.ProcessGroup) -> None:
    """All of it needs the batch only, as an embedding does."""
    torch.manual_seed(0)
    with_exchange = Predicting([Dense(), Dense()], [Depth([moe(group)]), Depth([moe(group)])])
    for model in (two(), with_exchange):
        overlapped = transformed(model)
        found = [(node.place, node.slot) for node in chunk_of(overlapped).nodes if node.phase.value == "F"]
        assert [place for place, _ in dict.fromkeys(found)][:3] == ["", "L0", "L1"]
        assert {place for place, slot in found if slot is Slot.MTP_POST} == {"MTP0", "MTP1"}
        assert steps_are_right(overlapped)


@pytest.mark.parametrize("pattern", ["E/E", "[*E]/[E]"])
def test_a_depth_that_exchanges_and_has_no_layers_of_its_own(pattern: str, group: dist.ProcessGroup) -> None:
    class Whole(Block):
        def __init__(self) -> None:
            super().__init__()
            self.inner = moe(group)

        def forward(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
            return self.inner(hidden + embedded)

    torch.manual_seed(0)
    trunk = [Attention(), moe(group)][-len(pattern.partition("/")[0].strip("[]")) :]
    overlapped = transformed(Predicting(trunk, [Whole()]), pattern=pattern)
    assert physical(overlapped)[-1] == ("mtp.0", 0)
    assert {"MTP0.dispatch.F", "MTP0.mtp_post.F"} <= {node.name for node in chunk_of(overlapped).nodes}
    assert steps_are_right(overlapped)


RUNS = "but the forward runs 2: mtp.0.layers.0, mtp.1.layers.0, which mtp_layers='mtp.*' matches"
REFUSED = [
    (two, {"pattern": "----"}, f"'----' has 0 layers in its MTP parts, {RUNS}. Write one symbol for each layer, each"),
    (
        two,
        {"pattern": "--"},
        f"'--' has 0 layers in its MTP parts, {RUNS}. Write one symbol for each layer, each depth",
    ),
    (two, {"pattern": "-/-/-"}, "has 1 layers, but the forward runs 2: layers.0, layers.1, which layers='layers.*'"),
    (two, {"pattern": "--/-"}, f"has 1 layers in its MTP parts, {RUNS}"),
    (two, {"pattern": "--/-/-/-"}, f"has 3 layers in its MTP parts, {RUNS}"),
    (two, {"pattern": "--/*-/*-"}, f"has 4 layers in its MTP parts, {RUNS}"),
    (two, {"pattern": "--/*-"}, "has 2 layers in each MTP part, but a depth of the model has 1: mtp.0.layers.0. Write"),
    (wide, {"pattern": "-/-/-/-/-"}, "has 1 layers in each MTP part, but a depth of the model has 2: mtp.0.layers.0, "),
    (wide, {"pattern": "-/*-*-"}, "has 4 layers in each MTP part, but a depth of the model has 2: mtp.0.layers.0, "),
    (bare, {"pattern": "--/*-/*-"}, "has 4 layers in its MTP parts, but the forward runs 2: mtp.0, mtp.1"),
    (two, {"pattern": "--/-/-", "mtp_layers": "h.*"}, "mtp_layers='h.*' matches no module that the forward runs. Set"),
    (
        two,
        {"pattern": "--/-/-", "layers": "h.*"},
        "needs 2 layers, but layers='h.*' matches no module that the",
    ),
]


@pytest.mark.parametrize(("make", "config", "said"), REFUSED)
def test_patterns_that_do_not_fit_say_what_to_write(make: Callable[[], Predicting], config: Any, said: str) -> None:
    with pytest.raises(fxo.UnsupportedError, match=re.escape(said)):
        transformed(make(), **config)


def test_symbols_of_a_depth_say_which_layers_exchange(group: dist.ProcessGroup) -> None:
    def model() -> Predicting:
        return Predicting([moe(group)], [Depth([Attention(), moe(group)])])

    with pytest.raises(fxo.UnsupportedError, match=r"'E/E-' says '-' for layer mtp.0.layers.1, .* Write 'E' for it"):
        transformed(model(), pattern="E/E-")
    with pytest.raises(fxo.UnsupportedError, match=r"'E/EE' says 'E' for mtp.0.layers.0, which exchanges no tokens"):
        transformed(model(), pattern="E/EE")
    with pytest.raises(fxo.UnsupportedError, match=r"'-/\*E' says '-' for layer layers.0, but that layer exchanges"):
        transformed(model(), pattern="-/*E")
    with pytest.raises(
        fxo.UnsupportedError, match=r"'layers.0' exchanges tokens outside the layers.*OverlapConfig.layers"
    ):
        transformed(model(), layers="nowhere.*")


def test_a_glob_of_depths_that_matches_nothing_is_a_warning() -> None:
    overlapped = transformed(two(), mtp_layers="nextn.*")
    assert [depth for _, depth in physical(overlapped)] == [None] * 4
    assert "mtp_layers='nextn.*' matches no module" in " ".join(overlapped.report().warnings)
    assert steps_are_right(overlapped)


class Alone(Depth):
    """The only depth of a model, which has no list of them."""

    def __iter__(self) -> Iterator[Depth]:
        yield self


def a_list_in_a_module() -> Predicting:
    model = wide()
    model.mtp, depths = nn.Module(), model.mtp
    model.mtp.layers = depths
    model.mtp.__class__ = type("Named", (nn.Module,), {"__iter__": lambda self: iter(self.layers)})
    return model


def alone() -> Predicting:
    model = two()
    model.mtp = Alone([Dense()])
    return model


@pytest.mark.parametrize(
    ("make", "warning", "glob", "depths"),
    [
        (
            a_list_in_a_module,
            "matches mtp.layers, which makes mtp.layers.0, mtp.layers.1 the layers",
            "mtp.layers.*",
            2,
        ),
        (alone, "of each of mtp.hidden_norm, .*mtp.token_norm, which are parts of the module 'mtp'", "mtp", 1),
    ],
)
def test_a_glob_that_seems_to_miss_the_depths_is_a_warning(
    make: Callable[[], Predicting], warning: str, glob: str, depths: int
) -> None:
    overlapped = transformed(make())
    said = " ".join(overlapped.report().warnings)
    assert re.search(warning, said) and f"set mtp_layers='{glob}'" in said
    assert steps_are_right(overlapped)
    named = transformed(make(), mtp_layers=glob)
    assert "mtp_layers" not in " ".join(named.report().warnings)
    assert named.report().depths == depths and steps_are_right(named)


# --- what is said of them ------------------------------------------------------------------------------------------


def test_report_and_explain_name_depths(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "explain.json"
    assert cli.main(["explain", "--pattern", "[*E]/[*E]", "--json", str(path)]) == 0
    printed = capfd.readouterr().out
    figures = json.loads(path.read_text())
    assert figures["golden"] in printed
    for text in ("MTP0 F  pre_dispatch", "F:MTP0.mtp_post.F", "a depth of multi-token prediction among them"):
        assert text in printed, text


def test_explain_refuses_parts_that_differ(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["explain", "--pattern", "[*E]/[*E]/E"])
    assert "MTP part that is not like the first" in capfd.readouterr().err
