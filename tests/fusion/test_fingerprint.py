"""Neural hash: fixed for all machines; repeated runs are found and confirmed exactly."""

import time
from collections import defaultdict
from dataclasses import replace
from itertools import combinations

import pytest

from stof_compile.fusion import fingerprint as module
from stof_compile.fusion.chain import ChainOp, OpChain, Operand, Value
from stof_compile.fusion.fingerprint import (
    Repeat,
    find_repeats,
    fingerprint,
    fingerprints,
    nearest_power,
    power_above,
)
from stof_compile.fusion.op_kind import OpKind
from stof_compile.fusion.segment_key import segment_key

PINNED = 0x8B77CCB16E871BD9
ROW = Value((2, 33, 32), "torch.float32", "contiguous", "cpu")


def small_chain(*names, value=ROW):
    """A straight chain of elementwise ops."""
    ops = []
    for i, name in enumerate(names):
        operand = Operand(f"n{i - 1}", i - 1 if i else None, value)
        kind = OpKind(name, "elementwise", "elementwise")
        ops.append(ChainOp(f"n{i}", (f"n{i}",), kind, value, (operand,), name))
    return OpChain(tuple(ops))


def test_the_same_on_every_machine():
    assert fingerprint(small_chain("exp", "sin", "cos"), 0, 3) == PINNED


def test_sizes_enter_as_buckets():
    def of(rows):
        return fingerprint(small_chain("exp", "sin", value=replace(ROW, shape=(2, rows, 32))), 0, 2)

    assert of(46) == of(90) and of(90) != of(91)  # 64 is nearest: from 2**5.5 to 2**6.5


@pytest.mark.parametrize(
    ("smaller", "larger", "shared"),
    [
        (768, 1024, (True, True)),  # widths of BERT-base and BERT-large
        (2304, 3072, (False, True)),  # of their packed projections
        (3072, 4096, (True, True)),
        (12, 16, (True, True)),  # heads
        (1024, 1280, (True, False)),  # GPT2-medium and GPT2-large
        (1024, 2048, (False, False)),
    ],
)
def test_sizes_of_one_family_share_a_bucket(smaller, larger, shared):
    assert tuple(b(smaller) == b(larger) for b in (nearest_power, power_above)) == shared
    values = [replace(ROW, shape=(2, 33, size)) for size in (smaller, larger)]
    found = [fingerprints(small_chain("exp", "sin", value=value), 0, 2) for value in values]
    assert tuple(a == b for a, b in zip(*found, strict=True)) == shared
    assert found[0][0] == fingerprint(small_chain("exp", "sin", value=values[0]), 0, 2)


def test_the_inner_size_of_a_product_enters(bert):
    """Both products that a layer ends its halves with have the same result."""
    chains = bert(1).chains
    ends = []
    for chain in chains:
        names = [op.kind.name for op in chain.ops]
        stop = names.index("layer_norm") + 1
        assert names[stop - 3 : stop] == ["linear", "residual_add", "layer_norm"]
        ends.append((chain, stop - 3, stop))
    (one, a, b), (other, c, d) = ends
    assert one.ops[b - 1].value == other.ops[d - 1].value
    assert not set(fingerprints(one, a, b)) & set(fingerprints(other, c, d))


def test_kinds_edges_and_dtypes_enter():
    chain = small_chain("exp", "sin", "cos")
    half = small_chain("exp", "sin", "cos", value=replace(ROW, dtype="torch.float16"))
    turned = small_chain("cos", "sin", "exp")
    found = {fingerprint(c, 0, 3) for c in (chain, half, turned)}
    assert len(found) == 3 and all(0 <= value < 2**64 for value in found)


def test_names_do_not_matter(llama):
    chain = max(llama(1).chains, key=len)
    assert len(chain) >= 6
    renamed = OpChain(tuple(replace(op, name=f"other_{op.name}") for op in chain.ops))
    assert fingerprint(chain, 1, 6) == fingerprint(renamed, 1, 6)


