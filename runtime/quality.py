"""What is known of a pack's size and loss: the bits of its experts, and the sidecar `quality.json`.

`moe-pack convert` and `moe-pack eval` compare a pack with its source on a text and write what they measured to
`quality.json`; `moe-pack inspect` and the server's page show it.
"""

from dataclasses import dataclass

from moe_pack.formats import Pack
from moe_pack.formats.base import json_files
from moe_pack.formats.pack.sidecar import read_sidecar

QUALITY_FILE = "quality.json"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and half the width of its 95% confidence interval; None if there are fewer than two blocks."""

    value: float
    half_width: json_files.Amount | None

    @property
    def upper(self) -> float | None:
        """Returns the upper end of the interval."""
        return None if self.half_width is None else self.value + self.half_width


@dataclass(frozen=True, slots=True)
class SourceQuality:
    """A pack compared with its source; KL divergences in nats a token.

    `source`: the checkpoint's digest.   `is_exact`: whether `kl` is over the whole vocabulary; otherwise its tail is
    estimated from tokens drawn from the tail.   `kl_bound`: a lower bound, over the `num_outcomes` likeliest tokens and
    the tail as one more outcome.   `noise_floor`: KL between two runs of the source that differ only by rounding;
    smaller figures mean nothing.   `perplexity_increase`: relative, 0.01 for 1%.   `agreement`: the share of tokens
    with the same likeliest next token.   `source_tail`, `pack_tail`: mean probability outside those outcomes.
    """

    source: str
    is_exact: bool
    num_outcomes: json_files.Count
    kl: Estimate
    kl_bound: Estimate
    noise_floor: json_files.Amount
    source_perplexity: Estimate
    perplexity_increase: Estimate
    agreement: Estimate
    source_tail: json_files.Amount
    pack_tail: json_files.Amount


@dataclass(frozen=True, slots=True)
class SparsityPrice:
    """The loss of a pack at a sparsity, compared with the same pack with all neurons: KL in nats, perplexity relative.

    `realized`: the share of neurons that did not run on the judged text; None if no token reached an expert.
    """

    sparsity: json_files.Share
    realized: json_files.Share | None
    kl: Estimate
    perplexity_increase: Estimate


@dataclass(frozen=True, slots=True)
class SubstitutionPrice:
    """The loss of a pack with `--substitute alpha`, compared with the same pack without it: KL in nats.

    `replaced`: the share of chosen experts that were replaced.   `fetched`: the share of run experts that were missing.
    """

    alpha: json_files.Amount
    replaced: json_files.Share
    fetched: json_files.Share
    kl: Estimate
    perplexity_increase: Estimate


@dataclass(frozen=True, slots=True)
class Substitution:
    """The prices with one policy. `room`: the share of experts that fit in memory. `fetched`: without substitution."""

    policy: str
    room: json_files.Share
    fetched: json_files.Share
    prices: tuple[SubstitutionPrice, ...]


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices on the first `num_tokens` predicted tokens of a text. `calibration`: the text for the thresholds."""

    num_tokens: json_files.Positive
    calibration: str
    sparsity: tuple[SparsityPrice, ...]
    substitution: Substitution


@dataclass(frozen=True, slots=True)
class Quality:
    """The sidecar `quality.json`: the quality of a pack on a text; half-widths are of 95% intervals.

    `num_tokens`: predicted tokens.   `sparsity`: the share of neurons that did not run; None if no token reached an
    expert.   `prices`: of more sparsity and of substitution; `evaluate` does not measure them.
    """

    text: str
    text_sha256: str
    num_sequences: json_files.Positive
    sequence_length: json_files.Positive
    num_tokens: json_files.Positive
    content_bytes: json_files.Positive
    sparsity: json_files.Share | None
    perplexity: Estimate
    against: SourceQuality | None
    prices: Prices | None = None


def read_quality(pack: Pack) -> Quality | None:
    """Reads what was measured for the present content of a pack; None if nothing was.

    Raises:  PackError if the file is damaged.
    """
    return read_sidecar(pack.folder, QUALITY_FILE, Quality, pack.manifest.root)


def bits_per_weight(pack: Pack) -> float:
    """Returns the bits of selectors, records and extra values for each of the experts' weights."""
    spec, totals = pack.spec, pack.manifest.totals
    num_experts = len(spec.moe_layers) * spec.router.num_experts
    num_weights = num_experts * spec.expert.source_size * spec.hidden_size * len(spec.expert.matrices)
    return 8 * (totals.selectors + totals.records + totals.extra) / num_weights
