"""`octavo`: the command line. Each command is a module with `add_parser` and `run`."""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from importlib import import_module

from octavo import __version__
from octavo.errors import OctavoError
from octavo.metrics import configure_logging

# New objects after which the garbage collector looks for rings: a vocabulary is 100,000, none of which is ever garbage.
GC_THRESHOLD = 200_000

COMMANDS = ("generate", "chat", "serve", "inspect", "pull", "profile", "bench")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0; 1 after an error, told in one line on stderr; 130 after Ctrl-C."""
    gc.set_threshold(GC_THRESHOLD)
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="octavo", description="A paged LLM inference and serving engine.")
    parser.add_argument("--version", action="version", version=f"octavo {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    # A command that is named is the only one that is imported: it starts the sooner.
    for name in argv[:1] if argv and argv[0] in COMMANDS else COMMANDS:
        command = import_module(f"octavo.cli.{name}")
        sub = command.add_parser(commands)
        sub.add_argument("-v", "--verbose", action="store_true", help="log events to stderr, one line each")
        sub.set_defaults(run=command.run)
    args = parser.parse_args(argv)
    configure_logging(logging.INFO if args.verbose else logging.WARNING)
    try:
        return int(args.run(args))
    except OctavoError as error:
        print(f"octavo: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `octavo generate ... | head`
        sys.stderr.close()
        return 1


if __name__ == "__main__":
    sys.exit(main())
