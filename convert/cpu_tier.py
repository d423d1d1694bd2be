"""Memory of the CPU over a drive, as `moe-run --budget` runs a pack: the tier of `--device cpu`.

The budget is divided by the runtime's own function, so that what is planned is what is allocated.
"""

from moe_pack.convert.choices import Floats
from moe_pack.convert.cost_model import predict
from moe_pack.convert.machine_tier import MachineTier, foretold
from moe_pack.convert.tier import Foretold
from moe_pack.formats import ExpertLayout, PackLayout
from moe_pack.runtime import AS_TARGET, BudgetPlan, divide_budget, least_budget

_SEEN_TOKENS = 512  # in the cache, where the context is no shorter


class CpuTier(MachineTier):
    """A budget of memory on this machine, or one of the same rates."""

    def foretell(self, layout: PackLayout, sparsity: Floats, less_bytes: int = 0, is_rough: bool = False) -> Foretold:
        """What a pack of this layout, so sparse [L, E], would do; in a budget smaller by some bytes, if given.

        Args:    is_rough: sooner, and less exactly: for a search.
        Raises:  RunError if it does not fit; it says what is needed.
        """
        traffic = self._traffic
        plan = self._divided(layout, self.budget_bytes - less_bytes)
        routes, recall, seen = traffic.passes, traffic.recall, min(self._context_tokens // 2, _SEEN_TOKENS)
        found = predict(layout, plan, self._machine, traffic.popularity, sparsity, routes, recall, seen, is_rough)
        return foretold(plan.parts, found, found.misses)

    def least_bytes(self, layout: PackLayout) -> int:
        """The smallest budget that a pack of this layout runs in."""
        return least_budget(layout, self._context_tokens, self._traffic.predictor_bytes)

    def fetch_seconds(self, expert: ExpertLayout, sparsity: float) -> float:
        """What bringing an expert takes: whole, or its selector and running rows, whichever is less."""
        drive = self._machine.drive
        whole = drive.seconds(1, expert.num_bytes)
        if expert.selector is None or sparsity == 0:
            return whole
        rows = drive.seconds_for_rows(1 - sparsity, expert.records.row_bytes, expert.num_rows)
        return min(whole, drive.seconds(1, expert.selector_bytes) + rows)

    def _divided(self, layout: PackLayout, budget_bytes: int) -> BudgetPlan:
        return divide_budget(layout, budget_bytes, self._context_tokens, self._traffic.predictor_bytes, AS_TARGET)
