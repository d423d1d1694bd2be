"""Synthetic packs: a real model's dimensions with random weights, to measure its speed before a download.

Bytes, layout, widths, popularity of experts and the share of neurons that run are as in a pack of the real model. The
text is noise, and the empty source account says so (docs/pack.md, section 10). Weights are drawn as the bytes of a
pack: codes from a fast generator, with scales that keep a model's activations sane.

    x: hidden states of rms 1 after each norm.   gate, up, queries, ...: rows that give activations of deviation 1
    down, attention's output: so small that all layers together turn the hidden state by a few degrees

So the hidden state keeps two parts of the embedding, which the routers read: a constant direction, the same for every
token, and a part of the token's own.

    logit_e = popular_e + own_e . z        z: the token's own part of its normed hidden state, deviation 1 in each row
    own rows of the next layer = C * those of this layer + sqrt(1 - C^2) * new ones, experts renamed

The constant direction has the same value in every dimension. A layer norm without bias would take it away: there its
sign turns every 128 dimensions, as the weights of the norm before a router do. All rows are orthogonal to each other
and to the constant, so that logits are independent. `popular_logits` finds the `popular_e` for a popularity.
"""

import hashlib
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack import formats
from moe_pack.calib.profile import Profile
from moe_pack.convert import encoding, pipeline
from moe_pack.convert.account import PackOrigin, PackRecord
from moe_pack.convert.plan.rotation import check_rotation, with_rotation
from moe_pack.formats import parts
from moe_pack.formats.base import user_number
from moe_pack.formats.base.version import installed_version
from moe_pack.formats.pack import codecs, layouts, manifests, plans
from moe_pack.formats.pack.writer import PackWriter, Step
from moe_pack.formats.parts import specs
from moe_pack.formats.parts.residual import PLAIN
from moe_pack.runtime.model import TORCH, PackedExpert, activations

# The constant part of a normed hidden state, one value in every dimension: a quarter of the state's square.
CONSTANT = 0.5
OWN = math.sqrt(1 - CONSTANT**2)
# Of the embedding: far above the norms' epsilon, and large enough that float16 represents the scales of 8-bit codes.
_HIDDEN_RMS = 32.0
# What attention and experts of all layers add to the hidden state, as a share of it. It is mostly the same for every
# token, which shifts the popularity of experts: at 0.05 by less than a tenth.
_TURN = 0.05
# Of h(g, u) for normal g and u of deviation 1.
_ACTIVE_RMS: dict[formats.NeuronFunction, float] = {
    "silu": 0.5965,  # limits are far above such values
    "clipped_silu": 0.5965,
    "capped_silu": 0.5965,
    "gelu_tanh": 0.6521,
    "relu": 0.7071,
    "relu2": 1.2247,
    "clamped_swiglu": 0.9187,
}
_ROWS_AT_ONCE = 512
_RUN = 128  # columns; the scales of a row are of fewer


@dataclass(frozen=True, slots=True)
class WeightDistribution:
    """A uniform distribution of random weights."""

    mean: float
    deviation: float
    # The mean has another sign in every second run of columns (`turning_signs`); not with every codec.
    turns: bool = False


