"""What STOF needs beside a device: packages, compilers, caches, and how to get them."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stof_compile.device import DeviceFacts

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Problem:
    """Something that is not as it should be.

    Args:
        what: in words. fix: what to do, with the command.
        fatal: STOF cannot work so; else it has less than it could.
    """

    what: str
    fix: str
    fatal: bool


@dataclass(frozen=True)
class Tool:
    """A part that STOF or what it builds on looks for.

    Args:
        found: version or path, "" where it is missing. use: what for.
        needed: whether it has a use on this machine. fatal: and nothing works without it.
        fix: how to get it.
    """

    name: str
    found: str
    use: str
    needed: bool
    fatal: bool
    fix: str


@dataclass(frozen=True)
class Cache:
    """A folder where compiled or measured things are kept.

    Args:
        name: whose. writable: whether it, or the folder it would be made in, can be written to.
        fatal: nothing can be compiled unless it is. fix: which setting moves it.
    """

    name: str
    folder: str
    files: int
    size_bytes: int
    writable: bool
    fatal: bool
    fix: str


def tools(devices: Sequence[DeviceFacts]) -> list[Tool]:
    """All parts, found or not."""
    gpu = any(facts.is_cuda for facts in devices)
    nvidia = any(facts.runtime.startswith("cuda") for facts in devices)
    return [
        Tool(
            "C++ compiler",
            _program(os.environ.get("CXX"), "g++", "clang++"),
            "Inductor, for what runs on the CPU",
            True,
            not gpu,
            "apt install g++, or set CXX",
        ),
        Tool(
            "C compiler",
            _program(os.environ.get("CC"), "gcc", "clang"),
            "Triton, for the launchers of its kernels",
            gpu,
            True,
            "apt install gcc, or set CC",
        ),
        Tool(
            "Python.h",
            _python_header(),
            "what these two compile",
            True,
            True,
            "apt install python3-dev, for the Python in use",
        ),
        Tool("triton", _version("triton"), "GPU kernels", gpu, True, "pip install triton"),
        Tool(
            "ptxas",
            _ptxas(),
            "GPU kernels on NVIDIA",
            nvidia,
            True,
            "pip install --force-reinstall triton, which brings it, or set TRITON_PTXAS_PATH",
        ),
        Tool(
            "tilelang",
            _version("tilelang"),
            "further templates on NVIDIA",
            nvidia,
            False,
            "pip install 'tilelang[nvcc]'",
        ),
        Tool(
            "nvcc",
            _nvcc(),
            "what tilelang writes",
            nvidia,
            False,
            "pip install 'tilelang[nvcc]', or install a CUDA toolkit and set CUDA_HOME",
        ),
        Tool(
            "transformers",
            _version("transformers"),
            "demo, models of tune and of the benchmarks",
            True,
            False,
            "pip install 'transformers>=5.0'",
        ),
    ]


def caches() -> list[Cache]:
    """The caches of STOF and of the compilers below it."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    from stof_compile.store import default_root

    home = Path.home()
    triton = Path(os.environ.get("TRITON_HOME") or home, ".triton", "cache")
    return [
        _cache("stof", default_root(), False, "give options={'cache_dir': ...}"),
        _cache(
            "inductor",
            Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()),
            True,
            "set TORCHINDUCTOR_CACHE_DIR",
        ),
        _cache(
            "triton",
            Path(os.environ.get("TRITON_CACHE_DIR") or triton),
            False,
            "set TRITON_CACHE_DIR",
        ),
        _cache(
            "tilelang",
            Path(os.environ.get("TILELANG_CACHE_DIR") or home / ".tilelang" / "cache"),
            False,
            "set TILELANG_CACHE_DIR",
        ),
    ]


def missing(found_tools: Sequence[Tool], found_caches: Sequence[Cache]) -> list[Problem]:
    """What of these is a problem."""
    return [
        Problem(f"{tool.name} is missing, needed for: {tool.use}", tool.fix, tool.fatal)
        for tool in found_tools
        if tool.needed and not tool.found
    ] + [
        Problem(
            f"{cache.folder} (cache of {cache.name}) cannot be written to", cache.fix, cache.fatal
        )
        for cache in found_caches
        if not cache.writable
    ]


