"""What a model is, in the words of its arithmetic: all the runtime knows, whatever family the checkpoint is of.

Each family's file turns a `config.json` into a `ModelSpec`; the manifest holds it; the decoder follows it.
docs/format.md, section 11, says what each value means; `spec_check` says which values can be.
"""

from dataclasses import dataclass
from typing import Literal

from moe_pack.formats.strict_json import added

Matrix = Literal["gate", "up", "down"]
MATRICES: tuple[Matrix, ...] = ("gate", "up", "down")
Projection = Literal["q", "k", "v", "o"]
PROJECTIONS: tuple[Projection, ...] = ("q", "k", "v", "o")
Selector = Literal["up", "gate", "both", "none"]
SELECTORS: tuple[Selector, ...] = ("up", "gate", "both", "none")
NeuronFunction = Literal["silu", "relu", "clamped_swiglu"]


@dataclass(frozen=True, slots=True)
class NormSpec:
    """`rms`: `x / rms(x) * weight`. `layer`: `(x - mean) / deviation * weight + bias`. `eps` is added to the square."""

    kind: Literal["rms", "layer"]
    eps: float


@dataclass(frozen=True, slots=True)
class GroupedQuerySpec:
    """Grouped-query attention: `num_heads` queries share `num_kv_heads` keys and values of `head_dim`.

    A position sees at most `sliding_window` positions, itself included; null means all before it. `scale` multiplies
    query times key. `bias` names the projections that have one. `qk_norm`: queries and keys are normed (rms, the
    model's eps) each head on its own, or the whole projection at once, before they are rotated.
    `windowed_layers`: the layers, rising, to which the window applies; null means all. `sinks`: each query head has a
    logit of its own that takes part in its softmax, and that no value belongs to.
    Source of the sinks: gpt-oss model card (2508.10925), section 2.3; transformers, models/gpt_oss.
    """

    kind: Literal["grouped_query"]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None
    scale: float
    bias: tuple[Projection, ...]
    qk_norm: Literal["none", "head", "projection"]
    windowed_layers: tuple[int, ...] | None = added(None)
    sinks: bool = added(False)

    def window(self, layer: int) -> int | None:
        """How many positions one sees at most in a decoder layer, itself included; None: all before it."""
        return self.sliding_window if self.windowed_layers is None or layer in self.windowed_layers else None


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention: keys and values of all heads come from one latent vector a position.

    The cache holds that latent (`kv_lora_rank` values, normed) and one rotated key (`qk_rope_head_dim`) for all heads.
    Queries come from a latent of their own, of `q_lora_rank`, unless that is null. Both latents' norms are rms with
    `lora_norm_eps`.
    Source: DeepSeek-V2 (2405.04434), section 2.1.
    """

    kind: Literal["latent"]
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale: float
    lora_norm_eps: float


@dataclass(frozen=True, slots=True)
class RelativeSpec:
    """Attention of `num_heads` heads of `head_dim`, each with keys of its own, and no rotation.

    A learned bias a head, one of `num_buckets`, is added to `scale` times query times key: which one, follows from how
    far the key is from the query, in buckets that grow towards `max_distance`, beyond which there is one. A stack's
    layers share one table. Attention of a decoder layer to the encoder's output has no such bias.
    Source: T5 (1910.10683), section 2.1; transformers, models/switch_transformers, _relative_position_bucket.
    """

    kind: Literal["relative"]
    num_heads: int
    head_dim: int
    num_buckets: int
    max_distance: int
    scale: float


AttentionSpec = GroupedQuerySpec | LatentSpec | RelativeSpec


@dataclass(frozen=True, slots=True)
class YarnSpec:
    """Frequencies below `beta_slow` turns in the original context are divided by `factor`, above `beta_fast` kept.

    `attention_factor` multiplies cosine and sine; `truncate` rounds the two bounds outwards to whole dimensions.
    Source: YaRN (2309.00071), section 3.2.
    """

    kind: Literal["yarn"]
    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class LongRopeSpec:
    """Frequency `j` is divided by `short_factor[j]`, cosine and sine multiplied by `short_mscale`.

    In sequences longer than `original_max_position_embeddings` it is the long factors, at every position.
    Source: LongRoPE (2402.13753).
    """

    kind: Literal["longrope"]
    original_max_position_embeddings: int
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    short_mscale: float
    long_mscale: float


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding of the first `rotary_dim` values of a head, base `theta`; the others stay.

    Value `j` is turned against value `j + rotary_dim / 2`; if `interleaved`, `2 j` against `2 j + 1`.
    """

    theta: float
    rotary_dim: int
    interleaved: bool
    scaling: YarnSpec | LongRopeSpec | None


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How a token's experts and their weights follow from the router's logits; ties go to the lowest index.

    `softmax_topk`: softmax over all, the `num_experts_per_tok` largest. `topk_softmax`: the largest logits, softmax
    over those. `sigmoid_topk`: each logit's sigmoid, the largest. `sparsemixer`: one after the other the largest, its
    weight the softmax over those left that lie within `2 jitter` of it.
    `bias`: a bias an expert is added to scores for choosing, not to weights. `n_group` groups of equal size compete
    first, and `topk_group` of them stay (a group's score is its best expert's; with `sigmoid_topk` its two best's
    sum). `normalize`: weights are divided by their sum. `scaling_factor` multiplies weights last. `logit_bias`: the
    router's linear map has a bias, a part of the logits. `capacity`: an expert runs for that many tokens of a forward
    pass, the first in order; later ones get nothing of it. Null: for all.
    """

    kind: Literal["softmax_topk", "topk_softmax", "sigmoid_topk", "sparsemixer"]
    num_experts: int
    num_experts_per_tok: int
    normalize: bool
    bias: bool = False
    n_group: int = 1
    topk_group: int = 1
    scaling_factor: float = 1.0
    jitter: float = 0.0
    logit_bias: bool = added(False)
    capacity: int | None = added(None)


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """An expert: its neuron function, intermediate size, the matrices it has and which of them have a bias.

    A neuron's `h(g, u)` is `act(g) * factor(u)`, with `g` and `u` what its gate and up rows give; without a gate it is
    `act(u)`. `silu` and `relu` are `act`, and `factor(u) = u`. `clamped_swiglu`, which needs a gate:
    `act(g) = c * sigmoid(1.702 c)` with `c = min(g, 7)`, `factor(u) = clamp(u, -7, 7) + 1`.
    `bias` names matrices. That of gate or up has one value a neuron, in the neuron's row. That of down has `d`, which
    an expert that is chosen adds to its output whichever neurons run: its `extra_floats` float32 values, else 0.
    Source: `clamped_swiglu`: transformers, models/gpt_oss, GptOssExperts.
    """

    function: NeuronFunction
    intermediate_size: int
    matrices: tuple[Matrix, ...]
    bias: tuple[Matrix, ...]
    extra_floats: int

    @property
    def row_bias(self) -> tuple[Matrix, ...]:
        """The matrices whose bias lies in the neurons' rows."""
        return tuple(matrix for matrix in self.bias if matrix != "down")


