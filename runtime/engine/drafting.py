"""The choice of what drafts: a prediction layer, n-grams, or nothing, and then why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_pack.formats import families
from moe_pack.runtime import drafts, model
from moe_pack.runtime.engine.built import Setup
from moe_pack.runtime.engine.options import EngineOptions

if TYPE_CHECKING:
    from moe_pack.runtime.drafts.drafter import Drafter


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """The choice for a run, before there is a decoder."""

    layer: families.PredictionLayer | None  # that drafts; None: n-grams do, or nothing does
    why_not: str | None  # None if something drafts, or the options say that nothing does

    def is_drafting(self, options: EngineOptions) -> bool:
        """Returns whether something drafts."""
        return options.draft != "off" and self.why_not is None

    def memory_bytes(self, context_tokens: int) -> int:
        """Returns the bytes of the prediction layer that drafts, with its keys and values; 0 if none does."""
        return 0 if self.layer is None else drafts.prediction_bytes(self.layer, context_tokens)

    def open(
        self, setup: Setup, decoder: model.Decoder | model.EncoderDecoder, weights: model.PackWeights, most_tokens: int
    ) -> drafts.Drafts | None:
        """Opens what drafts; None if nothing does. `most_tokens`: of a pass that verifies drafts."""
        if not self.is_drafting(setup.options):
            return None
        assert isinstance(decoder, model.Decoder), "a model without an encoder"
        drafter: Drafter = drafts.NgramDrafter()
        if self.layer is not None:
            prediction = drafts.PredictionWeights(self.layer, weights, decoder.device)
            drafter = drafts.PredictionDrafter(prediction, setup.context_tokens, decoder.chunk_tokens)
            decoder.sequences[0].follower = drafter
        return drafts.Drafts(drafter, drafts.Gate(), most_tokens)


def choose_drafts(setup: Setup, operations: model.Operations) -> DraftChoice:
    """Returns what drafts; it is a fallback if the options ask for something that is not possible."""
    option, layer = setup.options.draft, None
    why_not = None if option == "off" else _why_not(setup, operations)
    if option == "mtp" and why_not is None:
        layer = families.PredictionLayer.find(setup.pack)
        if layer is None:
            why_not = "the pack has no prediction layer that runs; --draft ngram needs none"
    if why_not is not None and option != "auto":
        setup.fall_back(f"nothing is drafted: {why_not}")
    return DraftChoice(layer, why_not)


def _why_not(setup: Setup, operations: model.Operations) -> str | None:
    """Returns why this run cannot draft, whatever the pack has; None if it can."""
    options, approximations = setup.options, setup.options.approximations
    if options.device == "cuda" and options.draft == "auto":
        return "whether drafts pay on a GPU was not measured; --draft ngram drafts all the same"
    if setup.pack.spec.encoder is not None:
        return "the model has an encoder"
    if approximations.substitute is not None or approximations.runs_predicted or approximations.is_predicted_enough:
        return "an option that CHANGES THE ANSWER makes it depend on which tokens run together"
    if options.draft == "auto" and not isinstance(operations, model.NativeOperations):
        return "in torch, tokens of one pass differ by rounding; --draft ngram drafts all the same"
    if options.draft == "mtp" and setup.sequences.number > 1:
        return "a prediction layer follows one sequence, and several run; --draft ngram follows all"
    return None
