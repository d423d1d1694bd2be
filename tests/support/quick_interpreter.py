"""Triton's interpreter without what it does for nothing, which is half of its time with our kernels."""

from typing import Any


def spare_the_interpreter() -> None:
    """Leaves out two steps whose results nobody sees (triton 3.6, runtime/interpreter.py).

    It computes all sums and products of integers again in 64 bits, to assert that none overflowed, and then asserts
    nothing, because the interpreter's options have `debug` off, whatever TRITON_DEBUG says. And at each call of a
    jitted function by another it looks through all of `triton.language` for what is to be replaced, though the kernel's
    launch has replaced it until the kernel ends.
    """
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    if not options.debug:  # with it, the assertions would see something
        options.__dict__["sanitize_overflow"] = False  # a frozen dataclass
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
