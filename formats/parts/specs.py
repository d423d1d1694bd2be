"""A model as data: the runtime knows models only as a `ModelSpec`, whatever their family.

A family's file turns a `config.json` into a `ModelSpec`, the manifest stores it, and the decoder follows it;
docs/model.md says what each value means. From a spec alone follow the names and shapes of the dense tensors in a pack
(`dense_roles`), the size of the model and of its caches, and whether it can run (`spec_fault`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, Self

from moe_pack.formats import parts  # its face loads a kind of part for a model that has one
from moe_pack.formats.base.json_files import added
from moe_pack.formats.parts import latent, part
from moe_pack.formats.parts.attention import (
    AttentionSpec,
    OtherAttentionSpec,
    attention_fault,
    others_fault,
    rope_fault,
)
from moe_pack.formats.parts.positions import RopeSpec
from moe_pack.formats.parts.residual import PLAIN, ModelFacts, ResidualSpec
from moe_pack.formats.parts.router import RouterSpec as RouterSpec  # the face of `formats` offers it

Matrix = Literal["gate", "up", "down"]
MATRICES: tuple[Matrix, ...] = ("gate", "up", "down")
Selector = Literal["up", "gate", "both", "none"]
SELECTORS: tuple[Selector, ...] = ("up", "gate", "both", "none")
NeuronName = Literal["silu", "relu", "relu2", "clamped_swiglu", "gelu_tanh", "clipped_silu", "capped_silu"]
LimitedName = Literal["clipped_silu", "capped_silu"]


@dataclass(frozen=True, slots=True)
class LimitedFunction:
    """A neuron function whose values are limited: `name` says where, `limit` how."""

    name: LimitedName
    limit: float


NeuronFunction = NeuronName | LimitedFunction  # of an expert; a limited one always has its limit


@dataclass(frozen=True, slots=True)
class LimitSpec:
    """The limits of the neuron functions of some layers."""

    layers: tuple[int, ...] | None  # rising; null: all layers
    routed: float | None  # the limit of routed experts; null: none
    unrouted: float | None  # the limit of the shared or the dense expert; null: none


@dataclass(frozen=True, slots=True)
class ExpertSpec(part.Part):
    """An expert: its neuron function, intermediate size, the matrices it has and which of them have a bias.

    A neuron's `h(g, u)` is `act(g) * factor(u)`; `g` and `u` are the products of its gate and up rows with the input.
    Without a gate, `h` is `act(u)`. For `silu`, `relu`, its square `relu2`, and `gelu_tanh`, GELU in its approximation
    by tanh, `factor(u) = u`. The others need a gate:
    `clamped_swiglu`: `act(g) = c * sigmoid(1.702 c)` with `c = min(g, 7)`, `factor(u) = clamp(u, -7, 7) + 1`.
    `clipped_silu`: `act(g) = silu(min(g, limit))`, `factor(u) = clamp(u, -limit, limit)`.
    `capped_silu`: `act(g) = min(silu(g), limit)`, and the same factor.
    Source: transformers, models/gpt_oss, GptOssExperts; models/deepseek_v4, DeepseekV4Experts; models/step3p7,
    Step3p7Experts.
    """

    function: NeuronName
    intermediate_size: int  # `f`: rows of an expert; a repeated neuron has two
    matrices: tuple[Matrix, ...]  # gate, up and down, or up and down
    # Matrices with a bias. That of gate or up is a value in each neuron's row. That of down is `d` float32 values,
    # which a chosen expert adds to its output whichever neurons run.
    bias: tuple[Matrix, ...]
    extra_floats: int  # values in the bias of down: `d`, or 0 without one
    # Neurons with two rows in a pack. Gate and up are the same in both, and down is the sum of both, so that it has
    # twice the bits.
    repeats: int = added(0)
    limits: tuple[LimitSpec, ...] = added(())  # of `clipped_silu` and `capped_silu`; in layers without one: `silu`

    def routed_function(self, layer: int) -> NeuronFunction:
        """Returns the neuron function of a layer's routed experts."""
        limit = self._limit(layer)
        return self._limited(None if limit is None else limit.routed)

    def unrouted_function(self, layer: int) -> NeuronFunction:
        """Returns the neuron function of a layer's shared or dense expert."""
        limit = self._limit(layer)
        return self._limited(None if limit is None else limit.unrouted)

    def _limit(self, layer: int) -> LimitSpec | None:
        return next((limit for limit in self.limits if limit.layers is None or layer in limit.layers), None)

    def _limited(self, limit: float | None) -> NeuronFunction:
        if self.function != "clipped_silu" and self.function != "capped_silu":
            return self.function
        return "silu" if limit is None else LimitedFunction(self.function, limit)

    @property
    def source_size(self) -> int:
        """The number of neurons that the source's expert has."""
        return self.intermediate_size - self.repeats

    @property
    def row_bias(self) -> tuple[Matrix, ...]:
        """The matrices whose bias lies in the neurons' rows."""
        return tuple(matrix for matrix in self.bias if matrix != "down")