@dataclass(frozen=True, slots=True)
class SharedExpertSpec:
    """What runs for every token beside the routed experts (several shared experts lie side by side as one).

    Same neuron function and matrices as theirs. `gated`: its output is multiplied by the sigmoid of one logit a token.
    """

    intermediate_size: int
    gated: bool


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """The stack that reads a text before a decoder answers it: the model's first `num_layers` layers.

    In it a position sees all others. The decoder's layers, which come after, also attend to its output. What the
    decoder says begins after `start_token`.
    """

    num_layers: int
    start_token: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A mixture-of-experts model. `moe_layers` are the layers that have routed experts.

    Layers without them have one dense expert of `dense_intermediate_size` for every token (null if there are none).
    `encoder`: null where all layers are a decoder's. `rope`: null where attention is not rotary.
    The embedding is multiplied by `embedding_multiplier`, what each half of a layer adds by `residual_multiplier`, and
    logits are divided by `logits_scaling`.
    """

    family: str
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    moe_layers: tuple[int, ...]
    dense_intermediate_size: int | None
    max_position_embeddings: int
    norm: NormSpec
    tied_head: bool
    head_bias: bool
    embedding_multiplier: float
    residual_multiplier: float
    logits_scaling: float
    attention: AttentionSpec
    rope: RopeSpec | None
    router: RouterSpec
    expert: ExpertSpec
    shared_expert: SharedExpertSpec | None
    encoder: EncoderSpec | None = added(None)  # noqa: RUF009  # a field, whose default is None

    @property
    def rotation(self) -> RopeSpec:
        """The rotation of a model whose attention is rotary."""
        assert self.rope is not None, "a checked spec: grouped and latent attention rotate"
        return self.rope


def first_moe_layers(spec: ModelSpec) -> tuple[int, ...]:
    """Which of the MoE layers, counted from 0, is the first of its stack: nothing before tells what it chooses."""
    begins = (0,) if spec.encoder is None else (0, spec.encoder.num_layers)
    stacks = [sum(layer >= begin for begin in begins) for layer in spec.moe_layers]
    return tuple(idx for idx, stack in enumerate(stacks) if idx == 0 or stack != stacks[idx - 1])


def selector_matrices(selector: Selector, matrices: tuple[Matrix, ...]) -> tuple[Matrix, ...]:
    """Which of an expert's `matrices` the selector holds, in the order gate, up, down."""
    held: dict[Selector, tuple[Matrix, ...]] = {"up": ("up",), "gate": ("gate",), "both": ("gate", "up"), "none": ()}
    return tuple(matrix for matrix in MATRICES if matrix in held[selector] and matrix in matrices)


def record_matrices(selector: Selector, matrices: tuple[Matrix, ...]) -> tuple[Matrix, ...]:
    """Which of an expert's `matrices` a neuron record holds, in the order gate, up, down."""
    selected = selector_matrices(selector, matrices)
    return tuple(matrix for matrix in MATRICES if matrix in matrices and matrix not in selected)
