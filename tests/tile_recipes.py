"""Recipes that the tests of the TileLang templates share."""

from linear_recipes import Writer
from norm_recipes import HALF


def linear(
    rows=(64,), n=64, k=64, bias="", activation="", residual=False, kn=False, dtype=HALF,
    device="cpu",
):  # fmt: skip
    """linear [bias] [activation] [residual]; the bias is an "input" of the product or a "step"."""
    w = Writer(dtype, device)
    value = w.linear(w.operand(*rows, k), n, k, kn=kn, bias=bias == "input")
    if bias == "step":
        value = w.step("add", value, w.operand(n))
    if activation:
        value = w.step("activation", value, name=activation)
    if residual:
        w.step("add", w.operand(*rows, n), value)
    return w.done()


def linear_norm(
    rows=(64,), n=256, k=64, bias=True, residual=True, norm="layer_norm", kn=False, dtype=HALF,
    device="cpu",
):  # fmt: skip
    """linear [bias] [residual] norm; with a weight, and a bias if it is a layer norm."""
    w = Writer(dtype, device)
    value = w.linear(w.operand(*rows, k), n, k, bias=bias, kn=kn)
    if residual:
        value = w.step("add", value, w.operand(*rows, n))
    centred = norm == "layer_norm"
    vectors = [w.operand(n) for _ in range(2 if centred else 1)]
    w.step(norm, value, *vectors, width=n, eps=1e-5, has_weight=True, has_bias=centred)
    return w.done()


def chain(
    rows=(64,), k=64, hidden=128, n=64, bias=True, activation="gelu", residual=True, kn=False,
    dtype=HALF, device="cpu",
):  # fmt: skip
    """linear [activation] linear [residual]."""
    w = Writer(dtype, device)
    value = w.linear(w.operand(*rows, k), hidden, k, bias=bias, kn=kn)
    if activation:
        value = w.step("activation", value, name=activation)
    value = w.linear(value, n, hidden, bias=bias, kn=kn)
    if residual:
        w.step("add", value, w.operand(*rows, n))
    return w.done()
