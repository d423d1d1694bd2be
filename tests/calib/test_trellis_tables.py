"""The benchmark that made the trellis's tables: it makes tables as good, and the stored ones are."""

import pytest
import torch
from trellis_tables import Rounds, error, first_table, normal_rows, stored, tailed_rows, trained

from moe_pack.formats.codecs import trellis_steps
from moe_pack.runtime import is_available

pytestmark = pytest.mark.skipif(not is_available(), reason="tables are tried with the extension's search")


@pytest.mark.parametrize("width", [3, 4])
def test_a_short_training_comes_within_a_tenth_of_the_stored_table(width: int) -> None:
    bytes_, unit = trained(width, Rounds(orders=6, few=2, rows=(12, 24, 48), repeats=(3, 6, 8)))
    assert bytes_.shape == (1 + width % 2, 128) and bytes_.abs().max() == 127
    rows = normal_rows(24, 7)
    assert error(bytes_[[0, -1]] * unit, width, rows) < 1.1 * error(stored(width), width, rows)


@pytest.mark.parametrize("width", [3, 8])
def test_the_newest_bits_of_a_first_table_reach_all_of_the_distribution(width: int) -> None:
    for seed, bits in enumerate(trellis_steps(width)):
        table = first_table(bits, seed)
        assert len(set(table.tolist())) == 128
        # States that a state can be followed by differ in their highest bits: one lies in each part of the table.
        parts = table.argsort().argsort() * 2**bits // 128
        assert parts.view(2**bits, -1).sort(dim=0).values.eq(torch.arange(2**bits)[:, None]).all()


def test_rows_of_heavier_tails_have_unit_variance_too() -> None:
    rows = tailed_rows(50, 3)
    assert float(rows.std()) == pytest.approx(1, rel=1e-3)
    assert rows.abs().max() > normal_rows(50, 3).abs().max()
