"""What the figures of a report say of this model, in two or three plain sentences each. No figure is made here."""

import math

import numpy as np

from moe_pack.calib.forward import Array
from moe_pack.calib.report.figures import Coverage, Head, Paths, Prediction, Sensitivity
from moe_pack.calib.statistics import PopularityTest

_SIGNIFICANT = 0.001  # p-values are somewhat too small within one text: see `compare_popularity`
_MANY = 0.6  # three times what equally frequent paths would carry


def percent(share: float) -> str:
    """A share as people read it, with as many digits as it needs: 0.13 is 13%, 0.9987 is 99.87%."""
    if share == 0:
        return "0%"
    return f"{100 * share:.3g}%" if share < 0.995 or share == 1 else f"{100 * share:.4g}%"


def nats(kl: float) -> str:
    """A KL divergence, two digits of it."""
    return f"{kl:.2g} nats".replace("e-0", "e-")


def ranges(numbers: list[int]) -> str:
    """Ascending numbers, runs of three and more joined: 1, 4 to 6, 9."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def popularity(head: Head, tokens: Array, tests: tuple[PopularityTest, ...]) -> str:
    """On tokens [L, E] and the held-out test."""
    even = 1 / head.num_experts
    l, e = np.unravel_index(int(tokens.argmax()), tokens.shape)
    most = float(tokens[l, e]) / (head.num_tokens * head.num_experts_per_tok)
    said = (
        f"Were all experts alike, each would take {percent(even)} of its layer's choices. The most chosen is expert "
        f"{e} of layer {head.layers[l]} with {percent(most)}, {most / even:.1f} times that."
    )
    if not tests:
        return f"{said} No text was held out, so whether this holds for other text is not known."
    return f"{said} {_held_out(tests)}"


def _held_out(tests: tuple[PopularityTest, ...]) -> str:
    num_uneven = sum(test.p_value < _SIGNIFICANT for test in tests)
    gains = [test.calibrated_nats - test.uniform_nats for test in tests]
    quarter = float(np.mean([test.quarter_share for test in tests]))
    return (
        f"On held-out text popularity is uneven beyond chance in {num_uneven} of {len(tests)} layers "
        f"(p < {_SIGNIFICANT}). Counts from calibration foretell its choices better than an even guess in "
        f"{sum(gain > 0 for gain in gains)} layers, on average by {np.mean(gains):.2g} nats a choice, and the most "
        f"popular quarter of experts takes {percent(quarter)} of them (even: {percent(tests[0].quarter_uniform)})."
    )


def sparsity(head: Head, thresholds: Array, tokens: Array, kinds: tuple[str, ...]) -> str:
    """On thresholds [L, E, kinds] for 80% sparsity, and tokens [L, E]."""
    reached, spreads = tokens > 0, []
    for kind, name in enumerate(kinds):
        held = thresholds[..., kind][reached]
        low, high = float(held.min()), float(held.max())
        spreads.append(f"{name} {low:.3g} to {high:.3g}{f' ({high / low:.1f} times)' if low > 0 else ''}")
    l, e = np.unravel_index(int(np.where(reached, thresholds[..., 0], np.inf).argmin()), tokens.shape)
    return (
        f"For 80% of neurons not to run, an expert's threshold must lie at, lowest to highest: {'; '.join(spreads)}. "
        f"The further apart, the more one threshold for all would starve some experts and spare others: on {kinds[0]}, "
        f"expert {e} of layer {head.layers[l]} first. Selectors have scales of their own: compare them at equal "
        "sparsity, not at an equal threshold."
    )


def sensitivity(head: Head, quantized: Array, sparse: Array, figures: Sensitivity) -> str:
    """On predicted KL [L, E, matrices, widths] and [L, E, kinds, sparsities], in nats."""
    by_layer, narrow = quantized.sum(axis=(1, 2), dtype=np.float64), figures.widths[0]  # [L, widths]
    totals, worst = by_layer.sum(axis=0), int(by_layer[:, 0].argmax())
    share = by_layer[worst, 0] / totals[0] if totals[0] > 0 else 0.0
    matrix = figures.matrices[int(quantized[..., 0].sum(axis=(0, 1), dtype=np.float64).argmax())]
    wider = [f"{nats(total)} at {width}" for width, total in zip(figures.widths[1:], totals[1:], strict=True)]
    return (
        f"Layer {head.layers[worst]} is the most sensitive: with all its experts at {narrow} bits it costs "
        f"{nats(by_layer[worst, 0])}, {percent(float(share))} of what all layers cost together ({nats(totals[0])} at "
        f"{narrow} bits, {', '.join(wider)}). Of the matrices, {matrix} costs most at {narrow} bits. "
        f"{_sparse(sparse, figures)}"
    )


def _sparse(sparse: Array, figures: Sensitivity) -> str:
    at_80 = sparse[..., figures.sparsities.index(0.8)].sum(axis=(0, 1), dtype=np.float64)  # [kinds]
    best = int(at_80.argmin())
    others = [f"{nats(kl)} by {kind}" for kind, kl in zip(figures.kinds, at_80, strict=True)]
    del others[best]
    return (
        f"At 80% sparsity everywhere, selecting by {figures.kinds[best]} costs least: {nats(at_80[best])}, against "
        f"{' and '.join(others)}."
    )


def dense(figures: Sensitivity) -> str:
    """On the dense matrices, embedding and head."""
    known = [(matrix, matrix.kl[-1]) for matrix in figures.dense if matrix.kl[-1] is not None]
    if not known:
        return "No dense matrix of this model's layers can be stored in fewer bits."
    eight, four = figures.dense_widths
    at_eight, at_four = (sum(matrix.kl[idx] or 0.0 for matrix in figures.dense) for idx in range(2))
    worst, kl = max(known, key=lambda entry: entry[1])
    return (
        f"All dense matrices of the layers together cost {nats(at_eight)} at {eight} bits and {nats(at_four)} at "
        f"{four}; at {four} bits {worst.role} of layer {worst.layer} costs most ({nats(kl)}). {_ends(figures)}"
    )


def _ends(figures: Sensitivity) -> str:
    parts = []
    for name, kls in (("the embedding", figures.embedding), ("the head", figures.head)):
        held = [f"{nats(kl)} at {width}" for kl, width in zip(kls, figures.dense_widths, strict=True) if kl]
        if held:
            parts.append(f"{name} {' and '.join(held)}")
    return f"Beside them cost {', '.join(parts)} bits." if parts else ""


def experts_foretold(head: Head, found: Prediction) -> str:
    """On the predictors' recall."""
    best = [found.predictors[layer.best] for layer in found.layers]
    named = {
        name: [l for l, chosen in zip(head.foretold, best, strict=True) if chosen == name] for name in found.predictors
    }
    said = "; ".join(f"{name}, layer{'s' * (len(of) > 1)} {ranges(of)}" for name, of in named.items() if of)
    top, popular = (
        float(np.mean([row[0] or 0.0 for row in rows]))
        for rows in (
            [layer.experts[layer.best] for layer in found.layers],
            [layer.experts[0] for layer in found.layers],
        )
    )
    even = head.num_experts_per_tok / head.num_experts
    return (
        f"Best: {said}. The best of each layer foretells {percent(top)} of the experts that tokens use, popularity "
        f"alone {percent(popular)}, a blind guess {percent(even)}. What is not foretold must be fetched while the "
        "token waits."
    )


