"""What the operators of a transformer cost, by phase: floating point operations, and bytes read and written.

- A matrix product of m x k by k x n: 2mkn operations in each of F, B and W. W reads and writes the fp32 gradient.
- Attention: 2 T^2 (d_qk + d_v) operations a head, halved by the causal mask. B takes 2.5 times as many, because it
  computes the scores again (FlashAttention-2, arXiv 2307.08691, section 4.1).
- Pointwise: F reads n bytes and writes m; B reads the gradient and what F read, and writes n.
- Permutation: F reads n bytes and writes m, B the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxoverlap.benchmarks.models import Latent, Model
from fxoverlap.ir import Phase

_GRADIENT_BYTES = 4
_INDEX_BYTES = 8
_FP32 = 4


@dataclass(frozen=True, slots=True)
class Operator:
    """Floating point operations, and bytes moved, of an operator in each phase."""

    flops: tuple[float, float, float] = (0, 0, 0)
    moved: tuple[float, float, float] = (0, 0, 0)

    def cost(self, phase: Phase) -> tuple[float, float]:
        """(operations, bytes) in F, B or W; a replay is an F."""
        i = {Phase.F: 0, Phase.R: 0, Phase.B: 1, Phase.W: 2}[phase]
        return self.flops[i], self.moved[i]


@dataclass(frozen=True, slots=True)
class Part:
    """The operators of a slot, and bytes of what it keeps for its B and W, and of what its B makes for its W."""

    operators: tuple[Operator, ...]
    kept: float = 0
    grads: float = 0


def matmul(rows: float, inner: int, outer: int, size: int, weights: int = 1) -> Operator:
    """Rows of `inner` elements by `weights` matrices of inner x outer, each for its share of the rows."""
    ends, matrix = rows * (inner + outer) * size, weights * inner * outer
    moved = ends + matrix * size
    return Operator((2 * rows * inner * outer,) * 3, (moved, moved, ends + 2 * matrix * _GRADIENT_BYTES))


def pointwise(reads: float, writes: float) -> Operator:
    """A norm, an activation, an addition."""
    return Operator(moved=(reads + writes, 2 * reads + writes, 0))


def permutation(reads: float, writes: float) -> Operator:
    """A gather, and the scatter that is its gradient."""
    return Operator(moved=(reads + writes, reads + writes, 0))


class Parts:
    """The parts of a model's layers for so many tokens on a rank.

    Attributes:
        hidden: bytes of one tensor of the residual stream.
        rows: bytes of all copies of the tokens, one for each expert that a token goes to.
        routing: bytes of the experts' numbers and weights of all tokens.
    """

    def __init__(self, model: Model, tokens: int, ep: int) -> None:
        self._model, self._tokens, self._local = model, tokens, model.experts // ep
        self.hidden = tokens * model.hidden * model.activation_bytes
        self.rows = self.hidden * model.top_k
        self.routing = tokens * model.top_k * (_INDEX_BYTES + _FP32)

    def attention(self) -> Part:
        """Norm, attention, residual."""
        t, m = self._tokens, self._model
        a, size = m.attention, m.activation_bytes
        if isinstance(a, Latent):
            qk, v = a.nope_dim + a.rope_dim, a.v_dim
            wide = (a.heads * qk, a.heads * qk, a.heads * v)
            latents = t * (a.q_rank + a.kv_rank + a.rope_dim) * size
            projections = [
                matmul(t, m.hidden, a.q_rank, size),
                matmul(t, m.hidden, a.kv_rank + a.rope_dim, size),
                pointwise(latents, latents),
                matmul(t, a.q_rank, a.heads * qk, size),
                matmul(t, a.kv_rank, a.heads * (a.nope_dim + v), size),
            ]
        else:
            qk = v = a.head_dim
            wide = (a.heads * qk, a.kv_heads * qk, a.kv_heads * v)
            latents = 0
            projections = [matmul(t, m.hidden, sum(wide), size)]
        q_k, q_k_v, out = (t * size * each for each in (sum(wide[:2]), sum(wide), a.heads * v))
        scores = t * t * a.heads * (qk + v)
        core = Operator((scores, 2.5 * scores, 0), (q_k_v + out, 2 * (q_k_v + out), 0))
        operators = (
            pointwise(self.hidden, self.hidden),
            *projections,
            pointwise(q_k, q_k),
            core,
            matmul(t, a.heads * v, m.hidden, size),
            pointwise(2 * self.hidden, self.hidden),
        )
        # Kept: the normed input, latents before and after their norms, q, k, v, the result, its logarithmic sums, and
        # the sum with the residual. For W: gradients of q, k and v, of the latents, and of the residual.
        kept = 2 * self.hidden + 2 * latents + q_k_v + out + t * a.heads * _FP32
        return Part(operators, kept, self.hidden + latents + q_k_v)

    def router(self) -> Part:
        """Norm, scores of the experts, top-k; the normed tokens are a value of their own."""
        scores = self._tokens * self._model.experts * _FP32
        m = self._model
        operators = (
            pointwise(self.hidden, self.hidden),
            matmul(self._tokens, m.hidden, m.experts, m.activation_bytes),
            pointwise(scores, self.routing),
        )
        return Part(operators, scores, scores)

    def norm(self) -> Part:
        """The norm before a dense MLP."""
        return Part((pointwise(self.hidden, self.hidden),))

    def permute(self) -> Part:
        """The copies of the tokens in the order of their experts."""
        return Part((permutation(self.hidden, self.rows),))

    def experts(self) -> Part:
        """The tokens that came in, sorted by expert where there are several here; gated MLP; the order of arrival."""
        sort = (permutation(self.rows, self.rows),) if self._local > 1 else ()
        part = self._mlp(self._tokens * self._model.top_k, self._model.expert_dim, self._local)
        return Part((*sort, *part.operators, *sort), part.kept, part.grads)

    def shared(self) -> Part:
        """The shared experts; they read the router's normed tokens, which are kept anyway."""
        part = self._mlp(self._tokens, self._model.shared_experts * self._model.expert_dim, 1)
        return Part(part.operators, part.kept - self.hidden, part.grads - self.hidden)

    def dense(self) -> Part:
        """The MLP of a dense layer and the residual."""
        part = self._mlp(self._tokens, self._model.dense_dim, 1)
        operators = (*part.operators, pointwise(2 * self.hidden, self.hidden))
        return Part(operators, part.kept - self.hidden, part.grads - self.hidden)

    def post_combine(self) -> Part:
        """The weighted sum of what the experts made of a token, the shared expert, the residual."""
        return Part((pointwise(self.rows, self.hidden), pointwise(2 * self.hidden, self.hidden)))

    def embedding(self) -> Part:
        """Rows of the embedding."""
        return Part((Operator(moved=(2 * self.hidden, 0, 2 * self.hidden)),))

    def next_token(self) -> Part:
        """What an MTP depth does before its layer: the next token's embedding, two norms, and a projection of both."""
        m = self._model
        operators = (
            pointwise(2 * self.hidden, 2 * self.hidden),
            matmul(self._tokens, 2 * m.hidden, m.hidden, m.activation_bytes),
        )
        return Part(operators, 2 * self.hidden, self.hidden)

    def head(self) -> Part:
        """Norm, logits, cross entropy in fp32."""
        m = self._model
        logits = self._tokens * m.vocab * m.activation_bytes
        operators = (
            pointwise(self.hidden, self.hidden),
            matmul(self._tokens, m.hidden, m.vocab, m.activation_bytes),
            pointwise(logits, 0),
        )
        return Part(operators, self.hidden + logits, logits)

    def _mlp(self, rows: float, width: int, weights: int) -> Part:
        """Gate and up projections, SiLU of one by the other, down projection; kept with its input."""
        m = self._model
        size = m.activation_bytes
        operators = (
            matmul(rows, m.hidden, 2 * width, size, weights),
            pointwise(2 * rows * width * size, rows * width * size),
            matmul(rows, width, m.hidden, size, weights),
        )
        ends = rows * m.hidden * size
        return Part(operators, ends + 3 * rows * width * size, ends + 2 * rows * width * size)
