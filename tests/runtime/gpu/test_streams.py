"""Hyper-connections against the modules of transformers, with random weights."""

import torch
from support.families import quiet_transformers
from support.random_weights import RandomWeights
from support.specs import RESIDUALS, changed

from moe_pack.runtime.model.layers import head
from moe_pack.runtime.model.residuals import residual_of

D, T = 64, 7


def test_mixed_streams_are_those_of_deepseek_v4() -> None:
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead

    quiet_transformers()
    spec = changed(RESIDUALS["mixed streams"], "residual mixing", 20)
    weights, n, eps, residual = RandomWeights(spec, seed=3), 3, spec.norm.eps, residual_of(spec.residual)
    config = DeepseekV4Config(
        hidden_size=D, hc_mult=n, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=eps, num_hidden_layers=2
    )
    theirs, theirs_last = DeepseekV4HyperConnection(config), DeepseekV4HyperHead(config)
    role = "layers.1.attention_streams"
    with torch.no_grad():
        for name, parameter in (("weights", theirs.fn), ("base", theirs.base), ("scale", theirs.scale)):
            parameter.copy_(weights.tensors[f"{role}.{name}"])
        last = (("weights", theirs_last.hc_fn), ("base", theirs_last.hc_base), ("scale", theirs_last.hc_scale))
        for name, parameter in last:
            parameter.copy_(weights.tensors[f"streams.{name}"])
        generator = torch.Generator().manual_seed(4)
        x, y = torch.randn((T, n * D), generator=generator), torch.randn((T, D), generator=generator)
        post, comb, collapsed = theirs(x.view(1, T, n, D))
        normed = collapsed[0] * torch.rsqrt(collapsed[0].square().mean(-1, keepdim=True) + eps)
        expected = normed * weights.tensors["layers.1.attention_norm"]
        found = residual.half_input(x, weights, 1, "attention")
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
        entered = post[0, :, :, None] * y[:, None] + comb[0].transpose(-1, -2) @ x.view(T, n, D)
        found = residual.enter(x, y, weights, 1, "attention")
        torch.testing.assert_close(found, entered.flatten(1), atol=2e-5, rtol=2e-5)
        one = theirs_last(x.view(1, T, n, D))[0]
        one = one * torch.rsqrt(one.square().mean(-1, keepdim=True) + eps) * weights.tensors["norm"]
        torch.testing.assert_close(head(x, weights), one @ weights.tensors["head"].T, atol=5e-5, rtol=5e-5)


def test_streams_that_do_not_mix_are_those_of_hy_v4() -> None:
    from transformers.models.hy_v4.configuration_hy_v4 import HYV4Config
    from transformers.models.hy_v4.modeling_hy_v4 import HYV4HyperConnection

    quiet_transformers()
    spec = RESIDUALS["streams that do not mix"]
    weights, n, eps, residual = RandomWeights(spec, seed=5), 2, spec.norm.eps, residual_of(spec.residual)
    config = HYV4Config(hidden_size=D, hc_mult=n, hc_eps=1e-6, hc_magnitude=1.5, rms_norm_eps=eps, num_hidden_layers=2)
    theirs, role = HYV4HyperConnection(config), "layers.1.attention_streams"
    with torch.no_grad():
        for name, parameter in (("weights", theirs.fn), ("base", theirs.base), ("scale", theirs.scale)):
            parameter.copy_(weights.tensors[f"{role}.{name}"])
        generator = torch.Generator().manual_seed(6)
        x, y = torch.randn((T, n * D), generator=generator), torch.randn((T, D), generator=generator)
        post, collapsed = theirs(x.view(1, T, n, D))
        normed = collapsed[0] * torch.rsqrt(collapsed[0].square().mean(-1, keepdim=True) + eps)
        expected = normed * weights.tensors["layers.1.attention_norm"]
        found = residual.half_input(x, weights, 1, "attention")
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
        entered = x.view(T, n, D) + post[0, :, :, None] * y[:, None]
        found = residual.enter(x, y, weights, 1, "attention")
        torch.testing.assert_close(found, entered.flatten(1), atol=2e-5, rtol=2e-5)
