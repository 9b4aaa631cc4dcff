"""What several engines do alike, against transformers' processors: the same logits come out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.generation import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from octavo import SamplingParams
from octavo.sampling import History, Sampler, Shaping, features_of
from octavo.sampling_params import Bans
from tests.sampling.reference import make_rows, random_logits

VOCAB = 40
WORDS = ((3,), (17,), (5, 9), (8, 5, 2), (7, 7, 7))
ENDS = (0, 4, 30)


def shaped(logits: np.ndarray, tokens: list[int], prompt_length: int, bans: Bans, **values: object) -> np.ndarray:
    history = History(np.array(tokens, np.int32), prompt_length)
    return Shaping(features_of(SamplingParams(**values), bans), history)(logits)


def theirs(processor: LogitsProcessor, logits: np.ndarray, tokens: list[int]) -> np.ndarray:
    return processor(torch.tensor([tokens]), torch.from_numpy(logits.copy())[None])[0].numpy()


@pytest.mark.parametrize("seed", range(20))
def test_logits_equal_transformers(seed: int) -> None:
    logits = random_logits(seed, rows=1, vocab=VOCAB)[0]
    output = np.random.default_rng(seed).integers(0, 10, 3 + seed % 4).tolist()
    output += [[7, 7], [5], [8, 5], []][seed % 4]  # the beginning of a word, or none
    tokens, length = [11, 12, 11, *output], 3
    for penalty in (1.3, 0.7):
        got = shaped(logits, tokens, length, Bans(), repetition_penalty=penalty)
        np.testing.assert_array_equal(got, theirs(RepetitionPenaltyLogitsProcessor(penalty), logits, tokens))
    got = shaped(logits, tokens, length, Bans(words=WORDS), bad_words=["x"])
    words = NoBadWordsLogitsProcessor([list(word) for word in WORDS])
    np.testing.assert_array_equal(got, theirs(words, logits, output))  # of the output alone
    for minimum in (len(output), len(output) + 1):
        got = shaped(logits, tokens, length, Bans(ends=ENDS), min_tokens=minimum)
        ends = MinNewTokensLengthLogitsProcessor(length, minimum, list(ENDS), device="cpu")
        np.testing.assert_array_equal(got, theirs(ends, logits, tokens))
    bias = {3: 2.5, 17: -100.0, 39: 0.3}
    got = shaped(logits, tokens, length, Bans(), logit_bias=bias)
    added = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})
    np.testing.assert_array_equal(got, theirs(added, logits, tokens))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("min_p", [0.02, 0.1, 0.4, 1.0])
def test_min_p_keeps_what_transformers_keeps(min_p: float, temperature: float) -> None:
    """Temperature comes first."""
    logits = random_logits(1, rows=1, vocab=12, scale=1.0)
    scaled = (logits[0] / np.float32(temperature)).astype(np.float32)
    kept = np.flatnonzero(np.isfinite(theirs(MinPLogitsWarper(min_p), scaled, [0])))
    params = [SamplingParams(min_p=min_p, temperature=temperature, seed=i) for i in range(3000)]
    seen = Sampler(12)(np.repeat(logits, 3000, axis=0), make_rows(params)).token_ids
    assert sorted({*seen.tolist()}) == kept.tolist()
