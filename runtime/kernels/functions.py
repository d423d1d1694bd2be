"""Neuron functions: `h(g, u) = act(g) * factor(u)`, or `act(u)` without a gate. The twin is `runtime.expert`.

A number that is none stays none, whatever is clamped.
"""

import triton
import triton.language as tl

SILU, RELU, CLAMPED_SWIGLU = (tl.constexpr(number) for number in range(3))
FUNCTIONS = {"silu": SILU.value, "relu": RELU.value, "clamped_swiglu": CLAMPED_SWIGLU.value}
_LIMIT, _STEEPNESS = tl.constexpr(7.0), tl.constexpr(1.702)  # of the clamped SwiGLU


@triton.jit
def act(g, FUNCTION: tl.constexpr):
    """What the gate's product makes, or up's where there is no gate."""
    if FUNCTION == RELU:
        active = tl.where(g < 0, 0.0, g)
    elif FUNCTION == CLAMPED_SWIGLU:
        clamped = tl.where(g > _LIMIT, _LIMIT, g)
        active = clamped / (1.0 + tl.exp(-_STEEPNESS * clamped))
    else:
        active = g / (1.0 + tl.exp(-g))
    return active


@triton.jit
def factor(u, FUNCTION: tl.constexpr):
    """What up's product multiplies the gate's activation by."""
    if FUNCTION == CLAMPED_SWIGLU:
        u = tl.where(u > _LIMIT, _LIMIT, tl.where(u < -_LIMIT, -_LIMIT, u)) + 1.0
    return u
