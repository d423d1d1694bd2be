"""Random weights in the bytes of a pack: codes from a fast generator, scales that keep a model's activations sane.

    x: hidden states of rms 1 after each norm.   gate, up, queries, ...: rows that give activations of deviation 1
    down, attention's output: so small that all layers together turn the hidden state by a few degrees

The hidden state so keeps what the embedding gave it: a constant direction, the same for every token, and the token's
own part. The routers of `random_routers` read both. A code is any of its values with the same probability, so that the
generator's bytes are the codes; a part's scales and zeros are all alike.

Routers whose choices are as popular, and as alike from layer to layer, as was asked for.

    logit_e = popular_e + own_e . z        z: the token's own part of its normed hidden state, deviation 1 in each row
    own rows of the next layer = C * those of this layer + sqrt(1 - C^2) * fresh ones, experts renamed

The hidden state has the same value in every dimension beside z (`random_weights`): that is what `popular_e` is read
from. All rows are orthogonal, to each other and to the constant, so that logits are independent. What `popular_e` gives
the popularity asked for is found by drawing logits and letting the router choose.

Folders in memory: a pack in a file system that has no drive, with a link to it where it was asked for.

Synthetic packs: a real model's dimensions, random weights. How fast would it run here, before it is downloaded?

All that decides speed is as in a pack of the real model: bytes, layout, widths, how many neurons run, how popular
experts are. Its text is noise, and its source account, which is empty, says so (docs/format.md, section 10).
"""

import hashlib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.calib.profile import Profile
from moe_pack.convert.account import PackOrigin, PackRecord
from moe_pack.convert.pipeline import ConversionResult, ItemWork, write_pack
from moe_pack.formats import (
    NO_PROGRESS,
    ConversionError,
    ExpertFormat,
    ExpertLayout,
    ModelSpec,
    NeuronFunction,
    PackLayout,
    PartFormat,
    Plan,
    PlanError,
    Progress,
    RouterSpec,
    RowLayout,
    dense_roles,
)
from moe_pack.formats.codecs import Trellis, affine, e2m1_values, trellis_values
from moe_pack.formats.layout import DenseLayout, Item, expert_layout, pack_layout, seal_rows
from moe_pack.formats.manifest import NO_SOURCE, PackageVersion
from moe_pack.formats.plan import E5M2, FP8
from moe_pack.formats.spec import DenseRole
from moe_pack.formats.version import installed_version
from moe_pack.formats.writer import PackWriter, Step
from moe_pack.runtime.model import TORCH, PackedExpert, activations

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
class WeightDistribution:
    """How random weights lie: evenly about `mean`, with this standard deviation."""

    mean: float
    deviation: float


def random_stream(*key: int) -> np.random.BitGenerator:
    """The random bits that belong to a key: a seed, and what tells an item from others."""
    return np.random.SFC64(np.random.SeedSequence(key))


def expert_spreads(spec: ModelSpec) -> dict[str, WeightDistribution]:
    """How the weights of gate, up and down lie."""
    router = spec.router
    # Weights of sigmoids that nobody divides by their sum add up to the number of experts at most.
    weight = router.scaling_factor * (
        router.num_experts_per_tok if router.kind == "sigmoid_topk" and not router.normalize else 1
    )
    rows = WeightDistribution(0.0, spec.hidden_size**-0.5)
    return {"gate": rows, "up": rows, "down": _down(spec, spec.expert.intermediate_size, weight)}


def dense_spread(spec: ModelSpec, role: DenseRole) -> WeightDistribution:
    """How the weights of a dense matrix lie; routers are not made here."""
    name, num_cols = role.name.rpartition(".")[2], role.shape[1]
    if role.name == "embed":
        size = _HIDDEN_RMS / spec.embedding_multiplier
        # A norm of kind layer takes the mean away: there `dense_vector` gives the constant.
        return (
            WeightDistribution(size * CONSTANT, size * OWN)
            if spec.norm.kind == "rms"
            else WeightDistribution(0.0, size)
        )
    if role.name == "head":
        return WeightDistribution(0.0, spec.logits_scaling * num_cols**-0.5)
    if name == "down":
        return _down(spec, num_cols, 1.0)
    if name == "o":
        return WeightDistribution(0.0, _branch(spec) * num_cols**-0.5)
    return WeightDistribution(0.0, num_cols**-0.5)


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


