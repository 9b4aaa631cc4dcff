"""`octavo generate`: continue prompts, all batched together."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from octavo.cli.fetch import fetch
from octavo.cli.options import (
    add_beam_flags,
    add_engine_flags,
    add_sampling_flags,
    beams_from,
    engine_from,
    sampling_from,
)
from octavo.cli.terminal import show, show_styled
from octavo.config import DEMO_MODEL
from octavo.engine import LLMEngine
from octavo.errors import OctavoError, RequestError
from octavo.llm import load_engine, run_until_idle
from octavo.outputs import CompletionOutput, PositionLogprobs, RequestOutput


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "generate",
        help="continue prompts",
        description="Continues prompts, all batched together. A prompt that is refused is reported; the others go on.",
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to continue; stdin when there is none")
    parser.add_argument("--model", default=DEMO_MODEL, help=f"what to run (default: {DEMO_MODEL})")
    parser.add_argument("--file", type=Path, help="one prompt a line (or, if it ends in .jsonl, a JSON string a line)")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a request on stdout, in order of completion"
    )
    parser.add_argument("--quiet", action="store_true", help="neither boot report nor statistics on stderr")
    add_sampling_flags(parser, max_tokens=64)
    add_beam_flags(parser)
    add_engine_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    params = beams_from(args) or sampling_from(args)
    config = engine_from(args)
    prompts = _prompts(args)
    quiet = False if args.quiet else None
    engine = load_engine(replace(config, model=str(fetch(config.model))), progress=quiet)
    if not args.quiet:
        show_styled(f"{engine.boot_report}\n", "dim", sys.stderr)
    refused = 0
    start = time.perf_counter()
    for i, prompt in enumerate(prompts):
        try:
            engine.add_request(str(i), prompt, params)
        except RequestError as error:
            refused += 1
            print(f"octavo: error: prompt {i}: {error}", file=sys.stderr)
            if args.json:
                _print_record({"index": i, "prompt": prompt, "error": str(error)})
    finished = run_until_idle(
        engine, len(prompts) - refused, progress=quiet, on_finish=_print_json if args.json else None
    )
    seconds = time.perf_counter() - start
    if not args.json:
        _print_texts(sorted(finished, key=lambda output: int(output.request_id)))
    if not args.quiet:
        show_styled(_statistics(engine, finished, seconds) + "\n", "dim", sys.stderr)
    failed = [output for output in finished if output.error is not None]
    for output in failed:
        print(f"octavo: error: prompt {output.request_id}: {output.error}", file=sys.stderr)
    engine.close()
    return 1 if refused or failed else 0


def _prompts(args: argparse.Namespace) -> list[str]:
    """Prompts from the arguments and the file; else what stdin holds, as one prompt."""
    prompts = list(args.prompts)
    if args.file is not None:
        prompts += _read_file(args.file)
    if not prompts and args.file is None:
        if sys.stdin.isatty():
            print("octavo: reading the prompt from the terminal; end it with Ctrl-D", file=sys.stderr)
        prompts = [sys.stdin.read().removesuffix("\n")]
    if not prompts:
        raise OctavoError(f"{args.file} holds no prompt")
    return prompts


def _read_file(path: Path) -> list[str]:
    try:
        # Not splitlines: it cuts at characters that may stand inside a prompt.
        lines = [line.removesuffix("\r") for line in path.read_text(encoding="utf-8").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise OctavoError(f"cannot read prompts from {path}: {error}") from error
    if path.suffix != ".jsonl":
        return [line for line in lines if line]
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise OctavoError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(value, str):
            raise OctavoError(f"{path}, line {number}: {line[:60]} is not a JSON string")
        prompts.append(value)
    return prompts


def _print_texts(outputs: list[RequestOutput]) -> None:
    for output in outputs:
        for completion in output.outputs:
            show_styled(output.prompt or "", "bold", sys.stdout)
            show(completion.text + "\n")
            kind, score = ("choice", "") if completion.score is None else ("beam", f"score {completion.score:.3f}, ")
            which = f"{kind} {completion.index + 1} of {len(output.outputs)}, " if len(output.outputs) > 1 else ""
            note = f"[{which}{score}{len(completion.token_ids)} tokens, {completion.finish_reason}]\n\n"
            show_styled(note, "dim", sys.stdout)


def _print_json(output: RequestOutput) -> None:
    record: dict[str, Any] = {
        "index": int(output.request_id),
        "prompt": output.prompt,
        "choices": [_choice(completion) for completion in output.outputs],
        "num_prompt_tokens": len(output.prompt_token_ids),
        "metrics": asdict(output.metrics),
    }
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = [_position(entry) for entry in output.prompt_logprobs]
    if output.error is not None:
        record["error"] = output.error
    _print_record(record)


def _print_record(record: dict[str, Any]) -> None:
    """One line; what no encoding can hold (a lone surrogate in a refused prompt) is escaped."""
    print(json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace").decode(), flush=True)


def _choice(completion: CompletionOutput) -> dict[str, Any]:
    record: dict[str, Any] = {
        "index": completion.index,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.cumulative_logprob is not None:
        record["cumulative_logprob"] = completion.cumulative_logprob
    if completion.score is not None:
        record["score"] = completion.score
    if completion.logprobs is not None:
        record["logprobs"] = [_position(entry) for entry in completion.logprobs]
    return record


def _position(entry: PositionLogprobs | None) -> list[dict[str, object]] | None:
    return None if entry is None else [{"token_id": token, **asdict(value)} for token, value in entry.items()]


def _statistics(engine: LLMEngine, finished: list[RequestOutput], seconds: float) -> str:
    stats = engine.stats()
    sampled = round(stats["num_generated_tokens"])
    prompt = sum(len(output.prompt_token_ids) for output in finished)
    return (
        f"{len(finished)} requests, {prompt} prompt tokens and {sampled} generated in {seconds:.1f} s: "
        f"{sampled / seconds:.1f} tokens/s; KV blocks at peak {stats['peak_used_blocks']:.0f} of "
        f"{stats['num_blocks']:.0f}; {100 * stats['slot_utilization']:.1f} % of the allocated KV slots held a token"
    )
