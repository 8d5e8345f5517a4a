"""``explain(fast)``: what STOF found in a compiled model, what it chose and why.

There is no registry of compiled graphs. Dynamo keeps, with the code object of every function it
compiled, a list of cache entries; the bytecode of an entry calls the callables our backend returned
through global names. Those callables carry the :class:`~stof_compile.dump.Record` of their graph as
``stof_record``, so the record lives exactly as long as the compiled code.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stof_compile.dump import Record, SiteRecord, read_dump
from stof_compile.errors import StofUnsupportedError
from stof_compile.plan import ChainPlan, PackPlan


@dataclass(frozen=True)
class Explanation:
    """Records of all graphs of one compiled model or function, in the order of compilation."""

    graphs: tuple[Record, ...]

    @property
    def sites(self) -> tuple[SiteRecord, ...]:
        """Attention sites of all graphs."""
        return tuple(site for record in self.graphs for site in record.sites)

    @property
    def near_misses(self) -> tuple[dict[str, str], ...]:
        """What looked like attention and was not taken, with the reason."""
        return tuple(miss for record in self.graphs for miss in record.near_misses)

    @property
    def chains(self) -> tuple[ChainPlan, ...]:
        """Schemes of the op chains of all graphs."""
        return tuple(chain for record in self.graphs for chain in record.chains)

    @property
    def packs(self) -> tuple[PackPlan, ...]:
        """Projections that share an input, of all graphs."""
        return tuple(pack for record in self.graphs for pack in record.packs)

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the graphs as a whole."""
        return tuple(note for record in self.graphs for note in record.notes)

    @property
    def fallbacks(self) -> tuple[dict[str, str], ...]:
        """What was left to PyTorch, with the reason."""
        return tuple(fallback for record in self.graphs for fallback in record.fallbacks)

    @property
    def unmatched(self) -> tuple[str, ...]:
        """Module paths of the option's mask that matched a site in none of the graphs."""
        matched: dict[str, bool] = {}
        for record in self.graphs:
            for path, names in record.mask_paths.items():
                matched[path] = matched.get(path, False) or bool(names)
        return tuple(path for path, found in matched.items() if not found)

    def __str__(self) -> str:
        if not self.graphs:
            return "nothing compiled by STOF yet: call the compiled model once, then explain it"
        rewritten = sum(site.status == "rewritten" for site in self.sites)
        parts = [
            f"STOF: {len(self.graphs)} graph(s), {len(self.sites)} attention site(s), "
            f"{rewritten} rewritten, {len(self.fallbacks)} left to PyTorch"
        ]
        if self.unmatched:
            parts.append(f"mask paths that match no site: {', '.join(self.unmatched)}")
        masks = [record for record in self.graphs if record.options.get("mask") is not None]
        if masks and not any(record.masked for record in masks):
            parts.append("no attention of these graphs takes the mask of the options")
        for index, record in enumerate(self.graphs):
            title = f"-- graph {index} " + (f"({record.folder}) " if record.folder else "")
            parts.append(f"{title.ljust(98, '-')}\n{record.summary().rstrip()}")
        return "\n".join(parts)


def explain(fast: Callable[..., Any]) -> Explanation:
    """Collect what STOF did for a compiled model or function.

    Args:
        fast: what ``torch.compile(..., backend="stof")`` returned, a module on which (or on a
            submodule of which) ``.compile(backend="stof")`` was called, already run once.
    Raises:
        StofUnsupportedError: ``fast`` is neither a module nor a compiled function.
    """
    if not isinstance(fast, torch.nn.Module) and not hasattr(fast, "_torchdynamo_orig_callable"):
        raise StofUnsupportedError(
            f"explain() takes a compiled module or function, got {type(fast).__name__}; "
            'compile it first: fast = torch.compile(model, backend="stof")'
        )
    walk = _Walk()
    walk.start(fast)
    records = [record for _, record in sorted(walk.found, key=lambda pair: pair[0])]
    return Explanation(tuple(records))


def explain_dump(dump_dir: Path) -> Explanation:
    """Read the same from a dump folder."""
    return Explanation(tuple(read_dump(dump_dir)))


# -- the walk over Dynamo's cache entries ---------------------------------------------------------