@dataclass(frozen=True, slots=True)
class SharedExpertSpec:
    """The shared expert, with the function and matrices of routed ones, which runs for every token; several are one."""

    intermediate_size: int
    gated: bool  # its output is multiplied by the sigmoid of one logit a token


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """The stack that reads a text; each position sees all others. The decoder's layers also attend to its output."""

    num_layers: int  # the model's first layers
    start_token: int  # an answer begins after it


@dataclass(frozen=True, slots=True)
class ModelSpec(part.Part):
    """A mixture-of-experts model."""

    family: str  # the source's `model_type`; readers of a pack ignore it
    hidden_size: int  # `d`
    vocab_size: int
    num_hidden_layers: int
    moe_layers: tuple[int, ...]  # layers with routed experts, counted from 0, rising, at least one
    dense_intermediate_size: int | None  # of the dense expert that all other layers have; null: there are none
    max_position_embeddings: int
    norm: part.NormSpec
    tied_head: bool  # the embedding is the head too
    head_bias: bool  # logits have a bias
    embedding_multiplier: float  # multiplies the embedding
    residual_multiplier: float  # multiplies the output of each half of a layer
    logits_scaling: float  # divides logits
    attention: AttentionSpec
    rope: RopeSpec | None  # null: attention is not rotary
    router: RouterSpec
    expert: ExpertSpec
    shared_expert: SharedExpertSpec | None
    # null: all layers are a decoder's
    encoder: EncoderSpec | None = added(None)  # noqa: RUF009  # a field, whose default is None
    # stands in place of attention in some layers
    mixer: "parts.MixerSpec | None" = added(None)  # noqa: RUF009  # as text: its face imports it for a model that has one
    # layers with attention, or experts, alone; null: all have both
    halves: "parts.HalvesSpec | None" = added(None)  # noqa: RUF009
    others: tuple[OtherAttentionSpec, ...] = added(())  # layers whose attention or rope are not those above
    # how the halves of layers read and change the hidden state; null: they add to it
    residual: ResidualSpec | None = added(None)  # noqa: RUF009
    logits_softcap: float | None = added(None)  # bounds logits: `cap * tanh(logits / cap)`; null: no bound
    # adds rows of tables on the disk before the first half of some layers
    ngrams: "parts.NgramSpec | None" = added(None)  # noqa: RUF009

    @property
    def stream_width(self) -> int:
        """The values of a token's hidden state between layers."""
        return self.hidden_size * (1 if self.residual is None else self.residual.streams)

    def attention_kind(self, layer: int) -> int:
        """Returns the place of a layer's attention and rotary positions in `attention_kinds`."""
        return next((idx for idx, other in enumerate(self.others, 1) if layer in other.layers), 0)

    @property
    def attention_kinds(self) -> tuple[tuple[AttentionSpec, RopeSpec | None], ...]:
        """The kinds of attention in the model with their rotary positions, the most layers' first, then `others`."""
        return ((self.attention, self.rope), *((other.attention, other.rope) for other in self.others))

    def attention_of(self, layer: int) -> AttentionSpec:
        """Returns the attention of a layer."""
        return self.attention_kinds[self.attention_kind(layer)][0]

    def rope_of(self, layer: int) -> RopeSpec | None:
        """Returns the rotary positions of a layer; None if it does not rotate."""
        return self.attention_kinds[self.attention_kind(layer)][1]

    def expert_function(self, layer_idx: int) -> NeuronFunction:
        """Returns the neuron function of the routed experts of a MoE layer, counted from 0."""
        return self.expert.routed_function(self.moe_layers[layer_idx])

    def has_first(self, layer: int) -> bool:
        """Returns whether a layer has its first half, attention or a mixer."""
        return self.halves is None or layer not in self.halves.second

    def has_second(self, layer: int) -> bool:
        """Returns whether a layer has its second half, experts or a dense expert."""
        return self.halves is None or layer not in self.halves.first

    def indexer_of(self, layer: int) -> latent.IndexerSpec | None:
        """Returns the indexer that chooses the positions of a layer's latent attention; None if it attends to all."""
        attention, has_attention = self.attention_of(layer), self.has_first(layer) and self.mixer_of(layer) is None
        return attention.indexer if has_attention and isinstance(attention, latent.LatentSpec) else None

    def chooser_of(self, layer: int) -> int | None:
        """Returns the earlier layer whose indexer chose the positions that a layer attends to; None if none did."""
        indexer = self.indexer_of(layer)
        if indexer is None or not indexer.shared:
            return None
        before = ((each, self.indexer_of(each)) for each in range(layer - 1, -1, -1))
        return next(each for each, found in before if found is not None and not found.shared)

    @property
    def shared_choosers(self) -> frozenset[int]:
        """The layers whose indexers choose positions for later layers too."""
        choosers = map(self.chooser_of, range(self.num_hidden_layers))
        return frozenset(chooser for chooser in choosers if chooser is not None)

    @property
    def needs_ids(self) -> bool:
        """Whether some layers depend on the tokens themselves, not on hidden states alone."""
        return self.ngrams is not None or bool(self.router.table_layers)

    def mixer_of(self, layer: int) -> "parts.MixerSpec | None":
        """Returns the mixer of a layer; None if the layer has attention."""
        return self.mixer if self.mixer is not None and layer in self.mixer.layers else None

    def ngrams_of(self, layer: int) -> "parts.NgramSpec | None":
        """Returns the n-gram embeddings of a layer; None if it adds none."""
        return self.ngrams if self.ngrams is not None and layer in self.ngrams.layers else None

    @property
    def rotation(self) -> RopeSpec:
        """The rotary positions, if attention is rotary."""
        assert self.rope is not None, "GPUs run models with rotary positions alone"
        return self.rope

    def of_layers(self, first: int, last: int) -> Self:
        return replace(part.of_layers(self, first, last), num_hidden_layers=last - first)

    def lacks(self, runner: part.Runner) -> Iterator[str]:
        if runner == "gpu" and self.encoder is not None:
            yield "an encoder"
        kinds = dict.fromkeys(
            attention.kind for attention, _ in self.attention_kinds if attention.is_unknown_to(runner)
        )
        yield from (f"{kind} attention" for kind in kinds)
        given = (self.rope, self.ngrams, self.norm, self.router, self.residual, self.mixer, self.expert)
        for each in given:
            if each is not None:
                yield from each.lacks(runner)
        yield from self.attention.lacks(runner)


