"""llama.cpp through the C interface of llama-cpp-python: the file's weights, KV in f16.

Its library runs one batch at a time and leaves scheduling to the caller. Here as its server does it: a number of slots
with a KV stream each (one unified stream is far slower, since attention then runs over all slots' cells), decoding
slots first in each batch, then prompts in pieces.
"""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass, field
from importlib.metadata import version

import child
import llama_cpp as llama
import numpy as np
from workloads import Request

SLOTS = 32
BATCH = 2048  # tokens handed over at once
CONTEXT = 4096  # of the context with one slot
SLOT_CONTEXT = 1280  # of each of many: the longest request of A and D has 1,088 tokens


@dataclass
class Slot:
    """A request that has a KV stream: `done` of its prompt's tokens were computed, `output` follows."""

    index: int  # of the request
    prompt: list[int]
    count: int
    done: int = 0
    output: list[int] = field(default_factory=list)


class LlamaCpp:
    def __init__(self, model: str, threads: int) -> None:
        self.log = llama.llama_log_callback(lambda level, text, data: None)  # silent; kept alive with this object
        llama.llama_log_set(self.log, ctypes.c_void_p(0))
        llama.llama_backend_init()
        self.threads = threads
        self.model = llama.llama_model_load_from_file(model.encode(), llama.llama_model_default_params())
        self.vocab = llama.llama_model_get_vocab(self.model)
        self.vocab_size = llama.llama_vocab_n_tokens(self.vocab)
        self.batch = llama.llama_batch_init(BATCH, 0, 1)
        self.contexts: dict[int, llama.llama_context_p] = {}  # by number of slots
        self.versions = {"llama-cpp-python": version("llama-cpp-python")}

    def context(self, slots: int) -> llama.llama_context_p:
        if slots not in self.contexts:
            params = llama.llama_context_default_params()
            params.n_ctx = CONTEXT if slots == 1 else slots * SLOT_CONTEXT
            params.n_batch = BATCH
            params.n_seq_max = slots
            params.kv_unified = False
            params.n_threads = params.n_threads_batch = self.threads
            params.no_perf = True
            self.contexts[slots] = llama.llama_init_from_model(self.model, params)
        return self.contexts[slots]

    def generate(self, requests: list[Request]) -> list[list[int]]:
        slots = 1 if len(requests) == 1 else SLOTS
        context = self.context(slots)
        waiting = deque(Slot(i, prompt, count) for i, (prompt, count) in enumerate(requests))
        running: dict[int, Slot] = {}  # by KV stream
        outputs: list[list[int]] = [[] for _ in requests]
        while waiting or running:
            for stream in range(slots):
                if stream not in running and waiting:
                    llama.llama_memory_seq_rm(llama.llama_get_memory(context), stream, -1, -1)
                    running[stream] = waiting.popleft()
            for stream in self._step(context, running):
                slot = running[stream]
                if len(slot.output) == slot.count:
                    outputs[slot.index] = running.pop(stream).output
        return outputs

    def _step(self, context: llama.llama_context_p, running: dict[int, Slot]) -> list[int]:
        """One batch; the streams that gained a token."""
        self.batch.n_tokens = 0
        rows: list[tuple[int, int]] = []  # (stream, row of the batch whose logits give its next token)
        for stream, slot in running.items():
            if slot.output:
                position = len(slot.prompt) + len(slot.output) - 1
                rows.append((stream, self._put(slot.output[-1], position, stream, logits=True)))
        for stream, slot in running.items():
            if slot.output:
                continue
            for token in slot.prompt[slot.done : slot.done + BATCH - self.batch.n_tokens]:
                last = slot.done == len(slot.prompt) - 1
                row = self._put(token, slot.done, stream, logits=last)
                slot.done += 1
                if last:
                    rows.append((stream, row))
        status = llama.llama_decode(context, self.batch)
        if status != 0:
            raise RuntimeError(f"llama_decode gave {status} for {self.batch.n_tokens} tokens")
        for stream, row in rows:
            logits = np.ctypeslib.as_array(llama.llama_get_logits_ith(context, row), shape=(self.vocab_size,))
            running[stream].output.append(int(logits.argmax()))
        return [stream for stream, _ in rows]

    def _put(self, token: int, position: int, stream: int, *, logits: bool) -> int:
        batch, row = self.batch, self.batch.n_tokens
        batch.token[row] = token
        batch.pos[row] = position
        batch.n_seq_id[row] = 1
        batch.seq_id[row][0] = stream
        batch.logits[row] = logits
        batch.n_tokens = row + 1
        return int(row)

    def first_token(self, prompt: str) -> str:
        text = prompt.encode()
        ids = (llama.llama_token * (len(text) + 8))()
        count = llama.llama_tokenize(self.vocab, text, len(text), ids, len(ids), True, True)
        ((token,),) = self.generate([(list(ids[:count]), 1)])
        piece = ctypes.create_string_buffer(256)
        size = llama.llama_token_to_piece(self.vocab, token, piece, len(piece), 0, False)
        return piece.raw[:size].decode(errors="replace")


if __name__ == "__main__":
    child.main(LlamaCpp)
