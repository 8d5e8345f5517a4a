"""Hand-written kernels: tensors in, tensors out, nothing of STOF imported.

This package holds only names that need neither Triton nor a GPU; a file with kernels is imported
where it is launched.
"""
