#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Who may look at whom, how large files and folders may be, and words that only their author understands.

A line of LAYERS: a folder, and what its files may include in quotation marks beside the files of the folder itself. Sources are
compiled with src/ and include/ as include folders, so a name with a folder in it is a path from src/.
"""
import ast
import re
import sys
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
C_FILES = (".c", ".h", ".inc", ".cpp", ".cu", ".cuh")

PUBLIC = ["fusedmoe.h"]
BACKEND = PUBLIC + ["backend.h", "codes.h", "device.h", "util.h"]  # all that a backend knows of the core
CPU = ["cpu/plan.h", "cpu/parallel.h", "cpu/groups.h", "cpu/kernels/kernels.h"]
LAYERS = {
    "include": PUBLIC + ["fusedmoe_ep.h"],
    "src": PUBLIC,
    "src/cpu": BACKEND + CPU + ["cpu/kernels/kernels.inc", "cpu/ops/ops.h"],  # ops.h: the table of backend.c
    "src/cpu/ref": BACKEND,  # the specification knows nothing of the kernels
    "src/cpu/ops": BACKEND + CPU + ["cpu/ops/*.h", "cpu/gemm/*.h"],
    "src/cpu/gemm": BACKEND + CPU + ["cpu/gemm/*.h"],
    "src/cpu/kernels": PUBLIC + ["codes.h", "util.h", "cpu/kernels/*"],
    "src/cpu/kernels/x86": PUBLIC + ["util.h", "cpu/kernels/*", "cpu/kernels/x86/*"],
    "src/cpu/kernels/x86/quant": PUBLIC + ["codes.h", "util.h", "cpu/kernels/*", "cpu/kernels/x86/*", "cpu/kernels/x86/quant/*"],
    "src/cpu/kernels/arm": PUBLIC + ["util.h", "cpu/kernels/*", "cpu/kernels/arm/*"],
    "src/cuda": BACKEND + ["cuda/*", "decode/*", "quant/*", "sm80/*", "sm90/*", "sm90/coded/*"],
    "src/cuda/decode": BACKEND + ["cuda/*", "cuda/sm80/mma.cuh", "cuda/quant/*.cuh"],
    "src/cuda/ep": BACKEND + ["cuda/*"],
    "src/cuda/quant": BACKEND + ["codes.h", "cuda/*"],
    "src/cuda/sm80": BACKEND + ["cuda/*"],
    "src/cuda/sm90": BACKEND + ["cuda/*"],
    "src/cuda/sm90/coded": BACKEND + ["cuda/*", "cuda/quant/*.cuh", "cuda/sm90/*.cuh"],
    "src/ascend": BACKEND + ["ascend/*", "cann/*"],
    "src/ascend/cann": BACKEND,
    "cli": PUBLIC + ["util.h"],  # numbers of 16 bits, for the check of a device
    "src/ep": PUBLIC + ["fusedmoe_ep.h", "error.h", "util.h", "device.h"],  # the public API, and indices and memory of a device
    "src/ep/mpi": PUBLIC + ["fusedmoe_ep.h", "fusedmoe_mpi.h"],
    "examples": PUBLIC,
    "bench": PUBLIC,
    "python/core": PUBLIC + ["fusedmoe_ep.h", "core.h", "pages.h", "pool.h"],
}
ONLY = {"cpu/ops/ops.h": ["src/cpu/backend.c", "src/cpu/ops/*"]}  # and no other file
SYSTEM = {"include": ["mpi.h", "stddef.h", "stdint.h"]}  # headers in angle brackets, where not all are welcome

FILES, LINES = 20, 600  # of a folder of src; of a file of
SHORT = ("include", "src", "cli", "python", "bench", "examples", "tests", "tools")

# Parts of identifiers and of file names. In src/cpu too: words that mean something else elsewhere.
WORDS = {"lying", "quad", "quads", "touched", "touches"}
CPU_WORDS = WORDS | {"along", "beside", "brief", "direct", "lies", "low", "outer", "past", "side", "through", "turn", "turned", "turns",
                     "wide"}
KNOWN = {"wide_factors", "vget_low_f16", "vget_low_s8", "vget_low_u8"}  # of backend.h; of arm_neon.h


def sources(folder, suffixes=C_FILES):
    """The files of a folder (with "/**": and of those in it) that have one of the suffixes, as paths from the root."""
    found = (ROOT / folder.removesuffix("/**")).glob("**/*" if folder.endswith("/**") else "*")
    return sorted(path.relative_to(ROOT) for path in found if path.is_file() and path.name.endswith(suffixes))


def matches(name, pattern):
    """As a shell does it: a star stays in its folder."""
    names, patterns = str(name).split("/"), pattern.split("/")
    return len(names) == len(patterns) and all(map(fnmatch, names, patterns))


def layer(folder):
    includes, errors = 0, []
    for path in sources(folder):
        for bracket, name in re.findall(r'^\s*#\s*include\s*([<"])([^">]+)[">]', (ROOT / path).read_text(), re.M):
            includes += 1
            if bracket == "<":
                wrong = name not in SYSTEM.get(folder, [name])
            else:
                own = "/" not in name and (ROOT / folder / name).is_file()
                wrong = not own and not any(matches(name, may) for may in LAYERS[folder])
                wrong = wrong or name in ONLY and not any(matches(path, only) for only in ONLY[name])
            if wrong:
                errors.append(f"{path} includes {name}")
    return errors if includes else [f"no file of {folder} includes anything: the rule is of no use"]


def every_folder_has_a_layer():
    folders = {str(path.parent) for path in sources("src/**")}
    return [f"{folder} is in no layer" for folder in sorted(folders - set(LAYERS))]


def imported(path):
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            if node.module in (None, "fusedmoe"):  # its names are modules, or may be
                yield from (alias.name for alias in node.names)


def python_imports():
    """The package does without benchmarks and tests, benchmarks do without tests."""
    own = sources("python/**", (".py",))
    package = {name for path in own for name in (path.stem, path.parent.name)} | {"bench", "meters"}  # the wheel has fusedmoe.bench
    benches = {path.stem for path in sources("bench", (".py",))} - package
    errors, imports = [], 0
    for folder, never in {"python/**": benches | {"tests"}, "bench/**": {"tests", "conftest"}}.items():
        for path in sources(folder, (".py",)):
            for module in imported(path):
                imports += 1
                if never & set(module.split(".")):
                    errors.append(f"{path} imports {module}")
    return errors if imports else ["no imports were found"]


def folders_are_small():
    count = {}
    for path in sources("src/**", ("",)):
        count[str(path.parent)] = count.get(str(path.parent), 0) + 1
    return [f"{folder} has {n} files" for folder, n in count.items() if n > FILES]


def files_are_short():
    every = [path for folder in SHORT for path in sources(f"{folder}/**", (*C_FILES, ".py", ".sh"))]
    lines = {path: (ROOT / path).read_text().count("\n") for path in every}
    return [f"{path} has {n} lines" for path, n in lines.items() if n > LINES]


def words_are_common():
    errors = []
    for path in sources("src/**"):
        words = CPU_WORDS if str(path).startswith("src/cpu/") else WORDS
        code = re.sub(r"/\*.*?\*/|//[^\n]*", "", (ROOT / path).read_text(), flags=re.S)
        code = re.sub(r'"(?:\\.|[^"\\\n])*"', "", code)
        names = set(re.findall(r"[A-Za-z_]\w*", code)) | {path.stem}
        errors += [f"{path}: {name}" for name in sorted(names - KNOWN) if words & set(name.lower().split("_"))]
    return errors


def functions_have_names_of_their_own():
    """Static ones of the CPU that are not inlined: a profile shows no files. Templates carry their level in the name."""
    files = {}
    for path in sources("src/cpu/**", (".c",)):
        code = re.sub(r"/\*.*?\*/", "", (ROOT / path).read_text(), flags=re.S)
        for name in re.findall(r"^static (?!.*\binline\b)[^;{}()=]*?\b(\w+)\([^;{}]*\)\s*\{", code, re.M):
            files.setdefault(name, set()).add(str(path))
    twice = [f"{name}: {' '.join(sorted(paths))}" for name, paths in files.items() if len(paths) > 1]
    return twice if files else ["no functions were found"]


def main():
    tests = {f"layer {folder}": lambda folder=folder: layer(folder) for folder in LAYERS}
    for test in (every_folder_has_a_layer, python_imports, folders_are_small, files_are_short, words_are_common,
                 functions_have_names_of_their_own):
        tests[test.__name__] = test
    failed = 0
    for name, test in tests.items():
        errors = test()
        failed += bool(errors)
        print(f"{'FAILED' if errors else 'ok':7} {name}")
        for error in errors:
            print(f"        {error}")
    print(f"{len(tests) - failed} passed, {failed} failed, 0 skipped")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
