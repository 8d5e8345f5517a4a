"""Which GPUs the tests compile kernels for, and how much on each."""

import os
from collections.abc import Sequence
from typing import Any

CUDA = (80, 86, 89, 90, 100)
FULL = os.environ.get("STOF_FULL_COMPILE") == "1"
"""Everything on every GPU, which takes hours."""


def on_each_gpu(values: Sequence[Any], fullest: Any) -> list[tuple[int, Any]]:
    """Pairs of an sm number and a value to compile for.

    To save time sm_80 and sm_90 get every value and the others the ``fullest`` one; all of them get
    all with STOF_FULL_COMPILE=1.
    """
    return [(t, v) for t in CUDA for v in values if FULL or t in (80, 90) or v == fullest]
