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
