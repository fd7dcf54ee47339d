"""tools/benchmark.py kernels: counts of small graphs by hand, and our model next to a plain GPT-2."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from modeling import fusing
from modeling.hidden_dropout import _Dropped, dropped
from modeling.parallel import cross_entropy
from tools import benchmark
from tools.benchmarks.kernel_counts import Counts, Kernel, count, passes
from tools.benchmarks.kernels import one_micro_batch

M, K, N = 8, 16, 32
SMALL = ["model.layers=2", "model.hidden=64", "model.heads=4", "sequence_length=128", "batch.micro=2"]


def tensor(*size: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta", requires_grad=grad)


def test_bytes_and_operations_are_those_of_the_operands():
    x, weight = tensor(M, K), tensor(N, K, grad=True)
    counts = count(lambda: F.gelu(F.linear(x, weight)).sum())
    names = Counter(kernel.name for kernel in counts.kernels)
    assert names == Counter(mm=2, gelu=1, sum=1, ones_like=1, gelu_backward=1)
    product = 4 * (M * K + K * N + M * N)
    assert {k.moved for k in counts.kernels if k.name == "mm"} == {product}
    numbers = counts.numbers()
    assert numbers["operations"] == 2 * 2 * M * N * K and numbers["kernels"] == 6
    assert numbers["bytes"] == 2 * product + 4 * (2 * M * N + (M * N + 1) + 2 + (2 * M * N + 1))


def test_gathers_and_expanded_tensors_count_what_is_read():
    table, at = tensor(1000, K, grad=True), tensor(5, dtype=torch.int64)
    (kernel, *_) = count(lambda: F.embedding(at, table).sum()).kernels
    assert kernel == Kernel("embedding", 2 * 4 * 5 * K + 8 * 5, 0)
    (kernel, *_) = count(lambda: (tensor(K, grad=True).expand(100, K) + 1).sum()).kernels
    assert kernel == Kernel("add", 4 * (K + 100 * K), 0)


def test_a_number_read_on_the_host_is_a_wait():
    x = tensor(K, grad=True)
    assert count(lambda: (x * x.max().item()).sum()).waits == 1


def test_time_is_the_larger_of_bytes_and_operations():
    counts = Counts()
    counts.kernels += [Kernel("bytes", 100, 10), Kernel("operations", 10, 300)]
    assert counts.seconds(bytes_per_s=10, operations_per_s=100) == 10 + 3


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_our_model_starts_no_more_kernels_than_a_plain_gpt2_and_moves_no_more_bytes(dropout):
    """fp16 and bf16 are alike."""
    own = [*SMALL, f"dropout.hidden={dropout}", f"dropout.attention={dropout}"]
    numbers = {}
    for precision in ("fp16", "bf16"):
        recipe = one_micro_batch("openwebtext/gpt2-124m", [*own, f"precision={precision}"])
        numbers[precision] = [count(one_pass).numbers() for _, one_pass in passes(recipe)]
    assert numbers["fp16"] == numbers["bf16"]
    ours, plain, theirs = numbers["bf16"]
    assert ours["kernels"] <= plain["kernels"] < theirs["kernels"]
    assert ours["bytes"] <= 1.1 * plain["bytes"] and not ours["waits"]
    assert ours["operations"] == pytest.approx(plain["operations"], rel=0.01), "but for rows of padding"


def test_dropout_and_loss_are_fused_kernels():
    recipe = one_micro_batch("openwebtext/gpt2-124m", [*SMALL, "dropout.hidden=0.1"])
    _, ours = next(passes(recipe))
    named = Counter(kernel.name for kernel in count(ours).kernels)
    assert named["dropped"] == 2 * (1 + 2 * recipe.model.layers), "both ways"
    assert named["_statistics"] == named["_overwrite"] == 1 and not named["_log_softmax"]


def test_fused_functions_compute_what_the_others_do(monkeypatch):
    """By torch.compile's tracing, which a GPU's kernels follow: dropout to the bit, the loss to rounding."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 7, K, generator=draw).bfloat16().requires_grad_()
    dropout_seeds = torch.randint(-(2**40), 2**40, (2, 7, 2), generator=draw)
    columns = torch.randint(-(2**31), 2**31, (K,), generator=draw).int()
    targets = torch.randint(K, (2, 7), generator=draw)

    def both(drop: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        out = drop(x, dropout_seeds, columns, 0.3)
        losses = cross_entropy.token_losses(3 * x, targets, None)
        gradients = [torch.autograd.grad(y.float().square().sum(), x)[0] for y in (out, losses)]
        return [out.detach(), gradients[0], losses.detach(), gradients[1]]

    plain = both(dropped)
    compiled = []
    monkeypatch.setattr(fusing, "fuses", lambda x: not torch.compiler.is_compiling())
    monkeypatch.setattr(
        fusing, "_compiled", lambda f: compiled.append(f) or torch.compile(f, backend="aot_eager")
    )
    fused = both(_Dropped.apply)
    assert len({*compiled}) == 3, "dropout, the loss and its gradient"
    assert torch.equal(fused[0], plain[0]) and torch.equal(fused[1], plain[1])
    torch.testing.assert_close(fused[2:], plain[2:])


def test_the_table_shows_counts_times_and_predictions(monkeypatch, capsys, tmp_path):
    out = tmp_path / "counts.json"
    flags = [flag for each in SMALL for flag in ("--set", each)]
    monkeypatch.setattr(
        sys, "argv", ["benchmark.py", "kernels", "--recipe", "wikipedia/bert-336m", "--out", str(out), *flags]
    )
    benchmark.main()
    said = capsys.readouterr().out
    assert all(system in said for system in (" ours ", " transformers ", " ours, by plan.py "))
    ours = json.loads(out.read_text())["rows"][0]
    assert (ours["system"], ours["dropout"]) == ("ours", 0.0) and ours["kernels"] > 50
    assert ours["h100-80x8"] < ours["v100-32x8"]
