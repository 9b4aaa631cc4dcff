"""The engine in the caller's process: text in, text out, one step at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.config import EngineConfig, engine_config
from octavo.core import KVSnapshot
from octavo.engine.core import EngineCore
from octavo.engine.inputs import InputProcessor, Prompt, prompt_text
from octavo.engine.interrupts import deferred_interrupt
from octavo.engine.messages import BeamRequest, Request
from octavo.engine.outputs import OutputProcessor
from octavo.errors import OctavoError, RequestError
from octavo.executor import make_executor
from octavo.metrics import Profiler, log_event
from octavo.models import model_config
from octavo.outputs import FinishReason, RequestOutput
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.tokenizer import load_tokenizer
from octavo.weights import open_checkpoint, resolve_model
from octavo.worker import BootReport


class LLMEngine:
    """Loads a model and serves requests: `add_request`, then `step` while `has_unfinished_requests`.

    ::

        add_request -> InputProcessor -> EngineCore (Scheduler -> Executor) -> OutputProcessor -> step's return value
    """

    def __init__(self, config: EngineConfig, *, on_load: Callable[[float], None] | None = None) -> None:
        """
        Args:
            on_load: called with the share of the weights that are loaded, 0 to 1, as they are.

        Raises:
            ModelError: the model cannot be found, read or understood.
            ConfigError: an option cannot be honoured on this machine.
        """
        self.config = config
        checkpoint = open_checkpoint(resolve_model(config.model))
        self.model_config = model_config(checkpoint.config, checkpoint.generation_config)
        self.tokenizer = load_tokenizer(
            checkpoint.path, checkpoint.metadata, checkpoint.config, checkpoint.generation_config
        )
        vocab_size = min(self.tokenizer.vocab_size, self.model_config.vocab_size)
        executor = make_executor(config, self.model_config, checkpoint, vocab_size, on_load)
        self.boot_report: BootReport = executor.boot_report
        self._core = EngineCore(config, executor)
        max_model_len = self.boot_report.memory.max_model_len
        self._inputs = InputProcessor(self.tokenizer, self.model_config, max_model_len, config.seed)
        self._outputs = OutputProcessor(self.tokenizer)
        self._seq_ids: dict[str, list[int]] = {}  # of unfinished requests; of a beam search, the first that it had
        self._closed = False
        log_event("engine_ready", self.boot_report.fields())

    @classmethod
    def from_options(cls, model: str, **options: Any) -> LLMEngine:
        """An engine from the keyword arguments of `octavo.LLM`."""
        return cls(engine_config(model, options))

    def process_prompt(
        self, prompt: Prompt, params: SamplingParams | BeamSearchParams, priority: int = 0
    ) -> Request | BeamRequest:
        """Tokenises and checks a request without queueing it.

        Raises:
            RequestError: the request is refused; the message names the value and the limit.
        """
        if isinstance(params, BeamSearchParams):
            return self._inputs.process_beams(prompt, params, priority)
        return self._inputs.process(prompt, params, priority)

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | BeamSearchParams, *, priority: int = 0
    ) -> None:
        """Queues a request; `priority` matters under `scheduling_policy="priority"`, where smaller goes first.

        Raises:
            RequestError: the request is refused, or its id is that of an unfinished one; nothing else is touched.
        """
        self.add_processed(request_id, prompt_text(prompt), self.process_prompt(prompt, params, priority))

    def add_processed(self, request_id: str, prompt: str | None, request: Request | BeamRequest) -> None:
        """Queues what `process_prompt` returned."""
        if self._closed:
            raise OctavoError("the engine is closed")
        if not isinstance(request_id, str):
            raise RequestError(f"request_id={request_id!r}: expected text")
        if request_id in self._seq_ids:
            raise RequestError(f"request_id={request_id!r} belongs to an unfinished request; give another")
        with deferred_interrupt():
            if isinstance(request, BeamRequest):
                self._core.add_beams(request)
                self._outputs.add_beams(request_id, prompt, request)
                self._seq_ids[request_id] = [request.seq_id]
                return
            for sequence in request.sequences:  # all of one size: if any is refused, the first is
                self._core.add(sequence)
            self._outputs.add(request_id, prompt, request)
            self._seq_ids[request_id] = [sequence.seq_id for sequence in request.sequences]

    def step(self) -> list[RequestOutput]:
        """Runs one step. Returns the requests that it moved, finished ones for the last time.

        A Ctrl-C in the main thread takes effect when the step is done (and its outputs are then not returned).
        """
        with deferred_interrupt():
            outputs, stopped = self._outputs.process(self._core.step())
            self._end(stopped, "stop")
            for output in outputs:
                if output.finished:
                    del self._seq_ids[output.request_id]
        return outputs

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request at once and returns what it has; None when there is no such unfinished request."""
        with deferred_interrupt():
            outputs = self._end(self._seq_ids.pop(request_id, []), "abort")
        return outputs[0] if outputs else None

    @property
    def has_unfinished_requests(self) -> bool:
        return self._core.has_unfinished

    def stats(self) -> dict[str, float]:
        """Gauges and counters since the engine was made."""
        return {**self._core.stats()._asdict(), "num_generated_tokens": self._outputs.num_generated_tokens}

    def kv_snapshot(self) -> KVSnapshot:
        """Which KV blocks are free, cached and used, and by which requests, at this moment."""
        snapshot = self._core.kv_snapshot()
        owner: dict[int, tuple[str, int]] = {}
        for name, first_ids in self._seq_ids.items():
            seq_ids = [seq_id for first in first_ids for seq_id in self._core.live_seq_ids(first)]
            owner |= {seq_id: (name, choice) for choice, seq_id in enumerate(seq_ids)}
        for sequence in snapshot.sequences:
            sequence.request_id, sequence.choice = owner[sequence.seq_id]
        return snapshot

    def profiler(self) -> Profiler:
        """Times what the steps to come spend in the model's ops.

        Raises:
            ConfigError: the backend cannot.
        """
        return self._core.executor.profiler()

    def close(self) -> None:
        """Ends what is unfinished and gives the memory back. Safe to call twice."""
        for request_id in list(self._seq_ids):
            self.abort(request_id)
        self._core.close()
        self._closed = True

    def _end(self, seq_ids: list[int], reason: FinishReason) -> list[RequestOutput]:
        """Ends those of these sequences that have not ended yet."""
        updates = [self._core.abort(seq_id, reason) for seq_id in seq_ids]
        outputs, _ = self._outputs.process(update for update in updates if update is not None)
        return outputs
