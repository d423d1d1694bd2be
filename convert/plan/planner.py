"""The planner: the fastest pack within a memory budget and a loss, by turns of deciding and foretelling.

    prices ─▶ knapsack: formats, sparsities, dense widths within the loss ─▶ layout ─▶ budget ─▶ replay ─▶ prices

What a byte costs depends on what else is in memory, so each turn decides at the last turn's prices; the plan taken is
the one that is foretold to be the fastest of all turns and selector kinds.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Literal, get_args

import numpy as np

from moe_pack.convert.plan.papers import edgemoe_decision
from moe_pack.convert.plan.plan_file import Decision
from moe_pack.convert.plan.planned import EstimatedPlan, PlanningModel
from moe_pack.convert.plan.search import CostedFormats, least_time, menu_of, price
from moe_pack.convert.plan.tiers import MemoryTier
from moe_pack.formats import PackLayout, PartFormat, PlanError, RunError, Selector, part_format, size_text, uniform_plan
from moe_pack.formats.plan import format_fault
from moe_pack.formats.spec import SELECTORS

SearchName = Literal["knapsack", "edgemoe", "uniform"]
SEARCHES: tuple[SearchName, ...] = get_args(SearchName)

_FIRST_TURNS, _MORE_TURNS = 2, 3  # of every selector kind; of the best one: prices settle in two or three
# Until a plan fits, memory is made dearer: to dense matrices, all of which must be there, and to experts, one of which.
_DEARER = ((8.0, 1.0), (64.0, 1.0), (512.0, 8.0), (64.0, 64.0), (4096.0, 64.0), (4096.0, 4096.0))
_UNIFORM_TRIED = 12  # of uniform plans within the loss, those with the fewest bytes


class Planner:
    """Makes plans for one model and one memory.

    Args:    selectors: the kinds to choose from.
    Raises:  PlanError if the model has none of these selectors.
    """

    def __init__(
        self,
        model: PlanningModel,
        tier: MemoryTier,
        search: SearchName = "knapsack",
        selectors: Sequence[Selector] = SELECTORS,
    ) -> None:
        has_gate = "gate" in model.spec.expert.matrices
        self._selectors: list[Selector] = [kind for kind in selectors if has_gate or kind in ("up", "none")]
        if not self._selectors:
            raise PlanError(f"--selector {selectors[0]}: this model's experts have no gate matrix; use up or none")
        self._model = model
        self._tier = tier
        self._search = {"knapsack": self._by_knapsack, "edgemoe": self._by_edgemoe, "uniform": self._uniform}[search]
        self._menus: dict[Selector, CostedFormats] = {}
        self._settled: dict[Selector, EstimatedPlan] = {}  # whose prices the next plan, for another loss, begins with
        self._refused: list[PackLayout] = []  # of plans within the loss that had no room

    def plan(self, max_loss: float) -> EstimatedPlan:
        """The fastest plan found that is expected to lose at most so many nats of KL.

        Raises:  RunError if no plan within the loss fits the budget; it says the least that does, and what would have
                 to give. PlanError if none is within the loss.
        """
        self._refused.clear()
        found = list(self._search(max_loss))
        if found:
            best = _fastest(found)
            return self.foretold(best.decision, best.gap)
        if not self._refused:
            raise PlanError(f"no plan loses less than {max_loss:.2g} nats; allow more with --max-loss")
        raise RunError(self._too_small())

    def foretold(self, decision: Decision, gap: float | None = None, is_rough: bool = False) -> EstimatedPlan:
        """What a decision would come to.

        Args:    is_rough: sooner, and less exactly.
        Raises:  RunError if it does not fit the budget; PlanError if it does not fit the model.
        """
        layout = self._model.layout(decision.plan)
        loss = self._model.loss(decision)
        foretold = self._tier.foretell(layout, decision.sparsity, is_rough=is_rough)
        return EstimatedPlan(decision, layout, loss, gap, foretold)

    def _fitting(self, decision: Decision, gap: float | None) -> EstimatedPlan | None:
        """The same; None where it does not fit the budget."""
        try:
            return self.foretold(decision, gap, is_rough=True)
        except RunError:
            self._refused.append(self._model.layout(decision.plan))
            return None

    def _by_knapsack(self, max_loss: float) -> Iterator[EstimatedPlan]:
        best: EstimatedPlan | None = None
        for selector in self._selectors:
            settled = self._settled.get(selector)
            for found in self._turns(selector, max_loss, settled, _FIRST_TURNS if settled is None else 1):
                self._settled[selector] = found
                yield found
                best = found if best is None else _fastest([best, found])
        if best is not None:
            yield from self._turns(best.decision.plan.selector, max_loss, best, _MORE_TURNS)

    def _turns(
        self, selector: Selector, max_loss: float, last: EstimatedPlan | None, num_turns: int
    ) -> Iterator[EstimatedPlan]:
        """Plans of one selector kind, each decided at the prices that the one before came to."""
        model, menu = self._model, self._menu(selector)
        dearer, turns = iter(_DEARER), 0
        factors: tuple[float, float] | None = (1.0, 1.0)
        while factors is not None and turns < num_turns:
            prices = price(self._tier, model, menu, last, factors)
            found = least_time(model.spec, model.losses, max_loss, prices, menu.choices)
            if found is None:
                return
            planned = self._fitting(found.decision, found.solution.gap)
            if planned is None:
                factors = next(dearer, None)
                continue
            turns, last = turns + 1, planned
            yield planned

    def _menu(self, selector: Selector) -> CostedFormats:
        if selector not in self._menus:
            self._menus[selector] = menu_of(self._tier, self._model, selector)
        return self._menus[selector]

    def _by_edgemoe(self, max_loss: float) -> Iterator[EstimatedPlan]:
        """EdgeMoE's widths, under each selector kind."""
        for selector in self._selectors:
            found = self._fitting(edgemoe_decision(self._model, max_loss, selector), None)
            if found is not None:
                yield found

    def _uniform(self, max_loss: float) -> Iterator[EstimatedPlan]:
        """Plans that store all experts alike: of those within the loss, the ones that take the fewest bytes to run."""
        losses, held = self._model.losses, list[tuple[float, Decision]]()
        formats, _ = losses.of(losses.quantizer)
        widths = [None if width == 16 else part_format(width, 64) for width in losses.dense_widths]
        for selector, part, dense, sparsity in product(self._selectors, formats, widths, losses.sparsities):
            decision = self._alike(selector, part, dense, sparsity)
            if decision is not None and self._model.loss(decision) <= max_loss:
                running = part.part_bytes(self._model.spec.hidden_size) * (3 - 2 * sparsity)
                held.append((running, decision))
        for _, decision in sorted(held, key=lambda one: one[0])[:_UNIFORM_TRIED]:
            if (found := self._fitting(decision, None)) is not None:
                yield found

    def _alike(
        self, selector: Selector, part: PartFormat, dense: PartFormat | None, sparsity: float
    ) -> Decision | None:
        spec = self._model.spec
        if dense is not None and format_fault(dense, spec.hidden_size):
            return None
        plan = uniform_plan(spec, selector, part, part, dense, self._model.losses.quantizer)
        return Decision(plan, np.full(self._model.losses.popularity.shape, sparsity))

    def _too_small(self) -> str:
        """What to tell of a budget that no plan within the loss fits."""
        tier, spec, losses = self._tier, self._model.spec, self._model.losses
        least = min(tier.least_bytes(layout) for layout in self._refused)
        formats, _ = losses.of(losses.quantizer)
        smallest = min(formats, key=lambda part: part.part_bytes(spec.hidden_size))
        narrow = part_format(min(losses.dense_widths), 64)
        plan = uniform_plan(spec, self._selectors[0], smallest, smallest, narrow, losses.quantizer)
        any_loss = tier.least_bytes(self._model.layout(plan))
        # Sizes are rounded for people: where both read alike, all bytes are said.
        text = size_text if size_text(least) != size_text(tier.budget_bytes) else "{:,} bytes".format
        return (
            f"--target-vram: {text(tier.budget_bytes)}, the least within this loss is {text(least)}, and "
            f"{text(any_loss)} whatever it loses; give more memory, a larger --max-loss, or a shorter --context"
        )


def _fastest(plans: Sequence[EstimatedPlan]) -> EstimatedPlan:
    """The fastest; of those as fast, the one that loses less."""
    return min(plans, key=lambda planned: (planned.foretold.seconds, planned.loss))
