import logging
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from distributed_run import ProcessFailedError, run_distributed
from torch import nn
from torch.distributed.fsdp import fully_shard

from gc_dpr import distributed
from gc_dpr.distributed import gradients as gradients_file
from gc_dpr.errors import ConfigError

pytestmark = pytest.mark.distributed


def rows_of(rank, count, width=2):
    return torch.arange(count * width, dtype=torch.float64).view(count, width) + 100 * rank


def check_gathering():
    rank = distributed.rank()
    count = [2, 0, 3][rank]
    own = rows_of(rank, count)
    transposed = rows_of(rank, count).T.contiguous().T  # the same values, not contiguous
    found = {
        "rank": (rank, distributed.world_size(), distributed.is_main()),
        "backend": dist.get_backend(),
        "counts": distributed.gather_counts(count, "cpu"),
        "rows": distributed.gather_rows(own),
        "transposed": distributed.gather_rows(transposed),
        "bools": distributed.gather_rows(own > 101),
        "nothing": distributed.gather_rows(own[:0]),
        "ids": distributed.gather_rows(torch.full((count,), rank)),
        "columns": distributed.gather_rows_own_gradient(own.T, dim=-1),
        "sum": distributed.sum_over_processes(torch.tensor([1.0, rank])),
        "largest": distributed.largest_over_processes([rank, 5 - rank, -7], "cpu"),
        "no numbers": (
            distributed.largest_over_processes([], "cpu"),
            distributed.gather_integers([], "cpu"),
        ),
    }
    distributed.barrier()
    return found


def test_gathering_unequal_counts():
    results = run_distributed(check_gathering, 3)
    rows = torch.cat([rows_of(0, 2), rows_of(2, 3)])
    for rank, found in enumerate(results):
        assert found["rank"] == (rank, 3, rank == 0)
        assert found["backend"] == "gloo"
        assert found["counts"] == [2, 0, 3]
        assert torch.equal(found["rows"], rows)
        assert torch.equal(found["transposed"], rows)
        assert torch.equal(found["bools"], rows > 101)
        assert found["nothing"].shape == (0, 2)
        assert found["ids"].tolist() == [0, 0, 2, 2, 2]
        assert torch.equal(found["columns"], rows.T)
        assert found["sum"].tolist() == [3.0, 3.0]
        assert found["largest"] == [2, 5, -7]
        assert found["no numbers"] == ([], [[], [], []])


def known_gradient():
    """x_r = w * (r + 1), loss = sum of everything gathered, on each of two processes."""
    w = torch.ones(1, 1, requires_grad=True)
    distributed.gather_rows_with_gradient(w * (distributed.rank() + 1)).sum().backward()
    return w.grad.item()


def weighted_gradient():
    """Each process weighs the gathered rows by its own numbers. Not contiguous, counts 1, 2."""
    rank = distributed.rank()
    own = rows_of(rank, rank + 1).T.contiguous().T.requires_grad_()
    gathered = distributed.gather_rows_with_gradient(own)
    (gathered * weights_of(rank)).T.contiguous().T.sum().backward()
    return own.grad


def weights_of(rank):
    return torch.arange(6, dtype=torch.float64).view(3, 2) ** (rank + 1)


def one_sided_gradient():
    """Only rank 0 has rows that need a gradient; rank 1's backward must meet it all the same."""
    own = rows_of(distributed.rank(), 1).requires_grad_(distributed.rank() == 0)
    distributed.gather_rows_with_gradient(own).sum().backward()
    with torch.no_grad():
        plain = distributed.gather_rows_with_gradient(own)
    return None if own.grad is None else own.grad.tolist(), plain.requires_grad


def no_gradient():
    return distributed.gather_rows_with_gradient(rows_of(distributed.rank(), 1)).requires_grad


def no_rows_anywhere():
    own = rows_of(0, 0).requires_grad_()
    distributed.gather_rows_with_gradient(own).sum().backward()
    return list(own.grad.shape)