def _down(spec: ModelSpec, num_neurons: int, weight: float) -> WeightDistribution:
    return WeightDistribution(
        0.0, _branch(spec) / (weight * _ACTIVE_RMS[spec.expert.function] * math.sqrt(num_neurons))
    )


def random_rows(
    layout: RowLayout, num_rows: int, spreads: Mapping[str, WeightDistribution], stream: np.random.BitGenerator
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


def random_matrix(
    num_rows: int, num_cols: int, spread: WeightDistribution, stream: np.random.BitGenerator
) -> NDArray[np.uint8]:
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


def even_values(spread: WeightDistribution) -> NDArray[np.uint16]:
    """What each of 256 random bytes stands for, as the bits of bfloat16: [256], evenly spread."""
    return bf16_bits(_even(spread, 256))


def _even(spread: WeightDistribution, count: int) -> NDArray[np.float64]:
    """So many values, evenly spread."""
    steps = (np.arange(count) - (count - 1) / 2) / math.sqrt((count**2 - 1) / 12)
    return np.asarray(spread.mean + spread.deviation * steps)


def nearest_codes(part: PartFormat, spread: WeightDistribution) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
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


def trellis_scales(part: PartFormat, num_cols: int, spread: WeightDistribution) -> NDArray[np.uint8]:
    """The bytes that end a trellis's row, u8 [scale_bytes]: weights about 0, of the rms that was asked for."""
    codec, rms = Trellis(part, num_cols), float(trellis_values(part.width).square().mean().sqrt())
    scale = math.hypot(spread.mean, spread.deviation) / rms
    return codec.store_scales(torch.full((1, codec.num_groups), scale))[0].numpy()


def scales_and_zeros(part: PartFormat, num_cols: int, spread: WeightDistribution) -> NDArray[np.uint8]:
    """The bytes that end a part's row, u8 [2 * scale_bytes], for codes that are all as likely."""
    codec, top = affine(part, num_cols), 2**part.width - 1
    scale = spread.deviation / math.sqrt((4**part.width - 1) / 12)
    scales, zeros = codec.store_scales(
        torch.full((1, codec.num_groups), scale),
        torch.full((1, codec.num_groups), top / 2 - spread.mean / scale),
    )
    return torch.cat((scales, zeros), dim=1)[0].numpy()


Floats = NDArray[np.float64]

_RANKS, _LOGITS, _ROWS = 1, 2, 3  # keys of random streams
_DRAWS = 16384  # tokens for which logits are drawn
_ROUNDS = 12
_MOST = 0.95  # an expert that every token chose would leave no choice
_LEAST = 0.02  # of an even share: an expert that nobody ever chose would be a smaller model


def skewed_popularity(spec: ModelSpec, skew: float, seed: int) -> Floats:
    """The share of tokens that choose each expert, [L, E], by Zipf's law: the r-th has a share as `r ** -skew`.

    Which expert is the r-th is drawn for each layer.
    """
    E = spec.router.num_experts
    shares = _shares(np.arange(1.0, E + 1) ** -skew, spec.router.num_experts_per_tok)
    generator = np.random.Generator(random_stream(seed, _RANKS))
    return np.stack([shares[generator.permutation(E)] for _ in spec.moe_layers])


def profiled_popularity(spec: ModelSpec, profile: Profile) -> Floats:
    """The share of tokens that chose each expert when the profile was made, [L, E].

    Raises:  PlanError if the profile has other layers or experts.
    """
    found = (len(profile.spec.moe_layers), profile.spec.router.num_experts)
    wanted = (len(spec.moe_layers), spec.router.num_experts)
    if found != wanted:
        raise PlanError(
            f"--profile: found {found[0]} layers of {found[1]} experts, expected {wanted[0]} of {wanted[1]}; "
            "give a profile of the same model, or --layers"
        )
    k = spec.router.num_experts_per_tok
    return np.stack([_shares(profile.statistics(l).tokens.astype(np.float64), k) for l in range(wanted[0])])


def _shares(weights: Floats, k: int) -> Floats:
    """Shares in proportion to weights that add up to `k`, none above `_MOST` if that can be."""
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


def popular_logits(shares: Floats, router: RouterSpec, seed: int) -> Floats:
    """What to add to an expert's random logits, [E], so that this share of tokens chooses it.

    Args:    shares: [E], which add up to the number of experts a token.
    """
    E = len(shares)
    if np.ptp(shares) < 1e-9:
        return np.zeros(E)
    noise = np.random.Generator(random_stream(seed, _LOGITS)).standard_normal((_DRAWS, E), np.float32)
    drawn, wanted = torch.from_numpy(noise), torch.special.ndtri(torch.from_numpy(shares))
    logits = torch.zeros(E, dtype=torch.float64)
    bias = torch.zeros(E) if router.bias else None
    for _ in range(_ROUNDS):
        chosen, _ = TORCH.route(drawn + logits.to(torch.float32), router, bias)
        found = torch.bincount(chosen.flatten(), minlength=E).to(torch.float64) / _DRAWS
        # Were the last one chosen always at the same logit, one round would do.
        logits += wanted - torch.special.ndtri(found.clamp(0.5 / _DRAWS, 1 - 0.5 / _DRAWS))
        logits -= logits.mean()
    return logits.numpy()


def router_weights(spec: ModelSpec, popularity: Floats, path_correlation: float, seed: int) -> Iterator[Floats]:
    """The router of each MoE layer, one after the other: [E, d].

    Args:    popularity: [L, E], the share of tokens that shall choose each.   path_correlation: from 0 (a layer's
             choice says nothing of the next one's but popularity) to 1 (it says all).
    """
    E, d = spec.router.num_experts, spec.hidden_size
    generator = np.random.Generator(random_stream(seed, _ROWS))
    found: dict[bytes, Floats] = {}
    own = np.empty((0, d))
    for shares in popularity:
        # By rank, so that popular experts follow popular ones; among equals by chance.
        by_rank = np.lexsort((generator.random(E), -shares))
        fresh = _fresh_rows(E, own, d, generator)
        own = _unit_rows(path_correlation * own + np.sqrt(1 - path_correlation**2) * fresh) if len(own) else fresh
        rows = np.empty((E, d))
        rows[by_rank] = own / OWN
        # Groups are of neighbours: there an expert's popularity hangs on its number too.
        key = shares if spec.router.n_group > 1 else shares[by_rank]
        if key.tobytes() not in found:
            found[key.tobytes()] = popular_logits(key, spec.router, seed)
        popular = found[key.tobytes()].copy()
        if spec.router.n_group == 1:
            popular[by_rank] = found[key.tobytes()]
        yield rows + popular[:, None] / (CONSTANT * d)


def _fresh_rows(num_rows: int, rows: Floats, d: int, generator: np.random.Generator) -> Floats:
    """Random unit rows orthogonal to each other, to `rows` and to the constant, as far as `d` dimensions allow it."""
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
    """Makes `output` a link to a folder of its own in memory, and returns that folder; both may be there already.

    Args:    needed_bytes: what will be written there.
    Raises:  ConversionError if `output` is something else, or memory has no room or no file system for it.
    """
    place = _memory_place()
    name = hashlib.sha256(str(output.absolute()).encode()).hexdigest()[:12]
    folder = place / f"moe-pack-{os.getuid()}-{name}"
    if output.is_symlink():
        if output.readlink() != folder:
            raise ConversionError(f"{output}: links to {output.readlink()}, not to a pack in memory; remove it")
    elif output.exists():
        raise ConversionError(f"{output}: is there already; --in-memory makes a link of this name, give another one")
    if folder.is_symlink() or (folder.exists() and folder.stat().st_uid != os.getuid()):
        raise ConversionError(f"{folder}: belongs to somebody else; give another output folder")
    _check_room(place, needed_bytes - _held_bytes(folder))
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if not output.is_symlink():
            output.parent.mkdir(parents=True, exist_ok=True)
            output.symlink_to(folder)
    except OSError as fault:
        raise ConversionError(f"{output}: cannot be made a link to {folder} ({fault.strerror})") from fault
    return folder


def _memory_place() -> Path:
    lines = _MOUNTS.read_text("utf-8").splitlines() if _MOUNTS.exists() else []
    mounts = [line.split(" ") for line in lines]
    in_memory = {fields[1] for fields in mounts if fields[2] in ("tmpfs", "ramfs")}
    for place in _PLACES:
        if place in in_memory and os.access(place, os.W_OK):
            return Path(place)
    raise ConversionError(
        f"--in-memory: found no file system in memory to write to (tmpfs at {', '.join(_PLACES)}); leave it out"
    )


def _held_bytes(folder: Path) -> int:
    """What an earlier run has already taken."""
    return sum(512 * path.stat().st_blocks for path in folder.iterdir()) if folder.exists() else 0


def _check_room(place: Path, needed_bytes: int) -> None:
    drive = os.statvfs(place)
    room = drive.f_bavail * drive.f_frsize
    if room < needed_bytes:
        raise ConversionError(
            f"--in-memory: {place} has {room:,} bytes free, expected {needed_bytes:,}; "
            "give fewer --layers, or leave it out"
        )
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _MEMORY.read_text("utf-8"), re.MULTILINE)
    if found and 1024 * int(found[1]) < needed_bytes:
        raise ConversionError(
            f"--in-memory: this machine has {1024 * int(found[1]):,} bytes of memory free, expected {needed_bytes:,}; "
            "give fewer --layers, or leave it out"
        )


