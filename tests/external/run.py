# SPDX-License-Identifier: Apache-2.0
"""transformers' own model tests, without fusedmoe and with each of its two implementations: passed, failed, skipped, calls of ours.

    python tests/external/run.py CHECKOUT [model ...] [--distributed] [--json FILE]

CHECKOUT is a checkout of huggingface/transformers at the tag of the installed version (the wheel has no tests). Needs pytest,
pytest-xdist (transformers' conftest asks for it) and parameterized. --distributed: the tensor-parallel, expert-parallel and
FSDP tests instead of the others (two processes each, some 20 s a test). Ends with an error when a test that passes without ours fails
with it, or when ours was never called.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

MODELS = ("qwen3_moe", "qwen3_vl_moe", "mixtral", "deepseek_v3", "gpt_oss", "glm4_moe", "olmoe", "qwen2_moe", "nemotron_h")
DISTRIBUTED = "test_tp_ or test_ep_ or test_fsdp"
NAMES = ("fusedmoe", "fusedmoe_composed")


def suite(checkout: Path, model: str, name: str | None, only: str) -> tuple[dict[str, str], dict[str, int], float]:
    """Outcome of every test of one model with the implementation of this name, the calls of ours, and the seconds it took."""
    with tempfile.TemporaryDirectory() as folder:
        report, calls = Path(folder, "report.xml"), Path(folder, "calls.json")
        env = dict(os.environ, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", FMOE_CALLS=str(calls), FMOE_AUTOLOAD="0",
                   FMOE_NAME=name or "", PYTHONPATH=str(Path(__file__).parent))  # fmt: skip
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "log_cli=false", f"--junitxml={report}",
                   "-k", only, *(("-p", "fmoe_plugin") if name else ()), f"tests/models/{model}"]  # fmt: skip
        begin = time.monotonic()
        done = subprocess.run(command, cwd=checkout, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        seconds = time.monotonic() - begin
        if not report.exists():
            sys.exit(f"{model}: pytest did not run:\n{done.stdout[-4000:]}")
        outcome = {}
        for case in ET.parse(report).iter("testcase"):
            kinds = {child.tag for child in case}
            result = next((r for r in ("failure", "error", "skipped") if r in kinds), "passed")
            outcome[f"{case.get('classname').split('.')[-1]}::{case.get('name')}"] = result.replace("error", "failure")
        return outcome, json.loads(calls.read_text()) if calls.exists() else {}, seconds


def count(outcome: dict[str, str]) -> list[int]:
    """Passed, failed, skipped."""
    return [list(outcome.values()).count(result) for result in ("passed", "failure", "skipped")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--distributed", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    import transformers

    found = re.search(r'__version__ = "(.*?)"', (args.checkout / "src/transformers/__init__.py").read_text()).group(1)
    if found != transformers.__version__:
        sys.exit(f"the checkout is transformers {found}, the installed one is {transformers.__version__}")
    only = DISTRIBUTED if args.distributed else f"not ({DISTRIBUTED})"
    names = NAMES[: 1 if args.distributed else 2]
    print(f"transformers {found}: passed failed skipped (calls of ours), seconds", flush=True)
    rows, bad = [], 0
    for model in args.models:
        without, _, seconds = suite(args.checkout, model, None, only)
        row = dict(model=model, without=count(without))
        print(f"{model:14} {'without':18} {row['without']} {seconds:.0f} s", flush=True)
        for name in names:
            outcome, calls, seconds = suite(args.checkout, model, name, only)
            worse = sorted(test for test, result in without.items() if result == "passed" and outcome.get(test) != "passed")
            print(f"{'':14} {name:18} {count(outcome)} ({calls.get('ours', 0)}) {seconds:.0f} s", flush=True)
            for test in worse:
                print(f"    FAILS WITH OURS: {test}", flush=True)
            bad += bool(worse) or not (calls.get("ours") or args.distributed)
            row[name] = dict(outcome=count(outcome), calls=calls, worse=worse)
        rows.append(row)
        if args.json:
            args.json.write_text(json.dumps(dict(transformers=found, rows=rows), indent=1))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
