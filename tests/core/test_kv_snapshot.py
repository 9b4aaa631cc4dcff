"""The picture of the pool in docs/kv-memory.md is a real one."""

from dataclasses import fields
from pathlib import Path

from octavo.core import NOTHING, KVSnapshot, SchedulerStats, SequenceBlocks
from tests.core.helpers import Engine, make_scheduler, make_sequence

DOCS = Path(__file__).parents[2] / "docs" / "kv-memory.md"


def drawn(snapshot: KVSnapshot, names: dict[int, str]) -> str:
    """A block a column, then a sequence a line: what a snapshot holds, and no more."""
    owners = snapshot.owners
    columns = []
    for block, state in enumerate(snapshot.states):
        who = "".join(sorted(names[i] for i in owners.get(block, ())))
        columns.append((str(block), who if state == "used" else {"cached": "~", "free": "."}[state]))
    lines = ["  ".join(f"{column[row]:>2}" for column in columns) for row in (0, 1)]
    text = f"block     {lines[0]}\nheld by   {lines[1]}\n\n"
    text += "                computed   cached   preempted   shared   block tables\n"
    for s in sorted(snapshot.sequences, key=lambda s: names[s.seq_id]):
        tables = "  ".join(
            f"[{', '.join('-' if block == NOTHING else str(block) for block in table)}]" for table in s.block_tables
        )
        computed = f"{s.num_computed} of {s.num_tokens}"
        text += (
            f"{names[s.seq_id]}  {s.status:9} {computed:>12} {s.num_cached_tokens:8} {s.num_preemptions:11} "
            f"{s.num_shared:8}   {tables}\n"
        )
    return "\n".join(line.rstrip() for line in text.splitlines())


def test_the_picture_in_the_docs() -> None:
    engine = Engine(make_scheduler(blocks=24, windows=(None, 8), seqs=4, budget=32))
    engine.scheduler.add(make_sequence(0, 9, 1, first_token=900))  # ends at once, and leaves two blocks a group
    engine.run()
    engine.scheduler.add(make_sequence(1, 11, 20, first_token=5))
    for _ in range(7):
        engine.step()
    engine.scheduler.add(make_sequence(2, 10, 20, first_token=5))  # begins as the one before it
    for choice in (0, 1):
        engine.scheduler.add(make_sequence(3 + choice, 6, 9, first_token=300, group=3, choice=choice))
    engine.scheduler.add(make_sequence(5, 9, 20, first_token=500))  # finds no seat
    engine.step()
    snapshot = engine.scheduler.kv_snapshot()
    picture = drawn(snapshot, {1: "A", 2: "B", 3: "C", 4: "D", 5: "E"})
    print(picture)
    assert picture in DOCS.read_text()
    engine.run()


def test_the_docs_name_all_that_there_is() -> None:
    names = [*SchedulerStats._fields, *(f.name for f in fields(KVSnapshot)), *(f.name for f in fields(SequenceBlocks))]
    assert [name for name in names if f"`{name}`" not in DOCS.read_text()] == []