_DENSE, _EXPERT, _SAMPLE = 11, 12, 13  # keys of random streams
_SAMPLE_TOKENS, _SAMPLE_NEURONS = 64, 4096


@dataclass(frozen=True, slots=True, eq=False)
class SyntheticTraits:
    """What a synthetic model does beside having dimensions.

    `sparsity`: share of an expert's neurons that shall not run.   `popularity`: float64 [L, E], the share of tokens
    that shall choose each expert.   `path_correlation`: 0 to 1, how far a token's experts say the next layer's.
    """

    sparsity: float
    popularity: Floats
    path_correlation: float
    seed: int


def synthetic_layout(spec: ModelSpec, plan: Plan) -> PackLayout:
    """The layout of a synthetic pack: what is not quantized is bfloat16.

    Raises:  PlanError if the plan does not fit the model.
    """
    return pack_layout(spec, plan, ["BF16"] * len(dense_roles(spec)))


def synthesize(
    spec: ModelSpec,
    plan: Plan,
    character: SyntheticTraits,
    folder: Path,
    workers: int,
    progress: Progress = NO_PROGRESS,
    on_step: Callable[[Step], None] = lambda step: None,
) -> ConversionResult:
    """Writes a synthetic pack into `folder`, going on where a killed run stopped; same arguments, same bytes.

    Args:    workers: threads, one torch thread each (torch's own are set to one for the whole process).
             on_step: called before each change to the drive.
    Raises:  PlanError if the plan does not fit the model; ConversionError as `convert`.
    """
    torch.set_num_threads(1)
    layout = synthetic_layout(spec, plan)
    model = _SyntheticModel(layout, character)
    account = _account(layout, plan, character)
    writer = PackWriter(folder, layout, account.conversion, stamp="", on_step=on_step)
    return write_pack(writer, layout, account, ItemWork(model.item_bytes, lambda i: 2 * i.num_bytes), workers, progress)


