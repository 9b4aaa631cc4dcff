"""The comparison with peers: requests that never change, and the conversation with processes that may fail."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import ModuleType

import pytest

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a test import the scripts' modules, which import each other as a script's folder allows."""
    monkeypatch.syspath_prepend(str(PEERS))
    for name in ("workloads", "child", "roster", "report", "resident", "machine"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


# First 16 digits of the SHA-256 of each workload as JSON, repetitions 0 and 1, from the script that the peers were
# first measured with.
DIGESTS = {
    "A": ("3e140fdb8accee7e", "3f8112f960fae02d"),
    "B": ("8426634381ed02e4", "42125f299eadabed"),
    "C": ("1b20e013ef63ba11", "dec1c206d4311aee"),
    "D": ("ee8e40a159f73500", "22b17c4dd439ef5a"),
}


@pytest.mark.usefixtures("peers")
class TestWorkloads:
    def test_requests_are_the_same_for_ever(self) -> None:
        resident = load("workloads").RESIDENT
        found = {
            name: tuple(hashlib.sha256(json.dumps(make(rep)).encode()).hexdigest()[:16] for rep in (0, 1))
            for name, make in resident.items()
        }
        assert found == DIGESTS

    def test_totals_of_the_offline_workload(self) -> None:
        requests = load("workloads").offline(0)
        assert (len(requests), sum(len(ids) for ids, _ in requests), sum(n for _, n in requests)) == (
            128,
            38289,
            16928,
        )

    def test_no_run_starts_like_another(self) -> None:
        workloads = load("workloads")
        runs = [workloads.single_stream(rep, output=n) for rep in range(3) for n in (1,)]
        runs += [workloads.single_stream(rep + 100, output=1) for rep in range(3)]
        starts = {tuple(ids[:4]) for run in runs for ids, _ in run}
        assert len(starts) == 6


@pytest.mark.usefixtures("peers")
class TestReport:
    def test_a_ratio_says_how_many_times_as_fast_octavo_is(self) -> None:
        report = load("report")
        ours = [{"seconds": 2.0, "output_tokens": 257, "ttft": 1.0, "first_ids": [1, 2]}]
        theirs = [{"seconds": 4.0, "output_tokens": 257, "ttft": 1.0, "first_ids": [1, 3]}]
        assert report.speedups("A", ours, theirs) == pytest.approx([2.0])
        assert report.speedups("B", ours, theirs) == pytest.approx([3.0])
        assert report.speedups("C", ours, theirs) == pytest.approx([1.0])
        assert report.MEASURES["B"].of(ours[0]) == pytest.approx(1000 / 256)
        assert report.same_first_ids(ours, theirs) == (1, 2)

    def test_ratios_are_of_runs_that_stood_side_by_side(self) -> None:
        """The machine is half as fast in the second repetition: that changes no ratio."""
        report = load("report")
        ours = [{"seconds": seconds, "others": 0.0} for seconds in (1.0, 2.0, 1.0)]
        theirs = [{"seconds": seconds, "others": 0.5} for seconds in (3.0, 6.0)]  # and then it failed
        rows = report.rows({"octavo": {"E": ours}, "vllm_cpu": {"E": theirs}}, ["A", "E"])
        assert [row["engine"] for row in rows] == ["octavo", "vllm_cpu"]
        assert rows[1]["speedup"] == report.Spread(3.0, 3.0, 3.0)
        assert rows[0]["spread"] == report.Spread(1.0, 1.0, 2.0)

    def test_a_peer_is_compared_with_the_octavo_of_its_weights(self) -> None:
        report = load("report")
        seconds = {"octavo": 4.0, "octavo_q4_1": 2.0, "llama_cpp": 8.0, "llama_cpp_q4_1": 6.0, "llama_cpp_gemma3": 1.0}
        runs = {
            name: {"B": [{"seconds": each, "output_tokens": 2, "ttft": 0.0, "first_ids": [1], "others": 0.0}]}
            for name, each in seconds.items()
        }
        rows = {row["engine"]: row for row in report.rows(runs, ["B"])}
        beside = {name: (row["beside"], row["speedup"].median) for name, row in rows.items() if "beside" in row}
        assert beside == {
            "octavo_q4_1": ("octavo", 0.5),
            "llama_cpp": ("octavo", 2.0),
            "llama_cpp_q4_1": ("octavo_q4_1", 3.0),
        }
        assert rows["llama_cpp_q4_1"]["target"] == 1.6
        assert "speedup" not in rows["llama_cpp_gemma3"]  # what it goes with has not run

    def test_no_path_of_the_machine_is_kept(self) -> None:
        text = "ended with 1: FileNotFoundError: [Errno 2] No such file: '/home/me/models/x.gguf' (logs in /tmp/a-b)"
        kept = load("report").without_paths(text)
        assert kept == "ended with 1: FileNotFoundError: [Errno 2] No such file: '(path)' (logs in (path))"
        assert load("report").without_paths("2 tokens/s, 1/2 or a/b") == "2 tokens/s, 1/2 or a/b"


ENGINE = """
    import sys
    sys.path.insert(0, {peers!r})
    import child

    class Engine:
        versions = {{"fake": "1"}}

        def __init__(self, model, threads):
            print("noise on stdout")

        def generate(self, requests):
            outputs = [[ids[0]] * count for ids, count in requests]
            {body}
            return outputs

        def first_token(self, prompt):
            return prompt[::-1]

    child.main(Engine)
"""


@pytest.mark.usefixtures("peers")
class TestProcesses:
    @pytest.fixture
    def command(self, tmp_path: Path):
        def make(body: str = "pass") -> list[str]:
            script = tmp_path / "fake_peer.py"
            script.write_text(textwrap.dedent(ENGINE.format(peers=str(PEERS), body=body)))
            return [sys.executable, str(script), "--model", "m", "--threads", "2"]

        return make

    def start(self, command: list[str], tmp_path: Path, timeout: float = 60.0):
        return load("resident").Resident(command, dict(os.environ), tmp_path / "log", timeout)

    def test_a_workload_is_run_and_counted(self, command, tmp_path: Path) -> None:
        process = self.start(command(), tmp_path)
        try:
            assert process.boot["versions"] == {"fake": "1"}
            answer = process.ask(workload="A", rep=1, requests=3)
            expected = load("workloads").offline(1)[:3]
            assert answer["output_tokens"] == sum(count for _, count in expected)
            assert answer["first_ids"] == [ids[0] for ids, _ in expected]
            assert answer["ttft"] is None
            assert process.ask(workload="B", rep=0, requests=None)["ttft"] > 0
        finally:
            process.close()
        assert "noise on stdout" in (tmp_path / "log").read_text()

    def test_a_process_is_stopped_between_two_runs(self, command, tmp_path: Path) -> None:
        process = self.start(command(), tmp_path)
        try:
            process.ask(workload="C", rep=0)
            stat = Path(f"/proc/{process._process.pid}/stat")
            deadline = time.monotonic() + 10
            while (state := stat.read_text().rsplit(")", 1)[1].split()[0]) != "T" and time.monotonic() < deadline:
                time.sleep(0.01)
            assert state == "T"
        finally:
            process.close()

    def test_too_few_tokens_are_an_error_with_the_reason(self, command, tmp_path: Path) -> None:
        resident = load("resident")
        body = "outputs[0] = outputs[0][:-1] if len(requests) == 64 else outputs[0]"
        process = self.start(command(body), tmp_path)
        try:
            with pytest.raises(resident.PeerError, match=r"1 of 64 requests gave another number of tokens, first \(31"):
                process.ask(workload="D", rep=0)
            with pytest.raises(resident.PeerError, match="ended with 1"):
                process.ask(workload="B", rep=0)
        finally:
            process.close()

    def test_a_process_that_does_not_come_up_is_an_error(self, command, tmp_path: Path) -> None:
        resident = load("resident")
        with pytest.raises(resident.PeerError, match="ended with 1: ZeroDivisionError"):
            self.start(command("1 / 0"), tmp_path)

    def test_a_process_that_hangs_is_ended(self, command, tmp_path: Path) -> None:
        resident = load("resident")
        with pytest.raises(resident.PeerError, match="no answer within 1 s"):
            self.start(command("import time; time.sleep(600)"), tmp_path, timeout=1.0)

    def test_time_to_output(self, command, tmp_path: Path) -> None:
        resident = load("resident")
        seconds = resident.time_to_output([*command(), "--cold"], dict(os.environ), tmp_path / "log", 60.0)
        assert 0 < seconds["seconds"] < 60
        late = [sys.executable, "-c", "import time; time.sleep(0.3); print('x', flush=True); time.sleep(0.3)"]
        assert resident.time_to_output(late, dict(os.environ), tmp_path / "log", 60.0)["seconds"] >= 0.3
        silent = [sys.executable, "-c", "import sys; sys.exit('no model')"]
        with pytest.raises(resident.PeerError, match="no model"):
            resident.time_to_output(silent, dict(os.environ), tmp_path / "log", 60.0)


@pytest.mark.usefixtures("peers")
def test_work_elsewhere_is_noticed() -> None:
    """A process that spins counts as one core, unless it is one's own. The machine may have other guests besides."""
    machine = load("machine")
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"], process_group=0)
    try:
        bystanders, before = machine.Bystanders(), machine.group_seconds(spinning.pid)
        time.sleep(1.0)
        own = machine.group_seconds(spinning.pid) - before
        all_of_it, others = bystanders.cores(0.0), bystanders.cores(own)
    finally:
        spinning.kill()
        spinning.wait()
    assert 0.05 < own < 1.2
    assert all_of_it - others == pytest.approx(own, abs=0.1)


@pytest.mark.usefixtures("peers")
def test_a_machine_that_never_falls_quiet_is_not_waited_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = load("machine")
    clock, busy = [0.0], [0.0]
    monkeypatch.setattr(machine.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(machine, "_busy_seconds", lambda: busy[0])

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        busy[0] += seconds if clock[0] <= 3.5 else 0.0

    monkeypatch.setattr(machine.time, "sleep", sleep)
    machine.wait_for_quiet(2.5)
    assert clock[0] == 3.0  # gave up
    machine.wait_for_quiet(100)
    assert clock[0] == 4.0  # and here it was quiet


@pytest.mark.usefixtures("peers")
def test_every_peer_has_its_script_and_its_requirements() -> None:
    roster = load("roster")
    for peer in roster.ROSTER.values():
        assert peer.script.exists()
        assert peer.ours or (PEERS / f"requirements-{peer.engine}.txt").exists()
        beside = roster.ROSTER[peer.beside]
        assert beside.ours
        assert beside.model == peer.model or beside.name == roster.OURS


@pytest.mark.usefixtures("peers")
def test_flags_name_the_folder_of_models(tmp_path: Path) -> None:
    roster = load("roster")
    setup = roster.Setup(tmp_path / "envs", tmp_path / "models", 2)
    packed = roster.ROSTER["octavo_q4_1_packed"]
    for command in (packed.command(setup), packed.cold_command(setup, "Hello")):
        assert command[command.index("--packed-cache") + 1] == str(tmp_path / "models" / "packed")
    assert packed.model == roster.ROSTER["octavo_q4_1"].model
