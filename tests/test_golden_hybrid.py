"""What models of hybrid layers are cut into and in which order they run, as texts to read.

Proves: a mixer is a mixer to the schedule, whatever it computes; several layers before a mixture of experts are one
logical layer; and those of a long run are layers of their own. `tests/test_golden.py` says how to refresh the texts.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist
from expecttest import assert_expected_inline
from hybrid_patterns import hybrid
from toys import batches

import fxoverlap as fxo

pytestmark = pytest.mark.usefixtures("shared_captures")


def golden(pattern: str, group: dist.ProcessGroup, given: str | None = None, schedule: str = "auto") -> str:
    """The text of a pattern's model; unless it is given, the passes find the layers themselves."""
    config = fxo.OverlapConfig(given, schedule=schedule)
    return fxo.transform(hybrid(pattern, group), config, example_inputs=batches(1)[0]).golden()


ONE_MIXER = """\
nodes
  -    F  pre_process  post_process
  L0   F  pre_dispatch  (counts)  permute  (dispatch)  experts  (combine)  post_combine
  -    B  post_process
  -    W  post_process  pre_process
  L0   B  post_combine  (combine)=  experts  (dispatch)=  pre_dispatch
  L0   W  experts  pre_dispatch

plan FB
  compute              comm
  F:pre_process.F
  B:post_process.B
  F:L0.pre_dispatch.F
                       > F:L0.counts.F
  B:L0.post_combine.B  | F:L0.counts.F
                       > B:L0.combine.B
  F:L0.permute.F       | B:L0.combine.B
                       > F:L0.dispatch.F
  B:post_process.W     | B:L0.combine.B, F:L0.dispatch.F
  B:L0.experts.B       | F:L0.dispatch.F
                       > B:L0.dispatch.B
  B:L0.experts.W       | F:L0.dispatch.F, B:L0.dispatch.B
  F:L0.experts.F       | B:L0.dispatch.B
                       > F:L0.combine.F
  B:L0.pre_dispatch.B  | F:L0.combine.F
  F:L0.post_combine.F
  F:post_process.F
  B:L0.pre_dispatch.W
  B:pre_process.W
"""


@pytest.mark.parametrize("pattern", ["[ME]", "[GE]", "[+E]", "[*E]"])
def test_one_mixer(pattern: str, group: dist.ProcessGroup) -> None:
    """A fixed order is the same for all; the search asks what a mixer costs."""
    assert golden(pattern, group, pattern, schedule="megatron") == ONE_MIXER


@pytest.mark.parametrize(("pattern", "given"), [("[M*E]", "[M*E]"), ("*-E", None)])
def test_layers_before_a_mixture_of_experts(pattern: str, given: str | None, group: dist.ProcessGroup) -> None:
    """They are one logical layer, whether brackets say so or the passes find it."""
    assert golden(pattern, group, given, schedule="megatron") == ONE_MIXER


def test_two_kinds_of_mixers(group: dist.ProcessGroup) -> None:
    assert_expected_inline(
        golden("[M*E][GE]", group, "[M*E][GE]"),
        """\
nodes
  -    F  pre_process  post_process
  L0   F  pre_dispatch  (counts)  permute  (dispatch)  experts  (combine)  post_combine
  L1   F  pre_dispatch  (counts)=  permute=  (dispatch)=  experts=  (combine)=  post_combine=
  -    B  post_process
  -    W  post_process  pre_process
  L1   B  post_combine  (combine)=  experts  (dispatch)=  pre_dispatch
  L1   W  experts  pre_dispatch
  L0   B  post_combine=  (combine)=  experts=  (dispatch)=  pre_dispatch
  L0   W  experts=  pre_dispatch

plan FB
  compute              comm
  F:pre_process.F
  F:L0.pre_dispatch.F
                       > F:L0.counts.F
  B:post_process.B     | F:L0.counts.F
  B:post_process.W     | F:L0.counts.F
  F:L0.permute.F
                       > F:L0.dispatch.F
  B:L1.post_combine.B  | F:L0.dispatch.F
                       > B:L1.combine.B
  F:L0.experts.F       | B:L1.combine.B
                       > F:L0.combine.F
  B:L1.experts.B       | F:L0.combine.F
                       > B:L1.dispatch.B
  B:L1.experts.W       | F:L0.combine.F, B:L1.dispatch.B
  F:L0.post_combine.F  | B:L1.dispatch.B
  F:L1.pre_dispatch.F  | B:L1.dispatch.B
                       > F:L1.counts.F
  B:L1.pre_dispatch.B  | F:L1.counts.F
  B:L1.pre_dispatch.W  | F:L1.counts.F
  B:L0.post_combine.B  | F:L1.counts.F
                       > B:L0.combine.B
  F:L1.permute.F       | B:L0.combine.B
                       > F:L1.dispatch.F
  B:L0.experts.B       | F:L1.dispatch.F
                       > B:L0.dispatch.B
  B:L0.experts.W       | F:L1.dispatch.F, B:L0.dispatch.B
  F:L1.experts.F       | B:L0.dispatch.B
                       > F:L1.combine.F
  B:L0.pre_dispatch.B  | F:L1.combine.F
  B:L0.pre_dispatch.W  | F:L1.combine.F
  B:pre_process.W      | F:L1.combine.F
  F:L1.post_combine.F
  F:post_process.F
""",
    )


