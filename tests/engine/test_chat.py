"""`LLM.chat`: the road from a conversation to a reply."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from octavo import LLM, RequestError, SamplingParams
from tests.tiny import make_llama

TEMPLATE = """\
{% if tools %}{{ tools | tojson }}{% endif %}{{ mood }}
{%- for m in messages %}
{%- if m.role == 'critic' %}{{ raise_exception('no critics, please') }}{% endif %}
{{- '<|turn|>' + m.role + '\\n' + m.content + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}
"""
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ONE = [{"role": "user", "content": "the quick brown fox"}]
TWO = [*ONE, {"role": "assistant", "content": "jumps"}, {"role": "user", "content": "over <|end|> what?"}]


def with_template(path: Path, template: Any) -> Path:
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    return path


@pytest.fixture(scope="module")
def directory(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat") / "tiny"
    shutil.copytree(tiny_llama, path)
    return with_template(path, TEMPLATE)


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(str(directory), num_kv_blocks=256, num_threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(directory: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(directory)


def test_prompts_equal_transformers_and_replies_equal_generate(llm: LLM, reference: Any) -> None:
    options: dict[str, Any] = {"add_generation_prompt": True, "tools": [{"name": "f"}]}
    (output,) = llm.chat(ONE, GREEDY, tools=options["tools"], chat_template_kwargs={"mood": "glad"})
    assert output.prompt == reference.apply_chat_template(ONE, tokenize=False, mood="glad", **options)
    assert output.prompt_token_ids == reference.apply_chat_template(ONE, return_dict=False, mood="glad", **options)
    (again,) = llm.generate([{"prompt_token_ids": output.prompt_token_ids}], GREEDY)
    assert output.outputs[0].token_ids == again.outputs[0].token_ids
    assert output.finished


def test_several_conversations(llm: LLM) -> None:
    short = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    outputs = llm.chat([ONE, TWO, ONE], [GREEDY, GREEDY, short])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [12, 12, 3]
    assert outputs[0].prompt == llm.chat(ONE, GREEDY)[0].prompt
    assert outputs[0].outputs[0].token_ids == llm.chat(ONE, GREEDY)[0].outputs[0].token_ids
    assert outputs[1].prompt.count("<|end|>") == 4
    assert outputs[1].prompt_token_ids.count(0) == 3  # the one in a message is text


def test_continued_message(llm: LLM, reference: Any) -> None:
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    (output,) = llm.chat(TWO[:2], GREEDY, **options)
    assert output.prompt == reference.apply_chat_template(TWO[:2], tokenize=False, **options)
    assert output.prompt.endswith("assistant\njumps")
    assert output.prompt_token_ids == reference.apply_chat_template(TWO[:2], return_dict=False, **options)


def test_without_max_tokens_the_context_is_the_limit(llm: LLM) -> None:
    """CASES 5."""
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (output,) = llm.chat(ONE, params)
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 256
    assert output.outputs[0].finish_reason == "length"


def test_exactly_one_bos(tmp_path: Path) -> None:
    """CASES 36: the tokeniser adds BOS to plain prompts, and the template writes it too."""
    path = with_template(make_llama(tmp_path / "bos", adds_bos=True), "<|start|>" + TEMPLATE)
    with LLM(str(path), num_kv_blocks=64, num_threads=1) as llm:
        (output,) = llm.chat(ONE, GREEDY)
        assert output.prompt_token_ids[0] == 1
        assert output.prompt_token_ids.count(1) == 1
        (plain,) = llm.generate([output.prompt], GREEDY)
        assert plain.prompt_token_ids == output.prompt_token_ids


class TestSalt:
    LONG = ({"role": "user", "content": "the quick brown fox " * 8},)

    def cached(self, llm: LLM, conversations: Any, salt: Any) -> list[int]:
        outputs = llm.chat(conversations, GREEDY, cache_salt=salt)
        return [output.metrics.num_cached_tokens for output in outputs]

    def test_only_conversations_of_one_salt_share(self, directory: Path) -> None:
        with LLM(str(directory), num_kv_blocks=256, num_threads=1) as llm:
            assert [self.cached(llm, self.LONG, salt) for salt in (None, "a", "b")] == [[0]] * 3
            (count,) = self.cached(llm, self.LONG, "a")
            assert count > 0
            assert self.cached(llm, self.LONG, None) == [count]
            assert self.cached(llm, [self.LONG] * 2, "c") == [0, count]  # one for all
            assert self.cached(llm, [self.LONG] * 4, ["a", "d", None, "e"]) == [count, 0, count, 0]  # one each
            (output,) = llm.chat(self.LONG, GREEDY, cache_salt="f")
            prompt = {"prompt_token_ids": output.prompt_token_ids, "cache_salt": "f"}
            assert llm.generate(prompt, GREEDY)[0].metrics.num_cached_tokens == count

    def test_a_salt_changes_no_reply(self, llm: LLM) -> None:
        plain, salted = llm.chat(ONE, GREEDY), llm.chat(ONE, GREEDY, cache_salt="tenant 7")
        assert plain[0].outputs[0].token_ids == salted[0].outputs[0].token_ids

    @pytest.mark.parametrize(
        ("salt", "message"),
        [
            ("", r"^prompt 0: cache_salt='': expected text of 1 to 1024 characters, or None$"),
            ("x" * 1025, r"^prompt 0: cache_salt='x+\.\.\.: expected text of 1 to 1024"),
            (7, r"^prompt 0: cache_salt=7: expected text"),
            (["a", 7], r"^prompt 1: cache_salt=7: expected text"),
            (["a"], r"^cache_salt has 1 entries for 2 prompts; give one, or one for each$"),
            (["a", "b", "c"], r"^cache_salt has 3 entries for 2 prompts"),
        ],
    )
    def test_what_is_no_salt_is_refused_before_anything_runs(self, llm: LLM, salt: Any, message: str) -> None:
        before = llm.stats()["num_tokens"]
        with pytest.raises(RequestError, match=message):
            llm.chat([ONE, TWO], GREEDY, cache_salt=salt)
        assert llm.stats()["num_tokens"] == before


class TestRefusals:
    @pytest.mark.parametrize("nothing", [[], [ONE, []]])
    def test_empty(self, llm: LLM, nothing: Any) -> None:
        with pytest.raises(RequestError, match="the conversation is empty"):
            llm.chat(nothing, GREEDY)

    def test_the_template_s_own_message(self, llm: LLM) -> None:
        """CASES 36."""
        critic = [{"role": "critic", "content": "boo"}]
        with pytest.raises(RequestError) as caught:
            llm.chat(critic, GREEDY)
        assert str(caught.value) == "no critics, please"
        before = llm.stats()["num_tokens"]
        with pytest.raises(RequestError, match=r"^conversation 1: no critics, please$"):
            llm.chat([ONE, critic], GREEDY)
        assert llm.stats()["num_tokens"] == before  # nothing has run

    def test_no_template(self, tiny_llama: Path) -> None:
        with LLM(str(tiny_llama), num_kv_blocks=64, num_threads=1) as llm:
            with pytest.raises(RequestError, match=r"the model has no chat template: .*give one as chat_template"):
                llm.chat(ONE, GREEDY)
            assert llm.chat(ONE, GREEDY, chat_template=TEMPLATE)[0].prompt.startswith("<|turn|>user\n")

    def test_a_conversation_longer_than_the_context(self, llm: LLM) -> None:
        with pytest.raises(RequestError, match="the context holds 256"):
            llm.chat([{"role": "user", "content": "x " * 600}], GREEDY)
        assert llm.chat(ONE, GREEDY)[0].finished

    def test_hostile_template(self, llm: LLM) -> None:
        """CASES 42."""
        with pytest.raises(RequestError, match="is not safe in line 1 and was stopped"):
            llm.chat(ONE, GREEDY, chat_template="{{ ''.__class__ }}")
        assert llm.chat(ONE, GREEDY)[0].finished


def test_the_renderer_ends_with_the_model(directory: Path) -> None:
    with LLM(str(directory), num_kv_blocks=64, num_threads=1) as llm:
        assert llm._chat_templates._sandbox._process is None  # not before the first chat
        llm.chat(ONE, GREEDY)
        process = llm._chat_templates._sandbox._process
        assert process is not None
        assert process.poll() is None
    assert process.poll() is not None
