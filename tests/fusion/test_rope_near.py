"""What looks like a rotary embedding behind a product and is left alone, with a reason."""

import pytest
import torch
import torch.nn.functional as F
from rope_graphs import (
    BATCH,
    DIM,
    LENGTH,
    WIDTH,
    Layer,
    attend,
    half_turned,
    heads,
    inputs,
    one_product,
    rotated,
    turn,
)

# -- near misses ----------------------------------------------------------------------------------


def normed(q, k, v, cos, sin):
    return attend(
        turn(F.rms_norm(heads(q), (DIM,)), cos[:, None], sin[:, None]), heads(k), heads(v)
    )


def partial(q, k, v, cos, sin):
    q, half = heads(q), DIM // 2
    turned = turn(q[..., :half], cos[:, None, :, :half], sin[:, None, :, :half])
    return torch.cat((turned, q[..., half:]), -1) * 2, k, v


def interleaved(q, k, v, cos, sin):
    q = heads(q)
    turned = torch.stack((-q[..., 1::2], q[..., ::2]), -1).flatten(-2)
    return q * cos[:, None] + turned * sin[:, None], k, v


def other_halves(q, k, v, cos, sin):
    q, half = heads(q), DIM // 2
    turned = torch.cat((-q[..., :half], q[..., half:]), -1)
    return q * cos[:, None] + turned * sin[:, None], k, v


def also_read(q, k, v, cos, sin):
    q = heads(q)
    return turn(q, cos[:, None], sin[:, None]) + q, k, v


def read_inside(q, k, v, cos, sin):
    other = half_turned(heads(q))
    return heads(q) * cos[:, None] + other * sin[:, None], other * 2, k, v


def last_columns(q, k, v, cos, sin):
    return q * 2, turn(heads(k), cos[:, None], sin[:, None]), v


def tables_of_heads(q, k, v, cos, sin):
    q = q.view(BATCH, LENGTH, 4, DIM)
    return turn(q, cos[:, :4], sin[:, :4]), k, v


def other_tables(q, k, v, cos, sin):
    return turn(heads(q), cos[:, None], sin[:, None]), turn(heads(k), sin[:, None], cos[:, None]), v


def in_half(q, k, v, cos, sin):
    return turn(heads(q).half(), cos[:, None].half(), sin[:, None].half()).float(), k, v


def wide_tables(q, k, v, cos, sin):
    return turn(heads(q), cos[:, None].double(), sin[:, None].double()).float(), k, v


def written_result(q, k, v, cos, sin):
    q = turn(heads(q), cos[:, None], sin[:, None])
    q[:, 0].zero_()
    return q, k, v


def written_table(q, k, v, cos, sin):
    first = heads(q)
    cos.mul_(0.5)
    return turn(first, cos[:, None], sin[:, None]) * 2, k, v


def flat_tables(q, k, v, cos, sin):
    return turn(heads(q), cos[:, None, :, :1], sin[:, None, :, :1]), k, v


def short_heads(q, k, v, cos, sin):
    c, s = cos[:, None, :, : DIM // 2], sin[:, None, :, : DIM // 2]
    return turn(heads(q, DIM // 2), c, s), turn(heads(k), cos[:, None], sin[:, None]), v


NEAR = {
    normed: "the result of 'rms_norm'",
    partial: "rotates 4 elements of heads that are 8 apart",
    interleaved: "interleaved",
    other_halves: "two halves",
    also_read: "is also read by",
    read_inside: "is also read by",
    last_columns: "does not follow the columns before it",
    tables_of_heads: "from head to head",
    other_tables: "different tables",
    in_half: "rotates a copy",
    wide_tables: "another dtype",
    written_result: "writes to",
    flat_tables: "the tables of",
    short_heads: "heads of different widths",
}


@pytest.mark.parametrize("use", NEAR, ids=lambda f: f.__name__)
def test_near_misses_have_a_reason(use):
    given = inputs()
    if use is tables_of_heads:
        given = given[0], *(t[:, :1].expand(1, LENGTH, DIM).contiguous() for t in given[1:])
    backend = rotated(Layer(use).eval(), *given)
    assert not backend.sites, "it was found"
    assert any(NEAR[use] in reason for reason in backend.reasons), backend.reasons


def test_a_table_that_is_written_before_it_is_read():
    given = inputs()
    layer = Layer(written_table).eval()
    backend = rotated(layer, *given)
    assert all("may write" in reason for reason in backend.reasons)
    assert not backend.sites and backend.reasons


def test_other_sums_are_no_rotations():
    backend = rotated(lambda x, c, s: x * 2 + x * 3 + torch.cat((x, x), -1)[..., :WIDTH], *inputs())
    assert backend.sites == [] and backend.refusals == []


def test_a_product_that_is_written_to():
    def spell(y, cos, sin):
        y[..., -1:].zero_()
        return turn(heads(y), cos, sin)

    backend = rotated(one_product(spell), *inputs())
    (reason,) = backend.reasons
    assert "writes to the result of the product" in reason and not backend.sites
