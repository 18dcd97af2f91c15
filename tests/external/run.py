# SPDX-License-Identifier: Apache-2.0
"""transformers' own model tests, without and with fusedmoe: what passed, failed, was skipped, and how often ours was called.

    python tests/external/run.py CHECKOUT [model ...] [--distributed] [--json FILE]

CHECKOUT is a checkout of huggingface/transformers at the tag of the installed version (the wheel has no tests). Needs pytest,
pytest-xdist (transformers' conftest asks for it) and parameterized. --distributed: the tensor-parallel, expert-parallel and
FSDP tests instead of the others (two processes each, some 20 s a test). A test that passes without ours only is run again with
one unit in the last place of bfloat16 allowed (see fmoe_plugin.py); if it still fails, or ours was never called, this ends with an
error.
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


def suite(checkout: Path, model: str, ours: bool, only: str, **more: str) -> tuple[dict[str, str], dict[str, int], float]:
    """Outcome of every test of one model, the calls of ours, and the seconds it took."""
    with tempfile.TemporaryDirectory() as folder:
        report, calls = Path(folder, "report.xml"), Path(folder, "calls.json")
        env = dict(os.environ, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", FMOE_CALLS=str(calls), FMOE_AUTOLOAD="0",
                   PYTHONPATH=str(Path(__file__).parent), **more)  # fmt: skip
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "log_cli=false", f"--junitxml={report}",
                   "-k", only, *(("-p", "fmoe_plugin") if ours else ()), f"tests/models/{model}"]  # fmt: skip
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
    print(f"transformers {found}: passed, failed, skipped\n{'model':14} {'without ours':>18} {'with ours':>18} {'calls':>8}", flush=True)
    rows, bad = [], 0
    for model in args.models:
        without, _, slow = suite(args.checkout, model, False, only)
        with_ours, calls, fast = suite(args.checkout, model, True, only)
        counts = [[list(run.values()).count(r) for r in ("passed", "failure", "skipped")] for run in (without, with_ours)]
        worse = sorted(name for name, result in without.items() if result == "passed" and with_ours.get(name) != "passed")
        text = [" ".join(f"{n:5}" for n in row) for row in counts]
        print(f"{model:14} {text[0]:>18} {text[1]:>18} {calls.get('ours', 0):8}   {slow:.0f} s, {fast:.0f} s", flush=True)
        if worse:
            names = " or ".join(name.split("::")[1] for name in worse)
            again = suite(args.checkout, model, True, names, FMOE_ONE_ULP="1")[0]
            close = [name for name in worse if again.get(name) == "passed"]
            for name in worse:
                print(f"    {'passes at one unit in the last place' if name in close else 'FAILS WITH OURS'}: {name}", flush=True)
            worse = [name for name in worse if name not in close]
        bad += bool(worse) or not (calls.get("ours") or args.distributed)
        rows.append(dict(model=model, without=counts[0], ours=counts[1], calls=calls, worse=worse))
        if args.json:
            args.json.write_text(json.dumps(dict(transformers=found, rows=rows), indent=1))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
