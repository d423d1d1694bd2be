"""The text below each figure of a report, in two or three sentences each; all numbers come from `figures`."""

import math

import numpy as np

from moe_pack.calib.forward import Array
from moe_pack.calib.report.figures import Coverage, Head, Paths, Prediction, Sensitivity
from moe_pack.calib.statistics import PopularityTest

_SIGNIFICANT = 0.001  # p-values are somewhat too small within one text: see `compare_popularity`
_MANY = 0.6  # three times what equally frequent paths would carry


def percent(share: float) -> str:
    """Returns a share with as many digits as it needs: 13% for 0.13, 99.87% for 0.9987."""
    if share == 0:
        return "0%"
    return f"{100 * share:.3g}%" if share < 0.995 or share == 1 else f"{100 * share:.4g}%"


def nats(kl: float) -> str:
    """Returns a KL divergence with two digits and its unit."""
    return f"{kl:.2g} nats".replace("e-0", "e-")


def ranges(numbers: list[int]) -> str:
    """Returns ascending numbers as text, with runs of three and more joined: 1, 4 to 6, 9."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def popularity(head: Head, tokens: Array, tests: tuple[PopularityTest, ...]) -> str:
    """Words how unevenly experts are chosen, from tokens [L, E] and the test on held-out text."""
    even = 1 / head.num_experts
    l, e = np.unravel_index(int(tokens.argmax()), tokens.shape)
    most = float(tokens[l, e]) / (head.num_tokens * head.num_experts_per_tok)
    text = (
        f"If all experts were chosen equally often, each would take {percent(even)} of its layer's choices. Expert {e} "
        f"of layer {head.layers[l]} is chosen most: it takes {percent(most)}, {most / even:.1f} times an even share."
    )
    if not tests:
        return f"{text} No text was held out, so it is not known whether other text chooses the same experts."
    return f"{text} {_held_out(tests)}"


def _held_out(tests: tuple[PopularityTest, ...]) -> str:
    num_uneven = sum(test.p_value < _SIGNIFICANT for test in tests)
    gains = [test.calibrated_nats - test.uniform_nats for test in tests]
    quarter = float(np.mean([test.quarter_share for test in tests]))
    return (
        f"On held-out text, the choices are more uneven than chance explains in {num_uneven} of {len(tests)} layers "
        f"(p < {_SIGNIFICANT}). In {sum(gain > 0 for gain in gains)} layers, the counts of the calibration "
        "text predict these choices better than an even guess; the mean gain of all layers is "
        f"{np.mean(gains):.2g} nats a choice. "
        f"The most popular quarter of the experts takes {percent(quarter)} of the choices (an even share would be "
        f"{percent(tests[0].quarter_uniform)})."
    )


def sparsity(head: Head, thresholds: Array, tokens: Array, kinds: tuple[str, ...]) -> str:
    """Words how far experts' thresholds differ, from thresholds [L, E, kinds] for 80% sparsity and tokens [L, E]."""
    reached, spreads = tokens > 0, []
    for kind, name in enumerate(kinds):
        of_kind = thresholds[..., kind][reached]
        low, high = float(of_kind.min()), float(of_kind.max())
        spreads.append(f"{low:.3g} to {high:.3g} by {name}{f' (a factor of {high / low:.1f})' if low > 0 else ''}")
    l, e = np.unravel_index(int(np.where(reached, thresholds[..., 0], np.inf).argmin()), tokens.shape)
    return (
        f"At 80% sparsity, the experts' thresholds range from {'; '.join(spreads)}. If they are far apart, one "
        "threshold for all experts drops too many neurons of some experts and too few of others. By "
        f"{kinds[0]}, expert {e} of layer {head.layers[l]} has the lowest threshold, so that it would lose the most "
        "neurons. The selectors have different scales: compare them at equal sparsity, not at an equal threshold."
    )


