import dataclasses
import math

import numpy as np
import pytest

from octavo import BeamSearchParams, SamplingParams
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
        ("max_tokens", -3, ["-3", "at least 0"]),
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
        ("stop_token_ids", range(1025), ["1025", "at most 1024"]),
        ("min_p", -0.1, ["-0.1", "between 0 and 1"]),
        ("min_p", 1.1, ["1.1", "between 0 and 1"]),
        ("min_p", math.nan, ["nan", "between 0 and 1"]),
        ("min_p", None, ["None", "number"]),
        ("repetition_penalty", 0, ["0", "between 1e-06 and 1e+06"]),
        ("repetition_penalty", -1.0, ["-1.0", "between 1e-06 and 1e+06"]),
        ("repetition_penalty", 1e-300, ["1e-300", "between 1e-06 and 1e+06"]),
        ("repetition_penalty", math.inf, ["inf", "finite"]),
        ("repetition_penalty", math.nan, ["nan", "finite"]),
        ("presence_penalty", 2.01, ["2.01", "between -2 and 2"]),
        ("presence_penalty", math.nan, ["nan", "between -2 and 2"]),
        ("frequency_penalty", -2.01, ["-2.01", "between -2 and 2"]),
        ("frequency_penalty", "1", ["'1'", "number"]),
        ("n", 0, ["0", "between 1 and 128"]),
        ("n", 129, ["129", "between 1 and 128"]),
        ("n", 1_000_000, ["1000000", "between 1 and 128"]),  # case 12
        ("n", HUGE, ["between 1 and 128"]),
        ("n", 2.0, ["2.0", "whole number"]),
        ("n", None, ["None", "whole number"]),
        ("best_of", 0, ["0", "between 1 and 128"]),
        ("best_of", 129, ["129", "between 1 and 128"]),
        ("min_tokens", -1, ["-1", "at least 0"]),
        ("min_tokens", None, ["None", "whole number"]),
        ("min_tokens", 17, ["17", "at most max_tokens", "16"]),
        ("logit_bias", {1: 100.5}, ["[1]", "100.5", "between -100 and 100"]),
        ("logit_bias", {1: -math.inf}, ["-inf", "between -100 and 100"]),
        ("logit_bias", {1: math.nan}, ["nan", "between -100 and 100"]),
        ("logit_bias", {1: "2"}, ["'2'", "number"]),
        ("logit_bias", {"1": 2}, ["'1'", "whole number"]),
        ("logit_bias", {-1: 2}, ["-1", "at least 0"]),
        ("logit_bias", {True: 2}, ["True", "whole number"]),
        ("logit_bias", [1, 2], ["[1, 2]", "mapping"]),
        ("logit_bias", [(1, 2), (1, 3)], ["twice"]),
        ("logit_bias", 5, ["5", "mapping"]),
        ("logit_bias", "ab", ["'ab'", "mapping"]),
        ("allowed_token_ids", [], ["()", "at least one id"]),
        ("allowed_token_ids", [-1], ["-1", "at least 0"]),
        ("allowed_token_ids", [1.5], ["1.5", "whole number"]),
        ("allowed_token_ids", 5, ["5", "list of token ids"]),
        ("stop", "", ["''", "1 to 1024 characters"]),
        ("stop", ["a", ""], ["''", "1 to 1024 characters"]),
        ("stop", [1], ["1", "expected a string"]),
        ("stop", b"ab", ["b'ab'", "list of strings"]),
        ("stop", 5, ["5", "list of strings"]),
        ("stop", ["x"] * 17, ["17 strings", "at most 16"]),
        ("stop", "x" * 1025, ["1 to 1024 characters", "..."]),
        ("bad_words", "ab", ["'ab'", "list of strings"]),
        ("bad_words", [""], ["''", "1 to 1024 characters"]),
        ("bad_words", [None], ["None", "expected a string"]),
        ("bad_words", ["x"] * 1025, ["1025 strings", "at most 1024"]),
        ("include_stop_str_in_output", 1, ["1", "true or false"]),
    ],
)
def test_a_refusal_names_the_parameter_the_value_and_the_limit(name, value, says):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(name)
    assert "\n" not in message
    assert len(message) < 200
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
        {"max_tokens": 0},
        {"max_tokens": 10**9},
        {"logprobs": 0, "prompt_logprobs": 20},
        {"n": 128, "best_of": 128},
        {"n": 1, "best_of": 1},
        {"min_p": 0, "repetition_penalty": 1e-6, "presence_penalty": -2, "frequency_penalty": 2},
        {"min_p": 1, "repetition_penalty": 1e6, "presence_penalty": 2, "frequency_penalty": -2.0},
        {"min_tokens": 16},
        {"min_tokens": 10**6, "max_tokens": None},
        {"stop": ("x" * 1024,) * 16, "bad_words": ("y",) * 1024},
        {"allowed_token_ids": (0,), "logit_bias": ((0, -100.0), (3, 100.0))},
    ],
)
def test_the_edges_are_allowed(values):
    params = SamplingParams(**values)
    assert {name: getattr(params, name) for name in values} == values