def as_with_nccl(function):
    """The way that only nccl takes; gloo knows it too, if slowly."""
    original, dist.get_backend = dist.get_backend, lambda: "nccl"
    try:
        return function()
    finally:
        dist.get_backend = original


def own_gradient():
    """A loss of all rows on each process; only rank 1 runs its backward pass."""
    rank = distributed.rank()
    own = rows_of(rank, rank + 1).requires_grad_()
    gathered = distributed.gather_rows_own_gradient(own)
    if rank == 1:
        (gathered * weights_of(0)).sum().backward()
    columns = distributed.gather_rows_own_gradient(own.T, dim=1)
    return own.grad, gathered.detach(), columns.requires_grad


def different_kinds():
    rank = distributed.rank()
    wrong = [rows_of(0, 1).to([torch.float32, torch.float64][rank]), rows_of(0, 1, 2 + rank)]
    gathers = (
        distributed.gather_rows_with_gradient,
        distributed.gather_rows,
        distributed.gather_rows_own_gradient,
    )
    return [message_of(gather, own) for own in wrong for gather in gathers]


def message_of(gather, own):
    try:
        gather(own)
    except ValueError as error:
        return str(error)
    return None


def gradients_of_gathered_rows():
    return (
        known_gradient(),
        weighted_gradient(),
        one_sided_gradient(),
        no_gradient(),
        different_kinds(),
        own_gradient(),
        no_rows_anywhere(),
        (as_with_nccl(known_gradient), as_with_nccl(weighted_gradient)),
    )


def test_gradient_of_gathered_rows_is_summed_over_processes():
    results = run_distributed(gradients_of_gathered_rows, 2)
    known, weighted, one_sided, plain, kinds, own, no_rows, nccl = zip(*results, strict=True)
    assert known == (2.0, 4.0)
    summed = weights_of(0) + weights_of(1)
    assert torch.equal(weighted[0], summed[:1])
    assert torch.equal(weighted[1], summed[1:])
    assert no_rows == ([0, 2], [0, 2])
    for rank, (one_number, rows) in enumerate(nccl):
        assert one_number == known[rank]
        assert torch.equal(rows, weighted[rank])
    assert one_sided == (([[2.0, 2.0]], False), (None, False))
    assert plain == (False, False)
    assert own[0][0] is None
    assert torch.equal(own[1][0], weights_of(0)[1:])
    for _, rows, has_gradient in own:
        assert torch.equal(rows, torch.cat([rows_of(0, 1), rows_of(1, 2)]))
        assert has_gradient
    for rank, messages in enumerate(kinds):
        assert all(f"processes [{1 - rank}] have something else" in text for text in messages)
        assert all(["torch.float32", "torch.float64"][rank] in text for text in messages[:3])
        assert all(f"({2 + rank},) per row" in text for text in messages[3:])


def make_module():
    """Parameters of two dtypes, one shared, one frozen, one without gradient anywhere."""
    module = nn.ParameterDict(
        {
            "everywhere": torch.zeros(2, 3),
            "on_rank_1": torch.zeros(3),
            "wide": torch.zeros(2, dtype=torch.float64),
            "nowhere": torch.zeros(4),
            "transposed": torch.zeros(2, 2),
        }
    )
    module["frozen"] = nn.Parameter(torch.zeros(1), requires_grad=False)
    module["shared"] = module["everywhere"]
    return module


def sum_module_gradients():
    rank, module = distributed.rank(), make_module()
    for name in ("everywhere", "wide"):
        module[name].grad = torch.full_like(module[name], rank + 1)
    module["transposed"].grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T
    if rank == 1:
        module["on_rank_1"].grad = torch.tensor([1.0, 2.0, 3.0])
    reduced = []
    original, dist.all_reduce = dist.all_reduce, lambda x: (reduced.append(x.numel()), original(x))
    collectives = distributed.sum_gradients([*module.values(), module["everywhere"]])
    dist.all_reduce = original
    gradients = {name: parameter.grad for name, parameter in module.items()}
    return collectives, reduced, gradients


