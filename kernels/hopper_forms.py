"""Forms of the Hopper attention kernels: tiles, programs, rings, registers."""

from typing import NamedTuple

from .problem import next_power_of_two


class SharedForm(NamedTuple):
    """Consumers that share keys (hopper_shared_kernel.py): tiles have 64 keys, and 64 rows for each
    of them."""

    rows: int  # of a tile
    programs: int  # per multiprocessor
    key_tiles: int  # in flight
    value_tiles: int
    query_slots: int  # for the query tiles of a unit
    registers: int  # of a thread at the start
    consumer: int  # then of consumers
    producer: int
    dims: tuple[int, int]  # of a head, the fewest and the most
    offered_from: int  # dims; heads of fewer have better forms
    # Worth timing where its tiles have at most so many times the scores of tiles of 64 x 64:
    # consumers pass over what only the others have, and wait for them.
    most_scores: float

    def takes(self, head_dim: int) -> bool:
        """Whether it takes heads of so many dims."""
        return self.dims[0] <= head_dim <= self.dims[1]

    def constants(self) -> dict[str, int]:
        """Of the kernel, in its order."""
        return {
            "KEY_TILES": self.key_tiles,
            "VALUE_TILES": self.value_tiles,
            "CONSUMERS": self.rows // TILE,
            "Q_SLOTS": self.query_slots,
        }


TILE = 64
SHORT = 32  # keys of a short tile, of those that are shifted
SHIFTED_DIMS = 128  # of a head at most, where tiles are shifted
PAIR_KEYS = 128  # of a tile, where tile rows are computed two at a time
# Registers a thread starts with, by programs per multiprocessor: 256 threads each, 65,536 in all.
# The compiler takes them from the warps that load and gives them to the consumers.
_REGISTERS = {1: 128, 2: 120, 3: 80, 4: 64}
# The same of the program of two tile rows (hopper_pair_kernel.py), which has 384 threads and a
# multiprocessor to itself, and of its consumers.
PAIR_REGISTERS, PAIR_CONSUMER = 168, 232
SHARED = (
    SharedForm(
        rows=192,
        programs=1,
        key_tiles=4,
        value_tiles=3,
        query_slots=2,
        registers=128,
        consumer=152,
        producer=56,
        dims=(65, 128),
        offered_from=97,
        most_scores=1.8,
    ),
    SharedForm(
        rows=128,
        programs=2,
        key_tiles=4,
        value_tiles=3,
        query_slots=2,
        registers=80,
        consumer=104,
        producer=32,
        dims=(33, 64),
        offered_from=33,
        most_scores=1.2,
    ),
    SharedForm(
        rows=128,
        programs=1,
        key_tiles=2,
        value_tiles=2,
        query_slots=1,
        registers=168,
        consumer=232,
        producer=40,
        dims=(193, 256),
        offered_from=193,
        most_scores=1.7,
    ),
)
_TILES = {(TILE, TILE), (TILE, PAIR_KEYS), *((form.rows, TILE) for form in SHARED)}
# (programs per multiprocessor, pairs of key and value tiles in flight; 1: a pair and the next keys,
# no next keys where they do not fit) by the width of a head; the first is taken where
# nothing is measured.
_FORMS = {
    64: ((4, 2),),
    80: ((3, 2), (2, 3)),
    96: ((3, 2), (2, 3)),
    128: ((3, 1), (2, 2)),
    144: ((2, 2),),
    160: ((2, 2),),
    192: ((2, 1),),
    256: ((2, 1),),
}


def tile_of(words: int, head_dim: int, programs: int) -> tuple[int, int] | None:
    """(rows, keys) of a tile with so many mask words, None where there is none."""
    if words == 256:
        shared = head_dim > 128 or (head_dim <= 64 and programs > 1)
        return (128, TILE) if shared else (TILE, PAIR_KEYS)
    return {128: (TILE, TILE), 384: (192, TILE)}.get(words)


def shared_form(rows: int, head_dim: int) -> SharedForm | None:
    """The form of tiles with so many rows, None where there is none for these heads."""
    return next((form for form in SHARED if form.rows == rows and form.takes(head_dim)), None)


def offered_form(head_dim: int) -> SharedForm | None:
    """The form of consumers that share keys that is worth timing for these heads."""
    fitting = (form for form in SHARED if form.takes(head_dim) and head_dim >= form.offered_from)
    return next(fitting, None)


