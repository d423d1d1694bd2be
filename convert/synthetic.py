"""Synthetic packs: a real model's dimensions, random weights. How fast would it run here, before it is downloaded?

All that decides speed is as in a pack of the real model: bytes, layout, widths, how many neurons run, how popular
experts are. Its text is noise, and its source account, which is empty, says so (docs/format.md, section 10).
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.convert.account import Account, Origin
from moe_pack.convert.pipeline import Conversion, Work, write_pack
from moe_pack.convert.random_routers import Floats, router_weights
from moe_pack.convert.random_weights import (
    CONSTANT,
    OWN,
    bf16_bits,
    dense_spread,
    dense_vector,
    expert_spreads,
    random_matrix,
    random_rows,
    random_stream,
)
from moe_pack.formats import (
    NO_PROGRESS,
    NO_SOURCE,
    DenseLayout,
    ExpertFormat,
    ExpertLayout,
    Item,
    ModelSpec,
    PackageVersion,
    PackLayout,
    PackWriter,
    Plan,
    Progress,
    Step,
    dense_roles,
    expert_layout,
    installed_version,
    pack_layout,
    seal_rows,
)
from moe_pack.runtime import PackedExpert, activations

_DENSE, _EXPERT, _SAMPLE = 11, 12, 13  # keys of random streams
_SAMPLE_TOKENS, _SAMPLE_NEURONS = 64, 4096


@dataclass(frozen=True, slots=True, eq=False)
class Character:
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
    character: Character,
    folder: Path,
    workers: int,
    progress: Progress = NO_PROGRESS,
    on_step: Callable[[Step], None] = lambda step: None,
) -> Conversion:
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
    return write_pack(writer, layout, account, Work(model.item_bytes, lambda i: 2 * i.num_bytes), workers, progress)


def _account(layout: PackLayout, plan: Plan, character: Character) -> Account:
    spec, seed = layout.spec, character.seed
    decisions = {
        "sparsity": repr(character.sparsity),
        "popularity": hashlib.sha256(character.popularity.astype("<f8").tobytes()).hexdigest(),
        "path_correlation": repr(character.path_correlation),
        "seed": str(seed),
    }
    made_with = tuple(PackageVersion(name, installed_version(name)) for name in ("moe-pack", "numpy", "torch"))
    thresholds = _thresholds(spec, plan, character.sparsity, seed)
    return Account(layout, plan, Origin(NO_SOURCE, (), made_with, decisions), thresholds)


class _SyntheticModel:
    """Makes the bytes of a synthetic pack's items, each from a random stream of its own."""

    def __init__(self, layout: PackLayout, character: Character) -> None:
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
