"""Hand-written kernels: tensors in, tensors out, nothing of STOF imported."""
