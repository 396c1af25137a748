"""Models that nobody here wrote: tiny random configs of the transformers package, transformed as they are.

They have no exchange, so there is nothing to hide; they exercise capture, cut, the split of the backward and the
runtime on attention, latent attention, Mamba, gated delta nets and MoE in other people's code.
"""

from __future__ import annotations

import pytest
import torch
from replays import faults
from torch import nn
from toys import train_both

import fxoverlap as fxo
from fxoverlap.ir import Phase

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    # The default dispatches experts in a Python loop over data.
    "experts_implementation": "batched_mm",
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 8}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}


def nemotron_h() -> nn.Module:
    config = transformers.NemotronHConfig(
        **{**SIZES, "num_hidden_layers": 4},
        hybrid_override_pattern="M*-E",
        head_dim=8,
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=8,
        n_routed_experts=4,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
        num_experts_per_tok=2,
    )
    return transformers.NemotronHForCausalLM(config)


def granite_moe_hybrid() -> nn.Module:
    config = transformers.GraniteMoeHybridConfig(
        **SIZES,
        **MAMBA,
        layer_types=["mamba", "attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
    )
    return transformers.GraniteMoeHybridForCausalLM(config)


def deepseek_v3() -> nn.Module:
    config = transformers.DeepseekV3Config(
        **{**SIZES, **LATENT},
        moe_intermediate_size=16,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    )
    return transformers.DeepseekV3ForCausalLM(config)


def qwen3_moe() -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, head_dim=8
    )
    return transformers.Qwen3MoeForCausalLM(config)


def qwen3_next() -> nn.Module:
    config = transformers.Qwen3NextConfig(
        **SIZES,
        **DELTA_NET,
        layer_types=["linear_attention", "full_attention"],
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        head_dim=8,
    )
    return transformers.Qwen3NextForCausalLM(config)


def sequences(step: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    tokens = [torch.randint(0, 64, (1, 16), generator=generator) for _ in range(3)]
    return [{"input_ids": each, "labels": each} for each in tokens]


MODELS = [nemotron_h, granite_moe_hybrid, deepseek_v3, qwen3_moe, qwen3_next]


@pytest.mark.parametrize("make", MODELS)
def test_transformed_as_they_are(make) -> None:
    torch.manual_seed(0)
    model = make()
    assert train_both(model, sequences, steps=3) == []
    table = str(fxo.transform(model, example_inputs=sequences(0)[0]).report())
    assert "2 logical layers" in table or "4 logical layers" in table


@pytest.mark.parametrize("make", MODELS)
def test_each_layer_is_replayed(make) -> None:
    torch.manual_seed(0)
    overlapped = fxo.transform(make(), fxo.OverlapConfig(recompute=fxo.Recompute("uniform")))
    assert train_both(overlapped, sequences, steps=2) == []
    chunk = overlapped.plan("FB").backward
    assert {node.layer for node in chunk.nodes if node.phase is Phase.R} == set(range(chunk.layers))
    assert faults(chunk) == []
