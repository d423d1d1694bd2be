"""The planner: finds the fastest pack within a memory budget and a loss, by turns of decisions and estimates.

    prices ─▶ knapsack: formats, sparsities, dense widths within the loss ─▶ layout ─▶ budget ─▶ estimate ─▶ prices

What a byte costs depends on what else is in memory. Therefore each turn decides at the prices of the turn before, and
the planner takes the plan with the highest estimated speed of all turns and selectors. The step "budget" divides the
memory with the runtime's own functions, which `speed` calls.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from moe_pack.convert.plan.options import SearchName
from moe_pack.convert.plan.papers import edgemoe_decision
from moe_pack.convert.plan.plan_file import Decision
from moe_pack.convert.plan.planned import EstimatedPlan, PlanningModel
from moe_pack.convert.plan.search import CostedFormats, costed_formats, least_time, price
from moe_pack.convert.plan.speed import MemoryTier
from moe_pack.formats import PackLayout, part_format, uniform_plan
from moe_pack.formats.base import commands, errors
from moe_pack.formats.pack.plans import format_fault
from moe_pack.formats.parts import specs
from moe_pack.runtime.offload.budgets import named_budget

_FIRST_TURNS, _MORE_TURNS = 2, 3  # for every selector; for the best one: prices settle in two or three turns
# Until a plan fits, memory costs more: by the first factor for dense matrices, all of which must be resident, and by
# the second for experts, of which one must be.
_DEARER = ((8.0, 1.0), (64.0, 1.0), (512.0, 8.0), (64.0, 64.0), (4096.0, 64.0), (4096.0, 4096.0))
_UNIFORM_TRIED = 12  # uniform plans within the loss whose speed is estimated: those with the fewest bytes


class Planner:
    """Makes plans for one model and one memory.

    Args:    selectors: those to choose from.   progress: is told of each plan that is tried.   is_fused: whether all
             experts of a layer have one format, of those that vLLM's fused layers have, and all neurons run; the search
             is then `knapsack`.
    Raises:  PlanError if the model has none of these selectors.
    """

    def __init__(
        self,
        model: PlanningModel,
        tier: MemoryTier,
        search: SearchName = "knapsack",
        selectors: Sequence[specs.Selector] = specs.SELECTORS,
        progress: commands.Progress = commands.NO_PROGRESS,
        *,
        is_fused: bool = False,
    ) -> None:
        has_gate = "gate" in model.spec.expert.matrices
        self._selectors: list[specs.Selector] = [kind for kind in selectors if has_gate or kind in ("up", "none")]
        if not self._selectors:
            raise errors.PlanError(
                f"--selector {selectors[0]}: this model's experts have no gate matrix; use up or none"
            )
        self._model = model
        self._tier = tier
        self._is_fused = is_fused
        self._progress = progress
        self._most_tried = {
            "knapsack": _FIRST_TURNS * len(self._selectors) + _MORE_TURNS,
            "edgemoe": len(self._selectors),
            "uniform": _UNIFORM_TRIED,
        }[search]
        self._search = {"knapsack": self._by_knapsack, "edgemoe": self._by_edgemoe, "uniform": self._uniform}[search]
        self._formats: dict[specs.Selector, CostedFormats] = {}
        self._refused: list[PackLayout] = []  # layouts of plans within the loss that do not fit the budget

    def plan(self, max_loss: float) -> EstimatedPlan:
        """Returns the fastest plan that is estimated to lose at most `max_loss` nats of KL divergence a token.

        Plans made before do not matter: a command that was killed between two of them makes the same ones.
        Raises:  RunError if no plan within the loss fits the budget; it says the smallest budget that does. PlanError
                 if no plan is within the loss.
        """
        self._refused.clear()
        self._progress.begin(commands.Stage("planning", self._most_tried, "plans"))
        plans = []
        for planned in self._search(max_loss):
            plans.append(planned)
            self._progress.advance(1, f"selector {planned.decision.plan.selector}")
        if plans:
            best = _fastest(plans)
            found = self.estimate(replace(best.decision, is_plain=self._is_fused), best.gap)
            self._progress.end()
            return found
        if not self._refused:
            raise errors.PlanError(f"--max-loss: every plan loses more than {max_loss:.2g} nats; allow more")
        raise errors.RunError(self._too_small())

    def estimate(self, decision: Decision, gap: float | None = None, is_rough: bool = False) -> EstimatedPlan:
        """Estimates loss and speed of a decision.

        Args:    is_rough: faster and less exact.
        Raises:  RunError if it does not fit the budget; PlanError if it does not fit the model.
        """
        layout = self._model.layout(decision.plan)
        loss = self._model.loss(decision)
        with named_budget("--target-vram", "--context"):
            speed = self._tier.estimate(layout, decision.sparsity, is_rough=is_rough)
        return EstimatedPlan(decision, layout, loss, gap, speed)

    def _fitting(self, decision: Decision, gap: float | None) -> EstimatedPlan | None:
        """Estimates a decision roughly; None if it does not fit the budget."""
        try:
            return self.estimate(decision, gap, is_rough=True)
        except errors.RunError:
            self._refused.append(self._model.layout(decision.plan))
            return None

    def _by_knapsack(self, max_loss: float) -> Iterator[EstimatedPlan]:
        best: EstimatedPlan | None = None
        for selector in self._selectors:
            for planned in self._turns(selector, max_loss, None, _FIRST_TURNS):
                yield planned
                best = planned if best is None else _fastest([best, planned])
        if best is not None:
            yield from self._turns(best.decision.plan.selector, max_loss, best, _MORE_TURNS)

    def _turns(
        self, selector: specs.Selector, max_loss: float, last: EstimatedPlan | None, num_turns: int
    ) -> Iterator[EstimatedPlan]:
        """Yields plans with one selector, each decided at the prices of the one before."""
        model, formats = self._model, self._formats_of(selector)
        dearer, turns = iter(_DEARER), 0
        factors: tuple[float, float] | None = (1.0, 1.0)
        while factors is not None and turns < num_turns:
            prices = price(self._tier, model, formats, last, factors)
            allocation = least_time(model.spec, model.losses, max_loss, prices, formats.choices)
            if allocation is None:
                return
            planned = self._fitting(allocation.decision, allocation.solution.gap)
            if planned is None:
                factors = next(dearer, None)
                continue
            turns, last = turns + 1, planned
            yield planned

    def _formats_of(self, selector: specs.Selector) -> CostedFormats:
        if selector not in self._formats:
            self._formats[selector] = costed_formats(self._tier, self._model, selector, is_fused=self._is_fused)
        return self._formats[selector]

    def _by_edgemoe(self, max_loss: float) -> Iterator[EstimatedPlan]:
        for selector in self._selectors:
            planned = self._fitting(edgemoe_decision(self._model, max_loss, selector), None)
            if planned is not None:
                yield planned

    def _uniform(self, max_loss: float) -> Iterator[EstimatedPlan]:
        """Yields plans that store all experts alike: those within the loss with the fewest bytes to run."""
        spec, losses, within = self._model.spec, self._model.losses, list[tuple[float, Decision]]()
        formats, _ = losses.of(losses.quantizer)
        widths = [None if width == 16 else part_format(width, 64) for width in losses.dense_widths]
        for selector, part, dense, sparsity in product(self._selectors, formats, widths, losses.sparsities):
            if dense is not None and format_fault(dense, spec.hidden_size):
                continue
            plan = uniform_plan(spec, selector, part, part, dense, losses.quantizer)
            decision = Decision(plan, np.full(losses.popularity.shape, sparsity))
            if self._model.loss(decision) <= max_loss:
                within.append((part.part_bytes(spec.hidden_size) * (3 - 2 * sparsity), decision))
        for _, decision in sorted(within, key=lambda candidate: candidate[0])[:_UNIFORM_TRIED]:
            if (planned := self._fitting(decision, None)) is not None:
                yield planned

    def _too_small(self) -> str:
        tier, spec, losses = self._tier, self._model.spec, self._model.losses
        least = min(tier.least_bytes(layout) for layout in self._refused)
        formats, _ = losses.of(losses.quantizer)
        smallest = min(formats, key=lambda part: part.part_bytes(spec.hidden_size))
        narrow = part_format(min(losses.dense_widths), 64)
        plan = uniform_plan(spec, self._selectors[0], smallest, smallest, narrow, losses.quantizer)
        any_loss = tier.least_bytes(self._model.layout(plan))
        # Sizes are rounded for people: if both read alike, the message has all digits.
        text = (
            commands.size_text
            if commands.size_text(least) != commands.size_text(tier.budget_bytes)
            else "{:,} bytes".format
        )
        return (
            f"--target-vram: {text(tier.budget_bytes)} is too small; a pack within this loss needs {text(least)}, one "
            f"of any loss {text(any_loss)}; give more memory, a larger --max-loss, or a shorter --context"
        )


def _fastest(plans: Sequence[EstimatedPlan]) -> EstimatedPlan:
    return min(plans, key=lambda planned: (planned.speed.seconds.total, planned.loss))