def form_refusal(
    tile: tuple[int, int], programs: int, stages: int, head_dim: int, *, shifted: bool = False
) -> str | None:
    """Why there is no form with these numbers, None where there is one.

    Args:
        tile: its (rows, keys). programs: per multiprocessor. stages: pairs of tiles in flight.
        shifted: whether tiles begin where their keys do.
    """
    name = "x".join(map(str, tile))
    if tile not in _TILES:
        known = ", ".join("x".join(map(str, one)) for one in sorted(_TILES))
        return f"tiles are one of {known}, not {name}"
    if shifted and tile != (TILE, TILE):
        return f"shifted tiles are {TILE} x {TILE}, not {tile[0]} x {tile[1]}"
    if shifted and head_dim > SHIFTED_DIMS:
        return f"with shifted tiles heads have up to {SHIFTED_DIMS} dims, not {head_dim}"
    shared = shared_form(tile[0], head_dim)
    dims = [(1, 256)] if tile[1] == TILE else [(1, 128)]
    sizes = [1]
    rings: tuple[int, ...] = (2, 4) if head_dim <= 64 else (2,)
    if tile == (TILE, TILE):
        sizes, rings = [n for n in sorted(_REGISTERS) if n <= 2 or head_dim <= 128], ()
    elif tile[0] > TILE:
        dims = [form.dims for form in SHARED if form.rows == tile[0]]
    if shared is not None:
        sizes, rings = [shared.programs], (shared.key_tiles,)
    if not any(fewest <= head_dim <= most for fewest, most in dims):
        known = " or ".join(f"{fewest} to {most}" for fewest, most in dims)
        return f"with tiles of {name} heads have {known} dims, not {head_dim}"
    if programs not in sizes:
        return f"with tiles of {name} programs must be one of {sizes}, not {programs}"
    if stages < 1:
        return f"stages must be at least 1, not {stages}"
    if rings and stages not in rings:
        return f"with tiles of {name} stages must be one of {rings}, not {stages}"
    return None


def hopper_forms(
    head_dim: int, *, pairs: bool = False, shared: bool = False, pairs_first: bool = True
) -> list[tuple[int, int, int, int]]:
    """(rows and keys of a tile, programs per multiprocessor, pairs of tiles in flight) worth
    timing.

    Args:
        pairs: whether tiles of 128 keys hold little more than those of 64 do.
        shared: whether those of ``offered_form`` do.
        pairs_first: whether the first of the two is likely the faster one.
    """
    width = sum(widths(head_dim, 2))
    found = [(TILE, TILE, programs, stages) for programs, stages in _FORMS[width]]
    form = offered_form(head_dim) if shared else None
    if form is not None:
        found = [(form.rows, TILE, form.programs, form.key_tiles), *found]
    if pairs and width == 128:
        found.insert(0 if pairs_first or form is None else 1, (TILE, PAIR_KEYS, 1, 2))
    return found


def widths(head_dim: int, programs: int) -> tuple[int, int]:
    """Widths of the products that make up a head dim: a power of two, and one for the rest or 0.

    96 as 64 and 32 takes three quarters of 128, and a third worker fits a multiprocessor; 128 as
    two halves fits a third one's registers. Over 128 a product has as many columns at most: 256 of
    them in one take more registers than the compiler has.
    """
    if head_dim > 128:
        return 128, max(16, next_power_of_two(head_dim - 128))
    if head_dim <= 64 or (head_dim > 96 and programs < 3):
        return next_power_of_two(head_dim), 0
    return 64, 16 if head_dim <= 80 else 32 if head_dim <= 96 else 64


def registers_of(programs: int, width: int) -> int:
    """Registers a thread starts with; heads of over 192 dims take all there are."""
    return 128 if width > 192 else _REGISTERS[programs]


def without_spills(programs: int, stages: int, split: bool, return_lse: bool) -> tuple[int, int]:
    """(programs, stages) that are launched: four programs lack the registers for pieces of long
    rows and a log-sum-exp in one kernel, three have them."""
    return (3, 3) if programs == 4 and split and return_lse else (programs, stages)


def ring(stages: int, width: int) -> int:
    """Tiles of keys and values a program holds: pairs, or a pair and the next keys, where these
    fit.

    Args:
        width: of a head.
    """
    return max(2 * stages, 3 if width <= 192 else 2)


def query_slots(width: int, programs: int) -> int:
    """Query tiles a program holds: two, so that the next one is there, where memory allows it.

    Args:
        width: of a head.
    """
    return 1 if width * programs > 288 else 2
