"""A model of any spec with random weights in memory, as a source of weights."""

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_pack.formats import ModelSpec, Selector, dense_roles
from moe_pack.runtime.model import TORCH, Expert, Matrix, NeuronBlock, StoredMatrix
from moe_pack.runtime.model.compute.rotation import Rotation


class RandomExpert:
    """An expert in float32, in one block."""

    def __init__(self, spec: ModelSpec, generator: torch.Generator) -> None:
        d, f = spec.hidden_size, spec.expert.intermediate_size
        gate, up, down = (torch.randn((f, d), generator=generator) * d**-0.5 for _ in range(3))
        self.block = NeuronBlock(gate if "gate" in spec.expert.matrices else None, up, down)

    def down_bias(self) -> None:
        """None: there is no bias."""

    def blocks(self) -> Iterator[NeuronBlock]:
        """All neurons."""
        yield self.block


class RandomWeights:
    """Vectors near 1, matrices whose products have a deviation near 1, and experts; no rotation, no thresholds."""

    selector: Selector = "none"
    operations = TORCH

    def __init__(self, spec: ModelSpec, seed: int = 0) -> None:
        self.spec = spec
        generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, Tensor] = {}
        for role in dense_roles(spec):
            drawn = torch.randn(role.shape, generator=generator)
            self.tensors[role.name] = 1 + 0.3 * drawn if len(role.shape) == 1 else drawn * role.shape[1] ** -0.5
            if role.integers:  # the experts of each token
                self.tensors[role.name] = (
                    drawn.argsort(dim=1) + torch.arange(len(drawn))[:, None]
                ) % spec.router.num_experts
        self.tensors["embed"] *= spec.hidden_size**0.5  # states of rms 1
        self._experts = [
            [RandomExpert(spec, generator) for _ in range(spec.router.num_experts)] for _ in spec.moe_layers
        ]

    def vector(self, role: str) -> Tensor:
        """Returns a norm's weight or a bias."""
        return self.tensors[role]

    def matrix(self, role: str) -> Matrix:
        """Returns a dense matrix."""
        return StoredMatrix(self.tensors[role])

    def load(self, role: str) -> Matrix:
        """Returns the same."""
        return self.matrix(role)

    def expert(self, layer_idx: int, expert: int) -> Expert:
        """Returns an expert."""
        return self._experts[layer_idx][expert]

    def threshold(self, layer_idx: int, expert: int) -> float:
        """Returns 0: all neurons run."""
        return 0.0

    def rotation(self, layer_idx: int) -> Rotation | None:
        """Returns None."""
        return None