def torch_problems(devices: Sequence[DeviceFacts]) -> list[Problem]:
    """Whether torch is of a version STOF knows, sees the backend and the GPU."""
    import torch

    problems = []
    wanted, least, below = supported_torch()
    get = f"pip install '{wanted}'"
    version = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])
    if version < least:
        problems.append(Problem(f"torch {torch.__version__} is too old", get, True))
    elif version >= below:
        what = f"torch {torch.__version__} is newer than those STOF was tested with"
        problems.append(Problem(what, get, False))
    if "stof" not in torch._dynamo.list_backends(exclude_tags=()):
        what = 'torch.compile does not see backend="stof"'
        fix = "install the package where this Python finds it: pip install -e . in its folder"
        problems.append(Problem(what, fix, True))
    if len(devices) == 1 and NVIDIA_DRIVER.exists():
        if torch.version.cuda is None:
            what = f"there is an NVIDIA driver, and torch {torch.__version__} is built without CUDA"
            fix = f"pip install --force-reinstall '{wanted}' gets the build with CUDA"
        else:
            what = f"there is an NVIDIA driver, and torch (CUDA {torch.version.cuda}) sees no GPU"
            fix = "look at nvidia-smi: the driver may be too old, or CUDA_VISIBLE_DEVICES hides it"
        problems.append(Problem(what, fix, False))
    for facts in devices:
        if facts.runtime.startswith("cuda") and (facts.capability or (0, 0)) < (8, 0):
            what = f"{facts.name} is {facts.arch}, kernels need sm_80: attention stays with PyTorch"
            problems.append(Problem(what, "use another GPU", False))
    return problems


def bytecode_problems() -> list[Problem]:
    """Whether every process compiles torch's sources again, since nothing keeps their bytecode."""
    import torch

    from stof_compile.bytecode import FOLDER, NONE_WRITTEN, lacking_bytecode

    folder = Path(torch.__file__).parent
    lacking = lacking_bytecode(folder)
    if lacking is None:
        return []
    what = (
        f"torch's bytecode is missing ({lacking.file}) and no import writes it here: every process "
        "that compiles takes seconds more to import torch (10 on a host with H100s)"
    )
    settings = []
    if lacking.forbidden:
        settings.append(f"unset {NONE_WRITTEN}")
    if not lacking.writable:
        settings.append(f"set {FOLDER} to a folder that can be written to")
    once = f"python -m compileall -q {shlex.quote(str(folder))}"
    who = "" if lacking.writable else ", as a user who may write there"
    return [Problem(what, f"{' and '.join(settings)}, or run once{who}: {once}", False)]


def supported_torch() -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """What this package requires of torch: as text, lowest version, first one excluded.

    All versions will do where the package is not installed; that is a problem of its own.
    """
    try:
        every = metadata.requires("stof-compile") or []
    except metadata.PackageNotFoundError:
        return "torch", (0,), (sys.maxsize,)
    (text,) = (line for line in every if re.match(r"torch\b", line))
    limits = dict(re.findall(r"(>=|<)([\d.]+)", text))
    least, below = (tuple(int(n) for n in limits[sign].split(".")) for sign in (">=", "<"))
    return text, least, below


# -- helpers --------------------------------------------------------------------------------------


def _program(chosen: str | None, *names: str) -> str:
    """The first of some programs that is there; the one that the user chose counts alone."""
    if chosen and chosen.strip():
        return chosen if shutil.which(chosen.split()[0]) else ""  # split: "ccache g++"
    return next((path for name in names if (path := shutil.which(name))), "")


def _python_header() -> str:
    # Debian's default scheme names a folder below /usr/local that has no headers
    folders = (sysconfig.get_config_var("INCLUDEPY"), sysconfig.get_path("include"))
    files = (Path(folder, "Python.h") for folder in folders if folder)
    return next((str(file) for file in files if file.is_file()), "")


def _version(package: str) -> str:
    if importlib.util.find_spec(package) is None:
        return ""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _ptxas() -> str:
    given = os.environ.get("TRITON_PTXAS_PATH")
    if given:
        return given if os.access(given, os.X_OK) else ""
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.origin is not None:
        own = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
        if own.is_file():
            return str(own)
    return shutil.which("ptxas") or ""


def _nvcc() -> str:
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    for home in homes:
        if home and Path(home, "bin", "nvcc").exists():
            return str(Path(home, "bin", "nvcc"))
    try:
        files = metadata.distribution("nvidia-cuda-nvcc").files or []
    except metadata.PackageNotFoundError:
        files = []
    packaged = next((str(file.locate()) for file in files if file.name == "nvcc"), "")
    return shutil.which("nvcc") or packaged


def _cache(name: str, folder: Path, fatal: bool, fix: str) -> Cache:
    from stof_compile.places import can_write

    sizes = []
    for parent, _, files in os.walk(folder):
        for file in files:
            try:
                sizes.append(os.lstat(os.path.join(parent, file)).st_size)
            except OSError:  # deleted meanwhile
                continue
    return Cache(name, str(folder), len(sizes), sum(sizes), can_write(folder), fatal, fix)
