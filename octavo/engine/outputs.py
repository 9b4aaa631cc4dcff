"""From sampled token ids to text and to what the caller sees."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from octavo.core import Hypothesis
from octavo.engine.messages import BeamOutput, BeamRequest, Request, SequenceOutput, SequenceRequest
from octavo.engine.stop_strings import StopStrings
from octavo.outputs import (
    CompletionOutput,
    Logprob,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
    combined_metrics,
)
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.tokenizer import Detokenizer, Tokenizer


@dataclass(slots=True)
class _Choice:
    """One of a request's continuations."""

    completion: CompletionOutput
    detokenizer: Detokenizer
    stops: StopStrings
    logprob: float = 0.0  # summed over its tokens, where the sampler reports them
    stopped_by: str | None = None  # the stop string that its text met; it grows no more
    error: str | None = None

    @property
    def mean_logprob(self) -> float:
        """What the best of several is chosen by; a choice that failed comes last."""
        count = len(self.completion.token_ids)
        return -math.inf if count == 0 or self.completion.finish_reason == "error" else self.logprob / count


@dataclass(slots=True)
class _Live:
    """One request that is still on its way."""

    output: RequestOutput
    params: SamplingParams
    choices: list[_Choice]
    metrics: list[RequestMetrics] = field(default_factory=list)  # of the choices that are finished


