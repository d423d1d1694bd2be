"""Random weights in the bytes of a pack: codes from a fast generator, scales that keep a model's activations sane.

    x: hidden states of rms 1 after each norm.   gate, up, queries, ...: rows that give activations of deviation 1
    down, attention's output: so small that all layers together turn the hidden state by a few degrees

The hidden state so keeps what the embedding gave it: a constant direction, the same for every token, and the token's
own part. The routers of `random_routers` read both. A code is any of its values with the same probability, so that the
generator's bytes are the codes; a part's scales and zeros are all alike.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from moe_pack.formats import E5M2, FP8, DenseRole, ModelSpec, NeuronFunction, PartFormat, RowLayout, seal_rows
from moe_pack.formats.codecs import Trellis, affine, e2m1_values, trellis_values

# The constant share of a normed hidden state, one value in every dimension; its square is a quarter of the state's.
CONSTANT = 0.5
OWN = math.sqrt(1 - CONSTANT**2)
# Of the embedding: far above the norms' epsilon, and so far above `_TURN` that float16 holds the scales of 8-bit codes.
_HIDDEN_RMS = 32.0
# What all halves of all layers add to the hidden state, as a share of it. It is mostly the same for every token, which
# shifts the popularity of experts: at 0.05 by less than a tenth.
_TURN = 0.05
# Of h(g, u) for normal g and u of deviation 1.
_ACTIVE_RMS: dict[NeuronFunction, float] = {"silu": 0.5965, "relu": 0.7071, "clamped_swiglu": 0.9187}
_ROWS_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class Spread:
    """How random weights lie: evenly about `mean`, with this standard deviation."""

    mean: float
    deviation: float


def random_stream(*key: int) -> np.random.BitGenerator:
    """The random bits that belong to a key: a seed, and what tells an item from others."""
    return np.random.SFC64(np.random.SeedSequence(key))


def expert_spreads(spec: ModelSpec) -> dict[str, Spread]:
    """How the weights of gate, up and down lie."""
    router = spec.router
    # Weights of sigmoids that nobody divides by their sum add up to the number of experts at most.
    weight = router.scaling_factor * (
        router.num_experts_per_tok if router.kind == "sigmoid_topk" and not router.normalize else 1
    )
    rows = Spread(0.0, spec.hidden_size**-0.5)
    return {"gate": rows, "up": rows, "down": _down(spec, spec.expert.intermediate_size, weight)}


def dense_spread(spec: ModelSpec, role: DenseRole) -> Spread:
    """How the weights of a dense matrix lie; routers are not made here."""
    name, num_cols = role.name.rpartition(".")[2], role.shape[1]
    if role.name == "embed":
        size = _HIDDEN_RMS / spec.embedding_multiplier
        # A norm of kind layer takes the mean away: there `dense_vector` gives the constant.
        return Spread(size * CONSTANT, size * OWN) if spec.norm.kind == "rms" else Spread(0.0, size)
    if role.name == "head":
        return Spread(0.0, spec.logits_scaling * num_cols**-0.5)
    if name == "down":
        return _down(spec, num_cols, 1.0)
    if name == "o":
        return Spread(0.0, _branch(spec) * num_cols**-0.5)
    return Spread(0.0, num_cols**-0.5)


def dense_vector(spec: ModelSpec, role: DenseRole, stream: np.random.BitGenerator) -> NDArray[np.float32]:
    """The values of a norm or a bias, or of sinks, which count as one more position."""
    name, num_values = role.name.rpartition(".")[2], role.shape[0]
    shifts = spec.norm.kind == "layer"
    if role.name == "norm":
        return _last_norm(spec, num_values, stream)
    if name == "mlp_norm" and shifts:
        return np.full(num_values, OWN, np.float32)
    if name == "mlp_norm_bias":
        return np.full(num_values, CONSTANT, np.float32)
    return np.full(num_values, 0.0 if name.endswith(("bias", "sinks")) else 1.0, np.float32)


def _last_norm(spec: ModelSpec, num_values: int, stream: np.random.BitGenerator) -> NDArray[np.float32]:
    """Signs at random: a head that is the embedding would else always foretell the token it has just seen."""
    signs = np.random.Generator(stream).integers(0, 2, num_values) * 2 - 1
    size = 1.0
    if spec.tied_head:
        embedding = dense_spread(spec, DenseRole("embed", (spec.vocab_size, num_values), True))
        size = spec.logits_scaling / (embedding.deviation * math.sqrt(num_values))
    return (signs * size).astype(np.float32)


def _branch(spec: ModelSpec) -> float:
    """The rms of what half a layer gives, before the residual multiplier."""
    return _HIDDEN_RMS * _TURN / math.sqrt(2 * spec.num_hidden_layers) / spec.residual_multiplier


def _down(spec: ModelSpec, num_neurons: int, weight: float) -> Spread:
    return Spread(0.0, _branch(spec) / (weight * _ACTIVE_RMS[spec.expert.function] * math.sqrt(num_neurons)))


def random_rows(
    layout: RowLayout, num_rows: int, spreads: Mapping[str, Spread], stream: np.random.BitGenerator
) -> NDArray[np.uint8]:
    """Whole rows, CRCs and all: u8 [num_rows, row_bytes].

    Args:    spreads: of each part's weights.
    """
    words = stream.random_raw(num_rows * layout.row_bytes // 8)  # a row is a multiple of 16 bytes
    assert isinstance(words, np.ndarray), "an array for a number of words"
    rows = words.astype("<u8", copy=False).view(np.uint8).reshape(num_rows, layout.row_bytes)
    for part in layout.parts:
        held = rows[:, part.offset : part.offset + part.num_bytes + 4 * part.has_bias]
        held[:, part.num_bytes :] = 0  # no bias
        if part.format.codec == "bf16":
            values = even_values(spreads[part.name])
            for start in range(0, num_rows, _ROWS_AT_ONCE):
                block = held[start : start + _ROWS_AT_ONCE]
                block[:, : part.num_bytes] = values[block[:, : layout.num_cols]].view(np.uint8)
        elif part.format.keeps_source:
            codes, scale = nearest_codes(part.format, spreads[part.name])
            num_codes = part.format.code_bytes(layout.num_cols)
            for start in range(0, num_rows, _ROWS_AT_ONCE):
                block = held[start : start + _ROWS_AT_ONCE]
                block[:, :num_codes] = codes[block[:, :num_codes]]
            held[:, num_codes : part.num_bytes] = np.tile(scale, part.format.num_groups(layout.num_cols))
        else:
            ends = trellis_scales if part.format.codec == "trellis" else scales_and_zeros
            held[:, part.format.code_bytes(layout.num_cols) : part.num_bytes] = ends(
                part.format, layout.num_cols, spreads[part.name]
            )
    seal_rows(layout, rows)
    return rows


def random_matrix(num_rows: int, num_cols: int, spread: Spread, stream: np.random.BitGenerator) -> NDArray[np.uint8]:
    """A matrix in bfloat16: u8 [num_rows, 2 num_cols]."""
    values = even_values(spread)
    out = np.empty((num_rows, num_cols), np.uint16)
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        num_values = min(_ROWS_AT_ONCE, num_rows - start) * num_cols
        words = stream.random_raw(-(-num_values // 8))
        assert isinstance(words, np.ndarray), "an array for a number of words"
        drawn = words.astype("<u8", copy=False).view(np.uint8)[:num_values]
        out[start : start + _ROWS_AT_ONCE] = values[drawn].reshape(-1, num_cols)
    return out.view(np.uint8)


def even_values(spread: Spread) -> NDArray[np.uint16]:
    """What each of 256 random bytes stands for, as the bits of bfloat16: [256], evenly spread."""
    return bf16_bits(_even(spread, 256))


def _even(spread: Spread, count: int) -> NDArray[np.float64]:
    """So many values, evenly spread."""
    steps = (np.arange(count) - (count - 1) / 2) / math.sqrt((count**2 - 1) / 12)
    return np.asarray(spread.mean + spread.deviation * steps)


def nearest_codes(part: PartFormat, spread: Spread) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """What each of 256 random bytes is replaced by in a format that keeps sources, [256]; and a scale's bytes.

    Meaning: the codes nearest to values evenly spread, the largest of which the scale makes the largest code.
    """
    values = torch.from_numpy(_even(spread, 2**part.width))
    largest = float(values.abs().max())
    if part == FP8:
        scale = np.array([largest / 448], "<f4")
        codes = (values / float(scale[0])).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return codes, scale.view(np.uint8)
    top = 57344.0 if part == E5M2 else 6.0
    exponent = math.ceil(math.log2(largest / top))
    scaled, stored = values * 2.0**-exponent, np.array([exponent + 127], np.uint8)
    if part == E5M2:
        return scaled.to(torch.float8_e5m2).view(torch.uint8).numpy(), stored
    numbers = e2m1_values(torch.arange(16, dtype=torch.uint8)).double()
    nearest = (scaled[:, None] - numbers).abs().argmin(dim=1).to(torch.uint8).numpy()
    pairs = np.arange(256)
    return nearest[pairs & 15] | nearest[pairs >> 4] << 4, stored


def bf16_bits(values: NDArray[np.floating]) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16 of each value, in the order of a file."""
    rounded = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    return np.ascontiguousarray(rounded.view(torch.uint16).numpy().astype("<u2"))


def trellis_scales(part: PartFormat, num_cols: int, spread: Spread) -> NDArray[np.uint8]:
    """The bytes that end a trellis's row, u8 [scale_bytes]: weights about 0, of the rms that was asked for."""
    codec, rms = Trellis(part, num_cols), float(trellis_values(part.width).square().mean().sqrt())
    scale = math.hypot(spread.mean, spread.deviation) / rms
    return codec.store_scales(torch.full((1, codec.num_groups), scale))[0].numpy()


def scales_and_zeros(part: PartFormat, num_cols: int, spread: Spread) -> NDArray[np.uint8]:
    """The bytes that end a part's row, u8 [2 * scale_bytes], for codes that are all as likely."""
    codec, top = affine(part, num_cols), 2**part.width - 1
    scale = spread.deviation / math.sqrt((4**part.width - 1) / 12)
    scales, zeros = codec.store_scales(
        torch.full((1, codec.num_groups), scale),
        torch.full((1, codec.num_groups), top / 2 - spread.mean / scale),
    )
    return torch.cat((scales, zeros), dim=1)[0].numpy()
