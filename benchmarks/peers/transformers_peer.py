"""transformers, bf16: padded batches of 32, sorted by output length; a batch runs to its longest output."""

from __future__ import annotations

from importlib.metadata import version

import child
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from workloads import Request

BATCH = 32
PAD = 2  # masked, so that any id would do


class Transformers:
    def __init__(self, model: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.path = model
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        self.versions = {name: version(name) for name in ("transformers", "torch")}

    def generate(self, requests: list[Request]) -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in requests]
        order = sorted(range(len(requests)), key=lambda i: requests[i][1])
        for start in range(0, len(order), BATCH):
            rows = order[start : start + BATCH]
            for i, ids in zip(rows, self._batch([requests[i] for i in rows]), strict=True):
                outputs[i] = ids[: requests[i][1]]
        return outputs

    def _batch(self, requests: list[Request]) -> list[list[int]]:
        width = max(len(prompt) for prompt, _ in requests)
        count = max(output for _, output in requests)
        ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt, _ in requests])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in requests])
        with torch.inference_mode():
            whole = self.model.generate(
                input_ids=ids, attention_mask=mask, min_new_tokens=count, max_new_tokens=count, do_sample=False,
                pad_token_id=PAD,
            )  # fmt: skip
        return [row[width:].tolist() for row in whole]

    def first_token(self, prompt: str) -> str:
        tokenizer = AutoTokenizer.from_pretrained(self.path)
        inputs = tokenizer(prompt, return_tensors="pt")
        whole = self.model.generate(**inputs, max_new_tokens=1, do_sample=False, pad_token_id=PAD)
        return str(tokenizer.decode(whole[0, -1]))


if __name__ == "__main__":
    child.main(Transformers)