class _Walk:
    """Visits code objects reachable from a compiled object and collects the records.

    Functions are shared between models (``forward`` of a class, wrappers of a library), so an entry
    counts only if it was compiled by a backend of the object asked about.
    """

    def __init__(self) -> None:
        self.found: list[tuple[tuple[int, int], Record]] = []
        self._backends: list[Any] = []
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # ids in _seen stay valid while the objects live

    def start(self, fast: Any) -> None:
        roots = [fast]
        if isinstance(fast, torch.nn.Module):
            for module in fast.modules():
                roots.append(getattr(module, "_compiled_call_impl", None))
            roots.append(fast.__dict__.get("forward"))
        for root in roots:
            if root is not None and hasattr(root, "_torchdynamo_orig_callable"):
                backend = _backend_of(root)
                if backend is not None:
                    self._backends.append(backend)
        for root in roots:
            self._visit(root)

    def _visit(self, value: Any) -> None:
        if value is None or id(value) in self._seen:
            return
        if isinstance(value, torch.nn.Module):
            self._mark(value)
            for module in value.modules():
                self._mark(module)
                self._visit(module.__dict__.get("forward"))
                for method in _methods(type(module)):
                    self._visit(method)
                self._visit(getattr(module, "_compiled_call_impl", None))
        elif isinstance(value, types.MethodType):
            self._visit(value.__func__)
            if isinstance(value.__self__, torch.nn.Module):
                self._visit(value.__self__)
        elif isinstance(value, types.FunctionType):
            self._mark(value)
            self._visit_function(value)

    def _mark(self, value: Any) -> None:
        self._seen.add(id(value))
        self._kept.append(value)

    def _visit_function(self, function: types.FunctionType) -> None:
        self._visit(function.__dict__.get("_torchdynamo_orig_callable"))
        self._visit(function.__dict__.get("__wrapped__"))
        closure = _closure(function)
        for value in closure.values():
            self._visit(value)
        if isinstance(closure.get("code"), types.CodeType):
            # Dynamo makes the resume function of a closure at every call, from its code
            self._visit_code(closure["code"], closure.get("f_globals", function.__globals__))
        self._visit_code(function.__code__, function.__globals__)

    def _visit_code(self, code: types.CodeType, scope: dict[str, Any]) -> None:
        entries = self._entries(code)
        for entry in entries:
            order = _order(entry)
            for name in entry.code.co_names:
                value = scope.get(name)
                records = list(_records_of(value))
                if records:
                    self._collect(order, records)
                else:
                    self._visit(value)  # resume functions, and functions called at a graph break
            for inner in entry.code.co_consts:  # resume functions of closures in torch 2.11
                if isinstance(inner, types.CodeType) and id(inner) not in self._seen:
                    self._mark(inner)
                    if self._entries(inner):
                        self._visit_code(inner, scope)
        if not entries:
            return
        for name in code.co_names:
            self._visit(scope.get(name))

    def _collect(self, order: tuple[int, int], records: list[Record]) -> None:
        known = {id(record) for _, record in self.found}
        self.found.extend((order, record) for record in records if id(record) not in known)

    def _entries(self, code: types.CodeType) -> list[Any]:
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list

        entries = list(_debug_get_cache_entry_list(code))
        if not self._backends:
            return entries
        same = [e for e in entries if any(e.backend is backend for backend in self._backends)]
        # Dynamo lets equal backends share entries: such an entry may be all this object has
        return same or [e for e in entries if any(_equal(e.backend, b) for b in self._backends)]


def _methods(kind: type) -> Iterator[types.FunctionType]:
    """Functions of a module's classes: after a graph break each may have graphs of its own."""
    for base in kind.__mro__[: kind.__mro__.index(torch.nn.Module)]:
        yield from (value for value in vars(base).values() if isinstance(value, types.FunctionType))


def _records_of(value: Any) -> Iterator[Record]:
    """Records behind a global that compiled bytecode calls, whatever Dynamo wrapped around it."""
    for _ in range(10):
        record = getattr(value, "stof_record", None)
        if isinstance(record, Record):
            yield record
            return
        if isinstance(value, types.MethodType):
            value = value.__self__
        if isinstance(value, torch.fx.GraphModule):
            # DDP splits a graph and keeps each compiled piece in a child of the result
            for module in value.modules():
                for inner in (module.__dict__.get("submod"), module.__dict__.get("forward")):
                    if not isinstance(inner, torch.nn.Module):
                        yield from _records_of(inner)
            return
        inner = getattr(value, "_torchdynamo_orig_callable", None)
        if inner is None:
            return
        value = inner


def _backend_of(compiled: Any) -> Any:
    """The innermost compiler callable behind a compiled function, None if it cannot be told."""
    while compiled is not None:
        callback = _closure(compiled).get("callback")
        if callback is not None:
            return innermost(callback)
        compiled = getattr(compiled, "__wrapped__", None)
    return None


def innermost(callback: Any) -> Any:
    """The object that stands for one ``torch.compile``, behind what Dynamo wraps around it."""
    for name in ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable"):
        inner = getattr(callback, name, None)
        if inner is not None:
            return innermost(inner)
    return callback


def _closure(function: Any) -> dict[str, Any]:
    function = getattr(function, "__func__", function)
    cells = getattr(function, "__closure__", None) or ()
    values = {}
    for name, cell in zip(function.__code__.co_freevars if cells else (), cells, strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # a cell that is not filled yet
            continue
    return values


def _equal(left: Any, right: Any) -> bool:
    try:
        return bool(left == right)
    except (RuntimeError, ValueError):  # options that hold tensors have no truth value
        return False


def _order(entry: Any) -> tuple[int, int]:
    compile_id = getattr(entry, "compile_id", None)
    frame = getattr(compile_id, "frame_id", None)
    attempt = getattr(compile_id, "frame_compile_id", None)
    return (frame if frame is not None else 0, attempt if attempt is not None else 0)
