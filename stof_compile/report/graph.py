"""A dumped graph as data: its operations, what each reads, and the user's line it came from.

The text of a stage is the Python that ``GraphModule.print_readable`` writes. It is parsed, never
run.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import dataclass, field, replace

SOURCE = re.compile(r"#\s*File: (?P<file>.+?):(?P<line>\d+) in (?P<name>.+?), code: ?(?P<code>.*)")
PACKAGES = re.compile(r"\S*/(?:site|dist)-packages/")
OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.MatMult: "matmul",
    ast.Pow: "pow", ast.FloorDiv: "floordiv", ast.Mod: "mod", ast.BitAnd: "and",
    ast.BitOr: "or", ast.BitXor: "xor", ast.LShift: "shift", ast.RShift: "shift",
    ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge",
    ast.Invert: "not", ast.USub: "neg", ast.Not: "not",
}  # fmt: skip
VIEWS = frozenset(
    {
        "view", "reshape", "transpose", "permute", "getitem", "expand", "unsqueeze", "squeeze",
        "narrow", "slice", "flatten", "unflatten", "chunk", "split", "unbind", "t", "contiguous",
        "select", "expand_as", "view_as", "detach", "log_api_usage_once",
    }
)  # fmt: skip
"""Operations that compute nothing; the picture leaves them out."""


def in_package(place: str) -> str:
    """A place in a program without the folder that packages are installed in."""
    return PACKAGES.sub("", place)


@dataclass(frozen=True)
class Source:
    """A line of the user's program."""

    file: str
    line: int
    function: str
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"

    @property
    def short(self) -> str:
        """The place as pages show it, without the folder that packages are installed in."""
        return in_package(str(self))


@dataclass(frozen=True)
class Op:
    """One operation of a graph.

    Args:
        name: of its result in the text. kind: what it does, as "linear" or "stof.fused_norm".
        shape: of its result, as "f16[8, 512, 768]"; empty where the text has none.
        reads: names of the operations whose results it takes, in order.
        code: the statement. source: the user's line, None where the text has none.
    """

    name: str
    kind: str
    shape: str
    reads: tuple[str, ...]
    code: str
    source: Source | None

    @property
    def is_view(self) -> bool:
        """Whether it computes nothing."""
        return self.kind in VIEWS

    @property
    def is_custom(self) -> bool:
        """Whether it is an operator of a library other than torch; in front of all of STOF."""
        return "." in self.kind


@dataclass(frozen=True)
class Graph:
    """The operations of one stage in order.

    Args:
        stage: "captured", "normalized" or "rewritten". remark: why there are none, else empty.
    """

    stage: str
    ops: tuple[Op, ...]
    remark: str = ""
    counts: Counter[str] = field(default_factory=Counter)