def test_a_long_run_is_cut(group: dist.ProcessGroup) -> None:
    assert_expected_inline(
        golden("M-G-*EME", group),
        """\
nodes
  -    F  pre_process  post_process
  L0   F  pre_dispatch
  L1   F  pre_dispatch
  L2   F  pre_dispatch
  L3   F  pre_dispatch=
  L4   F  pre_dispatch  (counts)  permute  (dispatch)  experts  (combine)  post_combine
  L5   F  pre_dispatch  (counts)=  permute=  (dispatch)=  experts=  (combine)=  post_combine=
  -    B  post_process
  -    W  post_process  pre_process
  L5   B  post_combine  (combine)=  experts  (dispatch)=  pre_dispatch
  L5   W  experts  pre_dispatch
  L4   B  post_combine=  (combine)=  experts=  (dispatch)=  pre_dispatch
  L4   W  experts=  pre_dispatch
  L3   B  pre_dispatch
  L3   W  pre_dispatch
  L2   B  pre_dispatch
  L2   W  pre_dispatch
  L1   B  pre_dispatch=
  L1   W  pre_dispatch=
  L0   B  pre_dispatch
  L0   W  pre_dispatch

plan FB
  compute              comm
  B:post_process.B
  B:L5.post_combine.B
                       > B:L5.combine.B
  F:pre_process.F      | B:L5.combine.B
  F:L0.pre_dispatch.F  | B:L5.combine.B
  F:L1.pre_dispatch.F  | B:L5.combine.B
  F:L2.pre_dispatch.F  | B:L5.combine.B
  F:L3.pre_dispatch.F  | B:L5.combine.B
  F:L4.pre_dispatch.F  | B:L5.combine.B
                       > F:L4.counts.F
  B:post_process.W     | B:L5.combine.B, F:L4.counts.F
  B:L5.experts.B       | F:L4.counts.F
                       > B:L5.dispatch.B
  B:L5.experts.W       | F:L4.counts.F, B:L5.dispatch.B
  F:L4.permute.F       | B:L5.dispatch.B
                       > F:L4.dispatch.F
  B:L5.pre_dispatch.B  | F:L4.dispatch.F
  B:L5.pre_dispatch.W  | F:L4.dispatch.F
  B:L4.post_combine.B  | F:L4.dispatch.F
                       > B:L4.combine.B
  F:L4.experts.F       | B:L4.combine.B
                       > F:L4.combine.F
  B:L4.experts.B       | F:L4.combine.F
                       > B:L4.dispatch.B
  B:L4.experts.W       | F:L4.combine.F, B:L4.dispatch.B
  F:L4.post_combine.F  | B:L4.dispatch.B
  F:L5.pre_dispatch.F  | B:L4.dispatch.B
                       > F:L5.counts.F
  B:L4.pre_dispatch.B  | F:L5.counts.F
  B:L4.pre_dispatch.W  | F:L5.counts.F
  B:L3.pre_dispatch.B  | F:L5.counts.F
  B:L3.pre_dispatch.W  | F:L5.counts.F
  B:L2.pre_dispatch.B  | F:L5.counts.F
  B:L2.pre_dispatch.W  | F:L5.counts.F
  B:L1.pre_dispatch.B  | F:L5.counts.F
  B:L0.pre_dispatch.B  | F:L5.counts.F
  F:L5.permute.F
                       > F:L5.dispatch.F
  B:L1.pre_dispatch.W  | F:L5.dispatch.F
  B:L0.pre_dispatch.W  | F:L5.dispatch.F
  B:pre_process.W      | F:L5.dispatch.F
  F:L5.experts.F
                       > F:L5.combine.F
  F:L5.post_combine.F
  F:post_process.F
""",
    )
