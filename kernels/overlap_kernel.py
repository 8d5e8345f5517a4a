"""Device code of overlapping launches; ``overlap.py`` says what they are."""

import triton
import triton.language as tl


@triton.jit
def start_after_previous(PDL: tl.constexpr):
    """First statement of a kernel: wait for the kernel before, let the one behind get ready."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