def read_graph(stage: str, text: str) -> Graph:
    """Parse the text of a stage; a text that is no such graph gives one without operations."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        return Graph(stage, (), f"{stage}.py cannot be parsed ({error})")
    body = _forward(tree)
    if body is None:
        return Graph(stage, (), f"{stage}.py has no forward()")
    lines = text.splitlines()
    reader = _Reader(lines)
    try:
        for statement in body:
            reader.take(statement)
    except RecursionError:
        return Graph(stage, (), f"{stage}.py is nested too deeply")
    ops = tuple(reader.ops)
    return Graph(stage, ops, "", Counter(op.kind for op in ops))


def lacks_its_end(text: str) -> str:
    """What stands where a graph has the return of its ``forward()``; empty where that is there.

    The text of a graph ends with it, of a graph within a graph too. A text that ends so and cannot
    be parsed is whole all the same: operands of any kind are printed as they print themselves.
    """
    lines = text.rstrip().splitlines()
    last = lines[-1].strip() if lines else ""
    try:
        body = ast.parse(last).body
    except (SyntaxError, ValueError):
        body = []
    if len(body) == 1 and isinstance(body[0], ast.Return) and body[0].value is not None:
        return ""
    shown = last if len(last) <= 60 else f"{last[:57]}..."
    return f"line {len(lines)} is the last one: {shown!r}" if last else "it is empty"


def _forward(tree: ast.Module) -> list[ast.stmt] | None:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and inner.name == "forward":
                    return inner.body
    return None


class _Reader:
    """Collects the operations of a body."""

    def __init__(self, lines: list[str]) -> None:
        self.ops: list[Op] = []
        self._lines = lines
        self._alias: dict[str, str] = {}  # name -> the operation it is another name of
        self._at: dict[str, int] = {}  # name of an operation -> its number
        self._read = 0  # lines looked at for comments
        self._source: Source | None = None

    def take(self, statement: ast.stmt) -> None:
        self._comments_up_to(statement.lineno)
        target: ast.expr
        if isinstance(statement, ast.AnnAssign):
            target, value, note = statement.target, statement.value, statement.annotation
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value, note = statement.targets[0], statement.value, None
        else:
            return  # several targets: values that are let go
        if not isinstance(target, ast.Name) or value is None:
            return
        if isinstance(value, ast.Constant):
            return
        if isinstance(value, ast.Name):
            if value.id in self._alias or value.id in self._at:
                self._alias[target.id] = self._alias.get(value.id, value.id)
            return
        kind = _kind(value)
        if not kind:
            return
        reads = dict.fromkeys(
            self._alias.get(node.id, node.id)
            for node in ast.walk(value)
            if isinstance(node, ast.Name)
        )
        shape = note.value if isinstance(note, ast.Constant) else ""
        code = self._lines[statement.lineno - 1].strip().split(";")[0]
        self.ops.append(
            Op(
                target.id, kind, str(shape), tuple(name for name in reads if name in self._at),
                code, self._source,
            )
        )  # fmt: skip
        self._at[target.id] = len(self.ops) - 1
        self._complete(value, str(shape))

    def _complete(self, value: ast.expr, shape: str) -> None:
        # an operator with several results has no shape in the text; it gets that of the first one
        if not isinstance(value, ast.Subscript) or not isinstance(value.value, ast.Name):
            return
        i = self._at.get(self._alias.get(value.value.id, value.value.id))
        first = isinstance(value.slice, ast.Constant) and value.slice.value == 0
        if first and i is not None and self.ops[i].is_custom and not self.ops[i].shape:
            self.ops[i] = replace(self.ops[i], shape=shape)

    def _comments_up_to(self, line: int) -> None:
        for text in self._lines[self._read : line - 1]:
            stripped = text.strip()
            if stripped.startswith("#"):
                found = SOURCE.match(stripped)
                if found:
                    self._source = Source(
                        found["file"], int(found["line"]), found["name"], found["code"]
                    )
            # no comment between two operations: they came from the same line
        self._read = line - 1


def _kind(value: ast.expr) -> str:
    """What a statement computes; empty where it only names something."""
    if isinstance(value, ast.Call):
        return _called(value)
    if isinstance(value, ast.BinOp):
        return OPERATORS.get(type(value.op), "operator")
    if isinstance(value, ast.UnaryOp):
        return OPERATORS.get(type(value.op), "operator")
    if isinstance(value, ast.Compare):
        return OPERATORS.get(type(value.ops[0]), "compare")
    if isinstance(value, ast.Subscript):
        return "getitem"
    return ""  # self.weight, a tuple


def _called(call: ast.Call) -> str:
    parts: list[str] = []
    node: ast.expr = call.func
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    parts.append(node.id if isinstance(node, ast.Name) else "")
    parts.reverse()
    if len(parts) >= 4 and parts[:2] == ["torch", "ops"]:
        name = parts[3]
        return f"{parts[2]}.{name}" if parts[2] not in ("aten", "prims") else name
    return parts[-1].strip("_") or parts[-1]