def broadcast_module():
    torch.manual_seed(distributed.rank())
    module = nn.BatchNorm1d(3)
    module.weight.data = torch.rand(3, 2)[:, 0]  # not contiguous
    module.register_buffer("mask", torch.tensor([distributed.is_main()]))
    module.running_mean += distributed.rank() + 1
    distributed.broadcast_parameters(module)
    return module.state_dict()


def sum_in_buckets():
    """Three gradients of 24 bytes with at most 50 bytes a bucket."""
    parameters = [nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(3)]
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, 10**number)
    original, gradients_file._BUCKET_BYTES = gradients_file._BUCKET_BYTES, 50
    try:
        collectives = distributed.sum_gradients(parameters)
    finally:
        gradients_file._BUCKET_BYTES = original
    return collectives, [parameter.grad.tolist() for parameter in parameters]


def sharded_module():
    """A fully sharded part inside a module, and what the functions make of it."""
    inside = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    fully_shard(inside[0])
    values = inside[0].weight.full_tensor().clone()
    distributed.broadcast_parameters(inside)
    synced = []
    with distributed.without_gradient_sync(inside):
        synced.append(inside[0]._get_fsdp_state()._fsdp_param_group.reduce_grads)
    synced.append(inside[0]._get_fsdp_state()._fsdp_param_group.reduce_grads)
    sharded = [distributed.is_fully_sharded(module) for module in (inside, *inside)]
    try:
        distributed.sum_gradients(inside.parameters())
    except ValueError as error:
        message = str(error)
    inside(torch.ones(1, 2)).sum().backward()
    norm = distributed.clip_gradients(inside[0].parameters(), 0.5)
    left = [parameter.grad.full_tensor() for parameter in inside[0].parameters()]
    # every one of the layer's two columns and its bias gets the sum of the next one's rows
    plain = float(inside[1].weight.detach().sum(0).norm()) * 3**0.5
    return {
        "kept": torch.equal(values, inside[0].weight.full_tensor()),
        "same": inside[1].weight.detach(),
        "synced": synced,
        "sharded": sharded,
        "message": message,
        "norm": (norm, plain),
        "clipped": float(sum(grad.square().sum() for grad in left) ** 0.5),
        "again": distributed.sum_gradients(inside[0].parameters()),
    }


def parameters_and_gradients():
    return sum_module_gradients(), broadcast_module(), sum_in_buckets(), sharded_module()


def test_parameters_and_gradients_become_equal():
    results = run_distributed(parameters_and_gradients, 2)
    for (collectives, reduced, gradients), state, buckets, sharded in results:
        assert collectives == 3  # which have one, float32, float64
        assert reduced == [5, 6 + 3 + 4, 2]
        assert gradients["everywhere"].unique().tolist() == [3.0]
        assert gradients["on_rank_1"].tolist() == [1.0, 2.0, 3.0]
        assert gradients["wide"].tolist() == [3.0, 3.0]
        assert gradients["transposed"].tolist() == [[2.0, 6.0], [4.0, 8.0]]
        assert gradients["nowhere"] is None
        assert gradients["frozen"] is None
        for name, value in state.items():
            assert torch.equal(value, results[0][1][name])
        assert buckets == (3, [[2.0] * 3, [20.0] * 3, [200.0] * 3])
        check_sharded(sharded)
        assert torch.equal(sharded["same"], results[0][3]["same"])
    assert state["running_mean"].tolist() == [1.0, 1.0, 1.0]
    assert state["mask"].tolist() == [True]


def check_sharded(found):
    assert found["kept"]
    assert found["synced"] == [False, True]
    assert found["sharded"] == [True, True, False]
    assert "2 of 4 trainable parameters are sharded" in found["message"]
    norm, expected = found["norm"]
    assert norm == pytest.approx(expected, rel=1e-6)
    assert norm > 0.5
    assert found["clipped"] == pytest.approx(0.5, rel=1e-4)
    assert found["again"] == 0