def _account(layout: PackLayout, plan: Plan, character: SyntheticTraits) -> PackRecord:
    spec, seed = layout.spec, character.seed
    decisions = {
        "sparsity": repr(character.sparsity),
        "popularity": hashlib.sha256(character.popularity.astype("<f8").tobytes()).hexdigest(),
        "path_correlation": repr(character.path_correlation),
        "seed": str(seed),
    }
    made_with = tuple(PackageVersion(name, installed_version(name)) for name in ("moe-pack", "numpy", "torch"))
    thresholds = _thresholds(spec, plan, character.sparsity, seed)
    return PackRecord(layout, plan, PackOrigin(NO_SOURCE, (), made_with, decisions), thresholds)


class _SyntheticModel:
    """Makes the bytes of a synthetic pack's items, each from a random stream of its own."""

    def __init__(self, layout: PackLayout, character: SyntheticTraits) -> None:
        spec = layout.spec
        self._layout = layout
        self._seed = character.seed
        self._dense = {dense.role.name: (number, dense) for number, dense in enumerate(layout.dense)}
        self._routers = {
            f"layers.{layer}.router": bf16_bits(weights)
            for layer, weights in zip(
                spec.moe_layers,
                router_weights(spec, character.popularity, character.path_correlation, character.seed),
                strict=True,
            )
        }

    def item_bytes(self, item: Item, stop: Event) -> NDArray[np.uint8]:
        """All bytes of a dense tensor or of an expert's extent: u8 [item.num_bytes]; `stop` is too late to matter."""
        if item.kind == "dense":
            number, dense = self._dense[item.role]
            key = (number, item.first_row) if item.first_row else (number,)
            num_rows = item.num_bytes * dense.role.shape[0] // dense.entry.num_bytes
            return self._dense_bytes(dense, num_rows, random_stream(self._seed, _DENSE, *key)).reshape(-1)
        expert = self._layout.experts[item.layer][item.expert]
        return _random_extent(self._layout.spec, expert, (self._seed, _EXPERT, item.layer, item.expert))

    def _dense_bytes(self, dense: DenseLayout, num_rows: int, stream: np.random.BitGenerator) -> NDArray[np.uint8]:
        spec, role = self._layout.spec, dense.role
        if role.name in self._routers:
            return self._routers[role.name].view(np.uint8)
        if len(role.shape) == 1:
            return bf16_bits(dense_vector(spec, role, stream)).view(np.uint8)
        spread = dense_spread(spec, role)
        if dense.rows is None:
            return random_matrix(num_rows, role.shape[1], spread, stream)
        return random_rows(dense.rows, num_rows, {"weight": spread}, stream)


