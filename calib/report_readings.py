"""What the figures of a report say of this model, in two or three plain sentences each. No figure is made here."""

import math

import numpy as np

from moe_pack.calib.arrays import Array
from moe_pack.calib.coverage import PopularityTest
from moe_pack.calib.report_figures import Coverage, Head, Paths, Prediction, Sensitivity

_SIGNIFICANT = 0.001  # p-values are somewhat too small within one text: see `compare_popularity`
_FEW = 8  # layers or experts that a sentence names


def percent(share: float) -> str:
    """A share as people read it, with as many digits as it needs: 0.13 is 13%, 0.001 is 0.1%."""
    if share == 0:
        return "0%"
    return f"{100 * share:.3g}%" if share < 0.995 or share == 1 else f"{100 * share:.4g}%"


def nats(kl: float) -> str:
    """A KL divergence."""
    return f"{kl:.2g} nats"


def ranges(numbers: list[int]) -> str:
    """Ascending numbers, runs of three and more joined: 1, 4-6, 9."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(parts)


def popularity(head: Head, tokens: Array, tests: tuple[PopularityTest, ...]) -> str:
    """On tokens [L, E] and the held-out test."""
    choices, even = head.num_tokens * head.num_experts_per_tok, 1 / head.num_experts
    l, e = np.unravel_index(int(tokens.argmax()), tokens.shape)
    text = (
        f"Were all experts alike, each would take {percent(even)} of its layer's choices. The most chosen is expert {e} "
        f"of layer {head.layers[l]} with {percent(tokens[l, e] / choices)}, {tokens[l, e] / choices / even:.1f} times that. "
    )
    if not tests:
        return text + "No text was held out, so whether this holds for other text is not known."
    uneven = [layer for layer, test in zip(head.layers, tests, strict=True) if test.p_value < _SIGNIFICANT]
    kept = [test for test in tests if test.calibrated_nats > test.uniform_nats]
    gain = float(np.mean([test.calibrated_nats - test.uniform_nats for test in tests]))
    quarter = float(np.mean([test.quarter_share for test in tests]))
    says = "no layer's popularity is" if not uneven else f"popularity is in {len(uneven)} of {len(tests)} layers"
    return (
        f"{text}On held-out text {says} uneven beyond chance (p < {_SIGNIFICANT}); counts from calibration foretell its "
        f"choices better than an even guess in {len(kept)} of {len(tests)} layers, by {gain:.2g} nats a choice on average, "
        f"and the most popular quarter of experts takes {percent(quarter)} of them (even: "
        f"{percent(tests[0].quarter_uniform)})."
    )


def sparsity(head: Head, thresholds: Array, tokens: Array, kinds: tuple[str, ...]) -> str:
    """On thresholds [L, E, kinds] for 80% sparsity, and tokens [L, E]."""
    reached = tokens > 0
    spreads = []
    for kind, name in enumerate(kinds):
        held = thresholds[..., kind][reached]
        low, high = float(held.min()), float(held.max())
        apart = f" ({high / low:.1f} times)" if low > 0 else ""
        spreads.append(f"{name} {low:.3g} to {high:.3g}{apart}")
    l, e = np.unravel_index(int(np.where(reached, thresholds[..., 0], np.inf).argmin()), tokens.shape)
    return (
        f"For 80% of neurons not to run, the threshold is, from the lowest expert to the highest: {'; '.join(spreads)}. "
        f"The further apart, the more one threshold for all would starve some experts and spare others: on {kinds[0]}, "
        f"expert {e} of layer {head.layers[l]} would be starved first. Selectors have scales of their own, so "
        "compare them at equal sparsity, not at an equal threshold."
    )


def sensitivity(head: Head, quantized: Array, sparse: Array, figures: Sensitivity) -> str:
    """On predicted KL [L, E, matrices, widths] and [L, E, kinds, sparsities], in nats."""
    by_layer = quantized.sum(axis=(1, 2), dtype=np.float64)  # [L, widths]
    totals, worst = by_layer.sum(axis=0), int(by_layer[:, 0].argmax())
    share = by_layer[worst, 0] / totals[0] if totals[0] > 0 else 0.0
    by_matrix = quantized.sum(axis=(0, 1), dtype=np.float64)[:, 0]
    matrix = figures.matrices[int(by_matrix.argmax())]
    others = [f"{nats(total)} at {width}" for width, total in zip(figures.widths[1:], totals[1:], strict=True)]
    at_80 = sparse[..., figures.sparsities.index(0.8)].sum(axis=(0, 1), dtype=np.float64)  # [kinds]
    best = int(at_80.argmin())
    return (
        f"Layer {head.layers[worst]} is the most sensitive: with all its experts at {figures.widths[0]} bits it costs "
        f"{nats(by_layer[worst, 0])}, {percent(share)} of what all layers cost together ({nats(totals[0])}; "
        f"{', '.join(others)}). Of the matrices, {matrix} costs most at {figures.widths[0]} bits. At 80% sparsity everywhere, "
        f"selecting by {figures.kinds[best]} costs least: {nats(at_80[best])}, against "
        f"{' and '.join(f'{nats(kl)} by {kind}' for kind, kl in zip(figures.kinds, at_80, strict=True) if kind != figures.kinds[best])}."
    )


def dense(figures: Sensitivity) -> str:
    """On the dense matrices, embedding and head."""
    if not figures.dense:
        return "No dense matrix of this model can be stored in fewer bits."
    known = [(matrix, matrix.kl[-1]) for matrix in figures.dense if matrix.kl[-1] is not None]
    totals = [sum(matrix.kl[width] or 0.0 for matrix in figures.dense) for width in range(len(figures.dense_widths))]
    worst, kl = max(known, key=lambda entry: entry[1], default=(figures.dense[0], 0.0))
    eight, four = figures.dense_widths
    return (
        f"All dense matrices of the layers together cost {nats(totals[0])} at {eight} bits and {nats(totals[1])} at {four}; "
        f"at {four} bits {worst.role} of layer {worst.layer} costs most ({nats(kl)}). {_ends(figures)}"
    )


def _ends(figures: Sensitivity) -> str:
    parts = []
    for name, kls in (("the embedding", figures.embedding), ("the head", figures.head)):
        held = [f"{nats(kl)} at {w}" for kl, w in zip(kls, figures.dense_widths, strict=True) if kl]
        if held:
            parts.append(f"{name} {' and '.join(held)}")
    return f"Beside them {', '.join(parts)} bits." if parts else ""


def experts_foretold(head: Head, found: Prediction) -> str:
    """On the predictors' recall."""
    recall = np.asarray(
        [[row[0] for row in layer.experts] for layer in found.layers], np.float64
    )  # [L - 1, predictors]
    best = [found.predictors[layer.best] for layer in found.layers]
    named = {
        name: [layer for layer, chosen in zip(head.layers[1:], best, strict=True) if chosen == name]
        for name in found.predictors
        if name in best
    }
    says = "; ".join(f"{name} in layer{'s' * (len(layers) > 1)} {ranges(layers)}" for name, layers in named.items())
    top, even = float(np.nanmax(recall, axis=1).mean()), head.num_experts_per_tok / head.num_experts
    return (
        f"Best by layer: {says}. The best of each layer finds {percent(top)} of the experts a token will use before the "
        f"layer runs, popularity alone {percent(float(recall[:, 0].mean()))}, a blind guess {percent(even)}. Those it misses "
        "must be fetched while the token waits."
    )


