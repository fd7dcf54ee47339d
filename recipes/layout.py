"""tp x pp x dp processes, and micro x accumulation x dp = global samples: the arithmetic and what may be wrong with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """How one optimizer step is shared out.

    Attributes:
        tp, pp, dp: degrees of tensor, pipeline and data parallelism, in ranks.
        micro: samples per forward pass and data-parallel rank.
        accumulation: micro-batches per optimizer step and data-parallel rank.
        global_batch: samples per optimizer step, over all data-parallel ranks.
    """

    tp: int
    pp: int
    dp: int
    micro: int
    accumulation: int
    global_batch: int

    def __post_init__(self) -> None:
        assert self.micro * self.accumulation * self.dp == self.global_batch, self

    @property
    def world(self) -> int:
        """Processes."""
        return self.tp * self.pp * self.dp

    def identity(self) -> str:
        """The batch in one line: "8 micro x 1 accumulation x 1 dp = 8 global"."""
        return f"{self.micro} micro x {self.accumulation} accumulation x {self.dp} dp = {self.global_batch} global"


def padded_vocab(vocab: int, tp: int, divisible_by: int = 128) -> int:
    """The smallest multiple of `divisible_by` x tp that holds `vocab` tokens (Megatron-LM's make_vocab_size_divisible_by)."""
    multiple = divisible_by * tp
    return -(-vocab // multiple) * multiple


def divisors(number: int) -> list[int]:
    """Divisors in ascending order."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def closest(number: int, options: list[int], count: int = 2) -> list[int]:
    """The options nearest to `number`, in ascending order."""
    return sorted(sorted(options, key=lambda option: (abs(option - number), option))[:count])


def share_batch(
    micro: int | None, accumulation: int | None, global_batch: int, dp: int, pp: int
) -> tuple[int, int] | str:
    """(micro, accumulation) with micro x accumulation x dp = global_batch, or the problem as one line.

    What is None is derived. With neither given, the micro-batch is the largest that leaves a pipeline of `pp` stages at least
    `pp` micro-batches, since with fewer some stage never works while another does.
    """
    if global_batch % dp:
        near = closest(global_batch, [max(dp, global_batch // dp * dp), (global_batch // dp + 1) * dp])
        return (
            f"batch.global={global_batch} is not divisible by dp={dp}: every data-parallel rank takes the same number of "
            f"samples; --set batch.global={_or(near)}, or start a number of processes that gives a dp of "
            f"{_or(closest(dp, divisors(global_batch)))}"
        )
    per_rank = global_batch // dp
    if micro is None and accumulation is None:
        accumulation = min((d for d in divisors(per_rank) if d >= pp), default=per_rank)
        return per_rank // accumulation, accumulation
    if micro is not None and accumulation is not None:
        if micro * accumulation == per_rank:
            return micro, accumulation
        fixes = [f"--set batch.global={micro * accumulation * dp}"]
        if per_rank % micro == 0:
            fixes.append(f"--set batch.accumulation={per_rank // micro}")
        if per_rank % accumulation == 0:
            fixes.append(f"--set batch.micro={per_rank // accumulation}")
        return (
            f"batch.micro={micro} x batch.accumulation={accumulation} x dp={dp} = {micro * accumulation * dp} is not "
            f"batch.global={global_batch}: micro x accumulation x dp = global; {', or '.join(fixes)}"
        )
    name, given = ("micro", micro) if micro is not None else ("accumulation", accumulation)
    assert given is not None
    if per_rank % given:
        whole = given * dp
        near = closest(
            global_batch, [max(whole, global_batch // whole * whole), (global_batch // whole + 1) * whole]
        )
        return (
            f"batch.{name}={given} with dp={dp} does not divide batch.global={global_batch}: micro x accumulation x dp = "
            f"global; --set batch.{name}={_or(closest(given, divisors(per_rank)))}, or --set batch.global={_or(near)}"
        )
    return (given, per_rank // given) if micro is not None else (per_rank // given, given)


def _or(numbers: list[int]) -> str:
    return " or ".join(str(number) for number in dict.fromkeys(numbers))
