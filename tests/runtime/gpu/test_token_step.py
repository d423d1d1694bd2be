"""A token's launches take no memory and ask no value of the device: what a CUDA graph may be made of."""

import inspect
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import case
from support.gpu_runs import GpuRun, gpu_engine
from support.models import pack
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_pack.calib.quantize import Rotate

TRITON = str(Path(find_spec("triton").origin).parent)  # type: ignore[union-attr, arg-type]  # it is installed


class Watch(TorchDispatchMode):
    """Fails on any operation of torch that takes memory or gives the host a value.

    The interpreter's own work for a launch is not counted: on a GPU only the driver launches.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not _is_launching():
            given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            assert "_local_scalar_dense" not in str(func), "a value is asked for"
            taken = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor) and _storage(leaf) not in given]
            assert not taken, f"{func} takes memory"
        return found


def _is_launching() -> bool:
    frame = inspect.currentframe()
    while frame is not None and not frame.f_code.co_filename.startswith(TRITON):
        frame = frame.f_back
    return frame is not None


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("family", "rotate"),
    [  # grouped queries and nothing else, a shared expert that is gated, latent attention and a dense layer
        ("mixtral", "off"),
        ("qwen2_moe", "on"),
        pytest.param("qwen2_moe", "off", marks=pytest.mark.slow),
        pytest.param("deepseek_v2", "off", marks=pytest.mark.slow),
    ],
)
def test_a_token_takes_no_memory_and_asks_for_no_value(family: str, rotate: Rotate, tmp_path: Path) -> None:
    from support.families import Tiny, write  # which imports transformers

    source = write(Tiny(family, "of two layers", {"num_hidden_layers": 2}), tmp_path / "source")
    pack(source, tmp_path / "packed", rotate=rotate)
    runs = [GpuRun(0.3, "split"), GpuRun(0.3, "pull")]
    runs += [GpuRun(0.3, cache_dtype="q4")] if family == "mixtral" else []
    for run in runs:
        with case(run), gpu_engine(tmp_path / "packed", run) as built, torch.inference_mode():
            logits = built.decoder.next_logits([80]).zero_()  # the memory to which every token's are copied
            with Watch():
                built.decoder.launch(0)
            assert logits.isfinite().all() and logits.any()


@pytest.mark.parametrize(
    "wrong",
    [lambda x: torch.zeros(1), lambda x: x + 1, lambda x: x.clone(), lambda x: x[:1].item(), lambda x: x.double()],
    ids=["zeros", "sum", "copy", "value", "another type"],
)
def test_what_may_not_be_is_seen(wrong: Any) -> None:
    with torch.inference_mode(), Watch(), pytest.raises(AssertionError):
        wrong(torch.ones(4))


def test_what_may_be_is_not_complained_of() -> None:
    x, y = torch.ones(4), torch.ones(4)
    with torch.inference_mode(), Watch():
        torch.sigmoid(x, out=y)
        y[1:].copy_(x[:3], non_blocking=True)
        x.view(torch.uint8).view(2, 8)
    assert y[0] < 1
