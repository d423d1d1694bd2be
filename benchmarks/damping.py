"""Measures how much error feedback saves on tokens it has not seen, by damping and by how few tokens it was made from.

    python benchmarks/damping.py MODEL

The model is profiled on 16,384 tokens of the shipped sample in a temporary folder. Of some experts of every layer two
thirds of the tokens are there to take some from, beside a few of the layer's others; the last third judges. Figures:
what rows lose there that are rounded with feedback, as a share of what they lose without, errors of rounding being free
of each other and of one size.
"""

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import click
import torch
from torch import Tensor

from moe_pack.calib import Profile, ProfileOptions, make_profile, read_tokens
from moe_pack.calib.expert_inputs import OTHERS_COUNT
from moe_pack.calib.expert_pass import sample_places
from moe_pack.calib.expert_quantizer import MAX_OTHER_TOKENS
from moe_pack.calib.moments import damping, feedback, second_moments
from moe_pack.formats import Checkpoint
from moe_pack.runtime import CheckpointWeights, FolderFiles, Text, activations

_NUM_TOKENS, _SEQUENCE_LENGTH = 16384, 512
_NUM_SEEN = (8, 32, 128, 512, 1280)
_SHARES = (0.01, 0.03, 0.1, 0.3, 1.0)
_EVERY_EXPERT = 3


def values_of(
    weights: CheckpointWeights, profile: Profile, layer_idx: int, expert: int
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """What gate and up, then down, are multiplied with: an expert's own tokens, their weights, the layer's others."""
    with profile.inputs(layer_idx) as inputs:
        found = inputs.of_expert(expert)
    num_own = len(found.weights) - MAX_OTHER_TOKENS
    x, function = found.inputs, profile.spec.expert.function
    h = torch.cat([activations(x, block, function).h for block in weights.expert(layer_idx, expert).blocks()], dim=1)
    for name, values in (("x", x), ("h", h)):
        yield name, values[:num_own], found.weights[:num_own], values[num_own:]


def lost(moments: Tensor, share: float, judge: Tensor) -> float:
    """The trace of `U^-1 H U^-T` over that of H: misses of aims are free of each other, errors are misses `U^-1`."""
    factor = feedback(moments, share).factor.to(torch.float64)
    errors = torch.linalg.solve_triangular(factor, torch.eye(len(factor), dtype=torch.float64), upper=True)
    return float((errors @ judge * errors).sum() / judge.trace())


@click.command(help=__doc__)
@click.argument("model", type=click.Path(path_type=Path, exists=True))
def main(model: Path) -> None:
    """Profiles, measures, prints."""
    torch.set_num_threads(1)
    tokens, checkpoint = (
        read_tokens(None, None, Text(FolderFiles(model)), _NUM_TOKENS, _SEQUENCE_LENGTH),
        Checkpoint(model),
    )
    sums: dict[tuple[str, int], list[list[float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="moe-pack-") as folder:
        profile = make_profile(checkpoint, tokens, Path(folder) / "p", ProfileOptions("none"))
        weights = CheckpointWeights(checkpoint)
        for layer_idx in range(len(profile.spec.moe_layers)):
            for expert in range(0, profile.spec.router.num_experts, _EVERY_EXPERT):
                for name, own, own_weights, others in values_of(weights, profile, layer_idx, expert):
                    end = len(own) * 2 // 3
                    judge = second_moments(own[end:], own_weights[end:]).to(torch.float64)
                    for number in _NUM_SEEN:
                        seen = sample_places(end, number)
                        each = float(own_weights[seen].mean()) * OTHERS_COUNT / len(others)
                        counts = torch.cat((own_weights[seen], torch.full((len(others),), each)))
                        moments = second_moments(torch.cat((own[seen], others)), counts)
                        shares = (*_SHARES, damping(counts, len(moments)))
                        sums[name, number].append([lost(moments, share, judge) for share in shares])
    checkpoint.close()
    click.echo("values tokens   " + " ".join(f"{share:>7}" for share in (*_SHARES, "by rule")))
    for (name, number), rows in sums.items():
        means = torch.tensor(rows).mean(dim=0).tolist()
        click.echo(f"{name:6} {number:>6}   " + " ".join(f"{mean:7.3f}" for mean in means))


if __name__ == "__main__":
    main()