def test_modules_that_reduce_nothing_of_their_own():
    module, synced = nn.Linear(1, 1), []
    with distributed.without_gradient_sync(None):
        pass
    with pytest.raises(ValueError, match="Linear reduces no gradients of its own"):
        distributed.without_gradient_sync(module)
    module.no_sync = lambda: nullcontext(synced.append(1))  # as DistributedDataParallel has it
    with distributed.without_gradient_sync(module):
        assert synced == [1]
    assert not distributed.is_fully_sharded(module)
    assert not distributed.is_fully_sharded(print)
    module.weight.grad, module.bias.grad = torch.full((1, 1), 3.0), torch.full((1,), 4.0)
    assert distributed.clip_gradients(module.parameters(), 1.0) == pytest.approx(5.0)
    assert module.weight.grad.item() == pytest.approx(0.6, rel=1e-5)


def test_one_process_needs_no_group():
    rows = rows_of(0, 2).requires_grad_()
    assert (distributed.rank(), distributed.world_size(), distributed.is_main()) == (0, 1, True)
    assert distributed.gather_counts(5, "cpu") == [5]
    assert distributed.gather_rows_with_gradient(rows) is rows
    assert distributed.gather_rows_own_gradient(rows, dim=1) is rows
    with pytest.raises(IndexError):
        distributed.gather_rows_own_gradient(rows, dim=2)
    assert distributed.largest_over_processes([3, 4], "cpu") == [3, 4]
    assert not distributed.gather_rows(rows).requires_grad
    total = distributed.sum_over_processes(rows)
    assert torch.equal(total, rows)
    assert total.data_ptr() != rows.data_ptr()
    module = nn.Linear(1, 1)
    assert distributed.sum_gradients(module.parameters()) == 0
    distributed.broadcast_parameters(module)
    distributed.barrier()
    with distributed.process_group("cpu") as device:
        assert device == torch.device("cpu")
        assert not dist.is_initialized()


def raise_on_rank_1():
    if distributed.rank() == 1:
        raise ValueError("only here")
    distributed.barrier()


def test_helper_reports_which_process_failed():
    start = time.monotonic()
    with pytest.raises(ProcessFailedError, match="only here") as failure:
        run_distributed(raise_on_rank_1, 2)
    assert 1 in failure.value.errors
    assert time.monotonic() - start < 15


@pytest.fixture
def fake_gpus(monkeypatch):
    """Two GPUs as far as choosing one goes."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


@pytest.mark.usefixtures("fake_gpus")
def test_several_gpus_without_torchrun_use_one_and_say_so(caplog):
    with caplog.at_level(logging.WARNING), distributed.process_group() as device:
        assert device == torch.device("cuda", 0)
    assert "2 GPUs found, using only cuda:0" in caplog.text
    with distributed.process_group("cuda:1") as device:
        assert device == torch.device("cuda", 1)


@pytest.mark.usefixtures("fake_gpus")
def test_torchrun_gives_out_gpus(monkeypatch):
    started = []
    monkeypatch.setattr(dist, "init_process_group", lambda **kwargs: started.append(kwargs))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: started.append("closed"))
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    with distributed.process_group() as device:
        assert device == torch.device("cuda", 1)
    assert started == [{"backend": "nccl", "device_id": device}, "closed"]
    with pytest.raises(ConfigError, match="it gives out GPUs"), distributed.process_group("cuda:0"):
        pass
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match="at most 2 processes"), distributed.process_group("cuda"):
        pass
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(ConfigError, match="torchrun"), distributed.process_group("cuda"):
        pass


@pytest.mark.parametrize(
    ("device", "message"), [("tpu9", "not a device"), ("cuda", "no GPU"), ("mps", "Apple")]
)
def test_missing_devices(monkeypatch, device, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=message), distributed.process_group(device):
        pass
