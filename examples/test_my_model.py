"""Pin down what overlaps what in a model of yours, so that a change of it shows in review.

    pytest examples/test_my_model.py                       # compare
    EXPECTTEST_ACCEPT=1 pytest examples/test_my_model.py   # write the new text into this file

The text holds nothing that moves with the machine or the torch version. One rank is enough to make it.
"""

import torch
import torch.distributed as dist
from expecttest import TestCase

import fxoverlap as fxo
from fxoverlap.models import HybridModel


class TestMyModel(TestCase):
    def setUp(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)

    def test_nodes_and_plan(self) -> None:
        model = HybridModel(
            "*-[*E]", dim=32, vocab_size=64, num_experts=4, expert_dim=16, top_k=2, group=dist.group.WORLD
        )
        tokens = torch.zeros(1, 16, dtype=torch.int64)
        config = fxo.OverlapConfig(schedule="megatron")  # the order of "auto" also depends on what nodes cost
        overlapped = fxo.transform(model, config, example_inputs=(tokens, tokens))
        self.assertExpectedInline(
            overlapped.golden(),
            """\
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
""",
        )
