"""The squared error of the trellis's tables on normal rows, and how the tables were made.

Without options: for each width the mean squared error of rows of 256 weights of unit variance, normal ones and ones of
heavier tails, beside 4^-bits, which no code of so many bits can go below on normal weights (rate-distortion theory).

--train makes a table by Lloyd's algorithm: find the best path of every row, make each value the mean of the weights it
stands for, and again. It starts from quantiles of the normal distribution in many random orders and goes on with the
best few. The newest bits and sums (over GF(2)) of older ones decide in which part of the distribution a value lies, so
that what leaves a state always reaches all of it. Rows for training are of heavier tails: of 97% normal weights, and 3%
2.2 times as large, as outliers of real rows are. The tables in formats/trellis_tables.py were made so; they are part of
the format, and other random numbers make other tables, as good within a percent.
"""

import sys
from dataclasses import dataclass

import click
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import TRELLIS_WIDTHS
from moe_pack.formats.codecs import trellis_steps, trellis_unit, trellis_values
from moe_pack.runtime import TrellisRows, is_available, search_trellis

NUM_COLS = 256
_BITS, _STATES = 7, 128
_TAIL_SHARE, _TAIL_SIZE = 0.03, 2.2
_TOP = 127  # of a table's bytes


@dataclass(frozen=True, slots=True)
class Rounds:
    """How a table is trained: orders tried, then the best few, then the best, each with its rows and repetitions."""

    orders: int = 80
    few: int = 5
    rows: tuple[int, int, int] = (100, 400, 1000)
    repeats: tuple[int, int, int] = (4, 12, 20)


def normal_rows(count: int, seed: int) -> Tensor:
    """Rows float32 [count, 256] of unit variance."""
    return torch.randn((count, NUM_COLS), generator=torch.Generator().manual_seed(seed))


def tailed_rows(count: int, seed: int) -> Tensor:
    """The same with some larger weights."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn((count, NUM_COLS), generator=generator)
    rows[torch.rand((count, NUM_COLS), generator=generator) < _TAIL_SHARE] *= _TAIL_SIZE
    return rows / rows.std()


def found(tables: Tensor, width: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The best paths of rows for tables float32 [2, 128] of unit variance: codes u8 and values float32, [rows, 256]."""
    starts, alike = torch.zeros(len(rows), dtype=torch.uint8), torch.ones(NUM_COLS)
    searched = TrellisRows(rows, rows, torch.ones_like(rows), alike, None, starts)
    codes, values, _ = search_trellis(searched, width, tables, NUM_COLS)
    return codes, values


def error(tables: Tensor, width: int, rows: Tensor) -> float:
    """The mean squared error of rows."""
    return float((found(tables, width, rows)[1] - rows).square().mean())


def stored(width: int) -> Tensor:
    """The format's tables, for weights of unit variance."""
    return trellis_values(width) * trellis_unit(width)


def first_table(bits: int, seed: int) -> Tensor:
    """Quantiles of the normal distribution in a random order in which the newest bits reach all of it."""
    random = np.random.default_rng(seed)
    states = np.arange(_STATES)
    while True:
        sums = random.integers(0, 2, (_BITS, _BITS))  # of a state's bits, the highest (newest) first
        sums[:bits, :bits] = np.eye(bits, dtype=int)
        digits = states[:, None] >> np.arange(_BITS - 1, -1, -1) & 1
        ranks = (digits @ sums.T % 2) @ (1 << np.arange(_BITS - 1, -1, -1))
        if len(set(ranks.tolist())) == _STATES:
            return 2**0.5 * torch.erfinv(torch.from_numpy((2 * ranks + 1) / _STATES - 1)).float()


def lloyd(tables: Tensor, width: int, rows: Tensor, repeats: int) -> tuple[float, Tensor]:
    """The best of so many improvements of tables, float32 [2, 128], and its error."""
    best = (error(tables, width, rows), tables)
    for _ in range(repeats):
        tables = improved(tables, width, rows)
        best = min(best, (error(tables, width, rows), tables), key=lambda pair: pair[0])
    return best


def improved(tables: Tensor, width: int, rows: Tensor) -> Tensor:
    """Each value the mean of the weights that it is found for; even widths have one table for all columns."""
    windows = np.zeros((NUM_COLS, len(rows)), np.int64)
    window: NDArray[np.int64] = windows[0]
    codes = found(tables, width, rows)[0].numpy().T.astype(np.int64)
    for j in range(NUM_COLS):
        bits = trellis_steps(width)[j % 2]
        window = windows[j] = window >> bits | codes[j] << (_BITS - bits)
    made, weights = tables.clone(), rows.numpy().T
    for even, columns in enumerate((slice(0, None, 2), slice(1, None, 2)) if width % 2 else (slice(None),)):
        counts = np.bincount(windows[columns].reshape(-1), minlength=_STATES)
        sums = np.bincount(windows[columns].reshape(-1), weights[columns].reshape(-1), _STATES)
        means = torch.from_numpy(sums / np.maximum(counts, 1)).float()
        made[even] = torch.where(torch.from_numpy(counts > 0), means, made[even])
    return made if width % 2 else made[:1].expand(2, -1)


def trained(width: int, rounds: Rounds) -> tuple[Tensor, float]:
    """Signed bytes of a table, int8 [1 or 2, 128], and what one of their steps is of weights of unit variance."""
    rows = [tailed_rows(count, seed) for seed, count in enumerate(rounds.rows)]
    tried = []
    for seed in range(rounds.orders):
        tables = torch.stack([first_table(bits, 2 * seed + i) for i, bits in enumerate(trellis_steps(width))])
        tables = tables if width % 2 else tables[:1].expand(2, -1)
        tried.append(lloyd(tables, width, rows[0], rounds.repeats[0]))
    few = sorted(tried, key=lambda pair: pair[0])[: rounds.few]
    better = min((lloyd(tables, width, rows[1], rounds.repeats[1]) for _, tables in few), key=lambda pair: pair[0])
    tables = lloyd(better[1], width, rows[2], rounds.repeats[2])[1][: 1 + width % 2]
    unit = float(tables.abs().max()) / _TOP
    return (tables / unit).round().to(torch.int8), unit


@click.command()
@click.option("--rows", default=300, show_default=True, help="Of each kind, to judge on.")
@click.option("--train", type=click.Choice([str(width) for width in TRELLIS_WIDTHS]), help="Make the table of a width.")
def main(rows: int, train: str | None) -> None:
    """Prints errors, or a new table as hexadecimal with its errors."""
    if not is_available():
        sys.exit("without the native kernels this would take hours: build them first")
    click.echo(f"{'bits':>4} {'4^-bits':>8} {'normal':>8} {'tails':>8}")
    judged = normal_rows(rows, 100), tailed_rows(rows, 101)
    for width in [int(train)] if train else TRELLIS_WIDTHS:
        errors = [error(stored(width), width, each) for each in judged]
        click.echo(f"{width / 2:4} {4 ** (-width / 2):8.4f} {errors[0]:8.4f} {errors[1]:8.4f}")
    if train:
        made, unit = trained(int(train), Rounds())
        errors = [error(made[[0, -1]] * unit, int(train), each) for each in judged]
        click.echo(f"made {'':8} {errors[0]:8.4f} {errors[1]:8.4f}  unit {unit:.6f}\n{made.numpy().tobytes().hex()}")


if __name__ == "__main__":
    main()
