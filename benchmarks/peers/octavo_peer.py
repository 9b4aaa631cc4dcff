"""octavo itself, from the environment that `run.py` is started in."""

from __future__ import annotations

import argparse

import child
from workloads import Request

import octavo
from octavo import LLM, SamplingParams


class Octavo:
    def __init__(self, model: str, threads: int) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--fast-math", action="store_true")
        parser.add_argument("--quantization")
        parser.add_argument("--kv-cache-dtype", default="auto")
        parser.add_argument("--packed-cache")
        options = vars(parser.parse_known_args()[0])
        kv_bytes = 4 << 30  # as the peers have
        self.llm = LLM(model, backend="cpu", num_threads=threads, kv_cache_memory_bytes=kv_bytes, **options)
        self.versions = {"octavo": octavo.__version__, "engine": str(self.llm.engine.boot_report.backend)}

    def generate(self, requests: list[Request]) -> list[list[int]]:
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in requests],
            [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _, count in requests],
            progress=False,
        )
        return [output.outputs[0].token_ids for output in outputs]

    def first_token(self, prompt: str) -> str:
        (output,) = self.llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1), progress=False)
        return output.outputs[0].text


if __name__ == "__main__":
    child.main(Octavo)
