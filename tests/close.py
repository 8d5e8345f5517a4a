"""The one way tests compare a result with its reference."""

import torch

from stof_compile.measure import check_close


def assert_close(
    out: torch.Tensor, ref64: torch.Tensor, dtype: torch.dtype | None = None, scale: float = 1.0
) -> None:
    """Fail unless ``out`` is within the tolerance of its dtype.

    Args:
        out: result; ref64: fp64 reference of the same shape.
        dtype: dtype the computation ran in; default: that of ``out``.
        scale: factor on the tolerance where errors add up, for instance over the layers of a model.
    """
    report = check_close(out, ref64, dtype or out.dtype, scale)
    assert report.ok, (
        f"{tuple(out.shape)} {dtype or out.dtype}: max error {report.max_rel:.2e}, rms error "
        f"{report.rms_rel:.2e} (relative to the reference); NaN or inf differ if both are inf"
    )


def assert_close_lse(lse: torch.Tensor, ref64: torch.Tensor, limit: float = 5e-3) -> None:
    """Fail unless a log-sum-exp is finite where its reference is, and there within a limit.

    Args:
        lse: fp32; ref64: fp64 of the same shape, -inf on rows without keys.
        limit: of the absolute error, as it is a logarithm; the default is of sums of products that
            were rounded to half precision.
    """
    finite = ref64.isfinite()
    assert torch.equal(lse.isfinite(), finite)
    torch.testing.assert_close(lse[finite].double(), ref64[finite], rtol=0, atol=limit)