def neurons_foretold(head: Head, found: Prediction) -> str:
    """On selector reuse, and the cosine of successive layers' inputs."""
    at_80 = found.sparsities.index(0.8)
    held = [[layer.neurons[kind][at_80] for layer in found.layers] for kind in range(len(found.kinds))]
    means = [_mean([recall for recall, _ in kind]) for kind in held]
    cosines = [mean for mean, _ in found.cosine if mean is not None]
    if any(mean is None for mean in means) or not cosines:
        return "No held-out token came to any expert, so nothing is known of its neurons."
    said = ", ".join(f"{percent(mean or 0.0)} for {kind}" for kind, mean in zip(found.kinds, means, strict=True))
    lowest = int(np.argmin(cosines))
    return (
        f"A layer's selector, run one layer early, finds at 80% sparsity this share of the neurons that will run: {said}. "
        f"A blind guess of as many finds 20%. It works as far as successive layers see similar inputs: their cosine is "
        f"{np.mean(cosines):.2f} on average, lowest at layer {head.layers[1:][lowest]} ({cosines[lowest]:.2f})."
    )


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def path_spread(found: Paths) -> str:
    """On EdgeMoE's Fig. 4."""
    fifth = found.covered_percents.index(20)
    share = float(np.mean([window.covered[fifth] for window in found.windows]))
    single = sum(window.num_single for window in found.windows) / sum(window.num_paths for window in found.windows)
    length = len(found.windows[0].layers)
    kept = (
        "Few paths carry most tokens, which path statistics can learn."
        if share >= 0.6
        else ("Tokens spread over many paths: exact paths are of little use to foretell experts here.")
    )
    return (
        f"The most frequent 20% of the paths through {length} layer{'s' * (length > 1)} carry {percent(share)} of the tokens "
        f"(were all equally frequent, 20%); {percent(single)} of the paths were taken by one token only. {kept}"
    )


