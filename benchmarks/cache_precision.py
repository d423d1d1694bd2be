"""What keys and values in bfloat16 cost: a pack's predictions with such a cache against its own with one in float32.

    python benchmarks/cache_precision.py

In torch on the CPU, as the decoder reads such a cache everywhere: keys and values are rounded as they enter it, and all
that is computed with them is float32. A text that the model has not seen, in windows, each from an empty context.
Figures are nats a token and relative growth, with the paired bootstrap's 95% interval over blocks of 128 tokens.
"""

import json
import math
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
import torch
from numpy.typing import NDArray
from paired_bootstrap import Difference, paired_difference
from torch import Tensor
from tqdm import tqdm

from moe_pack.calib import Tokens, read_tokens
from moe_pack.convert import convert
from moe_pack.formats import Checkpoint, Pack, part_format, uniform_plan
from moe_pack.runtime import Decoder, FolderFiles, PackWeights, Text
from moe_pack.runtime.experts import ExpertRunner, PartialState, run_one_by_one

_TESTS = Path(__file__).parents[1] / "tests"
_GROUP = 64
_BLOCK_TOKENS = 128

Blocks = NDArray[np.float64]  # [num_blocks]: means over the tokens of each


@dataclass(frozen=True, slots=True)
class Cost:
    """What a pack with a bfloat16 cache does beside itself with a float32 one.

    `width`: bits of an expert's weight.   `kl`: nats a token, and the median token's.   `growth`: of perplexity, 0.01
    for 1%.   `agreement`: share of tokens with the same likeliest successor.   `rerouted`: share of tokens that go to
    other experts, in any layer.   `kl_of_rerouted`: how much of all KL is theirs.
    """

    width: int
    num_tokens: int
    kl: float
    kl_interval: tuple[float, float]
    kl_median: float
    perplexity: float
    growth: float
    growth_interval: tuple[float, float]
    agreement: float
    rerouted: float
    kl_of_rerouted: float


@dataclass(frozen=True, slots=True, eq=False)
class _Window:
    """Of one window: each token's KL, whether it was rerouted, and blocks of each next token's nats by either cache."""

    kl: Tensor
    is_rerouted: Tensor
    nll: tuple[Blocks, Blocks]
    num_agreeing: int


class _WatchedWeights(PackWeights, ExpertRunner):
    """A pack's weights that keep where tokens went."""

    def __init__(self, pack: Pack) -> None:
        super().__init__(pack, torch.device("cpu"))
        self._routes: dict[int, list[Tensor]] = {}

    def run_experts(
        self,
        layer_idx: int,
        x: Tensor,
        experts: Tensor,
        router_weights: Tensor,
        partial_state: PartialState | None = None,
    ) -> Tensor:
        """The routed experts of a layer, one by one."""
        self._routes.setdefault(layer_idx, []).append(experts.sort(dim=1).values)
        return run_one_by_one(x, experts, router_weights, self, layer_idx)

    def take_routes(self) -> Tensor:
        """The experts of all tokens since the last call, int64 [T, L, k]."""
        routes, self._routes = self._routes, {}
        return torch.stack([torch.cat(routes[layer_idx]) for layer_idx in sorted(routes)], dim=1)


