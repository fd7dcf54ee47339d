"""Two ranks that check what the second device notices, each on a device of its own.

Started by tests/second_device/test_device.py. A deliberate mistake must show each time, whatever else the
machine does: as an error, or as wrong numbers.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime.activation_checkpointing.offload_activations import _ActivationOffloadEngine
from reporting import Checks, run_checks
from second_device.board import C

from launch.checkpoints import shares
from launch.checkpoints.tensor_file import TensorEntry
from launch.training.engine import HostCopy

SIZE = 1000


def attempts(attempt: Callable[[bool, float], bool]) -> None:
    """Check that `attempt(True, n)`, the right way, is always right, `attempt(False, n)` never.

    `n`: another number each time, so that what is left in memory is not right by chance.
    """
    outcomes: dict[bool, list[bool | str]] = {True: [], False: []}
    for number in range(6):
        right_way = number % 2 == 0
        torch.board.synchronize()
        try:
            outcomes[right_way].append(attempt(right_way, float(10 * number + 2)))
        except RuntimeError as error:
            assert "board: " in str(error) and " waited for " in str(error), error
            outcomes[right_way].append(str(error))
    assert outcomes[True] == [True] * 3 and True not in outcomes[False], outcomes


def filled(value: float) -> torch.Tensor:
    return torch.full((SIZE,), value, device=torch.board.current_device())


def is_full_of(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor.cpu() == value).all())


def a_stream_that_does_not_wait_for_another(right_way: bool, n: float) -> bool:
    x = filled(n)
    SIDE.wait_stream(torch.board.current_stream())
    with torch.board.stream(SIDE):
        y = x + 1
    if right_way:
        torch.board.current_stream().wait_stream(SIDE)
    z = y * 2
    torch.board.synchronize()
    return is_full_of(z, 2 * n + 2)


def an_event_that_nobody_waits_for(right_way: bool, n: float) -> bool:
    x, event = filled(0.0), torch.board.Event()
    SIDE.wait_stream(torch.board.current_stream())
    with torch.board.stream(SIDE):
        x.fill_(n)
        event.record()
    if right_way:
        event.wait()
    z = x + 1
    torch.board.synchronize()
    return is_full_of(z, n + 1)


def a_pinned_buffer_that_is_filled_again_too_early(right_way: bool, n: float) -> bool:
    buffer = torch.full((SIZE,), n).pin_memory()
    copied = buffer.to(torch.board.current_device(), non_blocking=True)
    if right_way:
        torch.board.current_stream().synchronize()
    buffer.fill_(-1.0)
    return is_full_of(copied, n)


def a_copy_to_the_host_that_is_read_too_early(right_way: bool, n: float) -> bool:
    event = torch.board.Event()
    host = torch.empty(SIZE).copy_(filled(n), non_blocking=True)
    pinned = torch.empty(SIZE, pin_memory=True).copy_(filled(n), non_blocking=True)
    event.record()
    if right_way:
        event.synchronize()
    assert bool((host == n).all()), "a copy to memory that is not pinned waits by itself"
    return bool((pinned == n).all())


def memory_given_back_while_another_stream_uses_it(right_way: bool, n: float) -> bool:
    x = filled(n)
    SIDE.wait_stream(torch.board.current_stream())
    with torch.board.stream(SIDE):
        y = x + 1
    if right_way:
        x.record_stream(SIDE)
    del x
    filled(-1.0)  # the same block
    torch.board.synchronize()
    return is_full_of(y, n + 1)


def a_saved_tensor_whose_part_of_the_pinned_buffer_is_read_too_early(right_way: bool, n: float) -> bool:
    """A checkpoint leaves the device in parts, through one buffer that each part fills anew."""
    x, accelerator = filled(n), shares.get_accelerator()
    unsynchronized = SimpleNamespace(
        pin_memory=accelerator.pin_memory, current_stream=lambda: SimpleNamespace(synchronize=lambda: None)
    )
    used = accelerator if right_way else unsynchronized
    with (
        mock.patch.object(shares, "STAGING_BYTES", 3 * SIZE),
        mock.patch.object(shares, "get_accelerator", lambda: used),
    ):
        copied = shares.Staging().copy(TensorEntry("x", x.dtype, (SIZE,), lambda: x)).read()
    return is_full_of(copied, n)


def figures_of_a_step_that_are_read_too_early(right_way: bool, n: float) -> bool:
    figures = HostCopy(filled(n))
    return (figures.read() if right_way else figures._values.tolist()) == [n] * SIZE


class NeverWaiting(torch.Stream):
    """The same stream, which waits for no event."""

    def wait_event(self, event: object) -> None:
        pass


def an_activation_that_is_used_before_it_is_back(right_way: bool, n: float) -> bool:
    """DeepSpeed's engine copies inputs of recomputed layers away and back on a stream of its own."""
    offload = _ActivationOffloadEngine(min_offload_bytes=0, max_fwd_stash_count=0, keep_last_count=0)
    away, here = offload.offload_input(filled(n)), torch.board.current_stream()
    if not right_way:
        place = {name: getattr(here, name) for name in ("stream_id", "device_index", "device_type")}
        here = NeverWaiting(**place)
    with mock.patch.object(_ActivationOffloadEngine, "compute_stream", property(lambda self: here)):
        back = offload.restore_input(away)
    return is_full_of(back + 1, n + 1)


def a_collective_that_is_not_waited_for(right_way: bool, n: float) -> bool:
    x = filled(n)
    work = dist.all_reduce(x, async_op=True)
    if right_way:
        work.wait()
    y = x * 10
    torch.board.synchronize()
    dist.barrier()
    return is_full_of(y, 20 * n)


