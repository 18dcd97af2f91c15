# SPDX-License-Identifier: Apache-2.0
"""python -m fusedmoe.lora convert | verify"""

import argparse
import sys

from .convert import convert
from .files import Facts, load, save
from .layouts import LAYOUTS, LayoutError
from .verify import verify


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m fusedmoe.lora", description="Adapters on experts between PEFT, vLLM and SGLang.")
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--base", help="folder or config.json of the base model: experts, hidden size, how gate and up are arranged")
    shared.add_argument("--gates", choices=("concatenated", "interleaved"), help="how gate and up are arranged in the base model")
    shared.add_argument("--experts", type=int, help="how many experts a layer has")
    shared.add_argument("--hidden", type=int, help="the hidden size")
    one = commands.add_parser("convert", parents=[shared], help="write an adapter in another layout; no number changes")
    one.add_argument("adapter")
    one.add_argument("out")
    one.add_argument("--to", required=True, choices=LAYOUTS)
    one.add_argument("--from", dest="layout", choices=LAYOUTS, help="its layout, where sizes do not tell")
    one.add_argument("--w-names", action="store_true", help="w1, w3, w2 in the place of gate_proj, up_proj, down_proj (Mixtral)")
    two = commands.add_parser("verify", parents=[shared], help="prove that two adapters are the same")
    two.add_argument("trained")
    two.add_argument("served")
    two.add_argument("--from", dest="layout", choices=LAYOUTS, help="the layout of the first")
    two.add_argument("--to", dest="served_layout", choices=LAYOUTS, help="the layout of the second")
    return parser


def _facts(args: argparse.Namespace) -> Facts:
    facts = Facts.of(args.base) if args.base else Facts()
    for name in ("experts", "hidden"):
        if (n := getattr(args, name)) is not None and n < 1:
            raise ValueError(f"--{name} is {n}, expected at least 1")
    facts.experts, facts.hidden = args.experts or facts.experts, args.hidden or facts.hidden
    facts.interleaved = facts.interleaved if args.gates is None else args.gates == "interleaved"
    facts.w_names = facts.w_names or getattr(args, "w_names", False)
    return facts


def main(arguments: list[str] | None = None) -> int:
    """0: done, or the same; 1: not the same; 2: refused."""
    args = _parser().parse_args(arguments)
    try:
        facts = _facts(args)
        if args.command == "verify":
            proof = verify(load(args.trained), load(args.served), facts, args.layout, args.served_layout)
            print(proof)
            return 0 if proof else 1
        adapter = load(args.adapter)
        made = convert(adapter, args.to, facts, args.layout)
        proof = verify(adapter, made, facts, args.layout, args.to)
        print(proof)
        if proof.problems:
            return 1
        save(made, args.out)
    except (LayoutError, NotImplementedError, OSError, ValueError) as problem:
        print(f"fusedmoe.lora: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
