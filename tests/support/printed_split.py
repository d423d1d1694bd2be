"""Algorithm 2 of Importance-Driven Expert Scheduling as it is printed, for any numbers of tokens.

On a GPU `kernels.neurons.compact` does the same for a batch of one token.
"""

from collections.abc import Sequence

from moe_pack.runtime.offload.split import LoadOrCompute


def balanced(computing: Sequence[float], loading: Sequence[float]) -> LoadOrCompute:
    """Splits from both ends: the next expert goes to the part that has cost less so far.

    Loading takes the expert with the most tokens, computing the one with the fewest. If both cost the same, the expert
    is loaded; of experts with equally many tokens, the earlier counts as having more.
    Args:    computing: seconds that each expert takes on the CPU, in proportion to its tokens.   loading: seconds to
             load it, the same for all in the paper.
    """
    order = sorted(range(len(computing)), key=lambda place: -computing[place])
    loaded, computed = list[int](), list[int]()
    load_cost = compute_cost = 0.0
    while order:
        if load_cost <= compute_cost:
            load_cost += loading[order[0]]
            loaded.append(order.pop(0))
        else:
            compute_cost += computing[order[-1]]
            computed.append(order.pop())
    return LoadOrCompute(tuple(loaded), tuple(computed))
