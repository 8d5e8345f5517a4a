"""Which tiles of a row a band keeps, from arithmetic alone: no list of tiles is read."""

import triton
import triton.language as tl


@triton.jit
def band_tiles(
    row, q_len, k_len, q_offset, band_lo, band_hi, global_q, global_k, band_cap,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, HAS_GLOBAL_Q: tl.constexpr,
    HAS_GLOBAL_K: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """Tiles of one row of a mask that is nothing but a band, from arithmetic alone.

    Returns:
        count: tiles; leading: how many of them are columns 0, 1, ...; skip: added to the number of
        the others; whole_from, whole_to: a tile inside [whole_from, whole_to] is kept whole, and so
        is one that ends before ``head_to``.
    """
    q_first = row * BLOCK_M + q_offset
    q_last = tl.minimum(row * BLOCK_M + BLOCK_M, q_len) - 1 + q_offset
    from_k = q_first * 0
    to_k = from_k + k_len
    whole_from = from_k
    whole_to = from_k + (k_len - 1)
    if HAS_LO:
        from_k = tl.maximum(q_first + band_lo, 0)
        whole_from = q_last + band_lo
    if HAS_HI:
        to_k = tl.minimum(to_k, q_last + band_hi + 1)
        whole_to = tl.minimum(whole_to, q_first + band_hi)
    if HAS_GLOBAL_Q:
        from_k = tl.where(q_first < global_q, 0, from_k)
        to_k = tl.where(q_first < global_q, k_len, to_k)
        whole_from = tl.where(q_last < global_q, 0, whole_from)
        whole_to = tl.where(q_last < global_q, k_len - 1, whole_to)
    if HAS_CAP:
        to_k = tl.minimum(to_k, q_last + band_cap + 1)
        whole_to = tl.minimum(whole_to, q_first + band_cap)
    first = from_k // BLOCK_N
    end = (to_k + BLOCK_N - 1) // BLOCK_N
    end = tl.where(to_k > from_k, end, first)
    leading = q_first * 0
    head_to = leading
    if HAS_GLOBAL_K:
        head = tl.minimum(global_k, k_len)
        head_to = leading + head
        if HAS_CAP:
            head = tl.minimum(head, q_last + band_cap + 1)
            head_to = tl.minimum(head_to, q_first + band_cap + 1)
        leading = (tl.maximum(head, 0) + BLOCK_N - 1) // BLOCK_N
        leading = tl.where(end > first, tl.minimum(leading, first), leading)
    return leading + end - first, leading, first - leading, whole_from, whole_to, head_to