def cost_of(pack: Pack, width: int, tokens: Tokens) -> Cost:
    """Runs all windows with both caches."""
    weights, num_positions, windows = _WatchedWeights(pack), tokens.sequences.shape[1], list[_Window]()
    exact, rounded = (Decoder(weights, num_positions, cache_dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    for ids in tqdm(tokens.sequences.tolist(), f"{width} bit", disable=None):
        windows.append(_window(exact, rounded, weights, ids))
    kl = np.concatenate([_blocks(window.kl) for window in windows])
    by_token, is_rerouted = (torch.cat([getattr(window, name) for window in windows]) for name in ("kl", "is_rerouted"))
    ours, other = (np.concatenate([window.nll[which] for window in windows]) for which in (1, 0))
    divergence, growth = paired_difference(kl, np.zeros_like(kl)), paired_difference(ours, other)
    return Cost(
        width,
        tokens.sequences.size,
        divergence.mean,
        (divergence.low, divergence.high),
        float(by_token.median()),
        math.exp(other.mean()),
        math.expm1(growth.mean),
        _grown(growth),
        sum(window.num_agreeing for window in windows) / tokens.sequences.size,
        float(is_rerouted.double().mean()),
        float(by_token[is_rerouted].sum() / by_token.sum()),
    )


def _window(exact: Decoder, rounded: Decoder, weights: _WatchedWeights, ids: list[int]) -> _Window:
    expected, usual = _logits(exact, ids), weights.take_routes()
    found, routes = _logits(rounded, ids), weights.take_routes()
    p, q = expected.log_softmax(dim=1), found.log_softmax(dim=1)
    nexts = torch.tensor(ids[1:])[:, None]
    return _Window(
        (p.exp() * (p - q)).sum(dim=1),
        (usual != routes).flatten(1).any(dim=1),
        (_blocks(-p[:-1].gather(1, nexts)[:, 0]), _blocks(-q[:-1].gather(1, nexts)[:, 0])),
        int((expected.argmax(dim=1) == found.argmax(dim=1)).sum()),
    )


def _logits(decoder: Decoder, ids: list[int]) -> Tensor:
    decoder.reset()
    return decoder.logits(ids).double()


def _blocks(values: Tensor) -> Blocks:
    pieces = values.tensor_split(-(-len(values) // _BLOCK_TOKENS))  # the last window's tokens but one have successors
    return np.array([float(piece.mean()) for piece in pieces])


def _grown(change: Difference) -> tuple[float, float]:
    return math.expm1(change.low), math.expm1(change.high)


def _line(cost: Cost) -> str:
    low, high = cost.kl_interval
    least, most = cost.growth_interval
    return (
        f"{cost.width:5}  {cost.kl:.2e} ({low:.2e} to {high:.2e})  {cost.kl_median:.2e}  {cost.perplexity:10.4f}  "
        f"{cost.growth:+.4%} ({least:+.4%} to {most:+.4%})  {cost.agreement:7.2%}  "
        f"{cost.rerouted:.2%}, {cost.kl_of_rerouted:.1%} of KL"
    )


@click.command(help=__doc__)
@click.option("--model", type=click.Path(path_type=Path, exists=True), default=_TESTS / "models" / "tiny-mixtral")
@click.option("--text", type=click.Path(path_type=Path, exists=True), default=_TESTS / "data" / "books-valid.txt")
@click.option("--tokens", default=16384, show_default=True, type=click.IntRange(1), help="Tokens of the text to take.")
@click.option("--window", default=512, show_default=True, type=click.IntRange(2), help="Tokens run together.")
@click.option("--widths", default="16,4", show_default=True, help="Bits of every expert's weights, one a pack.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(model: Path, text: Path, tokens: int, window: int, widths: str, as_json: bool) -> None:
    """Makes the packs in a temporary folder, runs them, prints."""
    taken = read_tokens(str(text), None, Text(FolderFiles(model)), tokens, window)
    costs, num_cores = [], len(os.sched_getaffinity(0))
    checkpoint = Checkpoint(model)
    with tempfile.TemporaryDirectory(prefix="moe-pack-") as folder:
        for width in map(int, widths.split(",")):
            part, path = part_format(width, _GROUP, 16), Path(folder) / f"{width}"
            convert(checkpoint, uniform_plan(checkpoint.spec, "up", part, part, None, "hqq"), path, num_cores)
            torch.set_num_threads(num_cores)  # converting leaves torch with one thread
            with Pack(path) as pack:
                costs.append(cost_of(pack, width, taken))
    checkpoint.close()
    if as_json:
        click.echo(json.dumps([asdict(cost) for cost in costs]))
        return
    click.echo(f"{taken.sequences.size} tokens in {len(taken.sequences)} windows of {window}")
    click.echo("width  KL, nats  median  perplexity  growth  same likeliest  rerouted")
    for cost in costs:
        click.echo(_line(cost))


if __name__ == "__main__":
    main()
