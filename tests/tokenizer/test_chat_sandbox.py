"""CASES 42: templates that try to get out, to loop for ever, or to eat the memory; and the life of the process."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from octavo.errors import RequestError
from octavo.tokenizer import ChatTemplates, load_tokenizer
from octavo.tokenizer.chat_sandbox import Sandbox


@pytest.fixture(scope="module", params=[None])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    sandbox = Sandbox() if request.param is None else Sandbox(request.param)
    yield sandbox
    sandbox.close()


def render(sandbox: Sandbox, source: str, **variables: object) -> str:
    return sandbox.render(source, {"messages": [], **variables})


def refused(sandbox: Sandbox, source: str) -> str:
    with pytest.raises(RequestError) as caught:
        render(sandbox, source)
    assert "\n" not in str(caught.value)
    assert render(sandbox, "{{ 1 + 1 }}") == "2"  # the next one is served
    return str(caught.value)


@pytest.mark.parametrize("source", [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ (''|attr('__class__')).__mro__ }}",
    "{{ ''['__class__'] }}",
    "{% set x = ''.__class__ %}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ self.__init__.__globals__ }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ ('{0.__cla' ~ 'ss__}').format('') }}",
    "{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{{ raise_exception.__globals__ }}",
    "{{ messages.append(1) }}",
    "{{ strftime_now.__code__ }}",
])  # fmt: skip
def test_ways_out(sandbox: Sandbox, source: str) -> None:
    assert "is not safe in line 1 and was stopped" in refused(sandbox, source)


@pytest.mark.parametrize("sandbox", [1.5], indirect=True)
@pytest.mark.parametrize("source", [
    "{% for a in range(100000) %}{% for b in range(100000) %}{% for c in range(100000) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "{{ 9 ** (9 ** 9) }}",
    "{% macro f(n) %}{{ f(n - 1) if n else '' }}{{ f(n - 1) if n else '' }}{% endmacro %}{{ f(60) }}",
])  # fmt: skip
def test_endless(sandbox: Sandbox, source: str) -> None:
    start = time.monotonic()
    message = refused(sandbox, source)
    assert message == "the chat template ran for more than 1.5 seconds and was stopped"
    assert time.monotonic() - start < 10  # the slack is for a busy machine


@pytest.mark.parametrize("source", [
    "{{ 'x' * 10**10 }}",
    "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    "{{ (range(100000) | list) * 100000 }}",
    "{{ '%9999999999d' | format(1) }}",
])  # fmt: skip
def test_memory(sandbox: Sandbox, source: str) -> None:
    assert "needs too much memory in line 1" in refused(sandbox, source)


def test_output(sandbox: Sandbox) -> None:
    source = "{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}"
    assert "wrote more than 8388608 characters" in refused(sandbox, source)
    assert len(render(sandbox, "{% for i in range(8) %}{{ '😊' * 1000000 }}{% endfor %}")) == 8_000_000


@pytest.mark.parametrize(("source", "message"), [
    ("a\n{% for %}", "the chat template has a syntax error in line 2: "),
    ("\n\n{% endif %}", "syntax error in line 3: "),
    ("\n{{ x.y }}", "the chat template failed in line 2: 'x' is undefined"),
    ("{{ messages[0].role.x }}", "the chat template failed in line 1: "),
    ("\n{{ 1 / 0 }}", "the chat template failed in line 2: ZeroDivisionError: division by zero"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ("{{" + "(" * 9000 + "1" + ")" * 9000 + "}}", "RecursionError"),
    ("{{ range(10**9) }}", "Range too big"),
    ("{% include 'other' %}", "no loader"),
    ("{{ x | nosuchfilter }}", "nosuchfilter"),
])  # fmt: skip
def test_mistakes(sandbox: Sandbox, source: str, message: str) -> None:
    assert message in refused(sandbox, source)


def test_the_template_s_own_message_word_for_word(sandbox: Sandbox) -> None:
    with pytest.raises(RequestError) as caught:
        render(sandbox, r"{{ raise_exception('Nein:\n <ü> \"😊\"') }}")
    assert str(caught.value) == 'Nein:\n <ü> "😊"'


def test_gguf_with_a_hostile_template() -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.chat_template": "{{ ''.__class__.__base__.__subclasses__() }}",
    }
    chat = ChatTemplates(load_tokenizer(Path("hostile.gguf"), metadata, {}, {}))
    with pytest.raises(RequestError, match="the chat template is not safe in line 1 and was stopped"):
        chat.render([{"role": "user", "content": "x"}])
    chat.close()


class TestProcess:
    def test_nothing_runs_before_the_first_render(self) -> None:
        assert Sandbox()._process is None

    def test_one_process_for_all_renders(self, sandbox: Sandbox) -> None:
        render(sandbox, "a")
        first = pid(sandbox)
        render(sandbox, "b")
        assert pid(sandbox) == first

    def test_killed_from_outside(self, sandbox: Sandbox) -> None:
        render(sandbox, "a")
        os.kill(pid(sandbox), signal.SIGKILL)
        wait_until(lambda: sandbox._process is not None and sandbox._process.poll() is not None)
        assert render(sandbox, "b") == "b"

    def test_limits_are_on(self, sandbox: Sandbox) -> None:
        render(sandbox, "a")
        limits = Path(f"/proc/{pid(sandbox)}/limits").read_text()
        assert "Max address space         536870912" in limits
        assert "Max file size             0 " in limits

    def test_close_ends_it_and_the_next_render_starts_another(self) -> None:
        sandbox = Sandbox()
        render(sandbox, "a")
        old = pid(sandbox)
        sandbox.close()
        assert not alive(old)
        assert render(sandbox, "b") == "b"
        sandbox.close()
        sandbox.close()

    def test_it_ends_with_its_object(self) -> None:
        sandbox = Sandbox()
        render(sandbox, "a")
        old = pid(sandbox)
        del sandbox
        gc.collect()
        assert not alive(old)

    @pytest.mark.parametrize("end", ["", "import os; os.kill(os.getpid(), 9)"])
    def test_it_ends_with_the_parent(self, end: str) -> None:
        script = (
            "from octavo.tokenizer.chat_sandbox import Sandbox\n"
            "s = Sandbox(); s.render('x', {'messages': []}); print(s._process.pid, flush=True)\n"
        )
        done = subprocess.run([sys.executable, "-c", script + end], capture_output=True, text=True, check=False)
        wait_until(lambda: not alive(int(done.stdout)))

    def test_it_ends_soon_after_a_parent_that_died_while_it_loops(self) -> None:
        script = (
            "import os, threading, time\n"
            "from octavo.tokenizer.chat_sandbox import Sandbox\n"
            "s = Sandbox(0.5); s.render('x', {'messages': []}); print(s._process.pid, flush=True)\n"
            "threading.Timer(0.2, lambda: os.kill(os.getpid(), 9)).start()\n"
            "s.render('{{ 9 ** (9 ** 9) }}', {'messages': []})\n"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        assert done.returncode == -signal.SIGKILL
        wait_until(lambda: not alive(int(done.stdout)))

    def test_an_interrupt_does_not_mix_up_answers(self, sandbox: Sandbox) -> None:
        render(sandbox, "a")
        me = threading.main_thread().ident
        threading.Timer(0.2, signal.pthread_kill, [me, signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            render(sandbox, "{{ 9 ** (9 ** 9) }}late")
        assert render(sandbox, "b") == "b"

    def test_many_threads(self, sandbox: Sandbox) -> None:
        found: dict[int, str] = {}

        def work(i: int) -> None:
            for _ in range(20):
                found[i] = render(sandbox, "{{ n }}", n=i)
                assert found[i] == str(i)

        threads = [threading.Thread(target=work, args=[i]) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {i: str(i) for i in range(8)}


def pid(sandbox: Sandbox) -> int:
    assert sandbox._process is not None
    return sandbox._process.pid


def alive(process_id: int) -> bool:
    """Whether the process runs: a zombie, which nobody here may reap, does not."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
