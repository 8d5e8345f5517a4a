"""Units of work and the queue they come from, for block-wise attention on Hopper GPUs.

The units of the first half of the heads are one side's of the L2 cache, the others the other's: a
worker draws from its own side as long as there are any, so that the keys of a head are read by
multiprocessors that are near to each other's copies (``l2_sides.py``), and then helps the other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def multiprocessor():
    """The number of the multiprocessor that runs the program."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %smid; // $1", "=r,r", [gl.program_id(0)], gl.int32, True, 1
    )


@gluon.jit
def _units_of(side, batch_heads, of_head):
    """(units of a side, the first one)."""
    half = batch_heads // 2
    first = gl.where(side > 0, half * of_head, 0)
    return gl.where(side > 0, batch_heads - half, half) * of_head, first


@gluon.jit
def _asked(queue, side, units):
    """The next number of a side's units. The first ones are those of the workers' own numbers, and
    never asked for."""
    begun = (gl.num_programs(0) + 1 - side) // 2
    number = gl.atomic_add(queue + side, 1, sem="relaxed")
    # each worker asks once in vain; whoever is the last leaves 0 for the next launch
    last = units - gl.minimum(units, begun) + gl.num_programs(0) - 1
    gl.store(queue + side, 0, mask=number == last)
    return number + begun


@gluon.jit
def next_number(queue, side, empty, batch_heads, of_head):
    """(number of a worker's next unit, the side to ask next, sides found empty, 0 to 2).

    A number that is no unit's: there are none left. Each worker has to ask until then, since that
    is what resets the queue (``work_queue.py``).

    Args:
        of_head: units of a head.
    """
    number = batch_heads * of_head
    if empty < 2:
        units, first = _units_of(side, batch_heads, of_head)
        found = _asked(queue, side, units)
        if found >= units:
            empty = empty + 1
            if empty < 2:
                side = side ^ 1
                units, first = _units_of(side, batch_heads, of_head)
                found = _asked(queue, side, units)
                if found >= units:
                    empty = empty + 1
        if found < units:
            number = first + found
    return number, side, empty


@gluon.jit
def first_number(queue, sides, batch_heads, of_head):
    """(number, side, empty) as ``next_number`` gives them, of a worker's first unit: that of the
    worker's own number where there is one."""
    own = gl.load(sides + multiprocessor())
    side = gl.program_id(0) % 2
    units, first = _units_of(side, batch_heads, of_head)
    number = first + gl.program_id(0) // 2
    empty = 0
    if gl.program_id(0) // 2 >= units:
        number, own, empty = next_number(queue, own, empty, batch_heads, of_head)
    return number, own, empty


@gluon.jit
def unit_place(number, batch_heads, heads, heavy, light, last_heads):
    """(batch, head, place in the order of a head's units) of a unit.

    Of a side, the heavy units of all heads come first, then the others head by head, so that
    programs read the same keys at about the same time. Of the last heads the longest units come
    first, so that short ones are left in the end.

    Args:
        heavy, light: units of a head. last_heads: in all; of each side half of them, rounded up.
    """
    half = batch_heads // 2
    count = half
    first = 0
    if number >= half * (heavy + light):
        number = number - half * (heavy + light)
        count = batch_heads - half
        first = half
    place = number // gl.maximum(count, 1)
    bh = number - place * count
    if number >= heavy * count:
        number = number - heavy * count
        bh = number // gl.maximum(light, 1)
        place = heavy + number - bh * light
        together = gl.maximum(gl.minimum((last_heads + 1) // 2, count), 1)
        if bh >= count - together:
            number = number - (count - together) * light
            place = heavy + number // together
            bh = count - together + number % together
    bh += first
    b = bh // heads
    return b, bh - b * heads, place


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
