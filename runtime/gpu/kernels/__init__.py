"""The Triton kernels; every module needs Triton.

A kernel has at most ten parameters. Pointers and numbers that belong together are one named tuple, and so are its
constants (`tl.constexpr`); Triton 3.6 takes both, in the interpreter and compiled. What limits it there:

- A tuple that may contain None is not compared with None, nor is its length asked: a constant says whether it is there.
- No field is called `values` or `type`, which Triton's own tuples have.
- A field that is a tuple itself, or a size in a list of sizes, is first given a name: `PART: tl.constexpr = HOW.part`.
- `do_not_specialize` takes a whole tuple: arguments that differ between layers stand in one of their own.
"""
