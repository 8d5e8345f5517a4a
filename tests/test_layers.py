"""Who may import whom: modules import lower layers or their own folder (docs/architecture.md)."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

LAYERS: tuple[frozenset[str], ...] = (
    frozenset(
        {"options", "errors", "device", "plan", "budget", "typed_json", "places", "bytecode"}
    ),
    frozenset(
        {"masks", "ops", "ops_block", "ops_cpu", "ops_fp8", "launchers", "ops_first_config"}
        | {"ops_fakes", "ops_hopper_attention", "ops_by_hand", "config_fields"}
        | {"measure", "replay", "store", "capture", "normalize"}
        | {
            "compiled_root",
            "dead_code",
            "emit",
            "folded",
            "short_gelu",
            "expand_multihead",
            "fake_encoder_layer",
            "memory",
            "new_tensors",
            "node_ops",
            "repeatable",
            "seen_tensors",
            "static_values",
        }  # parts of normalize, capture
        | {
            "graph_copy",
            "graph_key",
            "graph_bytes",
            "torch_modes",
            "progress",
            "triton_environment",
        }
        | {"inductor", "kernel_facts", "register_limit", "stored_operands", "early_start"}
        | {"fusion", "packing", "packing_guard", "packing_memory"}
        | {"packing_siblings", "packing_search", "packing_consumers"}
        | {"fold_transpose", "mark_infinities", "patch_products", "compare", "example_values"}
        | {"normalize_norms", "normalize_activations", "respell", "between"}  # of normalize
        | {"ops_linear", "ops_norm", "ops_pointwise", "ops_hopper_linear", "ops_tilelang"}
        | {"ops_rope_linear", "ops_cublas_linear"}
    ),
    frozenset({"attention", "templates"}),
    frozenset({"search"}),
    frozenset(
        {"dump", "dump_text", "explanation", "report"}
        | {"fallback", "record_attention", "unused_mask", "variants"}  # parts of backend
        | {
            "fuse",
            "placed_segments",
            "fusion_result",
            "record_fusion",
            "verdict",
            "plan_fit",
            "rank_plan",
        }
        | {"improve", "forms"}
    ),
    frozenset(
        {"backend", "cli", "demo", "integrations", "tune", "tune_print", "tune_subject", "zoo"}
    ),
)
OUTSIDE_KERNELS = {"torch", "triton", "tilelang"}
STANDARD = sys.stdlib_module_names


def layer_of(part: str) -> int | None:
    for number, names in enumerate(LAYERS):
        if part in names:
            return number
    return None


def imported_modules(file: Path) -> list[tuple[int, str, bool]]:
    """(line, dotted name, whether inside a function) of every import of a file."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for_types_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    inside = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in for_types_only:
            continue
        lazy = id(node) in inside
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, lazy) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                assert node.level == 1, f"{file}:{node.lineno}: imports from a folder above"
            elif node.module == "stof_compile":
                found += [(node.lineno, f"stof_compile.{a.name}", lazy) for a in node.names]
            else:
                found.append((node.lineno, str(node.module), lazy))
    return found


def package_files() -> list[Path]:
    return sorted((ROOT / "stof_compile").rglob("*.py")) + sorted(
        (ROOT / "templates").rglob("*.py")
    )


@pytest.mark.parametrize("file", package_files(), ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_go_down(file):
    relative = file.relative_to(ROOT).with_suffix("").parts
    part = relative[0] if relative[0] == "templates" else relative[1]
    if part == "__init__":  # the public names
        return
    own = layer_of(part)
    assert own is not None, f"{part} has no layer: give it one in tests/test_layers.py"
    for line, name, lazy in imported_modules(file):
        where = f"{file.relative_to(ROOT)}:{line} imports {name}"
        if not name.startswith("stof_compile"):
            root = name.split(".")[0]
            assert root not in ("kernels", "templates"), where
            assert root not in ("triton", "tilelang") or lazy, f"{where}: only inside a function"
            continue
        target = name.split(".")[1]
        if target == "kernels":
            # definitions and facts about kernels may be read; they are run through ops
            assert lazy and (part.startswith("ops") or part in ("attention", "kernel_facts")), where
            continue
        if target == part:
            continue
        other = layer_of(target)
        assert other is not None, f"{where}: {target} has no layer"
        assert other <= own, f"{where}: layer {own} must not know layer {other}"


@pytest.mark.parametrize(
    "file", sorted((ROOT / "kernels").rglob("*.py")), ids=lambda f: str(f.relative_to(ROOT))
)
def test_kernels_know_nothing_of_stof(file):
    for line, name, _ in imported_modules(file):
        root = name.split(".")[0]
        own = name.startswith("stof_compile.kernels")
        allowed = own or root in OUTSIDE_KERNELS or root in STANDARD
        assert allowed, f"{file.relative_to(ROOT)}:{line} imports {name}"