class OutputProcessor:
    """Keeps a RequestOutput for each unfinished request and brings it up to date, step by step."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.num_generated_tokens = 0  # since the engine was made
        self._live: dict[int, tuple[_Live, _Choice]] = {}  # by seq_id
        self._searches: dict[int, tuple[RequestOutput, BeamSearchParams]] = {}  # likewise

    def add(self, request_id: str, prompt: str | None, request: Request) -> None:
        params = request.params
        prompt_ids = list(request.sequences[0].tokens)
        choices = [self._choice(params, index, prompt_ids) for index in range(params.num_choices)]
        # Which n of more choices are the best is known at the end: until then their places stay empty.
        shown = [c.completion for c in choices] if params.num_choices == params.n else _empty(params.n)
        output = RequestOutput(request_id, prompt, prompt_ids, shown)
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]
        live = _Live(output, params, choices)
        for sequence, choice in zip(request.sequences, choices, strict=True):
            self._live[sequence.seq_id] = live, choice

    def add_beams(self, request_id: str, prompt: str | None, request: BeamRequest) -> None:
        output = RequestOutput(request_id, prompt, list(request.tokens), _empty(request.params.beam_width))
        self._searches[request.seq_id] = output, request.params

    def resume(self, request: SequenceRequest) -> SequenceRequest:
        """What an engine that knows nothing of a sequence is to be told, so that it goes on where it stands here."""
        _, choice = self._live[request.seq_id]
        sampled = choice.completion.token_ids
        if request.params.prompt_logprobs is None:
            return replace(request, sampled=list(sampled))
        if sampled:  # all of the prompt's are here
            return replace(request, sampled=list(sampled), params=replace(request.params, prompt_logprobs=None))
        return request

    def strike_out_held(self, update: SequenceOutput) -> None:
        """Takes out of an update all but what comes next: engines, or two stays in one, may compute the same twice."""
        live, choice = self._live[update.seq_id]
        if update.position != len(choice.completion.token_ids):
            update.token_id = update.logprobs = None
        held = len(live.output.prompt_logprobs or [None]) - 1
        update.prompt_logprobs = update.prompt_logprobs[max(0, held - update.prompt_position) :]

    def process(self, updates: Iterable[SequenceOutput | BeamOutput]) -> tuple[list[RequestOutput], list[int]]:
        """Takes what one step did.

        Returns:
            The requests that these updates moved, in order, each once; a request's object stays the same until it is
            finished. And the seq_ids whose text met a stop string: the core is to end them, and their last update is to
            come here.
        """
        moved: dict[str, RequestOutput] = {}
        stopped = []
        for update in updates:
            if isinstance(update, BeamOutput):
                output = self._close_search(update)
                moved[output.request_id] = output
                continue
            live, choice = self._live[update.seq_id]
            self._take(live, choice, update)
            if update.finish_reason is not None:
                self._finish(live, choice, update)
            elif choice.stopped_by is not None:
                stopped.append(update.seq_id)
            moved[live.output.request_id] = live.output
        return list(moved.values()), stopped

    def _choice(self, params: SamplingParams, index: int, prompt_ids: list[int]) -> _Choice:
        completion = CompletionOutput(index)
        if params.logprobs is not None:
            completion.logprobs, completion.cumulative_logprob = [], 0.0
        detokenizer = Detokenizer(self.tokenizer, skip_special_tokens=params.skip_special_tokens, prompt_ids=prompt_ids)
        return _Choice(completion, detokenizer, StopStrings(params.stop, include=params.include_stop_str_in_output))

    def _take(self, live: _Live, choice: _Choice, update: SequenceOutput) -> None:
        completion = choice.completion
        if live.output.prompt_logprobs is not None:
            live.output.prompt_logprobs += [self._with_text(entry) for entry in update.prompt_logprobs]
        if live.params.max_tokens == 0:
            return  # the one token that was sampled is not asked for
        if update.token_id is not None:
            completion.token_ids.append(update.token_id)
            self.num_generated_tokens += 1
        if update.logprobs is not None:
            choice.logprob += update.logprobs.logprob
            if completion.logprobs is not None:
                completion.logprobs.append(self._with_text(update.logprobs))
                completion.cumulative_logprob = choice.logprob
        if choice.stopped_by is None:
            self._add_text(live.params, choice, update)

    def _add_text(self, params: SamplingParams, choice: _Choice, update: SequenceOutput) -> None:
        completion, text = choice.completion, ""
        ended_by_token = update.finish_reason == "stop"  # which is then no part of the text
        if update.token_id is not None and (params.include_stop_str_in_output or not ended_by_token):
            text = choice.detokenizer.feed([update.token_id])
        if update.finish_reason is not None:
            text += choice.detokenizer.flush()
        may_stop = update.token_id is not None and len(completion.token_ids) > params.min_tokens
        shown, choice.stopped_by = choice.stops.feed(text, check=may_stop)
        completion.text += shown
        if update.finish_reason is not None:
            completion.text += choice.stops.flush()

    def _finish(self, live: _Live, choice: _Choice, update: SequenceOutput) -> None:
        completion = choice.completion
        completion.finish_reason = update.finish_reason
        if choice.stopped_by is not None:  # perhaps by the very token that was the last of its length
            completion.finish_reason, completion.stop_reason = "stop", choice.stopped_by
        elif update.finish_reason == "stop" and update.token_id in live.params.stop_token_ids:
            completion.stop_reason = update.token_id
        choice.error = update.error
        if update.metrics is not None:
            live.metrics.append(update.metrics)
        del self._live[update.seq_id]
        if all(choice.completion.finish_reason is not None for choice in live.choices):
            self._close(live)

    def _close(self, live: _Live) -> None:
        output, shown = live.output, live.choices
        if len(shown) > live.params.n:
            shown = sorted(shown, key=lambda choice: -choice.mean_logprob)[: live.params.n]
            output.outputs = [choice.completion for choice in shown]
            for index, completion in enumerate(output.outputs):
                completion.index = index
        output.error = next((choice.error for choice in shown if choice.error is not None), None)
        output.metrics = combined_metrics(live.metrics)
        output.finished = True

    def _close_search(self, update: BeamOutput) -> RequestOutput:
        output, params = self._searches.pop(update.seq_id)
        output.outputs = [
            self._beam(output, params, index, hypothesis) for index, hypothesis in enumerate(update.hypotheses)
        ]
        output.error, output.metrics, output.finished = update.error, update.metrics, True
        self.num_generated_tokens += sum(len(beam.token_ids) for beam in output.outputs)
        return output

    def _beam(
        self, output: RequestOutput, params: BeamSearchParams, index: int, hypothesis: Hypothesis
    ) -> CompletionOutput:
        tokens = shown = hypothesis.token_ids
        beam = CompletionOutput(
            index,
            token_ids=list(tokens),
            cumulative_logprob=hypothesis.logprob,
            finish_reason=hypothesis.finish_reason,
            score=hypothesis.score,
        )
        if beam.finish_reason == "stop":
            if tokens[-1] in params.stop_token_ids:
                beam.stop_reason = tokens[-1]
            if not params.include_stop_str_in_output:
                shown = tokens[:-1]
        detokenizer = Detokenizer(
            self.tokenizer, skip_special_tokens=params.skip_special_tokens, prompt_ids=output.prompt_token_ids
        )
        beam.text = detokenizer.feed(shown) + detokenizer.flush()
        return beam

    def _with_text(self, entry: TokenLogprobs) -> PositionLogprobs:
        """The token that stands there first, then the most likely ones."""
        ranked = [(entry.token_id, entry.logprob, entry.rank)]
        ranked += [
            (token, logprob, rank)
            for rank, (token, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1)
        ]
        return {token: Logprob(logprob, rank, self.tokenizer.token_text(token)) for token, logprob, rank in ranked}


def _empty(count: int) -> list[CompletionOutput]:
    return [CompletionOutput(index) for index in range(count)]
