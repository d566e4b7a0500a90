"""The command line of pytorch-ir: `info` and `visualize`. `onnxline ir` has more commands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from passes.visible import json_text
from pipeline.errors import OnnxlineError
from pipeline.terminal import print_text
from pipeline.torch_ir import IR, SerializationError, ir_to_mermaid, load_ir
from pipeline.torch_ir.command_files import summary, summary_text, write_picture, write_text
from torch_ir.aliases import VERSION

__all__ = ["SerializationError", "cmd_info", "cmd_visualize", "create_parser", "load_ir", "main"]


def create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pytorch-ir", description="pytorch-ir CLI tools, by onnxline")
    parser.add_argument("--version", action="version", version=f"pytorch-ir {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True)
    picture_parser = commands.add_parser("visualize", help="Visualize IR graph as Mermaid diagram")
    picture_parser.add_argument("ir_file")
    picture_parser.add_argument("--max-nodes", type=int, default=30)
    picture_parser.add_argument("--no-weights", action="store_true")
    picture_parser.add_argument("-o", "--output")
    picture_parser.set_defaults(run=cmd_visualize)
    info_parser = commands.add_parser("info", help="Show IR summary information")
    info_parser.add_argument("ir_file")
    info_parser.add_argument("--json", action="store_true")
    info_parser.add_argument("-o", "--output")
    info_parser.set_defaults(run=cmd_info)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = create_parser().parse_args(argv)
    try:
        args.run(args)
    except OnnxlineError as error:
        _leave(str(error))


def cmd_visualize(args: argparse.Namespace) -> None:
    ir, weights = _load_or_exit(args.ir_file), not args.no_weights
    if args.output:
        write_picture(ir, Path(args.output), args.max_nodes, weights)
    else:
        print_text(ir_to_mermaid(ir, max_nodes=args.max_nodes, include_weights=weights), wraps=False)


def cmd_info(args: argparse.Namespace) -> None:
    found = summary(_load_or_exit(args.ir_file))
    text = json_text(found) if args.json else summary_text(found)
    if args.output:
        write_text(Path(args.output), text)
    else:
        print_text(text, wraps=False)


def _load_or_exit(path: str) -> IR:
    if not Path(path).is_file():
        _leave(f"file not found: {path}")
    return load_ir(path)


def _leave(why: str) -> NoReturn:
    print_text(f"Error: {why}", err=True)
    raise SystemExit(1)
