"""Which specs describe a model that can run: sizes in range, heads and groups that divide, layers that exist.

The same check guards a foreign `config.json` and a pack's manifest; docs/format.md lists it in section 12.
"""

from itertools import pairwise

from moe_pack.formats.spec import (
    MATRICES,
    PROJECTIONS,
    AttentionSpec,
    ExpertSpec,
    GroupedQuerySpec,
    LatentSpec,
    LongRopeSpec,
    ModelSpec,
    RelativeSpec,
    RopeSpec,
    RouterSpec,
    YarnSpec,
)

MAX_LAYERS = 10_000  # with MAX_EXPERTS keeps what a hostile config makes us enumerate small;
MAX_EXPERTS = 1_000_000  # the largest published model has 31k experts in 128 layers
MAX_HIDDEN_SIZE = 2**24  # bytes of a row fit 32 bits,
MAX_MATRIX_WEIGHTS = 2**40  # bytes of an expert 64
MAX_BUCKETS = 2**16


def spec_fault(spec: ModelSpec) -> str | None:
    """Why `spec` describes no model that can run, or None."""
    return (
        _sizes_fault(spec)
        or _layers_fault(spec)
        or _numbers_fault(spec)
        or _attention_fault(spec)
        or _encoder_fault(spec)
        or _rope_fault(spec.rope, spec.attention)
        or _router_fault(spec.router)
        or _expert_fault(spec.expert, spec.hidden_size)
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
    } | _attention_sizes(spec)
    for name, size in sizes.items():
        if size is not None and not 0 < size < 2**31:
            return f"{name} is {size}, expected 1 to 2^31 - 1"
    if spec.num_hidden_layers > MAX_LAYERS:
        return f"num_hidden_layers is {spec.num_hidden_layers}, at most {MAX_LAYERS}"
    if len(spec.moe_layers) * spec.router.num_experts > MAX_EXPERTS:
        return f"{len(spec.moe_layers)} layers of {spec.router.num_experts} experts, at most {MAX_EXPERTS} in all"
    if spec.hidden_size > MAX_HIDDEN_SIZE or spec.hidden_size * spec.expert.intermediate_size > MAX_MATRIX_WEIGHTS:
        return f"expert matrices of {spec.expert.intermediate_size} by {spec.hidden_size} are too large"
    if spec.hidden_size % 64:
        return f"hidden_size is {spec.hidden_size}, expected a multiple of 64 (codes lie in blocks of 64)"
    return None


