"""What torch.compile was called on, and where in it a graph stands.

Dynamo does not tell a backend which object it compiles. The object is in the frame of the wrapper
that
``torch.compile`` returned, and that frame is on the Python stack whenever a backend runs, also for
the graphs behind
a graph break. Modules are then found by identity: Dynamo keys its module stack by ``id(module)``.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

Paths = Mapping[int, tuple[str, ...]]
# Wrappers a source expression passes through that are no modules of the user's.
WRAPPERS = frozenset(
    {"_modules", "_parameters", "_buffers", "_orig_mod", "__self__", "__wrapped__", "_fn"}
)


@dataclass(frozen=True)
class CompiledRoot:
    """The object being compiled.

    Args:
        modules: the module, or the modules a compiled function reaches; empty when they can't be
            told.
        codes: code objects a graph of the whole object starts in.
        compiling: code Dynamo is compiling now.
        callback: what Dynamo calls to compile its frames.
    """

    modules: tuple[nn.Module, ...]
    codes: frozenset[CodeType]
    compiling: CodeType | None
    callback: Any = None

    @property
    def at_start(self) -> bool:
        """Whether the graph being compiled starts where the root starts."""
        return self.compiling is not None and self.compiling in self.codes


def compiled_root() -> CompiledRoot:
    """Find the object being compiled; to be called while a backend runs."""
    compiling: CodeType | None = None
    for frame in _frames():
        module = frame.f_globals.get("__name__")
        if module == "torch._dynamo.convert_frame" and compiling is None:
            code = frame.f_locals.get("code")
            compiling = code if isinstance(code, CodeType) else None
        # Not "_fn", which torch._dynamo.disable wraps around whatever it disables.
        wraps = module == "torch._dynamo.eval_frame" and frame.f_code.co_name == "compile_wrapper"
        if wraps and "fn" in frame.f_locals:
            fn = frame.f_locals["fn"]
            given = (*frame.f_locals.get("args", ()), *frame.f_locals.get("kwargs", {}).values())
            found = _modules_of(fn) or tuple(m for m in given if isinstance(m, nn.Module))
            codes = frozenset(_start_codes(fn, found))
            callback = getattr(frame.f_locals.get("self"), "callback", None)
            return CompiledRoot(found, codes, compiling, callback)
    return CompiledRoot((), frozenset(), compiling)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _modules_of(fn: Any, depth: int = 0) -> tuple[nn.Module, ...]:
    """Modules a callable is, is bound to, closes over or names as globals."""
    module = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    if isinstance(module, nn.Module):
        module = getattr(module, "_orig_mod", module)
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module
        assert isinstance(module, nn.Module), "wrappers hold a module"
        return (module,)
    found: list[nn.Module] = []
    for cell in getattr(fn, "__closure__", None) or ():
        try:
            content = cell.cell_contents
        except ValueError:  # a variable that has not been assigned yet
            continue
        if depth < 4 and (isinstance(content, nn.Module) or callable(content)):
            found.extend(_modules_of(content, depth + 1))
    code = getattr(fn, "__code__", None)
    if isinstance(code, CodeType):
        scope = getattr(fn, "__globals__", {})
        found.extend(m for name in code.co_names if isinstance(m := scope.get(name), nn.Module))
    return tuple(dict.fromkeys(found))


def _start_codes(fn: Any, modules: Sequence[nn.Module]) -> Iterator[CodeType]:
    forwards = [module.forward for module in modules]
    for function in (fn, *forwards):
        for layer in (function, inspect.unwrap(function)):
            code = getattr(layer, "__code__", None)
            if isinstance(code, CodeType):
                yield code


def module_paths(roots: Sequence[nn.Module]) -> dict[int, tuple[str, ...]]:
    """Path of every module below the roots by identity; those reached twice are left out."""
    paths: dict[int, tuple[str, ...]] = {}
    twice: set[int] = set()
    for root in roots:
        for name, module in root.named_modules(remove_duplicate=False):
            if id(module) in paths:
                twice.add(id(module))
            paths[id(module)] = tuple(name.split(".")) if name else ()
    return {key: path for key, path in paths.items() if key not in twice}


def split_source(source: str) -> tuple[str, tuple[str, ...]]:
    """Split a source expression into its variable and the path of components below it.

    ``L['self']._modules['layer'][0].attention`` and ``L['self'].layer.0.attention`` both give
    ``("L['self']", ("layer", "0", "attention"))``.
    """
    match = re.match(r"[LG]\[(['\"])[^'\"]*\1\]", source)
    base = match.group(0) if match else source.split(".")[0]
    rest = source[len(base) :]
    found = re.findall(r"\[['\"]?([^'\"\]]+)['\"]?\]|\.?([^.\[\]()]+)", rest)
    parts = [bracketed or dotted for bracketed, dotted in found]
    return base, tuple(part for part in parts if part not in WRAPPERS)


def module_stack(node: Node) -> list[tuple[int | None, str]]:
    """Modules a node was traced in, outermost first: (identity where recorded, source
    expression)."""
    stack = []
    for key, value in (node.meta.get("nn_module_stack") or {}).items():
        digits = str(key).split("@")[0]  # "@n" counts repeated calls of one module
        stack.append((int(digits) if digits.isdigit() else None, str(value[0])))
    return stack


def path_of(node: Node, paths: Paths) -> tuple[str, ...]:
    """Path of the innermost module of a node: by identity where possible, else by its source."""
    stack = module_stack(node)
    if not stack:
        return ()
    innermost = split_source(stack[-1][1])[1]
    for identity, source in reversed(stack):
        if identity is not None and identity in paths:
            return paths[identity] + innermost[len(split_source(source)[1]) :]
    return innermost


def stands_in_root(gm: GraphModule, root: CompiledRoot, paths: Paths) -> tuple[bool, bool]:
    """(paths of nodes are relative to the root, the graph is the whole call of the root)."""
    known = bool(root.modules)
    whole = _starts_whole(root) and not ends_in_break(gm)
    for node in gm.graph.nodes:
        stack = module_stack(node)
        if stack and not any(identity in paths for identity, _ in stack):
            # A shared module, or one made on the way: its source counts if it starts at the root.
            text = split_source(stack[-1][1])[1]
            below = any(path[: len(text)] == text for path in paths.values())
            known = known and (below or root.at_start)
    return known, whole


def _starts_whole(root: CompiledRoot) -> bool:
    # torch.compile wraps some callables once more, in torch._dynamo.external_utils.
    code = root.compiling
    inlined = code is not None and "external_utils" in code.co_filename
    return root.at_start or inlined


def ends_in_break(gm: GraphModule) -> bool:
    """Whether a graph ends in a graph break, and not with its function."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return bool(getattr(reason, "graph_break", False))