def first_moe_layers(spec: ModelSpec) -> tuple[int, ...]:
    """Returns the MoE layers, counted from 0, that are the first of their stack: no layer predicts their experts."""
    begins = (0,) if spec.encoder is None else (0, spec.encoder.num_layers)
    stacks = [sum(layer >= begin for begin in begins) for layer in spec.moe_layers]
    return tuple(idx for idx, stack in enumerate(stacks) if idx == 0 or stack != stacks[idx - 1])


def selector_matrices(selector: Selector, matrices: tuple[Matrix, ...]) -> tuple[Matrix, ...]:
    """Returns those of an expert's `matrices` that are in the selector, in the order gate, up, down."""
    selected: dict[Selector, tuple[Matrix, ...]]
    selected = {"up": ("up",), "gate": ("gate",), "both": ("gate", "up"), "none": ()}
    return tuple(matrix for matrix in MATRICES if matrix in selected[selector] and matrix in matrices)


def record_matrices(selector: Selector, matrices: tuple[Matrix, ...]) -> tuple[Matrix, ...]:
    """Returns those of an expert's `matrices` that are in the records, in the order gate, up, down."""
    selected = selector_matrices(selector, matrices)
    return tuple(matrix for matrix in MATRICES if matrix in matrices and matrix not in selected)


