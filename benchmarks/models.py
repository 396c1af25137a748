"""Published models by their figures, and the JSON form of any other.

A `Model` is a stack of decoder layers, each attention and then a gated MLP of three matrices, dense in the first
layers and a mixture of experts in the others. That covers DeepSeek-V3, Qwen3-MoE, Mixtral and their like; layers
without attention (Mamba, delta net) have no form here.

As JSON a model is one object with the fields of `Model` as keys; `attention` is an object with the fields of `Grouped`
or of `Latent`. Fields that have a default may be left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fxoverlap.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Grouped:
    """Grouped-query attention.

    Attributes:
        heads: query heads.
        kv_heads: key and value heads, each shared by heads / kv_heads query heads.
        head_dim: width of a head.
    """

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention.

    Attributes:
        heads: heads of queries, keys and values.
        q_rank, kv_rank: widths of the latents that queries, and keys with values, are projected up from.
        nope_dim, rope_dim: width of a query or key head, without and with a position; the latter is shared by all keys.
        v_dim: width of a value head.
    """

    heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class Model:
    """A mixture-of-experts decoder.

    Attributes:
        name: what it is called.
        layers: decoder layers, without MTP depths.
        hidden: width of the residual stream.
        attention: of every layer.
        experts: routed experts of a layer.
        top_k: experts that a token goes to.
        expert_dim: inner width of an expert.
        vocab: tokens of the vocabulary.
        dense_layers: how many of the layers, from the first one on, have a dense MLP in place of experts.
        dense_dim: its inner width.
        shared_experts: experts that every token passes on its own rank.
        mtp_depths: multi-token prediction depths, each one more MoE layer with a projection before it and the head
            behind it.
        node_limit: most domains of fast links that a token's experts may be in; 0 for any number.
        activation_bytes: of an element of activations and weights.
        dispatch_bytes: of an element that travels to experts, in the forward and, as a gradient, in the backward.
    """

    name: str
    layers: int
    hidden: int
    attention: Grouped | Latent
    experts: int
    top_k: int
    expert_dim: int
    vocab: int
    dense_layers: int = 0
    dense_dim: int = 0
    shared_experts: int = 0
    mtp_depths: int = 0
    node_limit: int = 0
    activation_bytes: int = 2
    dispatch_bytes: int = 2

    def __post_init__(self) -> None:
        least = {each.name: int(each.default is MISSING or "bytes" in each.name) for each in fields(self)}
        _check_integers("model", asdict(self), {k: v for k, v in least.items() if k not in ("name", "attention")})
        if not isinstance(self.attention, (Grouped, Latent)):
            raise ConfigError(f"model: attention is {self.attention!r}; expected a Grouped or a Latent.")
        _check_integers("model: attention", asdict(self.attention), {each.name: 1 for each in fields(self.attention)})
        if self.top_k > self.experts:
            raise ConfigError(f"model: top_k is {self.top_k}; expected at most the number of experts, {self.experts}.")
        if self.dense_layers >= self.layers:
            raise ConfigError(
                f"model: dense_layers is {self.dense_layers} of {self.layers} layers; expected fewer, as without "
                f"experts there is nothing to exchange."
            )
        if self.dense_layers and not self.dense_dim:
            raise ConfigError("model: dense_layers without dense_dim; give the inner width of their MLP.")


def read(path: str | Path) -> Model:
    """Read a model from a JSON file. Raises ConfigError that names the field, and OSError."""
    try:
        given = json.loads(Path(path).read_text())
    except ValueError as error:  # what is no JSON, or no text at all
        raise ConfigError(f"{path}: expected JSON, got {error}.") from error
    try:
        model = _checked(given, Model, "model")
        return Model(**{**model, "attention": _attention(model["attention"])})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _attention(given: Any) -> Grouped | Latent:
    kind = Latent if isinstance(given, Mapping) and "kv_rank" in given else Grouped
    return kind(**_checked(given, kind, "model: attention"))


def _checked(given: Any, kind: type, where: str) -> dict[str, Any]:
    """What was given, if it has the keys of a dataclass."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} is {given!r}; expected an object.")
    allowed = {each.name: each for each in fields(kind)}
    unknown = sorted(set(given) - set(allowed))
    if unknown:
        raise ConfigError(f"{where} has {', '.join(unknown)}; allowed are {', '.join(allowed)}.")
    missing = [name for name, each in allowed.items() if each.default is MISSING and name not in given]
    if missing:
        raise ConfigError(f"{where} has no {', '.join(missing)}; add it.")
    return dict(given)


def _check_integers(where: str, given: Mapping[str, Any], least: Mapping[str, int]) -> None:
    for name, lowest in least.items():
        value = given[name]
        if type(value) is not int or value < lowest:
            raise ConfigError(f"{where}: {name} is {value!r}; expected an integer of at least {lowest}.")


PRESETS: Mapping[str, Model] = {
    each.name: each
    for each in (
        Model(
            "deepseek-v3",
            layers=61,
            hidden=7168,
            attention=Latent(heads=128, q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
            experts=256,
            top_k=8,
            expert_dim=2048,
            vocab=129280,
            dense_layers=3,
            dense_dim=18432,
            shared_experts=1,
            mtp_depths=1,
            node_limit=4,
        ),
        Model(
            "qwen3-30b-a3b",
            layers=48,
            hidden=2048,
            attention=Grouped(heads=32, kv_heads=4, head_dim=128),
            experts=128,
            top_k=8,
            expert_dim=768,
            vocab=151936,
        ),
    )
}
"""Models by name: the config.json of deepseek-ai/DeepSeek-V3 and of Qwen/Qwen3-30B-A3B on Hugging Face. The node limit
is from section 2.1.2 of the DeepSeek-V3 technical report (arXiv 2412.19437). Both in bf16, tokens on the way too."""
