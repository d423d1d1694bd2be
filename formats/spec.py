"""What a model is, in the words of its arithmetic: all the runtime knows, whatever family the checkpoint is of.

Each family's file turns a `config.json` into a `ModelSpec`; the manifest holds it; the decoder follows it.
"""

from dataclasses import dataclass
from typing import Literal

Matrix = Literal["gate", "up", "down"]
MATRICES: tuple[Matrix, ...] = ("gate", "up", "down")
Selector = Literal["up", "gate", "both", "none"]
MAX_EXPERTS = 1_000_000  # keeps what a hostile config makes us enumerate small; the largest published model has 31k
MAX_HIDDEN_SIZE = 2**24  # bytes of a row fit 32 bits,
MAX_MATRIX_WEIGHTS = 2**40  # bytes of an expert 64
SELECTORS: tuple[Selector, ...] = ("up", "gate", "both", "none")


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention: `num_heads` queries share `num_kv_heads` keys and values of `head_dim`.

    A position sees at most `sliding_window` positions, itself included; null means all before it.
    """

    kind: Literal["grouped_query"]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding over the whole head, halves rotated against each other, base `theta`."""

    kind: Literal["default"]
    theta: float


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """Softmax over all experts' logits, the `num_experts_per_tok` largest kept, made to sum to one if `normalize`."""

    kind: Literal["softmax_topk"]
    num_experts: int
    num_experts_per_tok: int
    normalize: bool


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """An expert: its neuron function, intermediate size, the matrices it has and which of them have a bias.

    `bias` names matrices, gate or up, whose bias has one value a neuron (it lies in the neuron's row); `extra_floats`
    counts float32 values an expert needs beyond its neurons, such as the bias of `down`.
    """

    function: Literal["silu"]
    intermediate_size: int
    matrices: tuple[Matrix, ...]
    bias: tuple[Matrix, ...]
    extra_floats: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only mixture-of-experts model. `moe_layers` are the decoder layers that have routed experts."""

    family: str
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    moe_layers: tuple[int, ...]
    max_position_embeddings: int
    norm: Literal["rms"]
    norm_eps: float
    tied_head: bool
    attention: AttentionSpec
    rope: RopeSpec
    router: RouterSpec
    expert: ExpertSpec


def selector_matrices(selector: Selector, matrices: tuple[Matrix, ...]) -> tuple[Matrix, ...]:
    """Which of an expert's `matrices` the selector holds, in the order gate, up, down."""
    held: dict[Selector, tuple[Matrix, ...]] = {"up": ("up",), "gate": ("gate",), "both": ("gate", "up"), "none": ()}
    return tuple(matrix for matrix in MATRICES if matrix in held[selector] and matrix in matrices)


def record_matrices(selector: Selector, matrices: tuple[Matrix, ...]) -> tuple[Matrix, ...]:
    """Which of an expert's `matrices` a neuron record holds, in the order gate, up, down."""
    selected = selector_matrices(selector, matrices)
    return tuple(matrix for matrix in MATRICES if matrix in matrices and matrix not in selected)


def spec_fault(spec: ModelSpec) -> str | None:
    """Why `spec` describes no model that can run, or None: sizes in range, heads that divide, layers that exist."""
    sizes = {
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "num_hidden_layers": spec.num_hidden_layers,
        "max_position_embeddings": spec.max_position_embeddings,
        "num_heads": spec.attention.num_heads,
        "num_kv_heads": spec.attention.num_kv_heads,
        "head_dim": spec.attention.head_dim,
        "sliding_window": 1 if spec.attention.sliding_window is None else spec.attention.sliding_window,
        "num_experts": spec.router.num_experts,
        "num_experts_per_tok": spec.router.num_experts_per_tok,
        "intermediate_size": spec.expert.intermediate_size,
    }
    for name, size in sizes.items():
        if not 0 < size < 2**31:
            return f"{name} is {size}, expected 1 to 2^31 - 1"
    if spec.num_hidden_layers * spec.router.num_experts > MAX_EXPERTS:
        return f"{spec.num_hidden_layers} layers of {spec.router.num_experts} experts, at most {MAX_EXPERTS} in all"
    if spec.hidden_size > MAX_HIDDEN_SIZE or spec.hidden_size * spec.expert.intermediate_size > MAX_MATRIX_WEIGHTS:
        return f"expert matrices of {spec.expert.intermediate_size} by {spec.hidden_size} are too large"
    if spec.hidden_size % 64:
        return f"hidden_size is {spec.hidden_size}, expected a multiple of 64 (codes lie in blocks of 64)"
    if spec.attention.num_heads % spec.attention.num_kv_heads:
        return f"{spec.attention.num_heads} heads cannot share {spec.attention.num_kv_heads} keys and values"
    if spec.attention.head_dim % 2:
        return f"head_dim is {spec.attention.head_dim}, expected an even number"
    if spec.router.num_experts_per_tok > spec.router.num_experts:
        return f"{spec.router.num_experts_per_tok} experts a token out of {spec.router.num_experts}"
    if len(spec.moe_layers) != spec.num_hidden_layers or any(i != l for i, l in enumerate(spec.moe_layers)):
        return "moe_layers does not name every decoder layer once, in order"
    if not 0 < spec.norm_eps < 1 or not 1 < spec.rope.theta < 1e12:
        return f"norm_eps {spec.norm_eps} or rope theta {spec.rope.theta} is out of range"
    return _expert_fault(spec.expert)


def _expert_fault(expert: ExpertSpec) -> str | None:
    ordered = tuple(matrix for matrix in MATRICES if matrix in expert.matrices)
    if expert.matrices != ordered or "up" not in ordered or "down" not in ordered:
        return f"expert matrices are {expert.matrices}, expected up and down, with or without gate, in that order"
    if expert.bias != tuple(m for m in MATRICES if m in expert.bias and m in ordered):
        return f"expert bias names {expert.bias}, expected a part of {expert.matrices}"
    if "down" in expert.bias:
        return "expert bias names down, whose bias is no neuron's: it belongs in extra_floats"
    if not 0 <= expert.extra_floats < 2**31:
        return f"extra_floats is {expert.extra_floats}"
    return None