def dense_roles(spec: ModelSpec) -> tuple[part.DenseRole, ...]:
    """Returns every dense tensor that the model runs, in the order of `dense.safetensors`."""
    roles = [part.DenseRole("embed", (spec.vocab_size, spec.hidden_size), True)]
    moe_layers = frozenset(spec.moe_layers)
    num_encoding = 0 if spec.encoder is None else spec.encoder.num_layers
    for i in range(spec.num_hidden_layers):
        layer = _layer(spec, i, i in moe_layers, spec.encoder is not None and i >= num_encoding)
        roles += _under(f"layers.{i}.", layer)
    for stack in ("",) if spec.encoder is None else ("encoder_", ""):
        roles += _under(stack, spec.attention.stack_roles())
    if spec.encoder is not None:
        roles += spec.norm.roles("encoder_norm", spec.hidden_size)
    roles += (spec.residual or PLAIN).final_roles(spec.hidden_size, spec.norm)
    if not spec.tied_head:
        roles.append(part.DenseRole("head", (spec.vocab_size, spec.hidden_size), True))
    if spec.head_bias:
        roles.append(part.DenseRole("head_bias", (spec.vocab_size,), False))
    return tuple(roles)


def usual_dtypes(spec: ModelSpec) -> tuple[str, ...]:
    """Returns a safetensors dtype for each of `dense_roles`, for a model of which only the dimensions are known."""
    return tuple("I32" if role.integers else "BF16" for role in dense_roles(spec))


def _layer(spec: ModelSpec, layer: int, has_experts: bool, is_crossing: bool) -> Iterator[part.DenseRole]:
    if (ngrams := spec.ngrams_of(layer)) is not None:
        yield from _under("ngrams.", ngrams.roles(spec.hidden_size, spec.stream_width, spec.norm.offset))
    if spec.has_first(layer):
        yield from _first_half(spec, layer, is_crossing)
    if not spec.has_second(layer):
        return
    yield from (spec.residual or PLAIN).half_roles("mlp", has_experts, spec.hidden_size, spec.norm)
    if not has_experts:
        assert spec.dense_intermediate_size is not None, "a checked spec"
        yield from _mlp(spec, "mlp", spec.dense_intermediate_size)
        return
    yield from spec.router.roles(spec.hidden_size, spec.vocab_size, layer)
    if spec.shared_expert is not None:
        yield from _mlp(spec, "shared", spec.shared_expert.intermediate_size)
        if spec.shared_expert.gated:
            yield part.DenseRole("shared_router", (1, spec.hidden_size), False)


def _first_half(spec: ModelSpec, layer: int, is_crossing: bool) -> Iterator[part.DenseRole]:
    mixer, attention = spec.mixer_of(layer), spec.attention_of(layer)
    yield from (spec.residual or PLAIN).half_roles("attention", False, spec.hidden_size, spec.norm)
    if mixer is not None:
        yield from _under("mixer.", mixer.roles(spec.hidden_size))
        return
    yield from _under("attention.", attention.roles(spec.hidden_size, spec.norm.offset))
    if is_crossing:
        yield from spec.norm.roles("cross_norm", spec.hidden_size)
        yield from _under("cross.", attention.roles(spec.hidden_size, spec.norm.offset))


def _under(prefix: str, roles: Iterator[part.DenseRole]) -> Iterator[part.DenseRole]:
    return (replace(role, name=f"{prefix}{role.name}") for role in roles)


def _mlp(spec: ModelSpec, name: str, intermediate_size: int) -> Iterator[part.DenseRole]:
    d, f = spec.hidden_size, intermediate_size
    for matrix in spec.expert.matrices:
        yield part.DenseRole(f"{name}.{matrix}", (d, f) if matrix == "down" else (f, d), True)


def num_parameters(spec: ModelSpec) -> int:
    """Returns the number of all weights: dense (a tied head counts once), of n-gram tables, and of all experts."""
    tables = 0 if spec.ngrams is None else sum(spec.ngrams.num_rows) * spec.ngrams.row_values
    return tables + _dense_parameters(spec) + len(spec.moe_layers) * spec.router.num_experts * _expert_parameters(spec)


