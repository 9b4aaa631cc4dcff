import math

import numpy as np
import pytest

from octavo import SamplingParams
from octavo.errors import OctavoError, RequestError
from octavo.sampling_params import GREEDY_TEMPERATURE

HUGE = 10**400  # a whole number that no float holds


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("temperature", -0.1, ["-0.1", "at least 0"]),
        ("temperature", math.nan, ["nan", "finite", "at least 0"]),
        ("temperature", math.inf, ["inf", "finite", "at least 0"]),
        ("temperature", HUGE, ["finite", "at least 0"]),
        ("temperature", "1", ["'1'", "number", "at least 0"]),
        ("temperature", True, ["True", "number"]),
        ("temperature", None, ["None", "number"]),
        ("top_p", 0, ["0", "above 0 and at most 1"]),
        ("top_p", 0.0, ["0", "above 0 and at most 1"]),
        ("top_p", -0.5, ["-0.5", "between 0 and 1"]),
        ("top_p", 1.01, ["1.01", "between 0 and 1"]),
        ("top_p", HUGE, ["between 0 and 1"]),
        ("top_p", math.nan, ["nan", "between 0 and 1"]),
        ("top_p", False, ["False", "number"]),
        ("top_k", 0.4, ["0.4", "whole number", "between -1 and"]),  # case 7
        ("top_k", 5.0, ["5.0", "whole number"]),
        ("top_k", "5", ["'5'", "whole number"]),
        ("top_k", True, ["True", "whole number"]),
        ("top_k", -2, ["-2", "-1"]),
        ("top_k", 2**31, [str(2**31), str(2**31 - 1)]),
        ("top_k", None, ["None", "whole number"]),
        ("seed", -1, ["-1", "between 0 and 18446744073709551615"]),
        ("seed", 2**64, ["18446744073709551616", "between 0 and 18446744073709551615"]),
        ("seed", 1.5, ["1.5", "whole number"]),
        ("seed", False, ["False", "whole number"]),
        ("max_tokens", 0, ["0", "at least 1"]),
        ("max_tokens", -3, ["-3", "at least 1"]),
        ("max_tokens", 3.0, ["3.0", "whole number"]),
        ("max_tokens", True, ["True", "whole number"]),
        ("logprobs", -1, ["-1", "between 0 and 20"]),
        ("logprobs", 21, ["21", "between 0 and 20"]),
        ("logprobs", True, ["True", "whole number"]),
        ("prompt_logprobs", 21, ["21", "between 0 and 20"]),
        ("prompt_logprobs", 0.0, ["0.0", "whole number"]),
        ("ignore_eos", 1, ["1", "true or false"]),
        ("ignore_eos", None, ["None", "true or false"]),
        ("skip_special_tokens", "no", ["'no'", "true or false"]),
        ("stop_token_ids", 5, ["5", "list of token ids"]),
        ("stop_token_ids", "ab", ["'ab'", "list of token ids"]),
        ("stop_token_ids", b"ab", ["list of token ids"]),
        ("stop_token_ids", [1, -1], ["-1", "at least 0"]),
        ("stop_token_ids", [1.0], ["1.0", "whole number"]),
        ("stop_token_ids", [True], ["True", "whole number"]),
        ("stop_token_ids", ["1"], ["'1'", "whole number"]),
    ],
)
def test_a_refusal_names_the_parameter_the_value_and_the_limit(name, value, says):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}=")
    assert "\n" not in message
    assert all(words in message for words in says)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {"temperature": 2},
        {"temperature": 1e308},
        {"temperature": np.float64(0.5)},
        {"top_p": 1},
        {"top_p": 5e-324},
        {"top_k": -1},
        {"top_k": 2**31 - 1},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"seed": None},
        {"max_tokens": None},
        {"max_tokens": 10**9},
        {"logprobs": 0, "prompt_logprobs": 20},
    ],
)
def test_the_edges_are_allowed(values):
    params = SamplingParams(**values)
    assert {name: getattr(params, name) for name in values} == values


def test_stop_token_ids_are_kept_as_a_tuple():
    for ids in ([3, 4], (3, 4), iter([3, 4]), {3: "a", 4: "b"}):
        assert SamplingParams(stop_token_ids=ids).stop_token_ids == (3, 4)
    hash(SamplingParams(stop_token_ids=[1]))


def test_an_unknown_parameter_and_positions_are_refused():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)
    with pytest.raises(TypeError):
        SamplingParams(0.5)


def test_parameters_are_frozen():
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 0.5


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0, True), (1e-4, True), (1e-3, True), (1.1e-3, False), (1, False)]
)
def test_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy
    assert GREEDY_TEMPERATURE == 1e-3


def test_a_request_error_is_a_value_error_and_an_octavo_error():
    assert issubclass(RequestError, ValueError)
    assert issubclass(RequestError, OctavoError)
