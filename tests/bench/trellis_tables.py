"""The error of the trellis tables on random weights, and how levels are trained.

    python tests/bench/trellis_tables.py
    python tests/bench/trellis_tables.py --train

Without options: the mean squared error of each width's tables on normal weights of unit variance, where no code errs
less than 4^-bits. The codes are those of the product's search, under the scale of unit variance.

--train makes levels as those of the format were made, with the format's hash: Lloyd's algorithm, which moves each level
to the mean of the weights that the search gives to it, and then integers in the unit with the least error. --hash SEED
does so with random hashes in place of the format's. Exits with 1 if the format's tables
err 1% more than those made here.
"""

from dataclasses import asdict, dataclass
from statistics import NormalDist

import click
import numpy as np
import torch
from benchlib import figure, finish, json_option, table
from torch import Tensor
from tqdm import tqdm

from moe_pack.formats.pack.codecs import TRELLIS_HASH, trellis_levels, trellis_unit
from moe_pack.formats.pack.plans import TRELLIS_WIDTHS
from moe_pack.runtime.cpu import TrellisRows, TrellisTables, search_trellis

_ROWS, _COLUMNS, _TRAINING_ROWS = 200, 1024, 60
_SPREAD = 1.25  # of the first levels: quantiles of a normal distribution so much wider than the weights'
_PRIOR = 2  # weights that a level counts as having besides those it was given
_SETS = 16
_MARGIN = 1.01
_TRAINING_SEED, _JUDGING_SEED = 5, 77


@dataclass(frozen=True, slots=True)
class Row:
    """The errors of one width. `trained`: of levels that were made here; None without --train."""

    bits: float
    bound: float
    error: float
    trained: float | None


def random_weights(seed: int, num_rows: int) -> Tensor:
    """Returns rows of normal weights of unit variance, float32 [num_rows, 1024]."""
    return torch.randn((num_rows, _COLUMNS), generator=torch.Generator().manual_seed(seed))


def rounded(weights: Tensor, tables: TrellisTables, unit: float) -> Tensor:
    """Returns the levels that stand for weights under the scale `unit`, float32 [rows, 1024], not scaled."""
    scales = torch.full_like(weights, unit)
    starts = torch.zeros(len(weights), dtype=torch.uint8)
    rows = TrellisRows(weights, weights, scales, torch.ones(_COLUMNS), None, starts)
    return search_trellis(rows, tables, _COLUMNS // 2)[1]


def error(weights: Tensor, tables: TrellisTables, unit: float) -> float:
    """Returns the mean squared error of weights under one scale."""
    return float((weights - unit * rounded(weights, tables, unit)).square().mean())


def first_levels(number: int) -> Tensor:
    """Returns quantiles of a normal distribution as levels, ascending: of 16 sets, each takes every 16th."""
    normal = NormalDist()
    return torch.tensor([_SPREAD * normal.inv_cdf((n + 0.5) / number) for n in range(number)])


def trained_levels(hashes: Tensor, sizes: tuple[int, int], rounds: int) -> tuple[TrellisTables, float]:
    """Returns integer levels for a hash, and the unit that they are for.

    Args:    sizes: levels of the first and of the second weight.   rounds: of Lloyd's algorithm.
    """
    weights = random_weights(_TRAINING_SEED, _TRAINING_ROWS)
    tables = TrellisTables(hashes, *(first_levels(size) for size in sizes))
    for _ in tqdm(range(rounds), desc=f"{sizes[0]} and {sizes[1]} levels", disable=None):
        values = rounded(weights, tables, 1.0)
        moved = []
        for place, levels in enumerate((tables.first_levels, tables.second_levels)):
            given = (values[:, place::2].reshape(-1, 1) == levels).float()
            sums = given.T @ weights[:, place::2].reshape(-1, 1)
            moved.append((sums[:, 0] + _PRIOR * levels) / (given.sum(dim=0) + _PRIOR))
        tables = TrellisTables(hashes, *moved)
    top = 31 if max(sizes) <= 2 * _SETS else 63
    largest = max(float(levels.abs().max()) for levels in (tables.first_levels, tables.second_levels))
    candidates = []
    for stretch in np.linspace(0.85, 1.6, 9):
        unit = largest / (float(stretch) * top)
        integers = [(lv / unit).round().clamp(-top - 1, top) for lv in (tables.first_levels, tables.second_levels)]
        candidate = TrellisTables(hashes, *integers)
        candidates.append((error(weights, candidate, unit), unit, candidate))
    _, unit, best = min(candidates, key=lambda one: one[0])
    return best, unit


@click.command(help=__doc__)
@click.option("--train", is_flag=True, help="Make levels too.")
@click.option("--hash", "seed", type=int, help="Train for random hashes of this seed instead of the format's.")
@click.option("--rounds", default=14, show_default=True, help="Of Lloyd's algorithm.")
@json_option
def main(train: bool, seed: int | None, rounds: int, as_json: bool) -> None:
    """Measures, trains, prints, and judges."""
    hashes = torch.tensor([list(bytes.fromhex(table)) for table in TRELLIS_HASH], dtype=torch.uint8)
    trained_hashes = hashes
    if seed is not None:
        trained_hashes = torch.randint(
            0, 256, (3, 16), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
        )
    weights, rows = random_weights(_JUDGING_SEED, _ROWS), list[Row]()
    for width in TRELLIS_WIDTHS:
        levels, unit, other = trellis_levels(width), trellis_unit(width), None
        tables = TrellisTables(hashes, *levels)
        if train or seed is not None:
            sizes = len(levels[0]), len(levels[1])
            other = error(weights, *trained_levels(trained_hashes, sizes, rounds))
        rows.append(Row(width / 2, 2.0**-width, error(weights, tables, unit), other))
    cells = [(f"{r.bits:g}", f"{r.bound:.4f}", f"{r.error:.4f}", figure(r.trained, ".4f")) for r in rows]
    faults = [
        f"{r.bits:g} bits: levels made here err {r.trained:.5f}, the format's {r.error:.5f}"
        for r in rows
        if r.trained is not None and r.trained * _MARGIN < r.error
    ]
    finish({"rows": [asdict(r) for r in rows]}, table(("bits", "4^-bits", "error", "trained"), cells), as_json, faults)


if __name__ == "__main__":
    main()
