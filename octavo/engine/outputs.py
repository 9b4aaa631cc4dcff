"""From sampled token ids to text and to what the caller sees."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.engine.messages import SequenceOutput, SequenceRequest
from octavo.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput, TokenLogprobs
from octavo.tokenizer import Detokenizer, Tokenizer


@dataclass(slots=True)
class _Live:
    """One sequence that is still on its way."""

    output: RequestOutput
    request: SequenceRequest
    detokenizer: Detokenizer


class OutputProcessor:
    """Keeps a RequestOutput for each unfinished request and brings it up to date, step by step."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._live: dict[int, _Live] = {}

    def add(self, request_id: str, prompt: str | None, request: SequenceRequest) -> None:
        params = request.params
        completion = CompletionOutput(index=request.choice)
        if params.logprobs is not None:
            completion.logprobs, completion.cumulative_logprob = [], 0.0
        output = RequestOutput(request_id, prompt, list(request.tokens), [completion])
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]
        detokenizer = Detokenizer(
            self.tokenizer, skip_special_tokens=params.skip_special_tokens, prompt_ids=request.tokens
        )
        self._live[request.seq_id] = _Live(output, request, detokenizer)

    def process(self, updates: Iterable[SequenceOutput]) -> list[RequestOutput]:
        """The requests that these updates moved, in order. A request's object stays the same until it is finished."""
        return [self._process(update) for update in updates]

    def _process(self, update: SequenceOutput) -> RequestOutput:
        live = self._live[update.seq_id]
        output, completion = live.output, live.output.outputs[0]
        if output.prompt_logprobs is not None:
            output.prompt_logprobs += [self._with_text(entry) for entry in update.prompt_logprobs]
        if update.token_id is not None:
            completion.token_ids.append(update.token_id)
            if update.finish_reason != "stop":  # the token that stopped it is no part of the text
                completion.text += live.detokenizer.feed([update.token_id])
        if update.logprobs is not None and completion.logprobs is not None:
            completion.logprobs.append(self._with_text(update.logprobs))
            completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + update.logprobs.logprob
        if update.finish_reason is not None:
            self._finish(live, update)
        return output

    def _finish(self, live: _Live, update: SequenceOutput) -> None:
        output, completion = live.output, live.output.outputs[0]
        completion.text += live.detokenizer.flush()
        completion.finish_reason = update.finish_reason
        if update.finish_reason == "stop" and update.token_id in live.request.params.stop_token_ids:
            completion.stop_reason = update.token_id
        if update.metrics is not None:
            output.metrics = update.metrics
        output.error = update.error
        output.finished = True
        del self._live[update.seq_id]

    def _with_text(self, entry: TokenLogprobs) -> PositionLogprobs:
        """The token that stands there first, then the most likely ones."""
        ranked = [(entry.token_id, entry.logprob, entry.rank)]
        ranked += [
            (token, logprob, rank)
            for rank, (token, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1)
        ]
        return {token: Logprob(logprob, rank, self.tokenizer.token_text(token)) for token, logprob, rank in ranked}
