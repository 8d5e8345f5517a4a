"""Neural hash of runs of ops, and what a model repeats.

The hash is F(G) = F_hash(F_conv(G)): each op starts with features of its kind and values, two
rounds of a graph convolution with fixed weights mix in its neighbours, the sum over the ops is
projected on 64 random directions, and the signs are the bits. Everything is integer arithmetic on
weights drawn from SHA-256, so a fingerprint is the same on every machine. Runs that look alike may
share one; the exact key decides.

Source: neural hashing of subgraphs, STOF paper, section 4.3; the layers are our reconstruction.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from stof_compile.fusion.chain import ChainOp, OpChain
from stof_compile.fusion.segment_key import check_range, segment_key

WIDTH = 32  # features of an op
ROUNDS = 2
BITS = 64
# Weights are in -LARGEST..LARGEST. An op has at most 13 features, and of a few ops 5 neighbours: it
# stays below 13 * 7 * (6 * 32 * 7)**2 < 2**28, a projection of the sum below 2**46. Longer segments
# might wrap around int64, on all machines in the same way.
LARGEST = 7

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Repeat:
    """A chain that a model has several times ("classical subgraph"): a layer, or a half of one.

    Args:
        chain: its number among the distinct chains. times: how often the model has it, alone or as
            a run of a longer chain.
        within: (number of the longer chain, first op) of each of its runs there.
    """

    chain: int
    times: int
    within: tuple[tuple[int, int], ...] = ()


def nearest_power(size: int) -> int:
    """log2 of a size, rounded to the nearest: from 724 to 1448 share 10."""
    return (size * size).bit_length() // 2


def power_above(size: int) -> int:
    """log2 of a size, rounded up, but for a power of two and the fifteenth part more: from 549 to
    1097 share 10.
    """
    return (size * 14 // 15).bit_length()


def fingerprint(
    chain: OpChain, start: int, stop: int, bucket: Callable[[int], int] = nearest_power
) -> int:
    """Hash a segment to 64 bits; names of nodes and the order of independent ops do not matter.

    Sizes enter as log2 buckets, so segments of slightly different shape may share a fingerprint.

    Args:
        chain: the chain. start, stop: its ops ``start <= i < stop``.
        bucket: size -> log2 bucket.
    Returns:
        0 <= int < 2**64.
    Raises:
        ValueError: not 0 <= start < stop <= number of ops.
    """
    check_range(chain, start, stop)
    ops = chain.ops[start:stop]
    reads = np.zeros((len(ops), len(ops)), np.int64)  # [reader, read]
    for reader, read in _edges(chain, start, stop):
        reads[reader, read] = 1
    state = np.stack([_features(op, bucket) for op in ops])  # [ops, WIDTH]
    for turn in range(ROUNDS):
        own, ins, outs = (_weights(f"{name} {turn}", WIDTH) for name in ("own", "in", "out"))
        state = np.maximum(state @ own + reads @ state @ ins + reads.T @ state @ outs, 0)
    pooled = state.sum(0)
    # after a relu all is positive: without the mean taken out, most signs would be one constant
    signs = _weights("hash", BITS).T @ (WIDTH * pooled - pooled.sum()) > 0
    return sum(int(bit) << i for i, bit in enumerate(signs.tolist()))


def fingerprints(chain: OpChain, start: int, stop: int) -> tuple[int, ...]:
    """The fingerprints of a segment with either border of the buckets.

    Wherever borders are, sizes of one family lie on both sides of some: of BERT-base and BERT-large
    768 and 1024 share a bucket that is rounded to the nearest, 2304 and 3072 (packed Q/K/V) do not.
    Segments are alike where they share one of these.
    """
    return tuple(fingerprint(chain, start, stop, bucket) for bucket in (nearest_power, power_above))


def find_repeats(chains: Sequence[OpChain], counts: Sequence[int]) -> list[Repeat]:
    """Find what a model repeats, also where its last occurrence is a part of a longer chain.

    The chain of a last layer goes on into the norm behind all layers, so that its key is another
    one. Fingerprints of runs are looked up among those of whole chains; the exact key decides, so
    no collision passes.

    Args:
        chains: distinct chains of a graph. counts: how often it has each.
    Returns:
        What occurs twice or more, of two ops and more; most frequent first, then longest first,
        then in order.
    """
    known: dict[tuple[int, int], list[int]] = {}  # by length and fingerprint
    for number, chain in enumerate(chains):
        if len(chain) > 1:
            value = fingerprint(chain, 0, len(chain))
            known.setdefault((len(chain), value), []).append(number)
    kinds = {tuple(op.kind.name for op in chains[n].ops) for alike in known.values() for n in alike}
    within: dict[int, list[tuple[int, int]]] = {}
    for number, chain in enumerate(chains):
        names = tuple(op.kind.name for op in chain.ops)
        for length in sorted({length for length, _ in known if length < len(chain)}):
            for start in range(len(chain) - length + 1):
                stop = start + length
                if names[start:stop] not in kinds:  # cheaper than a fingerprint
                    continue
                for part in known.get((length, fingerprint(chain, start, stop)), ()):
                    if segment_key(chains[part], 0, length) == segment_key(chain, start, stop):
                        within.setdefault(part, []).append((number, start))
    found = []
    for number in (n for alike in known.values() for n in alike):
        places = within.get(number, [])
        times = counts[number] + sum(counts[whole] for whole, _ in places)
        if times > 1:
            found.append(Repeat(number, times, tuple(places)))
    return sorted(found, key=lambda f: (-f.times, -len(chains[f.chain]), f.chain))


def _edges(chain: OpChain, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """(reader, read) of the edges inside a segment, counted from its start."""
    for i in range(start, stop):
        for operand in chain.ops[i].operands:
            if operand.position is not None and operand.position >= start:
                yield i - start, operand.position - start


def _features(op: ChainOp, bucket: Callable[[int], int]) -> Integers:
    """int64 [WIDTH]: one-hot features times their weights. Kinds, dtypes and sizes are no closed
    lists, so the row of weights of each is drawn by its name.
    """
    sizes = [_bucket(size, bucket) for size in op.value.shape]
    names = [f"kind {op.kind.name}", f"heavy {op.kind.compute_intensive}"]
    names += [f"rank {len(sizes)}", f"dtype {op.value.dtype}"]
    names += [f"size {len(sizes) - i} {size}" for i, size in enumerate(sizes[-8:])]
    if op.kind.compute_intensive and op.operands and op.operands[0].value.shape:
        # the sum of a product: a layer's two products into its width differ in nothing else
        names.append(f"inner {_bucket(op.operands[0].value.shape[-1], bucket)}")
    drawn: Integers = np.array([_numbers(name, WIDTH) for name in names], np.int64)
    total: Integers = drawn.sum(0)
    return total


def _bucket(size: int | str, bucket: Callable[[int], int]) -> str:
    """The bucket of a size; a symbolic one has a bucket of its own."""
    return str(bucket(size)) if isinstance(size, int) else "symbolic"


@lru_cache(maxsize=16)  # seven of them are all that is asked for
def _weights(name: str, columns: int) -> Integers:
    """int64 [WIDTH, columns], read only."""
    drawn = np.array(_numbers(f"weights {name}", WIDTH * columns), np.int64)
    drawn.flags.writeable = False
    return drawn.reshape(WIDTH, columns)


@lru_cache(maxsize=1024)
def _numbers(name: str, count: int) -> tuple[int, ...]:
    """Numbers in -LARGEST..LARGEST that depend on a name only."""
    drawn: list[int] = []
    block = 0
    while len(drawn) < count:
        digest = hashlib.sha256(f"stof {name} {block}".encode()).digest()
        # bytes of the uneven rest of 256 are left out: every number is equally likely
        drawn += [b % (2 * LARGEST + 1) - LARGEST for b in digest if b < 255]
        block += 1
    return tuple(drawn[:count])