def sensitivity(head: Head, quantized: Array, sparse: Array, figures: Sensitivity) -> str:
    """Words what costs most, from predicted KL [L, E, matrices, widths] and [L, E, kinds, sparsities], in nats."""
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
        f"With all experts at 80% sparsity, selection by {figures.kinds[best]} costs least: {nats(at_80[best])}, "
        f"compared with {' and '.join(others)}."
    )


def dense(figures: Sensitivity) -> str:
    """Words what the dense matrices, the embedding and the head cost in fewer bits."""
    known = [(matrix, matrix.kl[-1]) for matrix in figures.dense if matrix.kl[-1] is not None]
    if not known:
        return "No dense matrix of this model's layers can be stored in fewer bits."
    eight, four = figures.dense_widths
    at_eight, at_four = (sum(matrix.kl[idx] or 0.0 for matrix in figures.dense) for idx in range(2))
    worst, kl = max(known, key=lambda entry: entry[1])
    return (
        f"All dense matrices of the layers together cost {nats(at_eight)} at {eight} bits and {nats(at_four)} at "
        f"{four} bits. At {four} bits, {worst.role} of layer {worst.layer} costs most ({nats(kl)}). {_ends(figures)}"
    )


def _ends(figures: Sensitivity) -> str:
    sentences = []
    for name, kls in (("The embedding", figures.embedding), ("The head", figures.head)):
        costs = [f"{nats(kl)} at {width} bits" for kl, width in zip(kls, figures.dense_widths, strict=True) if kl]
        if costs:
            sentences.append(f"{name} costs {' and '.join(costs)}.")
    return " ".join(sentences)


def experts_predicted(head: Head, prediction: Prediction) -> str:
    """Words the predictors' recall of experts."""
    best = [prediction.predictors[layer.best] for layer in prediction.layers]
    layers_of = {
        name: [l for l, chosen in zip(head.predicted_layers, best, strict=True) if chosen == name]
        for name in prediction.predictors
    }
    named = "; ".join(
        f"{name} in layer{'s' * (len(layers) > 1)} {ranges(layers)}" for name, layers in layers_of.items() if layers
    )
    top, popular = (
        float(np.mean([row[0] or 0.0 for row in rows]))
        for rows in (
            [layer.experts[layer.best] for layer in prediction.layers],
            [layer.experts[0] for layer in prediction.layers],
        )
    )
    even = head.num_experts_per_tok / head.num_experts
    return (
        f"The best predictors are: {named}. Each layer's best predictor finds {percent(top)} of the "
        f"experts that tokens use; popularity alone finds {percent(popular)}, a random guess {percent(even)}. "
        "Experts that no predictor finds are fetched while the token waits."
    )


def neurons_predicted(head: Head, prediction: Prediction) -> str:
    """Words how well a selector run one layer early finds neurons, with the cosine of successive layers' inputs."""
    at_80 = prediction.sparsities.index(0.8)
    means = []
    for kind in range(len(prediction.kinds)):
        recalls = [layer.neurons[kind][at_80][0] for layer in prediction.layers]
        known = [recall for recall in recalls if recall is not None]
        means.append(sum(known) / len(known) if known else 0.0)
    shares = ", ".join(f"{percent(mean)} by {kind}" for kind, mean in zip(prediction.kinds, means, strict=True))
    cosines = [
        (mean, layer)
        for (mean, _), layer in zip(prediction.cosine, head.predicted_layers, strict=True)
        if mean is not None
    ]
    text = (
        "At 80% sparsity, a layer's selector that runs one layer early finds this share of the neurons that will run: "
        f"{shares}. A random fifth of all neurons would contain 20% of them."
    )
    if not cosines:
        return text
    lowest, layer = min(cosines)
    average = float(np.mean([mean for mean, _ in cosines]))
    return (
        f"{text} The prediction is good where successive layers have similar inputs: the cosine of their inputs is "
        f"{average:.2f} on average and lowest at layer {layer} ({lowest:.2f})."
    )


