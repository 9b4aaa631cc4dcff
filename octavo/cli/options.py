"""Flags made from the dataclasses that hold the options, so that each name, default and range lives in one place."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, fields
from typing import Any, get_args, get_type_hints

from octavo.config import EngineConfig, engine_config
from octavo.sampling_params import SamplingParams

_SAMPLING_HELP = {
    "temperature": "0 picks the most likely token",
    "top_k": "sample among the k most likely tokens; 0 means all",
    "top_p": "sample among the fewest tokens that hold this probability",
    "max_tokens": "most tokens to generate; 0 or less means up to the end of the context",
    "stop_token_ids": "token ids that end the output",
    "ignore_eos": "go on past the end-of-sequence token",
    "logprobs": "report logprobs of this many most likely tokens",
    "prompt_logprobs": "likewise for each token of the prompt",
    "skip_special_tokens": "leave control tokens out of the text",
}


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    for f in fields(EngineConfig):
        if f.name != "model":
            _add_flag(group, EngineConfig, f.name, f.default, f.metadata["help"])


def add_sampling_flags(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """All but `seed`: a command's `--seed` is the engine's, from which each of its requests draws its own."""
    group = parser.add_argument_group("sampling")
    for f in fields(SamplingParams):
        if f.name == "seed":
            continue
        default = defaults.get(f.name, f.default)
        _add_flag(group, SamplingParams, f.name, default, _SAMPLING_HELP[f.name])


def engine_from(args: argparse.Namespace) -> EngineConfig:
    return engine_config(args.model, {f.name: getattr(args, f.name) for f in fields(EngineConfig) if f.name != "model"})


def sampling_from(args: argparse.Namespace) -> SamplingParams:
    values = {f.name: getattr(args, f.name) for f in fields(SamplingParams) if f.name != "seed"}
    if values["max_tokens"] is not None and values["max_tokens"] <= 0:
        values["max_tokens"] = None
    return SamplingParams(**values)


def _add_flag(group: argparse._ArgumentGroup, owner: type, name: str, default: Any, text: str) -> None:
    flag = "--" + name.replace("_", "-")
    if default is MISSING:
        raise ValueError(f"{owner.__name__}.{name} has no default and cannot be a flag")
    hint = get_type_hints(owner)[name]
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    shown = text if default in (None, ()) else f"{text} (default: {default})"
    if kinds == [bool]:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=shown)
    elif isinstance(default, tuple):
        group.add_argument(flag, type=int, nargs="+", default=default, metavar="ID", help=shown)
    elif all(isinstance(kind, str) for kind in kinds):
        group.add_argument(flag, choices=kinds, default=default, help=shown)
    else:
        group.add_argument(flag, type=kinds[0], default=default, metavar=kinds[0].__name__.upper(), help=shown)