def num_active_parameters(spec: ModelSpec) -> int:
    """Returns the weights that one token uses: all dense ones, its rows of n-gram tables, `k` experts a MoE layer."""
    rows = 0 if spec.ngrams is None else len(spec.ngrams.layers) * spec.ngrams.embed_dim
    experts = len(spec.moe_layers) * spec.router.num_experts_per_tok
    return rows + _dense_parameters(spec) + experts * _expert_parameters(spec)


def cached_values(spec: ModelSpec) -> int:
    """Returns the values that a token adds to the key-value cache, in all layers (those with a window drop old ones).

    With an encoder, each token of the text and of the answer adds so many to the decoder's layers.
    """
    if spec.encoder is not None:
        return 2 * (spec.num_hidden_layers - spec.encoder.num_layers) * spec.attention.cached_width
    return sum(spec.attention_of(layer).cached_width for layer in attending(spec))


def attending(spec: ModelSpec) -> list[int]:
    """Returns the layers with attention."""
    return [i for i in range(spec.num_hidden_layers) if spec.has_first(i) and spec.mixer_of(i) is None]


def num_dense_layers(spec: ModelSpec) -> int:
    """Returns the number of layers with a dense expert instead of routed ones."""
    return sum(map(spec.has_second, range(spec.num_hidden_layers))) - len(spec.moe_layers)


def state_values(spec: ModelSpec) -> int:
    """Returns the values in the states of all mixers and n-grams, float32, whatever the length of the text."""
    mixers = 0 if spec.mixer is None else len(spec.mixer.layers) * spec.mixer.state.num_values
    if spec.ngrams is None:
        return mixers
    return mixers + len(spec.ngrams.layers) * spec.ngrams.state(spec.stream_width).num_values


def cache_values(spec: ModelSpec, context_tokens: int, chunk_tokens: int) -> int:
    """Returns the values of a key-value cache for so many tokens, of which at most `chunk_tokens` enter at once."""
    if spec.encoder is not None:
        return context_tokens * cached_values(spec)
    return sum(
        spec.attention_of(layer).cache_values(
            cached_tokens(spec, layer, context_tokens, chunk_tokens), context_tokens, chunk_tokens
        )
        for layer in range(spec.num_hidden_layers)
    )


def cached_tokens(spec: ModelSpec, layer: int, context_tokens: int, chunk_tokens: int) -> int:
    """Returns the tokens that a decoder layer caches: all, or with a window the chunk and what its first token sees.

    A layer without attention caches none.
    """
    if spec.mixer_of(layer) is not None or not spec.has_first(layer):
        return 0
    window = spec.attention_of(layer).window(layer)
    return context_tokens if window is None else min(context_tokens, window - 1 + chunk_tokens)


def _dense_parameters(spec: ModelSpec) -> int:
    return sum(math.prod(role.shape) for role in dense_roles(spec) if not role.integers)


def _expert_parameters(spec: ModelSpec) -> int:
    expert = spec.expert
    neuron = spec.hidden_size * len(expert.matrices) + len(expert.row_bias)
    return expert.source_size * neuron + expert.extra_floats


def with_repeats(spec: ModelSpec, repeats: int) -> ModelSpec:
    """Returns the spec of a pack in which so many neurons of each expert have two rows; 0: the source's spec."""
    size = spec.expert.source_size + repeats
    return replace(spec, expert=replace(spec.expert, intermediate_size=size, repeats=repeats))


# Limits, so that a hostile config cannot make us enumerate much. The largest published model has 31k experts in 128
# layers. With these sizes, the bytes of a row fit 32 bits, and those of an expert 64.
MAX_LAYERS = 10_000
MAX_EXPERTS = 1_000_000
MAX_HIDDEN_SIZE = 2**24
MAX_MATRIX_WEIGHTS = 2**40


def spec_fault(spec: ModelSpec) -> str | None:
    """Returns why `spec` does not describe a model that can run, or None."""
    return (
        _sizes_fault(spec)
        or _layers_fault(spec)
        or _numbers_fault(spec)
        or attention_fault(spec.attention, spec.rope, spec.num_hidden_layers)
        or _encoder_fault(spec)
        or _mixer_fault(spec)
        or rope_fault(spec.rope, spec.attention)
        or others_fault(spec.others, spec.attention, attending(spec), spec.num_hidden_layers)
        or _choices_fault(spec)
        or _residual_fault(spec)
        or _ngrams_fault(spec)
        or spec.router.fault(spec.moe_layers, spec.encoder is not None)
        or _expert_fault(spec.expert, spec.hidden_size)
        or _limits_fault(spec.expert, spec.num_hidden_layers)
    )


