"""Messages between front-end and engine process: what arrives is what was sent, and all that may be asked can be."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import EngineConfig, RequestError, SamplingParams
from octavo.core import BlockManager, Scheduler, Sequence, make_policy
from octavo.engine import wire
from octavo.engine.messages import SequenceOutput, SequenceRequest
from octavo.graph import KVGroup
from octavo.outputs import RequestMetrics, TokenLogprobs
from octavo.sampling_params import MAX_INTEGER, Bans
from octavo.worker import BootReport
from octavo.worker.cache_engine import MemoryPlan

ids = st.integers(0, 2**31 - 1)
counts = st.integers(0, MAX_INTEGER)
words = st.lists(st.text(min_size=1, max_size=6), max_size=3)
scores = st.floats(allow_nan=False)
numbers = st.floats(0, allow_nan=False, allow_infinity=False) | st.integers(0, 10**25)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    n = draw(st.integers(1, 128))
    min_tokens = draw(counts)
    return SamplingParams(
        n=n,
        best_of=draw(st.none() | st.integers(n, 128)),
        temperature=draw(numbers),
        top_k=draw(st.integers(-1, 2**31 - 1)),
        top_p=draw(st.floats(0, 1, exclude_min=True) | st.just(1)),
        min_p=draw(st.floats(0, 1) | st.integers(0, 1)),
        repetition_penalty=draw(st.floats(1e-6, 1e6)),
        presence_penalty=draw(st.floats(-2, 2) | st.integers(-2, 2)),
        frequency_penalty=draw(st.floats(-2, 2)),
        logit_bias=draw(st.dictionaries(ids, st.floats(-100, 100) | st.integers(-100, 100), max_size=3)),
        allowed_token_ids=draw(st.none() | st.lists(ids, min_size=1, max_size=3)),
        bad_words=draw(words),
        seed=draw(st.none() | counts),
        max_tokens=draw(st.none() | st.integers(min_tokens, MAX_INTEGER)),
        min_tokens=min_tokens,
        stop=draw(words),
        include_stop_str_in_output=draw(st.booleans()),
        stop_token_ids=draw(st.lists(ids, max_size=3)),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.none() | st.integers(0, 20)),
        prompt_logprobs=draw(st.none() | st.integers(0, 20)),
        skip_special_tokens=draw(st.booleans()),
    )


requests = st.builds(
    SequenceRequest,
    seq_id=counts,
    tokens=st.lists(ids, max_size=5),
    params=sampling_params(),
    seed=counts,
    max_length=counts,
    stop_token_ids=st.frozensets(ids, max_size=1),  # of more, the order in which they are shown may differ
    priority=st.integers(-(2**63) + 1, 2**63 - 1),
    arrival_time=st.floats(0, 1e9),
    choice=st.integers(0, 127),
    bans=st.builds(
        Bans,
        words=st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
        ends=st.just((0,)),
    ),
    cache_salt=st.none() | st.text(min_size=1, max_size=5),
    sampled=st.lists(ids, max_size=5),
)
logprobs = st.builds(
    TokenLogprobs,
    token_id=ids,
    logprob=scores,
    rank=st.integers(1, 2**31),
    top_ids=st.lists(ids, max_size=3),
    top_logprobs=st.lists(scores, max_size=3),
)
outputs = st.builds(
    SequenceOutput,
    seq_id=counts,
    token_id=st.none() | ids,
    logprobs=st.none() | logprobs,
    prompt_logprobs=st.lists(logprobs, max_size=2),
    finish_reason=st.sampled_from([None, "stop", "length", "abort", "error"]),
    metrics=st.none() | st.builds(RequestMetrics, queue_time=scores, prefill_time=scores, decode_time=scores),
    error=st.none() | st.text(),
    position=counts,
    prompt_position=counts,
)


@settings(max_examples=100, deadline=None)
@given(st.lists(requests, max_size=3))
def test_requests_arrive_as_they_were_sent(sequences: list[SequenceRequest]) -> None:
    message = wire.Add([wire.Group.of([sequence]) for sequence in sequences])
    arrived = wire.decode_to_engine(wire.encode(message))
    assert arrived == message
    assert repr(arrived) == repr(message)  # 1 == 1.0 == True, and -0.0 == 0.0


def choices(count: int, length: int, first: int = 0) -> list[SequenceRequest]:
    """Of one request, as they stand after a death; the first of them reports its prompt."""
    params = SamplingParams(n=128, prompt_logprobs=3)
    prompt = SequenceRequest(7 + first, [30000] * length, params, 5, 99, frozenset({0}), 1, 2.0, first)
    further = replace(params, prompt_logprobs=None)
    return [
        prompt,
        *(
            replace(prompt, seq_id=7 + choice, choice=choice, params=further, sampled=[choice])
            for choice in range(first + 1, first + count)
        ),
    ]


@pytest.mark.parametrize("first", [0, 3])
def test_the_choices_of_a_request_arrive(first: int) -> None:
    sent = [choice for choice in choices(9, 4, first) if choice.choice != 5]  # which is finished
    arrived = wire.decode_to_engine(wire.encode(wire.Add([wire.Group.of(sent)])))
    assert isinstance(arrived, wire.Add)
    assert list(arrived.requests[0].sequences()) == sent


def test_a_prompt_is_sent_once_however_many_choices_it_has() -> None:
    one, many = (len(wire.encode(wire.Add([wire.Group.of(choices(count, 10_000))]))) for count in (1, 128))
    assert many < one + 128 * 16


@settings(max_examples=100, deadline=None)
@given(st.lists(outputs, max_size=3))
def test_outputs_arrive_as_they_were_sent(updates: list[SequenceOutput]) -> None:
    message = wire.Stepped(updates)
    assert repr(wire.decode_from_engine(wire.encode(message))) == repr(message)


def test_what_is_not_finite_arrives() -> None:
    entry = TokenLogprobs(0, -math.inf, 1, [1], [math.nan])
    arrived: Any = wire.decode_from_engine(wire.encode(wire.Stepped([SequenceOutput(0, 1, entry)])))
    assert arrived.outputs[0].logprobs.logprob == -math.inf
    assert math.isnan(arrived.outputs[0].logprobs.top_logprobs[0])


def test_the_other_messages_arrive_as_they_were_sent() -> None:
    scheduler = Scheduler(BlockManager(4, 16), make_policy("fcfs"), max_num_seqs=2, max_num_batched_tokens=8)
    scheduler.add(Sequence(3, [1, 2, 3], SamplingParams(), max_length=8))
    scheduler.schedule()
    memory = MemoryPlan(1, 2, 3, (KVGroup(None, (0, 2)), KVGroup(40, (1,))), 16, 5, 6, 0, None, 8, 9)
    report = BootReport(
        model="model", family="llama", backend="cpu", load_seconds=0.25, packed_cache="off", memory=memory, note="so"
    )
    to_engine: list[wire.ToEngine] = [
        wire.Start(EngineConfig("somewhere", num_kv_blocks=4), 320, 30),
        wire.Abort([1, MAX_INTEGER]),
        wire.Ask(1, "stats"),
        wire.Ask(2, "kv_snapshot"),
    ]
    from_engine: list[wire.FromEngine] = [
        wire.Loading(0.5),
        wire.Ready(report),
        wire.Refused("ConfigError", "too small"),
        wire.Answer(1, stats=scheduler.stats()),
        wire.Answer(2, kv_snapshot=scheduler.kv_snapshot()),
    ]
    assert [wire.decode_to_engine(wire.encode(message)) for message in to_engine] == to_engine
    assert [wire.decode_from_engine(wire.encode(message)) for message in from_engine] == from_engine


@pytest.mark.parametrize(
    "damage",
    [
        {"type": "add", "requests": [{"first": {"seq_id": "one"}, "further": []}]},
        {"type": "add", "requests": 3},
        {"type": "eval", "code": "1"},
        {"type": "ask", "number": 1, "what": "everything"},
        ["add"],
    ],
)
def test_what_is_no_message_is_refused(damage: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        wire.decode_to_engine(wire.encode(damage))


def test_parameters_are_checked_as_they_arrive() -> None:
    """As those that a caller may not give: the front-end is not the only one that could write to a socket."""
    request = SequenceRequest(0, [1], SamplingParams(), 0, 9, frozenset(), 0, 0.0)
    sent = msgspec.msgpack.decode(wire.encode(wire.Add([wire.Group.of([request])])))
    sent["requests"][0]["first"]["params"]["temperature"] = -1.0
    with pytest.raises(msgspec.ValidationError, match=r"temperature=-1\.0: must be"):
        wire.decode_to_engine(wire.encode(sent))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": MAX_INTEGER + 1}, "max_tokens=18446744073709551616: must be at most 18446744073709551615"),
        ({"min_tokens": 10**400, "max_tokens": None}, "min_tokens=a number of more than 60 digits: must be at most"),
        ({"stop": ["fine", "\udc00"]}, r"stop='\\udc00': it holds a lone surrogate"),
        ({"bad_words": ["\ud800"]}, r"bad_words='\\ud800': it holds a lone surrogate"),
    ],
)
def test_what_no_message_can_hold_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**fields)


def test_whole_numbers_are_stored_as_they_are_used() -> None:
    params = SamplingParams(temperature=10**25, top_p=1, presence_penalty=-1)
    assert (params.temperature, type(params.temperature)) == (1e25, float)
    assert replace(params, top_p=1.0) == params
