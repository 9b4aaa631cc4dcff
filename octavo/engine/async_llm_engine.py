"""The engine in a process of its own: many callers on one asyncio loop, and nothing lost when it dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from octavo.config import EngineConfig, ModelConfig
from octavo.core import KVSnapshot
from octavo.engine import wire
from octavo.engine.dispatcher import Dispatcher, Submission
from octavo.engine.inputs import InputProcessor, Prompt, prompt_text
from octavo.engine.life import log_level
from octavo.engine.messages import Request
from octavo.engine.streams import RequestStream
from octavo.engine.supervisor import Health, Supervisor, SupervisorOptions
from octavo.errors import OctavoError, QueueFullError, RequestError
from octavo.models import model_config
from octavo.outputs import RequestOutput
from octavo.sampling_params import Bans, BeamSearchParams, SamplingParams
from octavo.tokenizer import Tokenizer, load_tokenizer
from octavo.weights import open_checkpoint, resolve_model
from octavo.worker import BootReport

T = TypeVar("T")

LONG_PROMPT = 4096  # characters or tokens; from here on prompts and parameters are tokenised and checked in a thread


class AsyncLLMEngine:
    """Serves requests on one asyncio loop; not to be used from several threads.

    ::

        submit -> InputProcessor -> Dispatcher ----------> engine process: Scheduler -> Executor
                                        |   Supervisor -> starts it, watches it, starts it again
        RequestStream <- OutputProcessor <---------------- tokens

    When the engine process dies or hangs, another is started, and every unfinished request goes on from the last token
    that came: on the cpu backend, to the same bits. docs/processes.md tells how.
    """

    def __init__(self, dispatcher: Dispatcher, model: _Model, inputs: InputProcessor, boot_report: BootReport) -> None:
        """Use `start`."""
        self.tokenizer: Tokenizer = model.tokenizer
        self.model_config: ModelConfig = model.config
        self.boot_report = boot_report  # of the first engine process
        self._dispatcher = dispatcher
        self._supervisor = dispatcher.supervisor
        self._inputs = inputs
        self._num_requests = 0
        self._closed_to_new: str | None = None  # why

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        max_waiting: int = 1024,
        hang_timeout: float = 60.0,
        options: SupervisorOptions | None = None,
    ) -> AsyncLLMEngine:
        """Returns once the model is loaded.

        Args:
            max_waiting: so many sequences may be unfinished beyond the `max_num_seqs` that run at once.
            hang_timeout: seconds without a sign of progress after which the engine process is killed and started anew.
            options: of the supervisor, that hardly anybody needs.

        Raises:
            ModelError: the model cannot be found, read or understood.
            ConfigError: an option cannot be honoured on this machine.
            OctavoError: the engine process died as it loaded the model.
        """
        # To fetch a model may take an hour, in which an engine process would seem to hang.
        config = replace(config, model=str((await asyncio.to_thread(resolve_model, config.model)).absolute()))
        dispatcher = Dispatcher(config.max_num_seqs + max_waiting)
        reading = asyncio.create_task(asyncio.to_thread(_Model.read, config))

        async def first_message() -> wire.Start:
            model = await asyncio.shield(reading)
            return wire.Start(config, model.vocab_size, log_level())

        supervisor = Supervisor(
            dispatcher,
            first_message,
            max_num_seqs=config.max_num_seqs,
            hang_timeout=hang_timeout,
            options=options or SupervisorOptions(),
        )
        try:
            model = await reading
            dispatcher.begin(model.tokenizer, supervisor)
            boot_report = await supervisor.ready()
        except BaseException:
            await supervisor.close()
            raise
        inputs = InputProcessor(model.tokenizer, model.config, boot_report.memory.max_model_len, config.seed)
        return cls(dispatcher, model, inputs, boot_report)

    @property
    def max_model_len(self) -> int:
        """The longest context, in tokens."""
        return self._inputs.max_model_len

    def check_text(self, text: str) -> None:
        """
        Raises:
            RequestError: no prompt is as long as this text, however it is tokenised.
        """
        self._inputs.check_text(text)

    @property
    def health(self) -> Health:
        """What is true now. A request may be submitted whenever it is `alive`."""
        return self._supervisor.health

    @property
    def num_unfinished_requests(self) -> int:
        return self._dispatcher.ledger.num_requests

    async def submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        priority: int = 0,
        request_ids: Sequence[str] | None = None,
    ) -> list[RequestStream]:
        """Queues all of these requests, or none; each has a stream of its own.

        Args:
            params: one for all prompts, or one for each.
            priority: matters under `scheduling_policy="priority"`, where smaller goes first.
            request_ids: one for each prompt; None makes some up.

        Raises:
            RequestError: a prompt or a parameter is refused, or an id is that of an unfinished request.
            QueueFullError: as many are unfinished as may be, or the engine takes no more requests.
            OctavoError: the engine is closed or could not be kept up.
        """
        batch, own_params = _pairs(prompts, params)
        if request_ids is not None and len(request_ids) != len(batch):
            raise RequestError(f"{len(request_ids)} request_ids for {len(batch)} prompts; give one for each")
        self._check_open()
        self._dispatcher.check_room(sum(map(_num_choices, own_params)))
        bans, tokens = await self._tokenised(batch, own_params)
        self._check_open()
        requests = self._requests(batch, own_params, bans, tokens, priority)
        names = request_ids or [f"request-{self._num_requests + i}" for i in range(len(batch))]
        self._num_requests += len(batch)
        texts = [prompt_text(prompt) for prompt in batch]
        return self._dispatcher.add([Submission(*each) for each in zip(names, texts, requests, strict=True)])

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, priority: int = 0, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """One request, as it grows; leaving the iteration early ends it. Raises what `submit` does."""
        ids = None if request_id is None else [request_id]
        (stream,) = await self.submit([prompt], params, priority=priority, request_ids=ids)
        async with stream:
            async for output in stream:
                yield output

    async def stats(self) -> dict[str, float]:
        """Gauges and counters. Those of the scheduler are the engine process's own, since that one was started; while
        there is none they are not there."""
        stats = await self._dispatcher.stats()
        health = self.health
        return {
            **({} if stats is None else stats._asdict()),
            "num_generated_tokens": self._dispatcher.outputs.num_generated_tokens,
            "num_unfinished_requests": self._dispatcher.ledger.num_requests,
            "num_restarts": health.num_restarts,
            "engine_ready": float(health.ready),
        }

    async def kv_snapshot(self) -> KVSnapshot:
        """Which KV blocks are free, cached and used, and by which requests, between two steps.

        Raises:
            OctavoError: there is no engine process that could say.
        """
        snapshot = await self._dispatcher.kv_snapshot()
        if snapshot is None:
            raise OctavoError(f"there is no KV pool to look at: {self.health.reason}")
        return snapshot

    async def failure(self) -> OctavoError:
        """Waits until the engine cannot be kept up, if that ever comes; why. All requests have ended by then."""
        return await asyncio.shield(self._dispatcher.failure)

    async def drain(self, deadline: float) -> None:
        """Takes no more requests, and waits until all have finished or so many seconds have passed."""
        self._closed_to_new = "the engine is being closed and takes no more requests"
        try:
            await asyncio.wait_for(self._dispatcher.idle.wait(), deadline)
        except TimeoutError:
            return

    async def close(self) -> None:
        """Ends what is unfinished, and the engine process. Safe to call twice."""
        self._closed_to_new = "the engine is closed"
        await self._supervisor.close()
        self._dispatcher.end_all("abort")

    async def __aenter__(self) -> AsyncLLMEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # Inside

    def _check_open(self) -> None:
        if self._dispatcher.failure.done():
            raise self._dispatcher.failure.result()
        if self._closed_to_new is not None:
            raise QueueFullError(self._closed_to_new, retry_after=1)

    async def _tokenised(
        self, batch: list[Prompt], params: list[SamplingParams]
    ) -> tuple[dict[int, Bans], list[list[int]]]:
        """The bans of the parameters, by `id`, and the tokens of the prompts."""

        def tokenise() -> tuple[dict[int, Bans], list[list[int]]]:
            bans = {key: self._bans(own) for key, own in distinct.items()}
            return bans, [_of(batch, i, self._inputs.tokens, prompt) for i, prompt in enumerate(batch)]

        distinct = {id(own): own for own in params}  # usually one, for all prompts
        if sum(map(_size, batch)) + sum(map(_params_size, distinct.values())) < LONG_PROMPT:
            return tokenise()
        return await asyncio.to_thread(tokenise)

    def _bans(self, params: Any) -> Bans:
        if isinstance(params, BeamSearchParams):
            raise RequestError("beam search is not served by AsyncLLMEngine yet; use LLM.beam_search")
        return self._inputs.bans(params)

    def _requests(
        self,
        batch: list[Prompt],
        params: list[SamplingParams],
        bans: dict[int, Bans],
        tokens: list[list[int]],
        priority: int,
    ) -> list[Request]:
        def request(i: int) -> Request:
            own = params[i]
            return self._inputs.process(batch[i], own, priority, tokens=tokens[i], bans=bans[id(own)])

        return [_of(batch, i, request, i) for i in range(len(batch))]


def _of(batch: list[Prompt], index: int, work: Callable[[Any], T], what: Any) -> T:
    """What is done for one prompt of a batch, whose index its errors name."""
    try:
        return work(what)
    except RequestError as error:
        if len(batch) == 1:
            raise
        raise RequestError(f"prompt[{index}]: {error}") from error


@dataclass(frozen=True, slots=True)
class _Model:
    """What the front-end knows of the model: all but the weights."""

    config: ModelConfig
    tokenizer: Tokenizer

    @classmethod
    def read(cls, config: EngineConfig) -> _Model:
        checkpoint = open_checkpoint(Path(config.model))
        tokenizer = load_tokenizer(
            checkpoint.path, checkpoint.metadata, checkpoint.config, checkpoint.generation_config
        )
        return cls(model_config(checkpoint.config, checkpoint.generation_config), tokenizer)

    @property
    def vocab_size(self) -> int:
        """Ids that can be sampled."""
        return min(self.tokenizer.vocab_size, self.config.vocab_size)


def _pairs(
    prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
) -> tuple[list[Prompt], list[SamplingParams]]:
    if not isinstance(prompts, (str, Mapping, Sequence)):
        raise RequestError(f"prompts={prompts!r}: expected one, or a list")
    batch: list[Prompt] = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
    own = list(params) if isinstance(params, Sequence) else [params] * len(batch)
    if len(own) != len(batch):
        raise RequestError(f"{len(own)} params for {len(batch)} prompts; give one, or one for each")
    return batch, own


def _num_choices(params: Any) -> int:
    """How many sequences will be asked for; 1 of what will be refused."""
    return params.num_choices if isinstance(params, SamplingParams) else 1


def _params_size(params: Any) -> int:
    """Characters that have to be tokenised, and ids that have to be checked."""
    if not isinstance(params, SamplingParams):
        return 0
    return 2 * sum(map(len, params.bad_words)) + len(params.allowed_token_ids or ())


def _size(prompt: Any) -> int:
    """Characters or tokens of a prompt; 0 of what is none."""
    content = prompt.get("prompt", prompt.get("prompt_token_ids")) if isinstance(prompt, Mapping) else prompt
    return len(content) if hasattr(content, "__len__") else 0
