"""The Triton kernels. Every module but `ahead` needs Triton."""
