"""Launch a compiled kernel again without asking Triton which compiled form the arguments need.

Triton answers that at every launch from all arguments, which takes tens of microseconds of the host
for kernels with many of them; its hooks before a launch and its debug settings are not looked at
again. Here a launch is recognised by what the answer depends on: the
kernel, the device, types and alignment of tensors, layouts of descriptors, the constants and
options, and of numbers whether they are 1, multiples of 16 or wide.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .memo import remember
from .settled_keys import settle_key

_compiled: dict[tuple[Any, ...], Any] = {}


class Descriptor(NamedTuple):
    """A tensor as TMA addresses it; Triton's own descriptor is made of it, and checked once.

    Args:
        base: the tensor, 16-byte aligned. shape, strides: in elements; the last stride is 1, the
            others are multiples of 16 bytes. block_shape: of what is copied at once.
        layout: of a block in shared memory.
    """

    base: Tensor
    shape: Sequence[int]
    strides: Sequence[int]
    block_shape: tuple[int, ...]
    layout: Any

    def checked(self) -> Any:
        """Triton's own descriptor."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        shape, strides, block = list(self.shape), list(self.strides), list(self.block_shape)
        return TensorDescriptor(self.base, shape, strides, block, self.layout)

    def like(self, other: Any) -> Any:
        """Triton's own descriptor again, with all else as in one that was checked."""
        return _with(other, base=self.base, shape=list(self.shape), strides=list(self.strides))


class Repeat:
    """A launch again: of the same kernel on tensors with the same layouts.

    Args:
        compiled: what Triton compiled for it. programs: of the grid. arguments: of that launch;
            descriptors and numbers, then other tensors and numbers. constants: the kernel's.
    """

    def __init__(
        self, compiled: Any, programs: int, arguments: Sequence[Any], constants: Sequence[Any]
    ) -> None:
        self._compiled, self._programs = compiled, programs
        # without the tensors: they would live as long as the process
        self._descriptors: list[Any] = []
        self._before: list[list[int]] = []  # numbers between a descriptor and the one before it
        plain: list[Any] = []
        for a in arguments:
            if isinstance(a, Tensor | int):
                plain.append(a)
            else:
                self._descriptors.append(_with(a, base=None))
                self._before.append(plain)
                plain = []
        self._rest = [*(None if isinstance(a, Tensor) else a for a in plain), *constants]
        self._places = [place for place, a in enumerate(plain) if isinstance(a, Tensor)]
        self._device = torch.cuda.current_device()
        self._direct = _direct_launch(compiled)
        self._encoded: dict[tuple[int, int], Sequence[Any]] = {}  # by place and address

    @property
    def here(self) -> bool:
        """Whether the device it was compiled on is current."""
        return torch.cuda.current_device() == self._device

    def __call__(self, *tensors: Tensor) -> None:
        """Run the kernel on the current stream.

        Args:
            tensors: in the place of the descriptors' and then of the others, in their order;
                sizes, strides, dtypes and alignments as they were.
        """
        from triton import knobs

        compiled, bases = self._compiled, tensors[: len(self._descriptors)]
        rest = self._rest.copy()
        for position, tensor in zip(self._places, tensors[len(bases) :], strict=True):
            rest[position] = tensor
        hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        heard = any(getattr(hook, "calls", hook) for hook in hooks)  # by a profiler
        if heard or compiled.function is None:  # not loaded: where launches are switched off
            compiled[self._programs, 1, 1](*self._placed(bases), *rest)
            return
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        place = self._programs, 1, 1, stream, compiled.function
        if self._direct is None:
            values = *self._placed(bases), *rest
            compiled.run(*place, compiled.packed_metadata, None, None, None, *values)
            return
        encoded: list[Any] = []
        for number, base in enumerate(bases):
            encoded += self._before[number]
            encoded += self._encode(number, base)
        start, how, _ = self._direct
        start(
            *place, *how, None, None, compiled.packed_metadata, None, None, None,
            *encoded, *rest,
        )  # fmt: skip

    def _placed(self, bases: Sequence[Tensor]) -> list[Any]:
        placed: list[Any] = []
        for numbers, made, base in zip(self._before, self._descriptors, bases, strict=True):
            placed += [*numbers, _with(made, base=base)]
        return placed

    def _encode(self, number: int, base: Tensor) -> Sequence[Any]:
        """A descriptor as the GPU reads it. Its address is all that is new: an allocator gives the
        same ones again and again.
        """
        address = base.data_ptr()
        known = self._encoded.get((number, address))
        if known is None:
            assert self._direct is not None, "asked for where descriptors are encoded by us"
            known = self._direct[2](number, _with(self._descriptors[number], base=base))
            remember(self._encoded, (number, address), known)
        return known


