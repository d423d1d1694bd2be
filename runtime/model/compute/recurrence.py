"""Short convolutions and recurrences over tokens, in plain torch: the reference of the native kernels.

A head's recurrent state S is a matrix [keys, values]. For each token, with query q, key k, value v, decay a and, in the
delta rule, a rate b:

    S = diag(a) S                       decay; a is one number a head, or one a key
    S = S + k (b (v - k S))             delta rule: S's answer to k moves towards v
    S = S + k v                         without a rate: Mamba-2, lightning attention
    y = q S

Many tokens are computed in chunks, in which all tokens see the state before the chunk and each other, by products of
matrices. Decays are kept as logarithms. Their sums over a chunk are float64, because small differences of large sums
count; only decays from an earlier to a later token are computed, so that none is above 1.

Source:  Gated Delta Networks (2412.06464), section 3.3; Mamba-2 (2405.21060), section 6; Kimi Linear (2510.26692),
         section 3; the recurrences of transformers 5.23, models/qwen3_next and models/kimi_linear.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import softplus

from moe_pack.formats.parts import mixers
from moe_pack.runtime.model.caches import states

L2_EPS = 1e-6  # of queries' and keys' lengths; no config names it


@dataclass(frozen=True, slots=True)
class Gates:
    """Numbers of each head from which decays and rates follow: Gated DeltaNet's with `rates`, Mamba-2's without.

        step = max(softplus(steps + dt_bias), least_step)      log_decay = -exp(a_log) step
        rate = sigmoid(rates)

    With rates, keys and queries are normalized (L2), and queries are scaled by keys^-0.5. Without, values are
    multiplied by their steps.
    """

    steps: Tensor  # float32 [T, heads]
    rates: Tensor | None  # float32 [T, heads]
    a_log: Tensor  # float32 [heads], as the vectors below
    dt_bias: Tensor
    least_step: float = 0.0
    skip: Tensor | None = None  # times the values as they were, is added to the output

    def of_rows(self, rows: slice) -> "Gates":
        """Returns the gates of some tokens."""
        return replace(self, steps=self.steps[rows], rates=None if self.rates is None else self.rates[rows])


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """A Gated DeltaNet between its products: its convolution's kernel, and the norm of its heads' outputs."""

    spec: mixers.GatedDeltaSpec
    kernel: Tensor  # as for `convolve`
    out_norm: Tensor  # float32 [values]
    eps: float


def gated(q: Tensor, k: Tensor, v: Tensor, gates: Gates) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Returns q, k, v, decays and rates of `recur` for those before gates, as `Gates` says."""
    step = softplus(gates.steps + gates.dt_bias)
    if gates.least_step:
        step = step.clamp(min=gates.least_step)
    log_decay = -gates.a_log.exp() * step
    if gates.rates is None:
        return q, k, v * step[:, :, None], log_decay, None
    return normalized(q) * q.shape[-1] ** -0.5, normalized(k), v, log_decay, gates.rates.sigmoid()