def _random_extent(spec: ModelSpec, expert: ExpertLayout, key: tuple[int, ...]) -> NDArray[np.uint8]:
    """An expert's selector, records and extra values, which are zero: u8 [num_bytes]."""
    spreads, stream = expert_spreads(spec), random_stream(*key)
    halves = [random_rows(rows, expert.num_rows, spreads, stream) for rows in (expert.selector, expert.records) if rows]
    if expert.extra is not None:
        halves.append(np.zeros((1, expert.extra.row_bytes), np.uint8))
        seal_rows(expert.extra, halves[-1])
    return np.concatenate([half.reshape(-1) for half in halves])


def _thresholds(spec: ModelSpec, plan: Plan, sparsity: float, seed: int) -> NDArray[np.float32]:
    """The quantile of `abs(a)` at a sparsity for experts of each format, over random tokens: [L, E]."""
    shape = (len(spec.moe_layers), spec.router.num_experts)
    if sparsity == 0:
        return np.zeros(shape, np.float32)
    formats = {expert for layer in plan.experts for expert in layer}
    quantiles = {expert: _quantile(spec, plan, expert, sparsity, seed) for expert in formats}
    return np.array([[quantiles[expert] for expert in layer] for layer in plan.experts], np.float32)


def _quantile(spec: ModelSpec, plan: Plan, expert: ExpertFormat, sparsity: float, seed: int) -> float:
    """What experts of one format have in common: how large their neurons' activations are."""
    tokens = _random_tokens(spec, seed)
    layout, found, number = expert_layout(expert, plan.selector, spec.expert, spec.hidden_size), list[Tensor](), 0
    while sum(held.shape[1] for held in found) < _SAMPLE_NEURONS:
        extent = torch.from_numpy(_random_extent(spec, layout, (seed, _SAMPLE, number)))
        for block in PackedExpert(layout, extent).blocks():
            found.append(activations(tokens, block, spec.expert.function).of(plan.selector).abs())
        number += 1
    return float(np.quantile(torch.cat(found, dim=1).numpy(), sparsity))


def _random_tokens(spec: ModelSpec, seed: int) -> Tensor:
    """Normed hidden states, float32 [T, d]: the constant direction, and a part of each token's own."""
    generator = np.random.Generator(random_stream(seed, _SAMPLE))
    own = generator.standard_normal((_SAMPLE_TOKENS, spec.hidden_size))
    return torch.from_numpy((CONSTANT + OWN * own).astype(np.float32))
