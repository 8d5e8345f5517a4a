"""STOF: a ``torch.compile`` backend for sparse attention and operator fusion.

The public names load on first use: ``import stof_compile`` is cheap and needs neither a GPU nor
Triton. It imports no transformers either; where their models are loaded already, it offers them the
attention "stof", and otherwise ``import stof_compile.integrations.transformers`` does.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stof_compile import masks
    from stof_compile.attention.functional import attention_kernel, sparse_attention
    from stof_compile.errors import (
        StofError,
        StofMaskError,
        StofOptionError,
        StofPlanError,
        StofUnsupportedError,
    )
    from stof_compile.explanation import Explanation, explain
    from stof_compile.options import StofOptions

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "StofError",
    "StofMaskError",
    "StofOptionError",
    "StofOptions",
    "StofPlanError",
    "StofUnsupportedError",
    "__version__",
    "attention_kernel",
    "explain",
    "masks",
    "sparse_attention",
]


def __getattr__(name: str) -> Any:
    if name == "masks":
        return importlib.import_module("stof_compile.masks")
    if name.startswith("Stof") and name.endswith("Error"):
        home = "stof_compile.errors"
    elif name == "StofOptions":
        home = "stof_compile.options"
    elif name in ("explain", "Explanation"):
        home = "stof_compile.explanation"
    elif name in ("sparse_attention", "attention_kernel"):
        home = "stof_compile.attention.functional"
    else:
        raise AttributeError(f"module 'stof_compile' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def _attend(*arguments: Any, **options: Any) -> Any:
    from stof_compile.integrations.transformers import attend

    return attend(*arguments, **options)


def _layer_mask(*arguments: Any, **options: Any) -> Any:
    from stof_compile.integrations.transformers import layer_mask

    return layer_mask(*arguments, **options)


_models: Any = sys.modules.get("transformers.modeling_utils")
_masking: Any = sys.modules.get("transformers.masking_utils")
if hasattr(_models, "AttentionInterface") and hasattr(_masking, "AttentionMaskInterface"):
    # the integration loads at the first call and then registers itself in place of these two
    _models.AttentionInterface.register("stof", _attend)
    _masking.AttentionMaskInterface.register("stof", _layer_mask)
