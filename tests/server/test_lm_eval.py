"""lm-eval scores a server, through `local-completions`, as it scores the same weights in transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.live import LiveServer
from tests.tiny import make_llama

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # lm-eval's own, and those of the dozen libraries that it brings
]

CHOICES = {
    "task": "tiny_choices",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [
        {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True},
    ],
}
GREEDY = {
    "task": "tiny_greedy",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[0]}}",
    "generation_kwargs": {"until": ["e", "\n"], "do_sample": False, "temperature": 0, "max_gen_toks": 24},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
TASKS = (CHOICES, GREEDY)
SUBJECTS = (
    "the quick brown fox",
    "a journey of a thousand miles",
    "the lazy dog",
    "numbers such as 1 2 3",
    "été, 東京 🦊",
)
ENDINGS = ("runs into the forest", "begins with a single step", "jumps", "is here as well: 4 5 ; ! ?", "says the book")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a vocabulary that is the tokeniser's: octavo samples no id beyond it, and transformers does."""
    return make_llama(tmp_path_factory.mktemp("lm-eval") / "tiny", seed=3, vocab_size=320)


@pytest.fixture(scope="module")
def float32(model: Path) -> Iterator[LiveServer]:
    with LiveServer(model, backend="torch", dtype="float32") as server:
        yield server


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs the tasks, which lie in files, and returns lm-eval's results."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    folder = tmp_path_factory.mktemp("tasks")
    questions = [
        {"question": f"{subject} {link}", "choices": [f" {ending}" for ending in ENDINGS], "answer": (i + j) % 5}
        for i, subject in enumerate(SUBJECTS)
        for j, link in enumerate(("and", "or", "which", "says:"))
    ]
    data = folder / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, questions)))
    source = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "target_delimiter": "",
    }
    for task in TASKS:
        (folder / f"{task['task']}.yaml").write_text(json.dumps({**task, **source}))  # JSON is YAML
    tasks = TaskManager(include_path=str(folder), include_defaults=False)

    def run(kind: str, **options: Any) -> dict[str, Any]:
        return lm_eval.simple_evaluate(
            model=kind,
            model_args=options,
            tasks=[task["task"] for task in TASKS],
            task_manager=tasks,
            log_samples=True,
            bootstrap_iters=0,
        )

    return run


def responses(results: dict[str, Any], task: str) -> list[Any]:
    """What the model has said to each question: (loglikelihood, is greedy) of each choice, or a text."""
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [sample["filtered_resps"] for sample in samples]


@pytest.fixture(scope="module")
def reference(model: Path, evaluate: Any) -> dict[str, Any]:
    results: dict[str, Any] = evaluate(
        "hf", pretrained=str(model), dtype="float32", device="cpu", batch_size=1, max_length=256
    )
    answers = responses(results, "tiny_choices")
    assert len(answers) == 20
    assert 0 < results["results"]["tiny_choices"]["acc,none"] < 1
    assert len({text for (text,) in responses(results, "tiny_greedy")}) > 5
    return results


@pytest.mark.parametrize("options", [
    {"tokenized_requests": True, "batch_size": 1},
    {"tokenized_requests": True, "batch_size": 7, "num_concurrent": 4},
    {"tokenized_requests": False, "num_concurrent": 4},
], ids=["ids", "batches of ids", "text"])  # fmt: skip
def test_the_scores_are_those_of_transformers(
    float32: LiveServer, model: Path, evaluate: Any, reference: dict[str, Any], options: dict[str, Any]
) -> None:
    results = evaluate(
        "local-completions",
        model="tiny",
        base_url=f"{float32.url}/v1/completions",
        tokenizer_backend="huggingface",
        tokenizer=str(model),
        max_length=256,
        **options,
    )
    for task, metric in (
        ("tiny_choices", "acc,none"),
        ("tiny_choices", "acc_norm,none"),
        ("tiny_greedy", "exact_match,none"),
    ):
        assert results["results"][task][metric] == reference["results"][task][metric]
    assert responses(results, "tiny_greedy") == responses(reference, "tiny_greedy")
    for own, expected in zip(responses(results, "tiny_choices"), responses(reference, "tiny_choices"), strict=True):
        assert [is_greedy for _, is_greedy in own] == [is_greedy for _, is_greedy in expected]
        assert [value for value, _ in own] == pytest.approx([value for value, _ in expected], abs=1e-3)
    float32.wait_idle()
