"""The Triton kernels; every module needs Triton.

A kernel has at most ten parameters; that of `compact` has more, for the last reason below. Pointers and numbers that
belong together are one named tuple, and so are its constants (`tl.constexpr`). Triton 3.6 takes both, in the
interpreter and compiled, with these limits:

- A tuple that may contain None is not compared with None, nor is its length asked: a constant says whether it is there.
- No field is called `values` or `type`, which Triton's own tuples have.
- A field that is a tuple itself, or a size in a list of sizes, is first given a name: `PART: tl.constexpr = HOW.part`.
- `do_not_specialize` has no effect on what stands in a tuple: pointers and numbers whose alignment or value differs
  between layers or launches are parameters of their own, or Triton compiles a kernel for each.
"""
