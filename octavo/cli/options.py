"""Flags made from the dataclasses that hold the options, so that each name, default and range lives in one place."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from octavo.config import EngineConfig, engine_config
from octavo.errors import OctavoError, RequestError
from octavo.sampling_params import BeamSearchParams, SamplingParams

_SAMPLING_HELP = {
    "n": "continuations to print",
    "best_of": "continuations to compute; the n most likely ones per token are printed",
    "temperature": "0 picks the most likely token",
    "top_k": "sample among the k most likely tokens; 0 means all",
    "top_p": "sample among the fewest tokens that hold this probability",
    "min_p": "drop tokens less likely than this share of the most likely one",
    "repetition_penalty": "above 1: tokens of prompt and output become less likely",
    "presence_penalty": "taken from the logit of each token in the output",
    "frequency_penalty": "likewise, once for each time that the token is there",
    "logit_bias": "added to the logit of this id, -100 to 100; give the flag once for each",
    "allowed_token_ids": "sample none but these ids; give the flag once for each",
    "bad_words": "text that the output shall not hold; give the flag once for each",
    "max_tokens": "most tokens to generate; -1 means up to the end of the context, 0 only scores the prompt",
    "min_tokens": "nothing ends the output before that many tokens",
    "stop": "text that ends the output, and is cut from it; give the flag once for each",
    "include_stop_str_in_output": "keep the text that stopped the output",
    "stop_token_ids": "token id that ends the output; give the flag once for each",
    "ignore_eos": "go on past the end-of-sequence token",
    "logprobs": "report logprobs of this many most likely tokens",
    "prompt_logprobs": "likewise for each token of the prompt",
    "skip_special_tokens": "leave control tokens out of the text",
}


def _id_and_bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not an id and a number, as in 42=-1.5") from error


# One value a flag: a flag that takes several would take the prompt for one of them.
_LISTS: dict[str, dict[str, Any]] = {
    "stop_token_ids": {"type": int, "action": "append", "metavar": "ID"},
    "allowed_token_ids": {"type": int, "action": "append", "metavar": "ID"},
    "logit_bias": {"type": _id_and_bias, "action": "append", "metavar": "ID=BIAS"},
    "stop": {"action": "append", "metavar": "TEXT"},
    "bad_words": {"action": "append", "metavar": "TEXT"},
}


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    hints = get_type_hints(EngineConfig)
    for f in fields(EngineConfig):
        if f.name != "model":
            _add_flag(group, f.name, hints[f.name], f.default, f.metadata["help"])


def add_sampling_flags(parser: argparse.ArgumentParser, *, without: Collection[str] = (), **defaults: Any) -> None:
    """All but `seed`: a command's `--seed` is the engine's, from which each of its requests draws its own."""
    group = parser.add_argument_group("sampling")
    hints = get_type_hints(SamplingParams)
    for f in fields(SamplingParams):
        if f.name == "seed" or f.name in without:
            continue
        if f.name in _LISTS:
            flag = _flag(f.name)
            group.add_argument(flag, help=_SAMPLING_HELP[f.name], **_LISTS[f.name])
        else:
            default = defaults.get(f.name, f.default)
            _add_flag(group, f.name, hints[f.name], default, _SAMPLING_HELP[f.name])


_EARLY_STOPPING: dict[str, bool | Literal["never"]] = {"false": False, "true": True, "never": "never"}


def add_beam_flags(parser: argparse.ArgumentParser) -> None:
    """What `BeamSearchParams` has and `SamplingParams` has not; None where a flag is not given."""
    group = parser.add_argument_group("beam search")
    group.add_argument(
        "--beam-width", type=int, metavar="INT", help="search for that many most likely continuations, and sample none"
    )
    group.add_argument(
        "--length-penalty", type=float, metavar="FLOAT", help="above 0 longer ones score higher (default: 1.0)"
    )
    group.add_argument(
        "--early-stopping", choices=_EARLY_STOPPING, help="when enough are finished, stop at once (default: false)"
    )


def beams_from(args: argparse.Namespace) -> BeamSearchParams | None:
    """None where no beam search is asked for.

    Raises:
        RequestError: a flag says how to search where none is asked for, or how to sample where nothing is sampled.
    """
    how = {name: getattr(args, name) for name in ("length_penalty", "early_stopping")}
    own: dict[str, Any] = {name: value for name, value in how.items() if value is not None}
    if args.beam_width is None:
        for name in own:
            raise RequestError(f"{_flag(name)} is for a beam search: give --beam-width too, or leave it out")
        return None
    if "early_stopping" in own:
        own["early_stopping"] = _EARLY_STOPPING[own["early_stopping"]]
    shared = {f.name for f in fields(BeamSearchParams)}
    for f in fields(SamplingParams):
        value = getattr(args, f.name)
        if f.name in shared:
            own[f.name] = value
        elif f.name != "seed" and value not in (None, f.default):
            raise RequestError(f"{_flag(f.name)} is not for a beam search: leave it or --beam-width out")
    if own["max_tokens"] == -1:
        own["max_tokens"] = None
    return BeamSearchParams(beam_width=args.beam_width, **own)


def engine_from(args: argparse.Namespace) -> EngineConfig:
    return engine_config(args.model, {f.name: getattr(args, f.name) for f in fields(EngineConfig) if f.name != "model"})


def sampling_from(args: argparse.Namespace) -> SamplingParams:
    names = {f.name for f in fields(SamplingParams) if f.name != "seed"}
    values = {name: value for name, value in vars(args).items() if name in names}
    if values["max_tokens"] is not None and values["max_tokens"] == -1:
        values["max_tokens"] = None
    return SamplingParams(**values)


def read_chat_template(given: str | None) -> str | None:
    """The source in the file of that name; what is no file is taken for the name of one of the model's templates.

    Raises:
        OctavoError: the file cannot be read.
    """
    if given is None or not Path(given).is_file():
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OctavoError(f"cannot read the chat template {given}: {error}") from error


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _add_flag(group: argparse._ArgumentGroup, name: str, hint: Any, default: Any, text: str) -> None:
    flag = _flag(name)
    if default is MISSING:
        raise ValueError(f"{name} has no default and cannot be a flag")
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    shown = text if default in (None, ()) else f"{text} (default: {default})"
    if kinds == [bool]:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=shown)
    elif all(isinstance(kind, str) for kind in kinds):
        group.add_argument(flag, choices=kinds, default=default, help=shown)
    else:
        group.add_argument(flag, type=kinds[0], default=default, metavar=kinds[0].__name__.upper(), help=shown)