def turning_signs(num_values: int) -> NDArray[np.float32]:
    """Returns 1 for 128 values, -1 for the next 128, and so on: a constant that no norm takes for the mean."""
    return np.where(np.arange(num_values) // _RUN % 2, -1.0, 1.0).astype(np.float32)


def random_stream(*key: int) -> np.random.BitGenerator:
    """Returns the random bits of a key: a seed and the numbers of an item."""
    return np.random.SFC64(np.random.SeedSequence(key))


def expert_spreads(spec: formats.ModelSpec) -> dict[str, WeightDistribution]:
    """Returns the distributions of the weights of gate, up and down."""
    router = spec.router
    # Router weights from sigmoids that are not normalized add up to at most the number of active experts.
    is_sum = router.kind in ("sigmoid_topk", "sqrtsoftplus_topk", "topk_sigmoid") and not router.normalize
    weight = router.scaling_factor * (router.num_experts_per_tok if is_sum else 1)
    rows = WeightDistribution(0.0, spec.hidden_size**-0.5)
    return {"gate": rows, "up": rows, "down": _down(spec, spec.expert.intermediate_size, weight)}


def dense_spread(spec: formats.ModelSpec, role: parts.DenseRole) -> WeightDistribution:
    """Returns the distribution of the weights of a dense matrix that is not a router."""
    name, num_cols = role.name.rpartition(".")[2], role.shape[1]
    if role.name == "embed":
        size = _hidden_rms(spec) / spec.embedding_multiplier
        # A norm of kind layer subtracts the mean: there `dense_vector` adds the constant, if a bias can add it.
        if spec.norm.has_bias:
            return WeightDistribution(0.0, size)
        return WeightDistribution(size * CONSTANT, size * OWN, turns=spec.norm.kind == "layer")
    if role.name == "head":
        return WeightDistribution(0.0, spec.logits_scaling * num_cols**-0.5)
    if name == "down" and not _is_of_gates(role):
        return _down(spec, num_cols, 1.0)
    if name in ("o", "o_b") or role.name.endswith("ngrams.value"):
        return WeightDistribution(0.0, _branch(spec) * num_cols**-0.5)
    return WeightDistribution(0.0, num_cols**-0.5)


def dense_vector(spec: formats.ModelSpec, role: parts.DenseRole, stream: np.random.BitGenerator) -> NDArray[np.float32]:
    """Returns the values of a norm, a bias, attention sinks or a mixer's vector: float32 [role.shape[0]]."""
    name, num_values = role.name.rpartition(".")[2], role.shape[0]
    before_router = (spec.residual or PLAIN).router_norm
    if role.name == "norm":
        return _last_norm(spec, num_values, stream)
    if name == before_router and spec.norm.kind == "layer":
        return np.full(num_values, OWN, np.float32) if spec.norm.has_bias else turning_signs(num_values)
    if name == f"{before_router}_bias":
        return np.full(num_values, CONSTANT, np.float32)
    if role.name.rpartition(".")[0].endswith(".mixer") and not name.endswith("norm"):
        return _mixer_vector(name, num_values, stream, getattr(spec.mixer, "lower_bound", None) is not None)
    if name in ("attention_post_norm", "mlp_post_norm"):
        return np.full(num_values, _branch(spec) - role.offset, np.float32)
    if _is_of_gates(role):  # gates of a half; streams enter and mix alike, whatever they are
        return np.full(num_values, 2.0 - role.offset if name == "norm" else 0.0, np.float32)
    if name == "router_scale":
        return np.full(num_values, math.sqrt(num_values), np.float32)  # by whose root the router divides
    if role.name.endswith("ngrams.conv"):
        return np.random.Generator(stream).normal(0.0, _branch(spec), num_values).astype(np.float32)
    usual = 0.0 if name.endswith(("bias", "sinks")) else 1.0 - role.offset
    return np.full(num_values, usual, np.float32)


def _is_of_gates(role: parts.DenseRole) -> bool:
    return role.name.rpartition(".")[0].endswith(("streams", "_gates"))


def _hidden_rms(spec: formats.ModelSpec) -> float:
    """Returns the rms of hidden states: 1 where halves read them as they are, or add to what they read."""
    return 1.0 if (spec.residual or PLAIN).is_read_as_is else _HIDDEN_RMS


def _mixer_vector(name: str, num_values: int, stream: np.random.BitGenerator, is_bounded: bool) -> NDArray[np.float32]:
    """Returns the values of a convolution's kernel, or those that decays follow from: states remember some time."""
    generator = np.random.Generator(stream)
    if name.endswith("conv"):
        return generator.normal(0.0, 0.5, num_values).astype(np.float32)
    if is_bounded and name in ("a_log", "dt_bias"):
        return np.full(num_values, -4.0 if name == "dt_bias" else 0.0, np.float32)
    if name == "a_log":
        return generator.uniform(-4.0, -1.0, num_values).astype(np.float32)
    return np.zeros(num_values, np.float32)


def _last_norm(spec: formats.ModelSpec, num_values: int, stream: np.random.BitGenerator) -> NDArray[np.float32]:
    """Returns random signs: otherwise a head that is the embedding would always predict the token before."""
    signs = np.random.Generator(stream).integers(0, 2, num_values) * 2 - 1
    size = 1.0
    if spec.tied_head:
        embedding = dense_spread(spec, parts.DenseRole("embed", (spec.vocab_size, num_values), True))
        size = spec.logits_scaling / (embedding.deviation * math.sqrt(num_values))
    return (signs * size - (1.0 if spec.norm.zero_centered else 0.0)).astype(np.float32)


def _branch(spec: formats.ModelSpec) -> float:
    """Returns the rms that attention, or the experts, of a layer add, before the residual multiplier."""
    return _hidden_rms(spec) * _TURN / math.sqrt(2 * spec.num_hidden_layers) / spec.residual_multiplier


def _down(spec: formats.ModelSpec, num_neurons: int, weight: float) -> WeightDistribution:
    return WeightDistribution(
        0.0, _branch(spec) / (weight * _ACTIVE_RMS[spec.expert.function] * math.sqrt(num_neurons))
    )


def random_rows(
    layout: formats.RowLayout, num_rows: int, spreads: Mapping[str, WeightDistribution], stream: np.random.BitGenerator
) -> NDArray[np.uint8]:
    """Returns rows with their CRCs, u8 [num_rows, row_bytes]; `spreads` has the distribution of each part's weights."""
    words = stream.random_raw(num_rows * layout.row_bytes // 8)  # a row is a multiple of 16 bytes
    assert isinstance(words, np.ndarray), "an array for a number of words"
    rows = words.astype("<u8", copy=False).view(np.uint8).reshape(num_rows, layout.row_bytes)
    for part in layout.parts:
        section = rows[:, part.offset : part.offset + part.code_bytes]
        scales = rows[:, part.scales_offset : part.bias_offset]
        rows[:, part.bias_offset : part.bias_offset + 4 * part.has_bias] = 0  # no bias
        if part.format.codec == "bf16" or part.format.keeps_source:
            values: NDArray[np.uint8] | NDArray[np.uint16] = even_values(spreads[part.name])
            if part.format.keeps_source:
                values, scale = nearest_codes(part.format, spreads[part.name])
                scales[:] = np.tile(scale, part.format.num_groups(layout.num_cols))
            for start in range(0, num_rows, _ROWS_AT_ONCE):
                block = section[start : start + _ROWS_AT_ONCE]
                block[:] = values[block[:, : part.code_bytes // values.itemsize]].view(np.uint8)
        else:
            stored_scales = trellis_scales if part.format.codec == "trellis" else scales_and_zeros
            scales[:] = stored_scales(part.format, layout.num_cols, spreads[part.name])
    layouts.seal_rows(layout, rows)
    return rows


def random_matrix(
    num_rows: int, num_cols: int, spread: WeightDistribution, stream: np.random.BitGenerator
) -> NDArray[np.uint8]:
    """Returns a random matrix in bfloat16: u8 [num_rows, 2 num_cols]."""
    values = even_values(spread)
    out = np.empty((num_rows, num_cols), np.uint16)
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        num_values = min(_ROWS_AT_ONCE, num_rows - start) * num_cols
        words = stream.random_raw(-(-num_values // 8))
        assert isinstance(words, np.ndarray), "an array for a number of words"
        drawn = words.astype("<u8", copy=False).view(np.uint8)[:num_values]
        out[start : start + _ROWS_AT_ONCE] = values[drawn].reshape(-1, num_cols)
    if spread.turns:
        out[:, turning_signs(num_cols) < 0] ^= 0x8000  # the bit of the sign
    return out.view(np.uint8)


def even_values(spread: WeightDistribution) -> NDArray[np.uint16]:
    """Returns the weight of each of 256 random bytes, as the bits of bfloat16: [256]."""
    return bf16_bits(_even(spread, 256))


def _even(spread: WeightDistribution, count: int) -> NDArray[np.float64]:
    steps = (np.arange(count) - (count - 1) / 2) / math.sqrt((count**2 - 1) / 12)
    return np.asarray(spread.mean + spread.deviation * steps)


def nearest_codes(part: formats.PartFormat, spread: WeightDistribution) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Returns the code for each of 256 random bytes in a format that keeps codes, [256], and a scale's bytes.

    Meaning: the codes nearest to values at equal distances; with the scale, the largest value is the largest code.
    """
    values = torch.from_numpy(_even(spread, 2**part.width))
    largest = float(values.abs().max())
    if part == plans.FP8:
        scale = np.array([largest / 448], "<f4")
        codes = (values / float(scale[0])).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return codes, scale.view(np.uint8)
    top = 57344.0 if part == plans.E5M2 else 6.0
    exponent = math.ceil(math.log2(largest / top))
    scaled, stored = values * 2.0**-exponent, np.array([exponent + 127], np.uint8)
    if part == plans.E5M2:
        return scaled.to(torch.float8_e5m2).view(torch.uint8).numpy(), stored
    numbers = codecs.e2m1_values(torch.arange(16, dtype=torch.uint8)).double()
    nearest = (scaled[:, None] - numbers).abs().argmin(dim=1).to(torch.uint8).numpy()
    pairs = np.arange(256)
    return nearest[pairs & 15] | nearest[pairs >> 4] << 4, stored


def bf16_bits(values: NDArray[np.floating]) -> NDArray[np.uint16]:
    """Returns the bits of the nearest bfloat16 of each value, little-endian."""
    rounded = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    return np.ascontiguousarray(rounded.view(torch.uint16).numpy().astype("<u2"))


def trellis_scales(part: formats.PartFormat, num_cols: int, spread: WeightDistribution) -> NDArray[np.uint8]:
    """Returns the scales of a trellis's row, u8 [scale_bytes], for weights of the distribution's rms with mean 0."""
    codec = codecs.Trellis(part, num_cols)
    rms = math.sqrt(sum(float(levels.square().mean()) for levels in codecs.trellis_levels(part.width)) / 2)
    scale = math.hypot(spread.mean, spread.deviation) / rms
    return codec.store_scales(torch.full((1, codec.num_groups), scale))[0].numpy()


def scales_and_zeros(part: formats.PartFormat, num_cols: int, spread: WeightDistribution) -> NDArray[np.uint8]:
    """Returns scales and zeros of an affine row, u8 [2 * scale_bytes], for codes with equal probability."""
    codec, top = codecs.affine(part, num_cols), 2**part.width - 1
    scale = spread.deviation / math.sqrt((4**part.width - 1) / 12)
    signs = turning_signs(num_cols)[:: num_cols // codec.num_groups] if spread.turns else np.ones(codec.num_groups)
    scales, zeros = codec.store_scales(
        torch.full((1, codec.num_groups), scale),
        top / 2 - torch.from_numpy(signs).float()[None] * (spread.mean / scale),
    )
    return torch.cat((scales, zeros), dim=1)[0].numpy()


Floats = NDArray[np.float64]

_RANKS, _LOGITS, _ROWS = 1, 2, 3  # keys of random streams
_DRAWS = 16384  # tokens for which logits are drawn
_ROUNDS = 12
_MOST = 0.95  # share of tokens: if all tokens chose an expert, there would be no choice
_LEAST = 0.02  # of an even share: with experts that no token chooses, the model would be a smaller one
_DIGITS = 12  # of a share, behind the point


def skewed_popularity(spec: formats.ModelSpec, skew: float, seed: int) -> Floats:
    """Returns the share of tokens for each expert, [L, E], by Zipf's law: as `r ** -skew`, with drawn ranks r.

    Shares are rounded to `_DIGITS` digits: the last ones of a power depend on the CPU, and plans compare such shares.
    """
    E = spec.router.num_experts
    shares = _shares(np.arange(1.0, E + 1) ** -skew, spec.router.num_experts_per_tok).round(_DIGITS)
    generator = np.random.Generator(random_stream(seed, _RANKS))
    return np.stack([shares[generator.permutation(E)] for _ in spec.moe_layers])


def profiled_popularity(spec: formats.ModelSpec, profile: Profile) -> Floats:
    """Returns the share of the profile's tokens for each expert, [L, E]; PlanError for other layers or experts."""
    profiled = (len(profile.spec.moe_layers), profile.spec.router.num_experts)
    L, E = len(spec.moe_layers), spec.router.num_experts
    if profiled != (L, E):
        raise formats.PlanError(
            f"--profile: found {profiled[0]} layers of {profiled[1]} experts, expected {L} of {E}; "
            "give a profile of the same model, or --layers"
        )
    k = spec.router.num_experts_per_tok
    return np.stack([_shares(profile.statistics(l).tokens.astype(np.float64), k) for l in range(L)])


def _shares(weights: Floats, k: int) -> Floats:
    """Returns shares in proportion to weights; they add up to `k`, and none is above `_MOST` if that is possible."""
    E, most = len(weights), max(_MOST, k / len(weights))
    shares: Floats = np.maximum(weights, _LEAST * weights.mean())
    shares = shares * k / shares.sum()
    for _ in range(E):  # each round gives what the largest have too much to the others
        free = shares < most
        if not (shares > most + 1e-12).any() or not free.any():
            break
        shares = np.where(free, shares, most)
        shares[free] *= (k - most * (E - free.sum())) / shares[free].sum()
    return shares


def popular_logits(shares: Floats, router: formats.RouterSpec, seed: int) -> Floats:
    """Returns the constant logits, [E], with which these shares of tokens, [E], choose experts; shares add up to k."""
    E = len(shares)
    if np.ptp(shares) < 1e-9:
        return np.zeros(E)
    noise = np.random.Generator(random_stream(seed, _LOGITS)).standard_normal((_DRAWS, E), np.float32)
    drawn, target = torch.from_numpy(noise), torch.special.ndtri(torch.from_numpy(shares))
    logits = torch.zeros(E, dtype=torch.float64)
    bias = torch.zeros(E) if router.bias else None
    for _ in range(_ROUNDS):
        chosen, _ = TORCH.route(drawn + logits.to(torch.float32), router, bias)
        drawn_shares = torch.bincount(chosen.flatten(), minlength=E).to(torch.float64) / _DRAWS
        # One round would be enough if the last chosen expert always had the same logit.
        logits += target - torch.special.ndtri(drawn_shares.clamp(0.5 / _DRAWS, 1 - 0.5 / _DRAWS))
        logits -= logits.mean()
    return logits.numpy()


def router_weights(spec: formats.ModelSpec, popularity: Floats, path_correlation: float, seed: int) -> Iterator[Floats]:
    """Yields the router of each MoE layer: [E, d], and with `num_identity` a row for each of these experts.

    Args:    popularity: [L, E], the share of tokens for each expert.   path_correlation: from 0 (a layer's choice
             predicts the next layer's no better than popularity) to 1 (it determines it).
    """
    E, Z, d = spec.router.num_outputs, spec.router.num_identity, spec.hidden_size
    # Experts that return their input are as popular as the mean of the others.
    router = replace(spec.router, num_experts=E, num_identity=0)
    even = np.repeat(popularity.mean(axis=1, keepdims=True), Z, axis=1)
    popularity = np.concatenate((popularity, even), axis=1) * ((E - Z) / E)
    generator = np.random.Generator(random_stream(seed, _ROWS))
    by_shares: dict[bytes, Floats] = {}
    own = np.empty((0, d))
    for shares in popularity:
        # By rank, so that popular experts follow popular experts; in random order among equals.
        by_rank = np.lexsort((generator.random(E), -shares))
        fresh = _fresh_rows(E, own, d, generator)
        own = _unit_rows(path_correlation * own + np.sqrt(1 - path_correlation**2) * fresh) if len(own) else fresh
        rows = np.empty((E, d))
        rows[by_rank] = own / OWN
        # Groups consist of neighbours: with groups, an expert's popularity also depends on its number.
        key = shares if spec.router.n_group > 1 else shares[by_rank]
        if key.tobytes() not in by_shares:
            by_shares[key.tobytes()] = popular_logits(key, router, seed)
        popular = by_shares[key.tobytes()].copy()
        if spec.router.n_group == 1:
            popular[by_rank] = by_shares[key.tobytes()]
        yield rows + popular[:, None] / (CONSTANT * d)


def _fresh_rows(num_rows: int, rows: Floats, d: int, generator: np.random.Generator) -> Floats:
    """Returns random unit rows orthogonal to each other, to `rows` and to the constant, if `d` dimensions allow it."""
    drawn = generator.standard_normal((num_rows, d))
    taken = np.concatenate((np.ones((1, d)), rows))
    if len(taken) + num_rows > d:
        return _unit_rows(drawn - drawn.mean(axis=1, keepdims=True))
    columns, _ = torch.linalg.qr(torch.from_numpy(np.concatenate((taken, drawn)).T))
    return np.ascontiguousarray(columns.numpy().T[len(taken) :])


def _unit_rows(rows: Floats) -> Floats:
    unit: Floats = rows / np.sqrt((rows**2).sum(axis=1, keepdims=True))
    return unit


_MOUNTS = Path("/proc/mounts")
_MEMORY = Path("/proc/meminfo")
_PLACES = ("/dev/shm", "/run/shm", "/tmp")


def link_memory_folder(output: Path, needed_bytes: int) -> Path:
    """Makes `output` a link to a folder in a file system in memory, and returns that folder; both may exist already.

    Raises:  ConversionError if `output` is something else, or there is too little memory or no such file system.
    """
    mounts = [line.split(" ") for line in (_MOUNTS.read_text("utf-8").splitlines() if _MOUNTS.exists() else ())]
    in_memory = {fields[1] for fields in mounts if fields[2] in ("tmpfs", "ramfs")}
    place = next((Path(place) for place in _PLACES if place in in_memory and os.access(place, os.W_OK)), None)
    if place is None:
        raise formats.ConversionError(
            "--in-memory: found no file system in memory to write to (tmpfs at "
            f"{', '.join(_PLACES)}); remove --in-memory"
        )
    name = hashlib.sha256(str(output.absolute()).encode()).hexdigest()[:12]
    folder = place / f"moe-pack-{user_number()}-{name}"
    if output.is_symlink():
        if output.readlink() != folder:
            raise formats.ConversionError(
                f"{output}: is a link to {output.readlink()}, not to a pack in memory; remove it"
            )
    elif output.exists():
        raise formats.ConversionError(
            f"{output}: exists already; --in-memory makes a link of this name; give another --output"
        )
    if folder.is_symlink() or (folder.exists() and folder.stat().st_uid != user_number()):
        raise formats.ConversionError(f"{folder}: belongs to another user; give another --output")
    written_bytes = sum(512 * path.stat().st_blocks for path in folder.iterdir()) if folder.exists() else 0
    _check_free(place, needed_bytes - written_bytes)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if not output.is_symlink():
            output.parent.mkdir(parents=True, exist_ok=True)
            output.symlink_to(folder)
    except OSError as fault:
        raise formats.ConversionError(
            f"{output}: cannot become a link to {folder} ({fault.strerror}); give another --output"
        ) from fault
    return folder


def _check_free(place: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(place).free
    found = f"{place} has {free_bytes:,} bytes free"
    line = re.search(r"^MemAvailable:\s+(\d+) kB", _MEMORY.read_text("utf-8"), re.MULTILINE)
    if free_bytes >= needed_bytes and line:
        free_bytes = 1024 * int(line[1])
        found = f"this machine has {free_bytes:,} bytes of memory free"
    if free_bytes < needed_bytes:
        raise formats.ConversionError(
            f"--in-memory: {found}, expected {needed_bytes:,}; give fewer --layers, or remove --in-memory"
        )


_DENSE, _EXPERT, _SAMPLE, _TABLE = 11, 12, 13, 14  # keys of random streams
_SAMPLE_TOKENS, _SAMPLE_NEURONS = 64, 4096


@dataclass(frozen=True, slots=True, eq=False)
class SyntheticTraits:
    """The properties of a synthetic model other than its dimensions and formats."""

    sparsity: float | Floats  # share of an expert's neurons that do not run, of all experts or float64 [L, E]
    popularity: Floats  # float64 [L, E], the share of tokens that choose each expert
    path_correlation: float  # 0 to 1, how well a token's experts predict those of the next layer
    seed: int
    theta: float | None = None  # one threshold for all experts, in place of shares (CORM)


def synthetic_layout(spec: formats.ModelSpec, plan: formats.Plan) -> formats.PackLayout:
    """Returns the layout of a synthetic pack, bfloat16 where not quantized; PlanError if the plan does not fit."""
    spec, plan = _without_repeats(spec, plan)
    return layouts.pack_layout(spec, plan, specs.usual_dtypes(spec))


def _without_repeats(spec: formats.ModelSpec, plan: formats.Plan) -> tuple[formats.ModelSpec, formats.Plan]:
    """Returns a model and a plan of the same size in which second rows are neurons of their own: rows are random."""
    wider = specs.with_repeats(spec, plan.repeats).expert
    return replace(spec, expert=replace(wider, repeats=0)), replace(plan, repeats=0)


def synthesize(
    spec: formats.ModelSpec,
    plan: formats.Plan,
    traits: SyntheticTraits,
    folder: Path,
    workers: int,
    progress: formats.Progress = formats.NO_PROGRESS,
    on_step: Callable[[Step], None] = lambda step: None,
    rotation: manifests.RotationVectors | None = None,
) -> pipeline.ConversionResult:
    """Writes a synthetic pack into `folder`; continues where a killed run stopped. Same arguments, same bytes.

    Args:    workers, on_step: as for `pipeline.convert`.   rotation: of the layers; random rows are as random in any
             coordinates, so it decides only what the runtime computes.
    Raises:  PlanError if the plan does not fit the model; ConversionError as `convert`.
    """
    torch.set_num_threads(1)
    spec, plan = _without_repeats(spec, plan)
    if rotation is not None:
        check_rotation(rotation, plan, spec)
    layout = with_rotation(synthetic_layout(spec, plan), rotation)
    model = _SyntheticModel(layout, traits)
    decisions = {
        "sparsity": _digest(np.asarray(traits.sparsity)),
        "popularity": _digest(traits.popularity),
        "path_correlation": repr(traits.path_correlation),
        "seed": str(traits.seed),
    }
    if traits.theta is not None:
        decisions["theta"] = repr(traits.theta)
    if rotation is not None:
        decisions["rotation"] = hashlib.sha256(manifests.rotation_bytes(rotation)).hexdigest()
    made_with = tuple(
        manifests.PackageVersion(name, installed_version(name)) for name in ("moe-pack", "numpy", "torch")
    )
    origin = PackOrigin(manifests.NO_SOURCE, (), made_with, decisions)
    account = PackRecord(layout, plan, origin, _thresholds(layout.spec, plan, traits), rotation=rotation)
    writer = PackWriter(folder, layout, account.conversion, stamp="", on_step=on_step)
    work = pipeline.ItemWork(lambda item, _: encoding.MadeItem(model.item_bytes(item)), lambda item: 2 * item.num_bytes)
    return pipeline.write_pack(writer, layout, account, work, workers, progress)


def _digest(values: Floats) -> str:
    return hashlib.sha256(values.astype("<f8").tobytes()).hexdigest()


class _SyntheticModel:
    """Makes the bytes of a synthetic pack's items, each from a random stream of its own."""

    def __init__(self, layout: formats.PackLayout, traits: SyntheticTraits) -> None:
        spec = layout.spec
        self._layout = layout
        self._seed = traits.seed
        self._dense = {dense.role.name: (number, dense) for number, dense in enumerate(layout.dense)}
        weights = router_weights(spec, traits.popularity, traits.path_correlation, traits.seed)
        named = zip(spec.moe_layers, weights, strict=True)
        self._routers = {f"layers.{layer}.router": bf16_bits(rows) for layer, rows in named}

    def item_bytes(self, item: layouts.Item) -> NDArray[np.uint8]:
        """Returns the bytes of a dense tensor, rows of a table or an extent: u8 [item.num_bytes]."""
        if item.kind == "dense":
            number, dense = self._dense[item.role]
            key = (number, item.first_row) if item.first_row else (number,)
            num_rows = item.num_bytes * dense.role.shape[0] // dense.entry.num_bytes
            return self._dense_bytes(dense, num_rows, random_stream(self._seed, _DENSE, *key)).reshape(-1)
        if item.kind == "ngrams":
            stream = random_stream(self._seed, _TABLE, item.layer, item.first_row)
            return _random_table(self._layout.ngrams[item.layer], item, stream)
        expert = self._layout.experts[item.layer][item.expert]
        return _random_extent(self._layout.spec, expert, (self._seed, _EXPERT, item.layer, item.expert))

    def _dense_bytes(
        self, dense: layouts.DenseLayout, num_rows: int, stream: np.random.BitGenerator
    ) -> NDArray[np.uint8]:
        spec, role = self._layout.spec, dense.role
        if role.name in self._routers:
            return self._routers[role.name].view(np.uint8)
        if role.integers:
            return _random_experts(spec, num_rows, stream).view(np.uint8)
        if len(role.shape) == 1:
            return bf16_bits(dense_vector(spec, role, stream)).view(np.uint8)
        spread = dense_spread(spec, role)
        if dense.rows is None:
            return random_matrix(num_rows, role.shape[1], spread, stream)
        return random_rows(dense.rows, num_rows, {"weight": spread}, stream)


def _random_experts(spec: formats.ModelSpec, num_tokens: int, stream: np.random.BitGenerator) -> NDArray[np.int32]:
    """Returns experts for tokens, different ones for each: int32 [num_tokens, k]."""
    drawn = np.random.Generator(stream).random((num_tokens, spec.router.num_experts))
    experts: NDArray[np.int32] = drawn.argsort(axis=1)[:, : spec.router.num_experts_per_tok].astype("<i4")
    return np.ascontiguousarray(experts)


def _random_table(table: layouts.NgramLayout, item: layouts.Item, stream: np.random.BitGenerator) -> NDArray[np.uint8]:
    rows = np.zeros((item.num_bytes // table.rows.row_bytes, table.rows.row_bytes), np.uint8)
    values = random_matrix(len(rows), table.rows.num_cols, WeightDistribution(0.0, 1.0), stream)
    rows[:, : table.rows.crc_offset] = values
    layouts.seal_rows(table.rows, rows)
    return rows.reshape(-1)


def _random_extent(spec: formats.ModelSpec, expert: formats.ExpertLayout, key: tuple[int, ...]) -> NDArray[np.uint8]:
    spreads, stream = expert_spreads(spec), random_stream(*key)
    halves = [random_rows(rows, expert.num_rows, spreads, stream) for rows in (expert.selector, expert.records) if rows]
    if expert.extra is not None:
        halves.append(np.zeros((1, expert.extra.row_bytes), np.uint8))
        layouts.seal_rows(expert.extra, halves[-1])
    return np.concatenate([half.reshape(-1) for half in halves])


def _thresholds(spec: formats.ModelSpec, plan: formats.Plan, traits: SyntheticTraits) -> NDArray[np.float32]:
    """Returns each expert's threshold: theta, or the quantile of `abs(a)` at its sparsity over random tokens: [L, E].

    Experts of equal formats and sparsity have equal thresholds.
    """
    shape = (len(spec.moe_layers), spec.router.num_experts)
    if traits.theta is not None:
        return np.full(shape, traits.theta, np.float32)
    thresholds = np.zeros(shape, np.float32)
    known: dict[tuple[formats.ExpertFormat, formats.NeuronFunction, float], float] = {}
    for (l, e), sparsity in np.ndenumerate(np.broadcast_to(np.asarray(traits.sparsity), shape)):
        key = (plan.experts[l][e], spec.expert_function(l), float(sparsity))
        if sparsity > 0 and key not in known:
            known[key] = _quantile(spec, plan, *key, traits.seed)
        thresholds[l, e] = known[key] if sparsity > 0 else 0.0
    return thresholds


def _quantile(
    spec: formats.ModelSpec,
    plan: formats.Plan,
    expert: formats.ExpertFormat,
    function: formats.NeuronFunction,
    sparsity: float,
    seed: int,
) -> float:
    tokens = _random_tokens(spec, seed)
    layout = layouts.expert_layout(expert, plan.selector, spec.expert, spec.hidden_size)
    samples, number = list[Tensor](), 0
    while sum(sample.shape[1] for sample in samples) < _SAMPLE_NEURONS:
        extent = torch.from_numpy(_random_extent(spec, layout, (seed, _SAMPLE, number)))
        for block in PackedExpert(layout, extent).blocks():
            samples.append(activations(tokens, block, function).of(plan.selector).abs())
        number += 1
    return float(np.quantile(torch.cat(samples, dim=1).numpy(), sparsity))


def _random_tokens(spec: formats.ModelSpec, seed: int) -> Tensor:
    """Returns normed hidden states, float32 [T, d]: the constant direction plus a part of each token's own."""
    generator = np.random.Generator(random_stream(seed, _SAMPLE))
    own = generator.standard_normal((_SAMPLE_TOKENS, spec.hidden_size))
    return torch.from_numpy((CONSTANT + OWN * own).astype(np.float32))