def neurons_foretold(head: Head, found: Prediction) -> str:
    """On selector reuse, and the cosine of successive layers' inputs."""
    at_80 = found.sparsities.index(0.8)
    means = []
    for kind in range(len(found.kinds)):
        recalls = [layer.neurons[kind][at_80][0] for layer in found.layers]
        known = [recall for recall in recalls if recall is not None]
        means.append(sum(known) / len(known) if known else 0.0)
    said = ", ".join(f"{percent(mean)} for {kind}" for kind, mean in zip(found.kinds, means, strict=True))
    cosines = [(mean, layer) for (mean, _), layer in zip(found.cosine, head.foretold, strict=True) if mean is not None]
    reading = (
        f"At 80% sparsity, a layer's selector run one layer early finds this share of the neurons that will run: "
        f"{said}; a fifth of all neurons, blindly guessed, would hold 20%."
    )
    if not cosines:
        return reading
    lowest, layer = min(cosines)
    average = float(np.mean([mean for mean, _ in cosines]))
    return (
        f"{reading} It works as far as successive layers see similar inputs: their cosine is {average:.2f} on average, "
        f"lowest at layer {layer} ({lowest:.2f})."
    )


def path_spread(found: Paths) -> str:
    """On EdgeMoE's Fig. 4."""
    fifth = found.covered_percents.index(20)
    share = float(np.mean([window.covered[fifth] for window in found.windows]))
    single = sum(window.num_single for window in found.windows) / sum(window.num_paths for window in found.windows)
    lengths = sorted({len(window.layers) for window in found.windows})  # of stacks of few layers they differ
    through = f"{' or '.join(map(str, lengths))} layer{'s' * (lengths[-1] > 1)}"
    few = "Few paths carry most tokens, which path statistics can learn."
    many = "Tokens spread over many paths: exact paths say little about the next expert here."
    return (
        f"The most frequent 20% of the paths through {through} carry {percent(share)} of the "
        f"tokens (were all equally frequent: 20%), and {percent(single)} of the paths were taken by one token only. "
        f"{few if share >= _MANY else many}"
    )


