"""Units of work and the queue they come from, for block-wise attention on Hopper GPUs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def next_number(queue, asked):
    """The number of a unit; the workers' first units are those of their own numbers.

    The queue is asked ``asked`` times in a launch. Whoever is the last leaves 0 for the next one
    (``work_queue.py``).
    """
    number = gl.atomic_add(queue, 1, sem="relaxed")
    gl.store(queue, 0, mask=number == asked - 1)
    return number + gl.num_programs(0)


@gluon.jit
def unit_place(number, batch_heads, heads, rows, heavy_rows, heavy_units, last_heads):
    """(batch, head, slot in the order of rows) of a unit.

    The heavy rows of all heads come first, then the others head by head, so that programs read the
    same keys at about the same time. Of the last heads the longest rows come first, so that short
    ones are left in the end.
    """
    slot = number // batch_heads
    bh = number - slot * batch_heads
    if number >= heavy_units:
        light_rows = gl.maximum(rows - heavy_rows, 1)
        light = number - heavy_units
        bh = light // light_rows
        slot = heavy_rows + light - bh * light_rows
        first = batch_heads - last_heads
        if bh >= first:
            light -= first * light_rows
            slot = heavy_rows + light // last_heads
            bh = first + light % last_heads
    b = bh // heads
    return b, bh - b * heads, slot


@gluon.jit
def tile_row(
    valid, b, h, slot, rows, plane_map, plane_stride_b, plane_stride_h,
    order, tile_ptr, full_start, SINGLE_PLANE: gl.constexpr,
):  # fmt: skip
    """(tile row, its first tile, its first full one, the end of its tiles) of a slot in the order
    of rows; zeros where the unit is not valid. Columns of a transposed list alike."""
    row = 0
    start = 0
    middle = 0
    stop = 0
    if valid:
        base = 0
        if not SINGLE_PLANE:
            base = gl.load(plane_map + b * plane_stride_b + h * plane_stride_h) * rows
        row = gl.load(order + base + slot)
        start = gl.load(tile_ptr + base + row)
        middle = gl.load(full_start + base + row)
        stop = gl.load(tile_ptr + base + row + 1)
    return row, start, middle, stop
