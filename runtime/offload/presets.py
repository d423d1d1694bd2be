"""Presets, the system of each paper as a combination of policies, by the names of `--policy`; and approximations.

A preset has the settings of its paper, read for one fast level above one slow level: host memory above the disk, or GPU
memory above host memory. Comments mark our own readings; docs/papers.md says what they change.
convert/plan/papers.py has what each paper stores (`--preset`).

This module is imported for `--help`, without numpy; eviction.py and prefetch.py compute what it names.
"""

from dataclasses import dataclass, replace
from typing import Literal

from moe_pack.formats.base import commands

PolicyName = Literal["lru", "floe", "corm", "fiddler", "edgemoe", "importance"]
PredictionName = Literal["none", "popularity", "paths", "router", "mlp", "partial", "best"]  # prefetch.py has them
EvictionName = Literal["lru", "layer_lru", "edgemoe", "importance", "none"]

ROUTING_FILE = "routing.safetensors"  # next to a pack; routing_file.py reads it
# Those of which this file has recalls, in its order.
PREDICTORS = ("popularity", "paths", "next router", "MLP of one layer", "MLP of two layers", "partial state")


@dataclass(frozen=True, slots=True)
class Preset:
    """The policies of a system."""

    name: PolicyName
    eviction: EvictionName
    placed_share: float = 0.0  # of the pages, for the most popular experts, which stay for the whole run
    keeps: bool = True  # whether other experts stay after they have run
    starts_filled: bool = False  # whether experts fill the pages before the run; they are evicted as all others
    prediction: PredictionName = "none"
    max_predicted: int | None = None  # experts predicted for a layer; None: as many as a token uses
    # The cutover, a share of neurons: if fewer of an expert's neurons run, a miss brings only their rows.
    rows_below: float = 0.0
    reuse_selector: bool = False  # the next layer's selector predicts neurons (FloE §3.3.2, CORM §4.2)
    needs_scores: bool = False  # the eviction uses the routers' scores of all experts
    # On a GPU Algorithm 2 of *importance* splits a token's missing experts between the link and the CPU one by one, and
    # prompts load all.
    balances: bool = False

    def without_prediction(self) -> "Preset":
        """Returns the same preset without prediction of experts and neurons, and with an empty cache before the run."""
        return replace(self, starts_filled=False, prediction="none", reuse_selector=False)

    def num_predicted(self, num_active: int) -> int:
        """Returns how many experts are predicted for a layer if a token uses `num_active`."""
        if self.prediction == "none":
            return 0
        return num_active if self.max_predicted is None else self.max_predicted


_LRU = Preset("lru", "lru")
# FloE moves only running rows, predicted by its networks and by the next layer's selector (§3.3, §3.4). About fast
# memory it says only that more of it has "more MoE layers" (Fig. 8). Our reading: the last used of all layers stay.
_FLOE = Preset("floe", "lru", prediction="mlp", rows_below=1.0, reuse_selector=True)
# CORM §4.2, §4.3; whole experts above 75% of running neurons: Fig. 9.
_CORM = Preset("corm", "layer_lru", prediction="router", rows_below=0.75, reuse_selector=True)
# Fiddler computes a missing expert in the memory where it is (§3.2, decode). Our reading for an expert on a disk: it is
# read, used once and not kept.
_FIDDLER = Preset("fiddler", "none", placed_share=1.0, keeps=False)
# EdgeMoE §III-C: "can preload 1-3 experts in each layer"; likeliest first, until the router has chosen. §III-C2
# initializes the expert buffer.
_EDGEMOE = Preset("edgemoe", "edgemoe", starts_filled=True, prediction="paths", max_predicted=3)
# Importance §5.2 (the best k by predicted score), §5.3, and §5.4 for decode alone: in prompts all experts are loaded
# (§4.1). Substitution (§5.1) changes answers and has an option of its own.
_IMPORTANCE = Preset("importance", "importance", prediction="partial", needs_scores=True, balances=True)

PRESETS: dict[str, Preset] = {preset.name: preset for preset in (_LRU, _FLOE, _CORM, _FIDDLER, _EDGEMOE, _IMPORTANCE)}
# The fewer things a policy does, the earlier: among policies that hit equally often, `auto` takes the first of these.
SIMPLEST_FIRST: tuple[PolicyName, ...] = ("lru", "fiddler", "corm", "edgemoe", "importance", "floe")


@dataclass(frozen=True, slots=True)
class Approximations:
    """The options that make a run faster and change its answer; all are off by default."""

    # Alpha of Algorithm 1 of Importance-Driven Expert Scheduling.
    substitute: float | None = commands.option_field(
        None,
        "--substitute",
        least=0,
        most=1,
        metavar="ALPHA",
        mark="approximation",
        help="CHANGES THE ANSWER: runs resident experts in place of missing ones with low scores. The paper of "
        "--policy importance uses 0.25 to 0.35.  [default: off]",
    )
    # If rows of an expert were predicted, only the neurons run whose rows are resident when the prefetch is complete.
    is_predicted_enough: bool = commands.option_field(
        False,
        "--trust-prediction",
        mark="offload",
        help="CHANGES THE ANSWER: where single rows are read, runs only the predicted neurons.",
    )
    # CORM §4.2.
    runs_predicted: bool = commands.option_field(
        False,
        "--trust-experts",
        mark="approximation",
        help="CHANGES THE ANSWER: in decode, runs the experts that were predicted for a layer, whatever its router "
        "chooses.",
    )


EXACT: Approximations = Approximations()