def alone(head: Head) -> str:
    """Why nothing can be foretold in a model of which no layer with experts follows another."""
    if len(head.layers) == 1:
        return "The model has one layer with experts: there is no layer before it to foretell from."
    return "Encoder and decoder have one layer with experts each: there is none before it to foretell from."


def path_recall(head: Head, found: Paths) -> str:
    """On what path statistics foretell of held-out text."""
    places = [place for place, layer in enumerate(head.layers) if layer in head.foretold]
    later = [found.recalls[place] for place in places]
    if not later:
        return alone(head)
    recall, doubled = float(np.mean([r.recall for r in later])), float(np.mean([r.recall_doubled for r in later]))
    exact, k = float(np.mean([r.stage_share[0] for r in later])), head.num_experts_per_tok
    first = "expert ranked first is on average right for" if k == 1 else f"{k} experts ranked first hold on average"
    return (
        f"Knowing the experts of the two layers before, the {first} {percent(recall)} of those chosen, the first "
        f"{2 * k} {percent(doubled)}. {percent(exact)} of the queries met sets of experts that calibration saw often "
        "enough; the others were answered from pairs of experts, or popularity."
    )


def accumulated(head: Head, found: Paths) -> str:
    """On EdgeMoE's Fig. 8 (right)."""
    known = np.asarray(found.accumulated).mean(axis=1)  # [3, n]
    n = min(max(math.ceil(head.num_experts / 4), head.num_experts_per_tok), known.shape[1])
    none, one, two = (percent(float(row[n - 1])) for row in known)
    return (
        f"Holding ready the {n} likeliest of {head.num_experts} experts serves {none} of the choices when nothing is "
        f"known of the token, {one} knowing the layer before, {two} knowing two: the distance between the curves is "
        "what knowing the path is worth."
    )


def coverage(head: Head, found: Coverage) -> str:
    """On experts that the text reached too seldom."""
    unreached, scarce = (sum(len(experts) for _, experts in held) for held in (found.unreached, found.scarce))
    total, least = len(head.layers) * head.num_experts, found.least[0]
    if not unreached and not scarce:
        return (
            f"The text reached all {total:,} experts with at least {found.min_tokens} tokens. The least covered is "
            f"expert {least.expert} of layer {least.layer} with {least.num_tokens:,} tokens: {percent(least.low)} to "
            f"{percent(least.high)} of all tokens, with 95% confidence."
        )
    parts = []
    if unreached:
        parts.append(
            f"No token reached {unreached:,} of {total:,} experts: their layers' pooled quantiles stand in for theirs, "
            "and their errors count as 0."
        )
    if scarce:
        parts.append(
            f"{scarce:,} of {total:,} had fewer than {found.min_tokens} tokens: too few to trust their thresholds and "
            "errors."
        )
    return f"{' '.join(parts)} More or other text (--tokens, --data) would reach more of them."
