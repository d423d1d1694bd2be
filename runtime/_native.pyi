"""The extension of runtime/native/: buffers and numbers, as `kernels` hands them over (runtime/native/module.cpp)."""

class MapCutError(Exception):
    """A page that was read is no longer in its file."""

def open_pool(threads: int, limit: str | None, /) -> object: ...
def instruction_set(pool: object, /) -> str: ...