def test_stop_token_ids_are_kept_as_a_tuple():
    for ids in ([3, 4], (3, 4), iter([3, 4]), {3: "a", 4: "b"}):
        assert SamplingParams(stop_token_ids=ids).stop_token_ids == (3, 4)
    hash(SamplingParams(stop_token_ids=[1]))


def test_ids_that_are_named_twice_are_kept_once():
    params = SamplingParams(stop_token_ids=[3, 1, 3] * 1000, allowed_token_ids=[2, 1, 2, 2])
    assert (params.stop_token_ids, params.allowed_token_ids) == ((3, 1), (2, 1))


def test_lists_are_kept_as_tuples_and_none_as_an_empty_one():
    params = SamplingParams(stop="ab", bad_words=["c"], allowed_token_ids=[2, 1], logit_bias={9: 1, 4: -2.5})
    assert params.stop == ("ab",)
    assert params.bad_words == ("c",)
    assert params.allowed_token_ids == (2, 1)
    assert params.logit_bias == ((4, -2.5), (9, 1.0))
    assert dataclasses.replace(params) == params
    assert hash(dataclasses.replace(params)) == hash(params)
    none = SamplingParams(stop=None, stop_token_ids=None, bad_words=None, logit_bias=None, allowed_token_ids=None)
    assert none == SamplingParams()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"n": 3, "best_of": 2}, "best_of=2: must be at least n, which is 3"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9: must be at most max_tokens, which is 8"),
    ],
)
def test_a_contradiction_names_both_sides(values, says):
    with pytest.raises(RequestError, match=says):
        SamplingParams(**values)


def test_how_many_choices_are_computed():
    assert SamplingParams().num_choices == 1
    assert SamplingParams(n=3).num_choices == 3
    assert SamplingParams(n=3, best_of=5).num_choices == 5


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


class TestBeamSearchParams:
    @pytest.mark.parametrize(
        ("name", "value", "says"),
        [
            ("beam_width", 0, ["0", "between 1 and 128"]),
            ("beam_width", 129, ["129", "between 1 and 128"]),
            ("beam_width", True, ["True", "whole number"]),
            ("beam_width", None, ["None", "whole number"]),
            ("max_tokens", 0, ["0", "at least 1"]),
            ("max_tokens", 2.0, ["2.0", "whole number"]),
            ("length_penalty", 10.5, ["10.5", "between -10 and 10"]),
            ("length_penalty", math.nan, ["nan", "between -10 and 10"]),
            ("length_penalty", "1", ["'1'", "number"]),
            ("early_stopping", "always", ["'always'", "true, false or 'never'"]),
            ("early_stopping", 1, ["1", "true, false or 'never'"]),
            ("early_stopping", None, ["None", "true, false or 'never'"]),
            ("ignore_eos", 1, ["1", "true or false"]),
            ("include_stop_str_in_output", None, ["None", "true or false"]),
            ("skip_special_tokens", "no", ["'no'", "true or false"]),
            ("stop_token_ids", [-1], ["-1", "at least 0"]),
            ("stop_token_ids", "ab", ["'ab'", "list of token ids"]),
        ],
    )
    def test_a_refusal_names_the_parameter_the_value_and_the_limit(self, name, value, says):
        with pytest.raises(RequestError) as caught:
            BeamSearchParams(**{"beam_width": 2, name: value})
        assert str(caught.value).startswith(name)
        assert "\n" not in str(caught.value)
        assert all(words in str(caught.value) for words in says)

    def test_edges_and_lists(self):
        params = BeamSearchParams(beam_width=128, max_tokens=None, length_penalty=-10, early_stopping="never")
        assert params.stop_token_ids == ()
        assert BeamSearchParams(beam_width=1, stop_token_ids=[3, 4]).stop_token_ids == (3, 4)
        assert BeamSearchParams(beam_width=1, stop_token_ids=None) == BeamSearchParams(beam_width=1)
        assert hash(dataclasses.replace(params)) == hash(params)

    def test_the_width_is_to_be_given(self):
        with pytest.raises(TypeError, match="beam_width"):
            BeamSearchParams()


def test_what_beams_ask_of_the_sampler_may_be_more_than_a_caller_may_ask():
    params = SamplingParams.reporting(129)
    assert (params.greedy, params.logprobs, params.num_choices) == (True, 129, 1)
