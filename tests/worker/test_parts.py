"""What a worker holds of a model that several share: how much, and that it reads nothing twice."""

from __future__ import annotations

from collections import Counter

import pytest

from octavo.backends.cpu import CpuBackend
from octavo.models import build_graph, model_config
from octavo.weights import Checkpoint, WeightTensor
from octavo.worker import Place, part_of
from tests.collectives_in_threads import workers


def load(checkpoint: Checkpoint, place: Place) -> CpuBackend:
    model = model_config(checkpoint.config, checkpoint.generation_config)
    graph, tensors = part_of(build_graph(model, "bfloat16"), checkpoint.tensors, place)
    return CpuBackend(
        graph,
        tensors,
        kv_cache_dtype="bfloat16",
        block_size=16,
        num_threads=1,
        vocab_size=100,
        collectives=None
        if place.alone
        else workers(place.tensor_parallel_size, place.pipeline_parallel_size)[place.index],
    )


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_holds_its_share_and_one_indivisible_group_at_most(smollm2: Checkpoint, size: int) -> None:
    """SmolLM2's nine query and three KV heads over two: six and two, three and one."""
    whole = load(smollm2, Place())
    group = sum(  # a KV head with its query heads, in each layer
        tensor.nbytes / 3 for name, tensor in smollm2.tensors.items() if ".attn." in name and len(tensor.shape) == 2
    )
    held = [load(smollm2, Place(rank, size, 1)).weight_bytes for rank in range(size)]
    norms = sum(4 * tensor.shape[0] for tensor in smollm2.tensors.values() if len(tensor.shape) == 1)
    assert max(held) <= whole.weight_bytes / size + group
    assert sum(held) == pytest.approx(whole.weight_bytes + (size - 1) * norms, rel=0.001)


def test_each_weight_is_read_once_a_rank_and_its_own_part_alone(
    smollm2: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    raw = WeightTensor.raw.fget
    assert raw is not None

    def counted(tensor: WeightTensor) -> object:
        read[tensor.name] += 1
        nbytes[tensor.name] += tensor.nbytes
        return raw(tensor)

    monkeypatch.setattr(WeightTensor, "raw", property(counted))
    for rank in range(2):
        read.clear()
        load(smollm2, Place(rank, 2, 1))
        assert set(read.values()) == {1}
        assert read.keys() == {tensor.name for tensor in smollm2.tensors.values()}
    for tensor in smollm2.tensors.values():
        copies = 2 if len(tensor.shape) == 1 else 1
        assert nbytes[tensor.name] == copies * tensor.nbytes