def a_collective_of_a_host_tensor() -> None:
    try:
        dist.all_reduce(torch.ones(2))
    except RuntimeError as error:
        assert "cpu" in str(error) or "No backend" in str(error), error
    else:
        raise AssertionError("it was not refused")


def collectives_give_what_gloo_gives() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    mean, whole = filled(float(rank)), torch.empty(2 * SIZE, device=torch.board.current_device())
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    dist.all_gather_into_tensor(whole, filled(float(rank)))
    part = filled(0.0)
    dist.reduce_scatter_tensor(part, whole)
    got = filled(-1.0)
    (dist.send if rank == 0 else dist.recv)(got if rank else filled(7.0), 1 - rank)
    assert is_full_of(mean, 0.5) and whole.cpu().tolist() == [0.0] * SIZE + [1.0] * SIZE
    assert is_full_of(part, float(rank * world)) and is_full_of(got, 7.0 if rank else -1.0)


def adam_counts_on_the_host() -> None:
    parameter = torch.nn.Parameter(filled(1.0))
    parameter.grad = filled(1.0)
    adam = torch.optim.AdamW([parameter], fused=True)
    adam.step()
    adam.state[parameter]["step"] = torch.tensor(1.0)
    adam.step()


def a_host_tensor_among_those_of_the_device() -> None:
    added = lambda: filled(1.0) + torch.ones(SIZE), lambda: filled(1.0).add_(torch.ones(SIZE))
    for wrong in (*added, adam_counts_on_the_host):
        try:
            wrong()
        except RuntimeError as error:
            assert "same device" in str(error), error
        else:
            raise AssertionError("it was not refused")
    assert is_full_of(filled(1.0) + torch.tensor(1.0), 2.0), "a number of the host may take part"


def the_host_reads_memory_of_the_device() -> None:
    address = filled(1.0).data_ptr()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(address, 4)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGSEGV


def a_forked_process_uses_the_device() -> None:
    x = filled(1.0)
    pid = os.fork()
    if pid == 0:
        try:
            x + 1
        except RuntimeError as error:
            os._exit(3 if "forked" in str(error) else 4)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3


def memory_has_a_limit() -> None:
    before = torch.board.memory_allocated()
    try:
        torch.empty(1 << 40, dtype=torch.uint8, device=torch.board.current_device())
    except torch.OutOfMemoryError as error:
        assert "out of memory" in str(error)
    else:
        raise AssertionError("there is no limit")
    assert torch.board.memory_allocated() == before
    free, total = torch.board.mem_get_info()
    assert total - free == before


def random_numbers_are_the_generators_own() -> None:
    """The same from the same seed as on a CPU, and drawing them there changes nothing here."""
    torch.manual_seed(3)
    ones, dropout = torch.ones(40), torch.nn.functional.dropout
    expected = torch.rand(5), torch.randn(20), dropout(ones) != 0
    torch.manual_seed(3)
    torch.rand(100)
    here = torch.board.current_device()
    found = torch.rand(5, device=here), torch.randn(20, device=here), dropout(ones.to(here)) != 0
    assert all(torch.equal(a, b.cpu()) for a, b in zip(expected, found, strict=True))


def what_waits_for_the_host_is_counted() -> None:
    def waits(call: Callable[[], object]) -> dict[str, int]:
        call()  # the first time, results are compared with what the meta device says
        torch.board.synchronize()
        before = C.counts()["waits"]
        call()
        return {
            name: n - before.get(name, 0)
            for name, n in C.counts()["waits"].items()
            if n > before.get(name, 0)
        }

    x, pinned = filled(1.0), torch.ones(SIZE).pin_memory()
    assert waits(lambda: torch.nn.functional.layer_norm(x, (SIZE,)).exp().sum()) == {}
    assert waits(lambda: x.copy_(pinned, non_blocking=True)) == {}
    assert waits(lambda: x.sum().item()) == {"item": 1}
    assert waits(lambda: x.nonzero()) == {"aten::nonzero": 1}
    assert waits(lambda: x.cpu()) == {"copy to host": 1}
    assert waits(lambda: x.copy_(torch.ones(SIZE))) == {"copy to device": 1}


MISTAKES = (
    a_stream_that_does_not_wait_for_another,
    an_event_that_nobody_waits_for,
    a_pinned_buffer_that_is_filled_again_too_early,
    a_copy_to_the_host_that_is_read_too_early,
    memory_given_back_while_another_stream_uses_it,
    a_saved_tensor_whose_part_of_the_pinned_buffer_is_read_too_early,
    figures_of_a_step_that_are_read_too_early,
    an_activation_that_is_used_before_it_is_back,
    a_collective_that_is_not_waited_for,
)
OTHERS = (
    a_collective_of_a_host_tensor,
    collectives_give_what_gloo_gives,
    a_host_tensor_among_those_of_the_device,
    the_host_reads_memory_of_the_device,
    a_forked_process_uses_the_device,
    memory_has_a_limit,
    random_numbers_are_the_generators_own,
    what_waits_for_the_host_is_counted,
)


def prepare(directory: Path) -> Checks:
    global SIDE
    SIDE = torch.board.Stream()
    checks = {check.__name__: check for check in OTHERS}
    return checks | {mistake.__name__: lambda each=mistake: attempts(each) for mistake in MISTAKES}


if __name__ == "__main__":
    run_checks(prepare, Path(sys.argv[1]))