def normalized(x: Tensor) -> Tensor:
    """Returns x float32 [..., n], divided by the lengths of its vectors."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + L2_EPS)


def convolve(x: Tensor, kernel: Tensor, bias: Tensor | None, state: states.LayerState, dilation: int = 1) -> Tensor:
    """Returns a causal convolution of each channel, float32 [T, channels]; the state keeps the last inputs.

    Args:    x: float32 [T, channels].   kernel: float32 [channels * taps], a channel's taps together, the newest last.
             bias: float32 [channels].   dilation: tokens from one tap to the next.
    """
    num_tokens, num_channels = x.shape
    taps = kernel.view(num_channels, -1).T  # [taps, channels]
    inputs = torch.cat((state.conv, x))
    y = taps[0] * inputs[:num_tokens]
    for tap in range(1, len(taps)):
        y = y + taps[tap] * inputs[tap * dilation : tap * dilation + num_tokens]
    state.conv.copy_(inputs[num_tokens:].detach())
    return y if bias is None else y + bias


def recur(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor | None, state: states.LayerState) -> Tensor:
    """Returns what each token reads from the recurrent state, float32 [T, heads, values]; all tokens update it in turn.

    Args:    q, k: float32 [T, key heads, keys]; a key head serves consecutive value heads.   v: float32 [T, heads,
             values].   log_decay: float32 [T, heads], or [T, heads, keys].   rate: float32 [T, heads]; None: each token
             adds its value as it is.
    """
    shared = v.shape[1] // k.shape[1]
    if shared > 1:
        q, k = (each.repeat_interleave(shared, dim=1) for each in (q, k))
    # Heads first: [heads, T, ...].
    q, k, v, log_decay = (each.transpose(0, 1) for each in (q, k, v, log_decay))
    rate = None if rate is None else rate.T
    step = mixers.CHUNK_TOKENS if log_decay.dim() == 2 else mixers.KEYED_CHUNK_TOKENS
    if v.shape[2] == 1:
        step = 1  # a chunk's tables would be larger than the states of all its tokens
    # Gradients need the state as it was.
    recurrent, pieces = state.recurrent.clone() if torch.is_grad_enabled() else state.recurrent, []
    for start in range(0, v.shape[1], step):
        at = slice(start, start + step)
        some_rates = None if rate is None else rate[:, at]
        piece, recurrent = _chunk(q[:, at], k[:, at], v[:, at], log_decay[:, at], some_rates, recurrent)
        pieces.append(piece)
    state.recurrent.copy_(recurrent.detach())
    return torch.cat(pieces, dim=1).transpose(0, 1)


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor | None, recurrent: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns what the tokens of a chunk read, [heads, C, values], and the recurrent state after them.

    Args:    q, k, v: [heads, C, ...].   log_decay: [heads, C] or [heads, C, keys].   rate: [heads, C], or None.
    """
    if v.shape[1] == 1:
        return _token(q[:, 0], k[:, 0], v[:, 0], log_decay[:, 0], rate, recurrent)
    total = log_decay.double().cumsum(dim=1)  # from before the chunk to after each token
    by_key = total if total.dim() == 3 else total[..., None]
    read = _decayed_products(q, k, total)
    since, until = by_key.exp().float(), (by_key[:, -1:] - by_key).exp().float()
    if rate is not None:
        # Of what the tokens write, each corrects those before it: a triangular system instead of one token at a time.
        system = _decayed_products(k, k, total) * rate[..., None]
        wanted = rate[..., None] * (v - (k * since) @ recurrent)
        v = torch.linalg.solve_triangular(system.tril(-1), wanted, upper=False, unitriangular=True)
    y = (q * since) @ recurrent + read @ v
    return y, recurrent * since[:, -1, :, None] + (k * until).transpose(1, 2) @ v


def _decayed_products(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    """Returns `a_i . (decay from j to i) b_j` for tokens j up to i of a chunk, else 0: [heads, C, C]."""
    num_tokens = a.shape[1]
    later = torch.ones((num_tokens, num_tokens), dtype=torch.bool, device=a.device).triu(1)
    if total.dim() == 2:
        decay = (total[:, :, None] - total[:, None, :]).masked_fill(later, -torch.inf).exp().float()
        return (a @ b.transpose(1, 2)) * decay
    decay = (total[:, :, None] - total[:, None, :]).masked_fill(later[..., None], -torch.inf).exp().float()
    return torch.einsum("hik,hjk,hijk->hij", a, b, decay)


def _token(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor | None, recurrent: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the same for one token: q, k [heads, keys], v [heads, values], log_decay [heads] or [heads, keys]."""
    decay = log_decay.exp()
    recurrent = recurrent * (decay[:, :, None] if decay.dim() == 2 else decay[:, None, None])
    if rate is not None:
        v = rate * (v - (k[:, None] @ recurrent)[:, 0])
    recurrent = recurrent + k[:, :, None] * v[:, None]
    return q[:, None] @ recurrent, recurrent