def _direct_launch(compiled: Any) -> tuple[Any, tuple[Any, ...], Any] | None:
    """Triton 3.6's launcher below the step that encodes descriptors at every launch.

    Returns:
        The launcher; its arguments between the function and the scratch memory, which there is
        none of; and (number, descriptor) -> what stands for a descriptor in the arguments. None
        where Triton is made otherwise, or the kernel wants scratch memory.
    """
    run = compiled.run
    step: Any = getattr(run, "launch", None)
    code = getattr(step, "__code__", None)
    names = getattr(code, "co_freevars", ())
    # 3.7 has the same step over a launcher with its arguments in another order and the kernel's in
    # one list; only 3.6 counts those before the kernel's
    counts = "_BASE_ARGS_FORMAT_LEN" in getattr(code, "co_names", ())
    try:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        scratch = run.global_scratch_size, run.profile_scratch_size
        how = run.launch_cooperative_grid, run.launch_pdl
        arguments = make_tensordesc_arg.__code__.co_argcount
    except (ImportError, AttributeError):
        return None
    held_there = {"launcher", "tensordesc_meta"} <= set(names)
    if not (counts and held_there) or any(scratch) or arguments != 2:
        return None
    held = dict(zip(names, (cell.cell_contents for cell in step.__closure__), strict=True))
    facts = held["tensordesc_meta"]
    if not facts or None in facts:
        return None
    return held["launcher"], how, lambda number, d: make_tensordesc_arg(d, facts[number])


def _with(descriptor: Any, **changed: Any) -> Any:
    """A copy of Triton's own descriptor, which is not checked again."""
    made = object.__new__(type(descriptor))
    made.__dict__.update(descriptor.__dict__, **changed)
    return made


def launch(
    kernel: Any,
    programs: int,
    arguments: Sequence[Any],
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Repeat | None:
    """Run a kernel on a one-dimensional grid of the current device and stream.

    Args:
        kernel: a Triton or Gluon kernel whose constants come last.
        programs: of the grid, at least 1.
        arguments: in the order of the kernel: ``Descriptor``s and ints in their place, then
            tensors and ints of at most 64 bits.
        constants: the kernel's, all of them, in its order.
        options: of the compiler: num_warps and the like.
    Returns:
        The launch again; None the first time, when Triton says what it compiled.
    """
    key = (
        kernel.fn,
        torch.cuda.current_device(),
        *map(_kind, arguments),
        *constants.values(),
        *options.items(),
    )
    known = _compiled.get(key)
    if known is None:
        settle_key(kernel)
        asked = [a.checked() if isinstance(a, Descriptor) else a for a in arguments]
        compiled = kernel[(programs,)](*asked, **constants, **options)
        if compiled is not None:
            # without the tensors: they would live as long as the process
            remember(_compiled, key, (compiled, [_without_tensor(a) for a in asked]))
    else:
        compiled, before = known
        values = [
            a.like(b) if isinstance(a, Descriptor) else a
            for a, b in zip(arguments, before, strict=True)
        ]
        compiled[programs, 1, 1](*values, *constants.values())
        return Repeat(compiled, programs, values, list(constants.values()))
    return None


def layout(tensor: Tensor | None) -> Any:
    """What a launch takes a tensor for, but for its address."""
    if tensor is None:
        return None
    aligned = tensor.data_ptr() % 16 == 0
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), aligned


def _without_tensor(value: Any) -> Any:
    """A checked descriptor without its tensor, None of all else."""
    if isinstance(value, Tensor | int):
        return None
    value.base = None
    return value


def _kind(value: Any) -> Any:
    """What the compiled form depends on in an argument."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return value == 1, value % 16 == 0, -(2**31) <= value < 2**31
    return value.base.dtype, value.block_shape, value.layout