def _sizes_fault(spec: ModelSpec) -> str | None:
    sizes = {
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "num_hidden_layers": spec.num_hidden_layers,
        "max_position_embeddings": spec.max_position_embeddings,
        "dense_intermediate_size": spec.dense_intermediate_size,
        "rotary_dim": spec.rope.rotary_dim if spec.rope else None,
        "num_experts": spec.router.num_experts,
        "num_experts_per_tok": spec.router.num_experts_per_tok,
        "n_group": spec.router.n_group,
        "topk_group": spec.router.topk_group,
        "router capacity": spec.router.capacity,
        "intermediate_size": spec.expert.intermediate_size,
        "shared intermediate_size": spec.shared_expert.intermediate_size if spec.shared_expert else None,
    } | spec.attention.sizes
    if (fault := part.sizes_fault(sizes)) is not None:
        return fault
    if spec.num_hidden_layers > MAX_LAYERS:
        return f"num_hidden_layers is {spec.num_hidden_layers}, at most {MAX_LAYERS}"
    if len(spec.moe_layers) * spec.router.num_experts > MAX_EXPERTS:
        return f"{len(spec.moe_layers)} layers of {spec.router.num_experts} experts, at most {MAX_EXPERTS} in all"
    if spec.hidden_size > MAX_HIDDEN_SIZE or spec.hidden_size * spec.expert.intermediate_size > MAX_MATRIX_WEIGHTS:
        return f"expert matrices of {spec.expert.intermediate_size} by {spec.hidden_size} are too large"
    if spec.hidden_size % 64:
        return f"hidden_size is {spec.hidden_size}, expected a multiple of 64 (codes lie in blocks of 64)"
    return None


def _layers_fault(spec: ModelSpec) -> str | None:
    if not spec.moe_layers or not part.are_layers(spec.moe_layers, spec.num_hidden_layers):
        return "moe_layers must list decoder layers, at least one, in rising order"
    if not all(map(spec.has_second, spec.moe_layers)):
        return "moe_layers lists a layer without a second half"
    dense = num_dense_layers(spec)
    if (dense > 0) != (spec.dense_intermediate_size is not None):
        return f"dense_intermediate_size is {spec.dense_intermediate_size}, but {dense} layers have no experts"
    return None


def _numbers_fault(spec: ModelSpec) -> str | None:
    numbers = {
        "embedding_multiplier": spec.embedding_multiplier,
        "residual_multiplier": spec.residual_multiplier,
        "logits_scaling": spec.logits_scaling,
        "router scaling_factor": spec.router.scaling_factor,
        "logits_softcap": spec.logits_softcap,
    }
    return part.numbers_fault({"norm eps": spec.norm.eps}, "1") or part.numbers_fault(numbers)


def _encoder_fault(spec: ModelSpec) -> str | None:
    encoder = spec.encoder
    if encoder is None:
        return None
    if spec.attention.kind != "relative" or spec.others:
        return f"attention is {spec.attention.kind}, but a model with an encoder needs relative"
    if not 0 < encoder.num_layers < spec.num_hidden_layers:
        return f"the encoder has {encoder.num_layers} of {spec.num_hidden_layers} layers, expected some, but not all"
    if spec.router.num_identity:
        return "a model with an encoder cannot have num_identity"
    if not 0 <= encoder.start_token < spec.vocab_size:
        return f"start_token is {encoder.start_token}, expected 0 to {spec.vocab_size - 1}"
    return None


