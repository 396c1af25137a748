"""The reference hybrid model and its layers."""

from fxoverlap.models.attention import Attention
from fxoverlap.models.delta import GatedDeltaNet
from fxoverlap.models.hybrid import HybridModel
from fxoverlap.models.layers import LayerFactory
from fxoverlap.models.mamba import Mamba2
from fxoverlap.models.mla import LatentAttention
from fxoverlap.models.mlp import MLP, SwiGLU
from fxoverlap.models.moe import MoE
from fxoverlap.models.mtp import MTPDepth
from fxoverlap.models.short_conv import ShortConv
from fxoverlap.models.tracker import LossTracker

__all__ = [
    "MLP",
    "Attention",
    "GatedDeltaNet",
    "HybridModel",
    "LatentAttention",
    "LayerFactory",
    "LossTracker",
    "MTPDepth",
    "Mamba2",
    "MoE",
    "ShortConv",
    "SwiGLU",
]
