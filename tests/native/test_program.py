"""What must not happen to a native program: forks, too little memory, arrays that lie. Each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

SETUP = """
import gc, os, resource, signal, sys, threading, time
from types import SimpleNamespace
import numpy as np
from octavo._native import Program

def make(width, threads=1):
    '''An embedding, some products, and the embedding again as the head.'''
    p = Program("portable", threads)
    w = p.add_weight(width if threads > 1 else 32, width)
    rows = width if threads > 1 else 32
    p.pack(w, 0, 1, np.ones((rows, width), np.float32), 0)
    x, h, y = p.add_buffer(width, False, True), p.add_buffer(width, False, False), p.add_buffer(width, False, False)
    s, t = p.add_buffer(width, True, True), p.add_buffer(width, True, False)
    ones = p.add_vector(np.ones(width, np.float32))
    p.add_cache(1, 16, 0)
    p.set_vocab_size(rows)
    p.embed(w, 1.0, 0, (x, 0))
    p.rms_norm((x, 0), ones, 1, 1e-5, (h, 0))
    for _ in range(6 if threads > 1 else 0):
        p.matmul((h, 0), w, -1, "store", (-1, 0), width, (y, 0))
    p.select_rows((x, 0), (s, 0))
    p.rms_norm((s, 0), ones, 1, 1e-5, (t, 0))
    p.logits((t, 0), w)
    p.allocate_kv_cache(64, 16)
    return p

def step(p, count, query_starts=None):
    starts = np.array(query_starts or [0, count], np.int32)
    batch = SimpleNamespace(
        token_ids=np.zeros(count, np.int32), positions=np.arange(count, dtype=np.int32), query_starts=starts,
        logit_rows=np.zeros(1, np.int32), slot_mapping=np.zeros((1, count), np.int64),
        block_tables=np.zeros((1, len(starts) - 1, 64), np.int32))
    logits = np.empty((1, p.vocab_size), np.float32)
    p.step(batch, None, p.vocab_size, np.zeros(1, np.int32), logits)
    return logits

def in_child(work):
    '''Exit status of work() in a fork; 14 when it hangs.'''
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            work()
        except RuntimeError as error:
            print(error, flush=True)
        os._exit(0)
    return os.waitpid(child, 0)[1]
"""


def run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", SETUP + script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return done.stdout


def test_after_a_step_that_found_no_memory_a_smaller_one_works() -> None:
    out = run("""
p = make(1 << 20)
before = step(p, 1)
size = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20),) * 2)
try:
    step(p, 600)
except MemoryError:
    print("no memory")
assert (step(p, 1) == before).all()
""")
    assert out == "no memory\n"


def test_a_child_may_drop_its_parents_engine_and_make_one_of_its_own() -> None:
    run("""
old = Program("portable", 4)
def work():
    global old
    new = Program("portable", 4)
    del old
    gc.collect()
    del new
    gc.collect()
for _ in range(5):
    assert in_child(work) == 0
""")


def test_a_fork_while_a_step_runs_is_told_in_the_child() -> None:
    out = run("""
p = make(2048, threads=2)
thread = threading.Thread(target=lambda: [step(p, 64) for _ in range(20)])
thread.start()
time.sleep(0.05)
assert thread.is_alive()
assert in_child(lambda: step(p, 1)) == 0
assert in_child(lambda: p.allocate_kv_cache(8, 16)) == 0
thread.join()
""")
    assert out.count("made before a fork") == 2


@pytest.mark.parametrize("starts", ["[0, 400000000, 5]", "[0, -3, 5]", "[0, 5, 4, 5]", "[0, 0, 5]"])
def test_query_starts_that_lie_are_refused_before_they_are_followed(starts: str) -> None:
    out = run(f"""
p = make(64)
try:
    step(p, 5, {starts})
except ValueError as error:
    print(error)
""")
    assert out.startswith("program: query_starts do not rise")


def test_a_profile_that_begins_while_a_step_waits_for_others() -> None:
    """It waits for the step's lock, and the step for the GIL: nobody may hold what the other needs."""
    out = run("""
signal.alarm(20)
calls = []

def exchange(kind, mine, everyone):
    if not calls:
        thread = threading.Thread(target=p.start_profile)
        thread.start()
        time.sleep(0.3)  # it is at the lock now
        calls.append(thread)
    everyone[...] = mine

p = Program("portable", 2)
p.set_exchange(2, exchange)
p.set_vocab_size(32)
w = p.add_weight(32, 32)
p.pack(w, 0, 1, np.ones((32, 32), np.float32), 0)
x, y = p.add_buffer(32, False, True), p.add_buffer(32, False, True)
s, t = p.add_buffer(32, True, True), p.add_buffer(32, True, False)
p.add_cache(1, 16, 0)
p.embed(w, 1.0, 0, (x, 0))
p.all_reduce((x, 0), 32, (y, 0))
p.select_rows((y, 0), (s, 0))
p.rms_norm((s, 0), p.add_vector(np.ones(32, np.float32)), 1, 1e-5, (t, 0))
p.logits((t, 0), w)
p.allocate_kv_cache(64, 16)
before = step(p, 3)
calls[0].join()
assert (step(p, 3) == before).all()
print(sorted({op["kind"] for op in p.stop_profile()} & {"all_reduce", "sum_ranks"}))
""")
    assert out == "['all_reduce', 'sum_ranks']\n"
