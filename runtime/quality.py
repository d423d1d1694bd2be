"""The measures of a pack: the bits of its experts, and its loss against its source, the sidecar `quality.json`."""

from dataclasses import dataclass

from moe_pack.formats import Pack
from moe_pack.formats.base import json_files
from moe_pack.formats.pack.sidecar import read_sidecar

QUALITY_FILE = "quality.json"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure."""

    value: float
    half_width: json_files.Amount | None  # of its 95% confidence interval; None if there are fewer than two blocks

    @property
    def upper(self) -> float | None:
        """The upper end of the interval."""
        return None if self.half_width is None else self.value + self.half_width


@dataclass(frozen=True, slots=True)
class SourceQuality:
    """A pack compared with its source; KL divergences in nats a token."""

    source: str  # the checkpoint's digest
    is_exact: bool  # whether `kl` is over the whole vocabulary; otherwise tokens drawn from the tail estimate its tail
    num_outcomes: json_files.Count  # the likeliest tokens
    kl: Estimate
    kl_bound: Estimate  # a lower bound, over these outcomes and the tail as one more
    noise_floor: json_files.Amount  # between two runs of the source that differ only by rounding
    source_perplexity: Estimate
    perplexity_increase: Estimate  # relative, 0.01 for 1%
    agreement: Estimate  # the share of tokens with the same likeliest next token
    source_tail: json_files.Amount  # mean probability outside these outcomes
    pack_tail: json_files.Amount  # likewise


@dataclass(frozen=True, slots=True)
class SparsityPrice:
    """The loss of a pack at a sparsity, compared with all neurons: KL in nats, perplexity relative."""

    sparsity: json_files.Share
    realized: json_files.Share | None  # neurons that did not run on the judged text; None if no token had an expert
    kl: Estimate
    perplexity_increase: Estimate


@dataclass(frozen=True, slots=True)
class SubstitutionPrice:
    """The loss of a pack with `--substitute alpha`, compared with the same pack without it: KL in nats."""

    alpha: json_files.Amount
    replaced: json_files.Share  # of the chosen experts
    fetched: json_files.Share  # of the experts that ran: those that were missing
    kl: Estimate
    perplexity_increase: Estimate


@dataclass(frozen=True, slots=True)
class Substitution:
    """The prices with one policy."""

    policy: str
    room: json_files.Share  # of the experts, that fit in memory
    fetched: json_files.Share  # without substitution
    prices: tuple[SubstitutionPrice, ...]


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices on the first `num_tokens` predicted tokens of a text."""

    num_tokens: json_files.Positive
    calibration: str  # the text for the thresholds
    sparsity: tuple[SparsityPrice, ...]
    substitution: Substitution


@dataclass(frozen=True, slots=True)
class Quality:
    """The sidecar `quality.json`: the quality of a pack on a text."""

    text: str
    text_sha256: str
    num_sequences: json_files.Positive
    sequence_length: json_files.Positive
    num_tokens: json_files.Positive  # predicted ones
    content_bytes: json_files.Positive
    sparsity: json_files.Share | None  # neurons that did not run; None if no token reached an expert
    perplexity: Estimate
    against: SourceQuality | None
    prices: Prices | None = None  # of more sparsity and of substitution; `evaluate` does not measure them


def read_quality(pack: Pack) -> Quality | None:
    """Reads the measures of a pack's present content, or None; raises PackError if the file is damaged."""
    return read_sidecar(pack.folder, QUALITY_FILE, Quality, pack.manifest.root)


def bits_per_weight(pack: Pack) -> float:
    """Returns the bits of selectors, records and extra values for each of the experts' weights."""
    spec, totals = pack.spec, pack.manifest.totals
    num_experts = len(spec.moe_layers) * spec.router.num_experts
    num_weights = num_experts * spec.expert.source_size * spec.hidden_size * len(spec.expert.matrices)
    return 8 * (totals.selectors + totals.records + totals.extra) / num_weights
