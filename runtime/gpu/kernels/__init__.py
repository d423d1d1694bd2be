"""The Triton kernels; every module needs Triton."""
