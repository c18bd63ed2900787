"""Who may import whom: DESIGN's layers, walked through the source."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import gc_dpr

PACKAGE = Path(gc_dpr.__file__).parent
FOUNDATION = (
    "errors",
    "artifacts",
    "distributed",
    "precision",
    "ragged",
    "seeding",
    "data.records",
    "evaluation.runs",
)
# Each layer may import itself (only where SELF allows it) and everything to its left.
LAYERS = {
    "foundation": FOUNDATION,
    "core": ("grad_cache",),
    "parts": ("losses", "models", "data", "evaluation", "cachex"),
    "stages": ("training", "retrieval"),
    "edge": ("config", "cli", "__main__"),
}
ORDER = list(LAYERS)


def module_name(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(path):
    """(module, at import time?) for every import of a file, type-checking blocks left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped.update(id(child) for child in ast.walk(node))
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}".removeprefix("gc_dpr.")
                yield f"gc_dpr.{inner}" if inner in MODULES else node.module


def home(module):
    """(layer, part) of a module below gc_dpr."""
    for layer, parts in LAYERS.items():
        for part in sorted(parts, key=len, reverse=True):
            if module == part or module.startswith(f"{part}."):
                return layer, part
    return None


def test_every_module_has_a_layer():
    assert [name for name in MODULES if name and home(name) is None] == []


@pytest.mark.parametrize("name", [name for name in MODULES if name])
def test_imports_point_down(name):
    layer, part = home(name)
    for imported in imports_of(MODULES[name]):
        if not imported.startswith("gc_dpr."):
            continue
        target = imported.removeprefix("gc_dpr.")
        target_layer, target_part = home(target)
        if target_part == part:
            continue
        allowed = ORDER.index(target_layer) < ORDER.index(layer) or layer in ("foundation", "edge")
        allowed = allowed and ORDER.index(target_layer) <= ORDER.index(layer)
        assert allowed, f"gc_dpr.{name} ({layer}) imports {imported} ({target_layer})"


@pytest.mark.parametrize(
    ("library", "homes"),
    [
        ("hydra", ("cli", "config")),
        ("omegaconf", ("cli", "config")),
        ("faiss", ("retrieval.index",)),
        ("torch.distributed", ("distributed",)),
        ("bm25s", ("retrieval.bm25",)),
        ("jax", ("cachex",)),
        ("matplotlib", ("evaluation.plots",)),
        ("gc_dpr.config", ("cli", "config")),
    ],
)
def test_libraries_stay_where_they_belong(library, homes):
    for name, path in MODULES.items():
        if any(name == place or name.startswith(f"{place}.") for place in homes):
            continue
        found = [i for i in imports_of(path) if i == library or i.startswith(f"{library}.")]
        assert not found, f"gc_dpr.{name} imports {found}"


def test_the_core_imports_only_torch():
    allowed = {"torch", "gc_dpr"} | set(sys.stdlib_module_names)
    for name, path in MODULES.items():
        if name.startswith("grad_cache"):
            others = {imported.split(".")[0] for imported in imports_of(path)} - allowed
            assert not others, f"gc_dpr.{name} imports {others}"


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("gc_dpr", ("torch", "numpy", "transformers", "faiss")),
        ("gc_dpr.data", ("torch",)),
        ("gc_dpr.evaluation", ("torch", "faiss")),
        ("gc_dpr.grad_cache", ("transformers", "faiss")),
        ("gc_dpr.cli", ("torch",)),
        ("gc_dpr.cachex", ("torch",)),
    ],
)
def test_imports_stay_light(module, absent):
    code = f"import sys, {module}; print([m for m in {absent!r} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_files_and_functions_stay_small(capsys):
    too_long, long = [], []
    for name, path in MODULES.items():
        text = path.read_text(encoding="utf-8")
        lines = len(text.splitlines())
        if lines > 400:
            too_long.append(name)
        elif lines > 300:
            long.append(f"{name} ({lines} lines)")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                code = len(ast.unparse(node).splitlines())
                doc = len(ast.unparse(node.body[0]).splitlines()) if ast.get_docstring(node) else 0
                if code - doc > 60:
                    too_long.append(f"{name}.{node.name}")
    if long:  # a warning: a file is cut by meaning, not to fit a number
        with capsys.disabled():
            print(f"\nfiles over 300 lines: {', '.join(long)}")
    assert too_long == []


def test_public_names_exist():
    for name in ("data", "evaluation", "grad_cache", "losses", "models", "retrieval", "training"):
        module = importlib.import_module(f"gc_dpr.{name}")
        for public in module.__all__:
            assert hasattr(module, public), f"gc_dpr.{name}.{public}"