def path_spread(paths: Paths) -> str:
    """Words how many tokens the most frequent paths carry (EdgeMoE's Fig. 4)."""
    fifth = paths.covered_percents.index(20)
    share = float(np.mean([window.covered[fifth] for window in paths.windows]))
    single = sum(window.num_single for window in paths.windows) / sum(window.num_paths for window in paths.windows)
    lengths = sorted({len(window.layers) for window in paths.windows})  # stacks of few layers have shorter windows
    through = f"{' or '.join(map(str, lengths))} layer{'s' * (lengths[-1] > 1)}"
    few = "A few paths carry most tokens, so that path statistics can learn them."
    many = "The tokens spread over many paths, so that the exact path says little about the next experts."
    return (
        f"The most frequent 20% of the paths through {through} carry {percent(share)} of the tokens (if all paths were "
        f"equally frequent: 20%). {percent(single)} of the paths were taken by only one token. "
        f"{few if share >= _MANY else many}"
    )


def alone(head: Head) -> str:
    """Returns why no experts can be predicted in a model where no layer with experts follows another."""
    if len(head.layers) == 1:
        return "The model has one layer with experts, so that no earlier layer can predict its experts."
    return "Encoder and decoder have one layer with experts each, so that no earlier layer can predict their experts."


def path_recall(head: Head, paths: Paths) -> str:
    """Words what path statistics predict of held-out text."""
    places = [place for place, layer in enumerate(head.layers) if layer in head.predicted_layers]
    later = [paths.recalls[place] for place in places]
    if not later:
        return alone(head)
    recall, doubled = float(np.mean([r.recall for r in later])), float(np.mean([r.recall_doubled for r in later]))
    exact, k = float(np.mean([r.stage_share[0] for r in later])), head.num_experts_per_tok
    first = "expert ranked first covers" if k == 1 else f"{k} experts ranked first cover"
    return (
        f"If the experts of the two layers before are known, the {first} {percent(recall)} of the choices on "
        f"average, and the first {2 * k} cover {percent(doubled)}. In {percent(exact)} of the queries, calibration had "
        "seen the exact sets of experts often enough; the other queries were answered from pairs of experts or from "
        "popularity."
    )


def accumulated(head: Head, paths: Paths) -> str:
    """Words what a cache of the likeliest experts would serve (EdgeMoE's Fig. 8, right)."""
    known = np.asarray(paths.accumulated).mean(axis=1)  # [3, n]
    n = min(max(math.ceil(head.num_experts / 4), head.num_experts_per_tok), known.shape[1])
    none, one, two = (percent(float(row[n - 1])) for row in known)
    return (
        f"A cache of the {n} likeliest of {head.num_experts} experts serves {none} of the choices if nothing is known "
        f"of the token, {one} if the experts of the layer before are known, and {two} if those of the two layers "
        "before are known. The distance between the curves is what knowledge of the path gains."
    )


def coverage(head: Head, reached: Coverage) -> str:
    """Words which experts the text reached too seldom."""
    unreached, scarce = (
        sum(len(experts) for _, experts in by_layer) for by_layer in (reached.unreached, reached.scarce)
    )
    total, least = len(head.layers) * head.num_experts, reached.least[0]
    if not unreached and not scarce:
        return (
            f"The text reached each of the {total:,} experts with at least {reached.min_tokens} tokens. Expert "
            f"{least.expert} of layer {least.layer} has the fewest, {least.num_tokens:,}: between {percent(least.low)} "
            f"and {percent(least.high)} of all tokens, with 95% confidence."
        )
    sentences = []
    if unreached:
        sentences.append(
            f"No token reached {unreached:,} of {total:,} experts. Their quantiles are those of all tokens of their "
            "layer, and their losses count as 0."
        )
    if scarce:
        sentences.append(
            f"{scarce:,} of {total:,} experts had fewer than {reached.min_tokens} tokens. Their thresholds and losses "
            "are only rough."
        )
    return f"{' '.join(sentences)} More text or other text (--tokens, --data) would reach more of them."
