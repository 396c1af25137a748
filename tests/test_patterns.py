"""Mixtures of layers: any order of symbols gives eager's bits on two ranks, and every weight gradient can be moved.

Two ranks with other tokens, 3 microbatches a step, two steps of AdamW: each kind of layer alone before a mixture of
experts, and random patterns of 4 to 8 layers. By default each kind alone and the first random ones are run in one dtype
or the other; with `-m slow` 20 random ones in both, and 200 more in one.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hybrid_patterns import gradient_phases, hybrid, outcomes, random_pattern
from toys import batches, train_both
from two_ranks import TwoRanks

import fxoverlap as fxo
from fxoverlap.ir import Phase
from fxoverlap.models.hybrid import SYMBOLS

pytestmark = pytest.mark.usefixtures("shared_captures")

MIXERS = [symbol for symbol in SYMBOLS if symbol != "E"]
ALONE = [f"{symbol}E" for symbol in MIXERS]
RANDOM = [random_pattern(seed) for seed in range(20)]
MORE = [random_pattern(seed) for seed in range(20, 220)]
DTYPES = (torch.float32, torch.bfloat16)
CASES = [(pattern, DTYPES[i % 2]) for i, pattern in enumerate((*ALONE, *RANDOM[:2]))]
LISTED = (*ALONE, *RANDOM)
MORE_CASES = [(pattern, DTYPES[i % 2]) for i, pattern in enumerate(MORE)]


@pytest.fixture(scope="module")
def found(two_ranks: TwoRanks) -> list[list[list[str]]]:
    return two_ranks.run(outcomes, CASES, timeout_s=600)


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def found_listed(request: pytest.FixtureRequest, two_ranks: TwoRanks) -> list[list[list[str]]]:
    return two_ranks.run(outcomes, [(pattern, request.param) for pattern in LISTED], timeout_s=1200)


@pytest.fixture(scope="module")
def found_more(two_ranks: TwoRanks) -> list[list[list[str]]]:
    return two_ranks.run(outcomes, MORE_CASES, timeout_s=3600)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{p}-{d}" for p, d in CASES])
def test_pattern(number: int, found: list[list[list[str]]]) -> None:
    assert [each[number] for each in found] == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(LISTED)), ids=LISTED)
def test_listed_pattern(number: int, found_listed: list[list[list[str]]]) -> None:
    assert [each[number] for each in found_listed] == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MORE_CASES)), ids=[f"{i}-{p}-{d}" for i, (p, d) in enumerate(MORE_CASES)])
def test_more_patterns(number: int, found_more: list[list[list[str]]]) -> None:
    assert [each[number] for each in found_more] == [[], []]


def test_random_patterns_hold_every_order() -> None:
    """A mixture of experts first, last, twice in a row; each kind of layer before and behind one; brackets and none."""
    plain = [pattern.replace("[", "").replace("]", "") for pattern in RANDOM]
    assert any(pattern.startswith("E") for pattern in plain) and any(pattern.endswith("E") for pattern in plain)
    assert any("EE" in pattern for pattern in plain)
    for symbol in MIXERS:
        assert any(f"{symbol}E" in pattern for pattern in plain) and any(f"E{symbol}" in pattern for pattern in plain)
    assert (min(map(len, plain)), max(map(len, plain))) == (4, 8)
    assert {"[" in pattern for pattern in RANDOM} == {True, False}


@pytest.mark.parametrize("symbol", MIXERS)
def test_every_weight_gradient_of_a_layer_is_w(symbol: str, group: dist.ProcessGroup) -> None:
    """Convolution, A_log, dt_bias, norms, gates: nothing upstream waits for any of them."""
    model = hybrid(f"{symbol}E", group)
    phases = gradient_phases(fxo.transform(model, example_inputs=batches(1)[0]))
    own = {name for name, _ in model.named_parameters() if name.startswith("layers.0.")}
    assert {name: phases[name] for name in own} == dict.fromkeys(own, Phase.W)


@pytest.mark.parametrize("pattern", ["[M*E][GE]", "[M+E][GE]"])
def test_packed_sequences(pattern: str, group: dist.ProcessGroup) -> None:
    """Boundaries at other places in each microbatch and step are one capture."""

    def make(step: int) -> list[tuple]:
        cuts = [torch.tensor([0, 2 + i % 2, 3 + step, 8]) for i in range(3)]
        return [(*each, cut) for each, cut in zip(batches(3, seed=step), cuts, strict=True)]

    overlapped = fxo.transform(hybrid(pattern, group), fxo.OverlapConfig(pattern))
    assert train_both(overlapped, make) == []
    assert overlapped.report().variants == 1


@pytest.mark.parametrize("pattern", ["M*GE", "M+GE"])
def test_packed_sequences_are_separate(pattern: str) -> None:
    """The loss of packed sequences is the mean of their own losses, by length; experts have no auxiliary loss here."""
    model = hybrid(pattern, None, torch.float64)
    model.layers[-1].aux_loss = 0.0
    ((tokens, targets),) = batches(1, tokens=9)
    packed = model(tokens, targets, torch.tensor([0, 4, 4, 9]))
    parts = [model(tokens[:, a:b], targets[:, a:b]) * (b - a) / 9 for a, b in ((0, 4), (4, 9))]
    # Positions run on in a packed row, and the rotary tables are fp32: differences of angles are right to 1e-7.
    torch.testing.assert_close(packed, sum(parts), rtol=1e-7, atol=0.0)


@pytest.mark.parametrize("wrong", [[1, 8], [0, 7], [0, 9], [0, 6, 3, 8], [0, -2, 8]], ids=str)
def test_wrong_boundaries(wrong: list[int], packed: fxo.OverlappedModel) -> None:
    given = (*batches(1)[0], torch.tensor(wrong))
    with pytest.raises(RuntimeError, match="cu_seqlens must rise from 0 to the number of tokens, 8"):
        packed(*given)
    with pytest.raises(fxo.StepError, match="cu_seqlens must rise from 0 to the number of tokens, 8"):
        packed.step([given])


@pytest.fixture(scope="module")
def packed() -> fxo.OverlappedModel:
    return fxo.transform(hybrid("*", None))


@pytest.mark.parametrize("wrong", [torch.tensor([0.0, 8.0]), torch.tensor([[0, 8]]), torch.tensor([8])], ids=repr)
def test_boundaries_of_another_kind(wrong: torch.Tensor, packed: fxo.OverlappedModel) -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens must be int32 or int64 \[sequences \+ 1\], got"):
        packed(*batches(1)[0], wrong)