def path_recall(head: Head, found: Paths) -> str:
    """On what path statistics foretell of held-out text."""
    later = found.recalls[1:]
    if not later:
        return "One layer with experts: there is no layer before it to foretell from."
    recall, doubled = (
        float(np.mean(held)) for held in zip(*((r.recall, r.recall_doubled) for r in later), strict=True)
    )
    exact = float(np.mean([r.stage_share[0] for r in later]))
    k = head.num_experts_per_tok
    return (
        f"Knowing the experts of the two layers before, the {_counted(k)} ranked first hold on average {percent(recall)} of those "
        f"chosen, the first {2 * k} {percent(doubled)}. {percent(exact)} of the queries matched a set of experts seen at "
        "least 8 times in calibration; the others were answered from pairs of experts, or popularity."
    )


def _counted(k: int) -> str:
    return "expert" if k == 1 else f"{k} experts"


def accumulated(head: Head, found: Paths) -> str:
    """On EdgeMoE's Fig. 8 (right)."""
    known = np.asarray(found.accumulated).mean(axis=1)  # [3, n]
    n = min(max(math.ceil(head.num_experts / 4), head.num_experts_per_tok), known.shape[1])
    none, one, two = (percent(float(row[n - 1])) for row in known)
    return (
        f"Holding ready the {n} likeliest of {head.num_experts} experts serves {none} of the choices when nothing is known "
        f"of the token, {one} knowing the layer before and {two} knowing two: the distance between the curves is what paths are worth."
    )


def coverage(head: Head, found: Coverage) -> str:
    """On experts that the text reached too seldom."""
    unreached, scarce = (sum(len(experts) for _, experts in held) for held in (found.unreached, found.scarce))
    total, least = len(head.layers) * head.num_experts, found.least[0]
    if not unreached and not scarce:
        return (
            f"The text reached all {total:,} experts with at least {found.min_tokens} tokens. The least covered is expert "
            f"{least.expert} of layer {least.layer} with {least.num_tokens:,} tokens: a share of {percent(least.low)} to "
            f"{percent(least.high)} of all tokens, with 95% confidence."
        )
    parts = []
    if unreached:
        parts.append(
            f"No token reached {unreached:,} of {total:,} experts; in their place stand their layers' pooled quantiles, "
            "and their errors count as 0."
        )
    if scarce:
        parts.append(
            f"{scarce:,} of {total:,} had fewer than {found.min_tokens} tokens: too few to trust their thresholds and errors."
        )
    return f"{' '.join(parts)} More or other text (--tokens, --data) would reach more of them."