def _attention_sizes(spec: ModelSpec) -> dict[str, int | None]:
    attention = spec.attention
    names: tuple[str, ...]
    if isinstance(attention, GroupedQuerySpec):
        names = ("num_heads", "num_kv_heads", "head_dim", "sliding_window")
    elif isinstance(attention, RelativeSpec):
        names = ("num_heads", "head_dim", "num_buckets", "max_distance")
    else:
        names = ("num_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {name: getattr(attention, name) for name in names}


def _layers_fault(spec: ModelSpec) -> str | None:
    if not spec.moe_layers or not _are_layers(spec.moe_layers, spec.num_hidden_layers):
        return "moe_layers does not name decoder layers, at least one, in rising order"
    dense = spec.num_hidden_layers - len(spec.moe_layers)
    if (dense > 0) != (spec.dense_intermediate_size is not None):
        return f"dense_intermediate_size is {spec.dense_intermediate_size} with {dense} layers without experts"
    return None


def _are_layers(layers: tuple[int, ...], num_layers: int) -> bool:
    return all(low < high for low, high in pairwise((-1, *layers, num_layers)))


def _numbers_fault(spec: ModelSpec) -> str | None:
    if not 0 < spec.norm.eps < 1:
        return f"norm eps is {spec.norm.eps}, expected between 0 and 1"
    if isinstance(spec.attention, LatentSpec) and not 0 < spec.attention.lora_norm_eps < 1:
        return f"lora_norm_eps is {spec.attention.lora_norm_eps}, expected between 0 and 1"
    positive = {
        "embedding_multiplier": spec.embedding_multiplier,
        "residual_multiplier": spec.residual_multiplier,
        "logits_scaling": spec.logits_scaling,
        "attention scale": spec.attention.scale,
        "router scaling_factor": spec.router.scaling_factor,
    }
    for name, number in positive.items():
        if not 0 < number < 1e6:
            return f"{name} is {number}, expected between 0 and 1e6"
    return None


def _attention_fault(spec: ModelSpec) -> str | None:
    attention = spec.attention
    if isinstance(attention, LatentSpec):
        return None
    if isinstance(attention, RelativeSpec):
        return _relative_fault(attention)
    if attention.num_heads % attention.num_kv_heads:
        return f"{attention.num_heads} heads cannot share {attention.num_kv_heads} keys and values"
    if attention.bias != tuple(name for name in PROJECTIONS if name in attention.bias):
        return f"attention bias names {attention.bias}, expected some of {PROJECTIONS} in that order"
    windowed = attention.windowed_layers
    if windowed is None:
        return None
    if attention.sliding_window is None:
        return "windowed_layers is given without a sliding_window"
    if not windowed or not _are_layers(windowed, spec.num_hidden_layers) or len(windowed) == spec.num_hidden_layers:
        return "windowed_layers does not name some decoder layers, at least one and not all, in rising order"
    return None


def _relative_fault(attention: RelativeSpec) -> str | None:
    # Half of the buckets are for distances of their own, and there are two directions: the rest grow to max_distance.
    if attention.num_buckets % 4 or attention.num_buckets > MAX_BUCKETS:
        return f"num_buckets is {attention.num_buckets}, expected a multiple of 4 up to {MAX_BUCKETS}"
    if attention.max_distance <= attention.num_buckets // 2:
        return f"max_distance is {attention.max_distance}, expected more than half of {attention.num_buckets} buckets"
    return None


def _encoder_fault(spec: ModelSpec) -> str | None:
    encoder = spec.encoder
    if encoder is None:
        return None
    if not isinstance(spec.attention, RelativeSpec):
        return f"an encoder with {spec.attention.kind} attention, expected relative"
    if not 0 < encoder.num_layers < spec.num_hidden_layers:
        return f"an encoder of {encoder.num_layers} layers out of {spec.num_hidden_layers}, expected some, but not all"
    if not 0 <= encoder.start_token < spec.vocab_size:
        return f"start_token is {encoder.start_token}, expected one of {spec.vocab_size} tokens"
    return None


def _rope_fault(rope: RopeSpec | None, attention: AttentionSpec) -> str | None:
    if isinstance(attention, RelativeSpec) or rope is None:
        fits = isinstance(attention, RelativeSpec) and rope is None
        return None if fits else f"{attention.kind} attention {'without' if rope is None else 'with'} rope"
    width = attention.head_dim if isinstance(attention, GroupedQuerySpec) else attention.qk_rope_head_dim
    if rope.rotary_dim % 2 or rope.rotary_dim > width:
        return f"rotary_dim is {rope.rotary_dim}, expected an even number up to {width}"
    if isinstance(attention, LatentSpec) and rope.rotary_dim != width:
        return f"rotary_dim is {rope.rotary_dim}, expected qk_rope_head_dim, {width}"
    if not 1 < rope.theta < 1e12:
        return f"rope theta is {rope.theta}, expected between 1 and 1e12"
    if isinstance(rope.scaling, YarnSpec):
        return _yarn_fault(rope.scaling)
    if isinstance(rope.scaling, LongRopeSpec):
        return _longrope_fault(rope.scaling, rope.rotary_dim)
    return None


def _yarn_fault(yarn: YarnSpec) -> str | None:
    if not 0 < yarn.original_max_position_embeddings < 2**31:
        return f"original_max_position_embeddings is {yarn.original_max_position_embeddings}"
    if not 1 <= yarn.factor < 1e6 or not 0 < yarn.attention_factor < 1e6:
        return f"yarn factor {yarn.factor} or attention_factor {yarn.attention_factor} is out of range"
    if not 0 < yarn.beta_slow <= yarn.beta_fast < 1e6:
        return f"yarn beta_slow {yarn.beta_slow} and beta_fast {yarn.beta_fast} are no range"
    return None


def _longrope_fault(longrope: LongRopeSpec, rotary_dim: int) -> str | None:
    if not 0 < longrope.original_max_position_embeddings < 2**31:
        return f"original_max_position_embeddings is {longrope.original_max_position_embeddings}"
    for name, factors in (("short_factor", longrope.short_factor), ("long_factor", longrope.long_factor)):
        if len(factors) != rotary_dim // 2 or not all(0 < factor < 1e6 for factor in factors):
            return f"longrope {name} is not {rotary_dim // 2} numbers between 0 and 1e6"
    if not 0 < longrope.short_mscale < 1e6 or not 0 < longrope.long_mscale < 1e6:
        return f"longrope short_mscale {longrope.short_mscale} or long_mscale {longrope.long_mscale} is out of range"
    return None


def _router_fault(router: RouterSpec) -> str | None:
    if router.num_experts_per_tok > router.num_experts:
        return f"{router.num_experts_per_tok} experts a token out of {router.num_experts}"
    if router.num_experts % router.n_group or router.topk_group > router.n_group:
        return f"{router.topk_group} of {router.n_group} groups of {router.num_experts} experts"
    group_size = router.num_experts // router.n_group
    if router.num_experts_per_tok > router.topk_group * group_size:
        return f"{router.num_experts_per_tok} experts a token out of {router.topk_group} groups of {group_size}"
    grouped = router.kind in ("softmax_topk", "sigmoid_topk")
    if not grouped and (router.n_group > 1 or router.bias or router.normalize):
        return f"a {router.kind} router has no groups, no bias, and weights that are normal already"
    if router.kind == "sigmoid_topk" and router.n_group > 1 and group_size < 2:
        return f"{router.n_group} groups of one expert, where the two best of each decide"
    if router.capacity is not None and (router.kind != "softmax_topk" or router.num_experts_per_tok > 1):
        return f"router capacity is {router.capacity}, which only softmax_topk with one expert a token has"
    if not 0 <= router.jitter < 1 or (router.jitter > 0 and router.kind != "sparsemixer"):
        return f"router jitter is {router.jitter} with {router.kind}"
    return None


def _expert_fault(expert: ExpertSpec, hidden_size: int) -> str | None:
    ordered = tuple(matrix for matrix in MATRICES if matrix in expert.matrices)
    if expert.matrices != ordered or "up" not in ordered or "down" not in ordered:
        return f"expert matrices are {expert.matrices}, expected up and down, with or without gate, in that order"
    if expert.function == "clamped_swiglu" and "gate" not in ordered:
        return f"expert function {expert.function} needs a gate"
    if expert.bias != tuple(m for m in MATRICES if m in expert.bias and m in ordered):
        return f"expert bias names {expert.bias}, expected a part of {expert.matrices}"
    expected = hidden_size if "down" in expert.bias else 0
    if expert.extra_floats != expected:
        return f"extra_floats is {expert.extra_floats}, expected {expected}: the bias of down, where there is one"
    return None
