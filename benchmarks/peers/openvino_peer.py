"""OpenVINO GenAI's continuous batching: weights in 16 bits, computed in bf16, bf16 KV."""

from __future__ import annotations

from importlib.metadata import version

import child
import numpy as np
import openvino as ov
import openvino_genai as genai
from workloads import Request


class OpenVino:
    def __init__(self, model: str, threads: int) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 4  # GB
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = 128
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        properties = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "bf16",
            "KV_CACHE_PRECISION": "bf16",
        }
        self.pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self.versions = {name: version(name) for name in ("openvino-genai", "openvino")}

    def generate(self, requests: list[Request]) -> list[list[int]]:
        prompts = [ov.Tensor(np.array([prompt], np.int64)) for prompt, _ in requests]
        results = self.pipeline.generate(prompts, [_greedy(count) for _, count in requests])
        return [list(result.m_generation_ids[0]) for result in results]

    def first_token(self, prompt: str) -> str:
        (result,) = self.pipeline.generate([prompt], [_greedy(1)])
        return str(result.m_generation_ids[0])  # of a text prompt these are text


def _greedy(count: int) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens = count
    config.ignore_eos = True
    config.do_sample = False
    return config


if __name__ == "__main__":
    child.main(OpenVino)
