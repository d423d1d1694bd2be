"""Triton's interpreter without what it does for nothing, which is three quarters of its time with our kernels."""

import inspect
from typing import Any


def spare_the_interpreter() -> None:
    """Leaves out steps whose results nobody sees, and does others once (triton 3.6, language/core.py, interpreter.py).

    It computes all sums and products of integers again in 64 bits, to assert that none overflowed, and then asserts
    nothing, because the interpreter's options have `debug` off, whatever TRITON_DEBUG says. At each call of a jitted
    function by another it looks through all of `triton.language` for what is to be replaced, though the kernel's launch
    has replaced it until the kernel ends. And each tensor has types made for its shape that differ from no other's.
    """
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    if not options.debug:  # with it, the assertions would see something
        options.__dict__["sanitize_overflow"] = False  # a frozen dataclass
    _replace_once(interpreter)
    _share_types(interpreter)


def _replace_once(interpreter: Any) -> None:
    """Looks for the language's functions once, and replaces them once for each launch."""
    launch, replace, replaced = interpreter.GridExecutor.__call__, interpreter._patch_lang, list[int]()
    is_running = False

    def launch_once(self: Any, *args: Any, **options: Any) -> None:
        nonlocal is_running
        is_running = True
        replaced.clear()
        try:
            launch(self, *args, **options)
        finally:
            is_running = False

    def replace_once(fn: Any) -> Any:
        """The launch is the first to call it, and undoes it; functions called in it undo nothing."""
        namespace = id(fn.__globals__)
        if is_running and namespace in replaced:
            return None
        replaced.append(namespace)
        return replace(fn)

    interpreter.GridExecutor.__call__ = launch_once
    interpreter._patch_lang = replace_once

    builtins = dict[int, list[tuple[str, Any]]]()
    semantic = interpreter.TritonSemantic(interpreter.interpreter_builder)

    def replace_builtins(package: Any, builder: Any, scope: Any) -> None:
        if id(package) not in builtins:
            members = inspect.getmembers(package)
            builtins[id(package)] = [each for each in members if interpreter.tl.core.is_builtin(each[1])]
        for name, member in builtins[id(package)]:
            replace_builtin(package, name, member, builder, scope)

    def replace_builtin(package: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        assert builder is interpreter.interpreter_builder

        def with_semantic(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return member(*args, **options)

        scope.set_attr(package, name, with_semantic)

    interpreter._patch_builtin = replace_builtins
    interpreter._patch_attr = replace_builtin


def _share_types(interpreter: Any) -> None:
    """Makes one type for all tensors of a shape and element, and one tuple for all shapes of the same sizes."""
    core, numpy_type = interpreter.tl.core, interpreter._get_np_dtype
    make_block = core.block_type.__init__
    numpy_types, blocks = dict[str, Any](), dict[tuple[str, tuple[int, ...]], dict[str, Any]]()
    shapes = dict[tuple[int, ...], tuple[Any, Any]]()

    def shared_numpy_type(of: Any) -> Any:
        if of.name not in numpy_types:
            numpy_types[of.name] = numpy_type(of)
        return numpy_types[of.name]

    def share_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(getattr(size, "value", size) for size in shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = {**self.__dict__}
        self.__dict__.update(blocks[key])

    def make_tensor(self: Any, handle: Any, of: Any) -> None:
        sizes = tuple(of.shape.values) if of.is_block() else ()
        if sizes not in shapes:
            original(self, handle, of)
            shapes[sizes] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, of, of.scalar
        self.numel, self.shape = shapes[sizes]

    def same_sizes(self: Any, other: Any) -> Any:
        return core.constexpr(self.values == other) if type(other) is list else same(self, other)

    original, same = core.tensor.__init__, core.tuple.__eq__
    core.tuple.__eq__ = same_sizes
    interpreter._get_np_dtype = shared_numpy_type
    core.block_type.__init__ = share_block
    core.tensor.__init__ = make_tensor