def distinct(chains):
    """The chains of different keys, and how often each occurs."""
    alike = defaultdict(list)
    for chain in chains:
        alike[segment_key(chain, 0, len(chain))].append(chain)
    return [found[0] for found in alike.values()], [len(found) for found in alike.values()]


@pytest.mark.parametrize("stack", ["bert", "llama"])
def test_layers_repeat(stack, request):
    chains, counts = distinct(request.getfixturevalue(stack)(3).chains)
    found = find_repeats(chains, counts)
    assert {counts[f.chain] for f in found} == {3} and all(f.times == 3 for f in found)
    assert all(f.within == () for f in found)
    lengths = [len(chains[f.chain]) for f in found]
    assert lengths == sorted(lengths, reverse=True) and 1 not in lengths
    assert len(found) == sum(n > 1 and len(c) > 1 for c, n in zip(chains, counts, strict=True))


def test_the_last_layer_is_found_in_a_longer_chain():
    """It goes on into the norm behind all layers."""
    layer, longer = small_chain("exp", "sin", "cos"), small_chain("exp", "sin", "cos", "tan")
    twice = small_chain("exp", "sin", "cos", "exp", "sin", "cos")
    assert find_repeats([layer, longer], [11, 1]) == [Repeat(0, 12, ((1, 0),))]
    assert find_repeats([longer, layer], [1, 1]) == [Repeat(1, 2, ((0, 0),))]
    assert find_repeats([layer, twice], [2, 3])[0] == Repeat(0, 8, ((1, 0), (1, 3)))
    assert find_repeats([layer, longer], [1, 0]) == []
    assert find_repeats([small_chain("exp"), layer], [5, 1]) == [], "one op is no layer"
    wide = small_chain("exp", "sin", "cos", "tan", value=replace(ROW, shape=(2, 33, 64)))
    assert find_repeats([layer, wide], [1, 1]) == []


def test_collisions_are_told_apart(monkeypatch):
    """Equal kinds, fingerprints that collide: constants are seen by the exact key only."""
    layer, longer = small_chain("exp", "sin"), small_chain("exp", "sin", "cos")
    other = OpChain(tuple(replace(op, constants="else") for op in layer.ops))
    honest = find_repeats([layer, other, longer], [2, 3, 1])
    assert honest == [Repeat(0, 3, ((2, 0),)), Repeat(1, 3)]
    monkeypatch.setattr(module, "fingerprint", lambda *_: 7)
    assert find_repeats([layer, other, longer], [2, 3, 1]) == honest


def test_finding_what_repeats_takes_no_time(bert):
    """One chain of each key is looked at, whatever the number of layers."""
    chains, counts = distinct(bert(8).chains)
    find_repeats(chains, counts)  # draws the weights
    began = time.perf_counter()
    found = find_repeats(chains, counts)
    assert time.perf_counter() - began < 0.05 and [f.times for f in found] == [8, 8]


def connected(chain, start, stop):
    """Whether a run of ops hangs together by its edges."""
    group = list(range(start, stop))
    for i in range(start, stop):
        for operand in chain.ops[i].operands:
            if operand.position is not None and operand.position >= start:
                old, new = group[i - start], group[operand.position - start]
                group = [new if g == old else g for g in group]
    return len(set(group)) == 1


def test_few_collisions(bert, llama):
    from torch import _dynamo

    chains = bert(1).chains
    _dynamo.reset()
    keys = defaultdict(set)
    for chain in [*chains, *llama(1).chains]:
        for start, stop in combinations(range(len(chain) + 1), 2):
            if 2 <= stop - start <= 6 and connected(chain, start, stop):
                keys[fingerprint(chain, start, stop)].add(segment_key(chain, start, stop))
    # the exact key sees constants and operands from outside, which the fingerprint does not
    assert sum(len(k) for k in keys.values()) < 1.2 * len(keys)


def test_range():
    with pytest.raises(ValueError, match="no segment 0:3"):
        fingerprint(small_chain("exp", "sin"), 0, 3)