def _mixer_fault(spec: ModelSpec) -> str | None:
    if spec.mixer is not None and spec.encoder is not None:
        return "a model with an encoder cannot have a mixer in place of attention"
    is_grouped = all(attention.kind == "grouped_query" for attention, _ in spec.attention_kinds)
    if spec.norm.unbiased and spec.norm.kind != "layer":
        return f"a norm that is unbiased needs kind layer, found {spec.norm.kind}"
    if spec.norm.zero_centered and (spec.norm.kind != "rms" or not is_grouped):
        return f"a zero-centered norm needs kind rms and grouped_query attention, found {spec.norm.kind}"
    if spec.halves is not None and (fault := spec.halves.fault(spec.num_hidden_layers)) is not None:
        return fault
    if spec.mixer is not None and not all(map(spec.has_first, spec.mixer.layers)):
        return "mixer layers list a layer without a first half"
    return None if spec.mixer is None else spec.mixer.fault(spec.num_hidden_layers)


def _residual_fault(spec: ModelSpec) -> str | None:
    residual = spec.residual
    if residual is None:
        return None
    if spec.encoder is not None or spec.halves is not None:
        return f"a {residual.kind} residual needs layers with both halves, and no encoder"
    facts = ModelFacts(
        num_layers=spec.num_hidden_layers,
        moe_layers=spec.moe_layers,
        norm=spec.norm,
        multiplier=spec.residual_multiplier,
        has_mixer=spec.mixer is not None,
        has_shared_expert=spec.shared_expert is not None,
        weighs_inputs=spec.router.on_input,
    )
    return residual.fault(facts)


def _choices_fault(spec: ModelSpec) -> str | None:
    chooser: latent.IndexerSpec | None = None
    for layer in range(spec.num_hidden_layers):
        indexer = spec.indexer_of(layer)
        if indexer is not None and indexer.shared and chooser != replace(indexer, shared=False):
            return f"layer {layer} shares the choice of an indexer, but the layers before it have no such indexer"
        chooser = chooser if indexer is None or indexer.shared else indexer
    return None


def _ngrams_fault(spec: ModelSpec) -> str | None:
    if spec.ngrams is None:
        return None
    if spec.encoder is not None or spec.norm.kind != "rms":
        return f"ngrams need a model without an encoder and a norm of kind rms, found {spec.norm.kind}"
    if spec.residual is not None and spec.residual.kind in ("shortcut", "parallel"):
        return f"ngrams cannot enter a {spec.residual.kind} residual"
    return spec.ngrams.fault(spec.num_hidden_layers, spec.stream_width, spec.vocab_size)


def _expert_fault(expert: ExpertSpec, hidden_size: int) -> str | None:
    ordered = tuple(matrix for matrix in MATRICES if matrix in expert.matrices)
    if expert.matrices != ordered or "up" not in ordered or "down" not in ordered:
        return f"expert matrices are {expert.matrices}, expected ('gate', 'up', 'down') or ('up', 'down')"
    if expert.function in ("clamped_swiglu", "clipped_silu", "capped_silu") and "gate" not in ordered:
        return f"expert function {expert.function} needs a gate"
    if expert.bias != tuple(m for m in MATRICES if m in expert.bias and m in ordered):
        return f"expert bias names {expert.bias}, expected some of {expert.matrices} in this order"
    if not 0 <= expert.repeats <= expert.intermediate_size // 2:
        return f"expert repeats is {expert.repeats}, expected 0 to half of the {expert.intermediate_size} rows"
    expected = hidden_size if "down" in expert.bias else 0
    if expert.extra_floats != expected:
        return f"extra_floats is {expert.extra_floats}, expected {expected}, the number of values in the bias of down"
    return None


def _limits_fault(expert: ExpertSpec, num_layers: int) -> str | None:
    if (expert.function in ("clipped_silu", "capped_silu")) != bool(expert.limits):
        return f"expert function {expert.function} with {len(expert.limits)} limits; clipped and capped ones need some"
    listed = [layer for limit in expert.limits for layer in limit.layers or ()]
    whole = any(limit.layers is None for limit in expert.limits)
    if len(set(listed)) < len(listed) or (whole and len(expert.limits) > 1):
        return "expert limits must list each layer once at most"
    for limit in expert.limits:
        if limit.layers is not None and (not limit.layers or not part.are_layers(limit.layers, num_layers)):
            return "expert limits must list decoder layers, at least one each, in rising order"
        given = [bound for bound in (limit.routed, limit.unrouted) if bound is not None]
        if not given or not all(0 < bound < 1e6 for bound in given):
            return f"expert limits are {limit.routed} and {limit.unrouted}, expected one at least, between 0 and 1e6"
    return None
