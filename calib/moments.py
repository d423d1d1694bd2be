"""Second moments of what an expert's weights are multiplied with, and what error feedback makes of them.

A row of weights `w` is rounded to `q`; over tokens `v` with weights `s` the squared error of its products is
`(w - q) H (w - q)^T`, `H = sum s v v^T / sum s`. With `H = U D U^T`, U upper triangular, ones on its diagonal, it is

    sum over columns j of D[j] (t[j] - q[j])^2,    t[j] = w[j] + sum over i < j of (w[i] - q[i]) U[i, j]

so rounding the columns in their order, each to what is nearest to `t[j]`, makes up for the errors before as far as
columns to come can (GPTQ, LDLQ). `U` and `D` are `Feedback.factor` and `Feedback.importance`.

Rows of down are summed, not multiplied: there `v` is `h` of all neurons, and feedback goes from neuron to neuron.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Shares of the mean of the diagonal, added to it. Less than the least (GPTQ's percdamp), and a factor may not exist.
LEAST_DAMPING = 0.01
# What `damping` says: more where columns are not much fewer than tokens, for then much of what seems to hang together
# does so by chance. Chosen by KL divergence at 2 and 3 bits.
USUAL_DAMPING, MOST_DAMPING = 0.1, 1.0
_DAMPING_OF_A_COLUMN = 0.4  # over the number of tokens
_PIECE_TOKENS = 256  # weighted at once


def second_moments(values: Tensor, weights: Tensor) -> Tensor:
    """Weighted second moments of columns, `sum w v v^T / sum w`.

    With one torch thread the same values give the same bits. 2 n m^2 operations; beside the result what 256 tokens'
    values take. For moments among some of the columns pass these columns.

    Args:    values: float32 [n, m].   weights: float32 [n], not negative.
    Returns: float32 [m, m]; zeros where no weight is above 0. Not checked: that all are finite.
    """
    moments = values.new_zeros((values.shape[1], values.shape[1]))
    total = float(weights.sum(dtype=torch.float64))
    if not total > 0:
        return moments
    shares = (weights.to(torch.float64) / total).sqrt().to(torch.float32)  # squares of weights may be tiny
    for piece, share in zip(torch.split(values, _PIECE_TOKENS), torch.split(shares, _PIECE_TOKENS), strict=True):
        weighted = piece * share[:, None]
        moments.addmm_(weighted.T, weighted)
    return moments


def damping(weights: Tensor, num_columns: int) -> float:
    """What `feedback` is to add to the diagonal of the moments of so many columns, as a share of its mean.

    Meaning: 0.4 m / n within 0.1 and 1, with n = (sum w)^2 / sum w^2: of tokens of equal weight, their number.
    Args:    weights: float32 [n], of the tokens that moments are made of.   num_columns: of a block, where these are
             taken by blocks.
    """
    exact = weights.to(torch.float64)
    squares = float(exact.square().sum())
    if not squares > 0:
        return MOST_DAMPING
    num_tokens = float(exact.sum()) ** 2 / squares
    return min(max(_DAMPING_OF_A_COLUMN * num_columns / num_tokens, USUAL_DAMPING), MOST_DAMPING)


@dataclass(frozen=True, slots=True, eq=False)
class Feedback:
    """How errors of columns are made up for by later ones.

    `factor` float32 [m, m]: upper triangular with ones on its diagonal; rounding column j aims at
    `w[j] + sum over i < j of (w[i] - q[i]) factor[i, j]`.   `importance` float32 [m]: what a squared error of that
    aim costs, above 0; with all later columns left unrounded it is all that is lost.
    """

    factor: Tensor
    importance: Tensor


@torch.no_grad()
def feedback(moments: Tensor, share: float = LEAST_DAMPING) -> Feedback:
    """The factor and importance of columns in their order, from their second moments, damped.

    Meaning: H + share * mean of its diagonal = U D U^T. So damped, moments of any values have a factor in float64:
             their largest eigenvalue is at most m / share + 1 times the smallest. A column that was always zero takes
             and gives no feedback; moments that are all zero give none, every column as important as the next.
    Cost:    m^3 / 3 multiplications in float64, and 16 m^2 bytes for a while: 256 MiB for 4,096 columns. Wider
             matrices go in blocks of columns: pass `moments[a:b, a:b]`, and let errors end at b.
    Args:    moments: float32 [m, m], symmetric: the upper triangle is read.   share: `damping` says how much; at
             least `LEAST_DAMPING`.
    """
    assert share >= LEAST_DAMPING, f"damped by {share}, a factor may not exist"
    # The lower Cholesky factor of the matrix turned by half a turn, turned back, is upper: R R^T = H, R = U sqrt(D).
    turned = moments.flip(0, 1).to(torch.float64)
    diagonal = turned.diagonal()
    mean = float(diagonal.mean())
    diagonal += share * mean if mean > 0 else 1.0
    root = torch.linalg.cholesky(turned)
    del turned, diagonal
    steps = root.diagonal().clone()  # [m], sqrt(D) turned
    root /= steps  # columns by their diagonal
    return Feedback(root.to(torch.float32).flip(0, 1), steps.flip(0).square().to(torch.float32))
