"""The staged engine's operations in plain torch, on any device: the twin of `TritonOps`."""

import torch
from torch import Tensor

from moe_pack.formats.codecs import decode_part
from moe_pack.formats.layout import DenseLayout
from moe_pack.runtime.gpu.kernels.cache import Selection
from moe_pack.runtime.gpu.kernels.rows import RowPart
from moe_pack.runtime.gpu.kernels.tables import SELECT_BLOCK, ExpertKind, LayerTables, StoredPart
from moe_pack.runtime.gpu.staged import TritonOps
from moe_pack.runtime.model import NEURONS, TORCH, Matrix, running
from moe_pack.runtime.model.pack_weights import stored_matrix


class TorchOps(TritonOps):
    """All of it in plain torch, on any device."""

    def __init__(self) -> None:
        self.operations = TORCH

    def matrix(self, dense: DenseLayout, raw: Tensor) -> Matrix:
        return stored_matrix(dense, raw)

    def select(self, x: Tensor, experts: Tensor, tables: LayerTables, out: Selection) -> None:
        """Finds the neurons that run; each block's stand at its beginning, rising."""
        for place, expert in enumerate(experts.tolist()):
            kind = tables.kinds[int(tables.kind[expert])]
            rows = torch.arange(kind.num_rows, device=x.device)
            runs = torch.ones(kind.num_rows, dtype=torch.bool, device=x.device)
            if kind.selector != "none":
                a = self._activations(x[None], tables, expert, kind, rows, in_selector=True)[0]
                runs = running(a, tables.thresholds[expert])
                out.a[place] = a
            for block in range(out.counts.shape[1]):
                first = block * SELECT_BLOCK
                found = rows[first : first + SELECT_BLOCK][runs[first : first + SELECT_BLOCK]].to(torch.int32)
                out.neurons[place, first : first + len(found)] = found
                out.counts[place, block] = len(found)

    def neurons(self, x: Tensor, experts: Tensor, tables: LayerTables, selection: Selection, partials: Tensor) -> None:
        """Partial sums of the outputs, of which the first is the sum."""
        partials.zero_()
        for place, expert in enumerate(experts.tolist()):
            kind = tables.kinds[int(tables.kind[expert])]
            blocks = enumerate(selection.counts[place].tolist())
            listed = [selection.neurons[place, b * SELECT_BLOCK : b * SELECT_BLOCK + count] for b, count in blocks]
            rows = torch.cat(listed).long()
            h = self._hidden(x[None], selection.a[place, rows][None], tables, expert, kind, rows)
            partials[place, 0] = (h @ _weights(tables, expert, kind.down, rows, kind)[0])[0]
            if tables.down_bias is not None:
                partials[place, 0] += tables.down_bias[expert]

    def reduce(self, partials: Tensor, weights: Tensor, out: Tensor) -> None:
        out.zero_()
        for place in range(len(partials)):
            out += weights[place] * partials[place].sum(0)

    def workspace_floats(self, num_tokens: int, num_rows: int) -> int:
        """None: torch takes what it needs."""
        return 0

    def many(
        self,
        x: Tensor,
        tokens: Tensor,
        weights: Tensor,
        tables: LayerTables,
        expert: int,
        kind: ExpertKind,
        y: Tensor,
        workspace: Tensor,
    ) -> None:
        rows, mine = torch.arange(kind.num_rows, device=x.device), x[tokens.long()]
        a = torch.zeros((len(mine), kind.num_rows), device=x.device)
        runs = torch.ones_like(a, dtype=torch.bool)
        if kind.selector != "none":
            a = self._activations(mine, tables, expert, kind, rows, in_selector=True)
            runs = running(a, tables.thresholds[expert])
        h = torch.where(runs, self._hidden(mine, a, tables, expert, kind, rows), 0.0)
        product = h @ _weights(tables, expert, kind.down, rows, kind)[0]
        if tables.down_bias is not None:
            product += tables.down_bias[expert]
        y[tokens.long()] += weights[:, None] * product

    def _hidden(self, x: Tensor, a: Tensor, tables: LayerTables, expert: int, kind: ExpertKind, rows: Tensor) -> Tensor:
        """h float32 [T, n] of some neurons, from what their selector told and their records."""
        if kind.selector == "none":
            h = self._activations(x, tables, expert, kind, rows, in_selector=False)
            return torch.where(running(h, tables.thresholds[expert]), h, 0.0)
        if kind.selector == "both" or kind.gate is None:
            return a
        return a * self._activations(x, tables, expert, kind, rows, in_selector=False)

    def _activations(
        self, x: Tensor, tables: LayerTables, expert: int, kind: ExpertKind, rows: Tensor, in_selector: bool
    ) -> Tensor:
        """What the matrices in selector rows, or in records, give: the gate's activation, up, or both multiplied."""
        gate, up = (
            held if held is not None and held.in_selector == in_selector else None for held in (kind.gate, kind.up)
        )
        found = torch.ones((len(x), len(rows)), device=x.device)
        neuron = NEURONS[kind.function]
        for held, function in ((gate, neuron.act), (up, neuron.act if kind.gate is None else neuron.factor)):
            if held is not None:
                weights, bias = _weights(tables, expert, held, rows, kind)
                product = x @ weights.T + bias
                found = found * function(product)
        return found


def _weights(
    tables: LayerTables, expert: int, held: StoredPart, rows: Tensor, kind: ExpertKind
) -> tuple[Tensor, Tensor]:
    """A matrix's rows float32 [n, d] and biases float32 [n]; zeros where it has none."""
    at = tables.selector_at if held.in_selector else tables.record_at
    assert at is not None, "a matrix in selector rows has their table"
    units = at[expert, rows].long()
    assert bool((units >= 0).all()), "rows that are not there"
    num_units, part = kind.selector_units if held.in_selector else kind.record_units, held.part
    found = tables.arena[: len(tables.arena) // 16 * 16].view(-1, 16)
    found = found[units[:, None] + torch.arange(num_units, device=units.device)].flatten(1)  # [n, row bytes]
    num_codes, num_bytes = held.format.code_bytes(part.num_cols), held.format.part_bytes(part.num_cols)
    codes = found[:, part.offset : part.offset + num_codes]
    scales = found[:, part.scales : part.scales + num_bytes - num_codes]
    return decode_part(held.format, part.num_cols, torch.cat([codes, scales], dim=1)), _biases(found, part)


def _biases(found: Tensor, part: RowPart) -> Tensor:
    if part.bias < 0:
        return torch.zeros(len(found), device=found.device)
    return found[:, part.bias : part.bias + 4].clone().view(torch.float32)[:, 0]
