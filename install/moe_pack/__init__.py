"""moe-pack from Python: load a pack and generate, or convert a checkpoint.

    import moe_pack

    model = moe_pack.load("packed/", budget="11G")
    print(model.generate("It was a dark night", max_tokens=64))

    moe_pack.convert("mixtral", "packed/", target_vram="11G")

`import moe_pack` itself loads nothing else; the first use of a name does. The four rooms `moe_pack.formats`, `runtime`,
`calib` and `convert` lie below it. `moe_pack.convert` is both that room and the function `making.convert`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_pack.convert.making import convert
    from moe_pack.formats.base.version import VERSION as __version__  # noqa: N811  # Python's name for it
    from moe_pack.runtime.loaded_model import Model, load

__all__ = ["Model", "__version__", "convert", "load"]


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name == "convert":  # the room, which can be called
        return import_module("moe_pack.convert")
    modules = {"Model": "runtime.loaded_model", "load": "runtime.loaded_model", "__version__": "formats.base.version"}
    if name not in modules:
        raise AttributeError(f"module 'moe_pack' has no attribute {name!r}")
    return getattr(import_module(f"moe_pack.{modules[name]}"), "VERSION" if name == "__version__" else name)
