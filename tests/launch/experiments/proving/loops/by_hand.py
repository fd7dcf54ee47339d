"""A GPT in plain torch, as somebody writes it: tensor and sequence parallelism by hand, DDP around it.

Words of a layout: sp cuts the residual stream by positions, clip clips gradients, drop drops embeddings.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, LENGTH, HIDDEN, HEADS, ROWS = 64, 16, 32, 4, 8


class Ranks:
    """The place of a rank, and what ranks do together."""

    def __init__(self, layout, rank):
        self.tp, self.dp, self.sp = layout["tp"], layout["dp"], layout["sp"]
        self.tp_rank, self.dp_rank = rank % self.tp, rank // self.tp
        tensor = [[d * self.tp + t for t in range(self.tp)] for d in range(self.dp)]
        self.tp_group = [dist.new_group(ranks) for ranks in tensor][self.dp_rank]
        self.dp_group = [dist.new_group(list(ranks)) for ranks in zip(*tensor, strict=True)][self.tp_rank]

    def sum(self, tensor, group):
        tensor = tensor.clone()
        dist.all_reduce(tensor, group=group)
        return tensor

    def part(self, tensor, dim):
        return tensor.chunk(self.tp, dim)[self.tp_rank].contiguous()

    def whole(self, tensor, dim):
        parts = [torch.empty_like(tensor) for _ in range(self.tp)]
        dist.all_gather(parts, tensor.contiguous(), group=self.tp_group)
        return torch.cat(parts, dim)


class Enter(Function):
    """Enters what each rank computes a part of; its gradient is the sum of the ranks'."""

    @staticmethod
    def forward(ctx, hidden, ranks):
        ctx.ranks = ranks
        return ranks.whole(hidden, 1) if ranks.sp else hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        gradient = ctx.ranks.sum(gradient, ctx.ranks.tp_group)
        return ctx.ranks.part(gradient, 1) if ctx.ranks.sp else gradient, None


class Leave(Function):
    """Leaves it: the sum of the ranks' parts."""

    @staticmethod
    def forward(ctx, partial, ranks):
        ctx.ranks = ranks
        hidden = ranks.sum(partial, ranks.tp_group)
        return ranks.part(hidden, 1) if ranks.sp else hidden

    @staticmethod
    def backward(ctx, gradient):
        return ctx.ranks.whole(gradient, 1) if ctx.ranks.sp else gradient, None


class Gather(Function):
    """All ranks' logits; everybody computes the same loss of them."""

    @staticmethod
    def forward(ctx, logits, ranks):
        ctx.ranks = ranks
        return ranks.whole(logits, -1)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.ranks.part(gradient, -1), None


class Linear(nn.Module):
    """A linear layer whose weight is cut by the dimension `cut`: 0 column parallel, 1 row parallel."""

    def __init__(self, inputs, outputs, ranks, cut):
        super().__init__()
        sizes = [outputs, inputs]
        sizes[cut] //= ranks.tp
        self.ranks, self.cut = ranks, cut
        self.weight = nn.Parameter(torch.randn(sizes) * 0.1)
        self.bias = nn.Parameter(torch.randn(sizes[0]) * 0.1)
        self.weight.cut, self.bias.cut = True, cut == 0

    def forward(self, hidden):
        if self.cut == 0:
            return F.linear(Enter.apply(hidden, self.ranks), self.weight, self.bias)
        return Leave.apply(F.linear(hidden, self.weight), self.ranks) + self.bias


class Layer(nn.Module):
    def __init__(self, ranks):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = Linear(HIDDEN, 3 * HIDDEN, ranks, 0), Linear(HIDDEN, HIDDEN, ranks, 1)
        self.heads = nn.LayerNorm(HIDDEN // HEADS)  # of each head, so within the tensor-parallel region
        self.heads.weight.summed = self.heads.bias.summed = True
        self.up, self.down = Linear(HIDDEN, 4 * HIDDEN, ranks, 0), Linear(4 * HIDDEN, HIDDEN, ranks, 1)

    def forward(self, hidden):
        qkv = self.qkv(self.norm_1(hidden)).unflatten(-1, (-1, 3, HIDDEN // HEADS)).transpose(1, 2)
        scale = (HIDDEN // HEADS) ** -0.5
        attended = F.scaled_dot_product_attention(*qkv.unbind(3), is_causal=True, scale=scale)
        hidden = hidden + self.out(self.heads(attended).transpose(1, 2).flatten(2))
        return hidden + self.down(F.gelu(self.up(self.norm_2(hidden))))


class Model(nn.Module):
    def __init__(self, ranks, dropped):
        super().__init__()
        self.ranks, self.dropped = ranks, dropped
        self.embedding = nn.Parameter(torch.randn(VOCABULARY // ranks.tp, HIDDEN) * 0.3)
        self.embedding.cut = True
        self.positions = nn.Parameter(torch.randn(LENGTH, HIDDEN) * 0.3)
        self.layers = nn.ModuleList(Layer(ranks) for _ in range(2))
        self.norm = nn.LayerNorm(HIDDEN)
        self.register_buffer("seen", torch.zeros(VOCABULARY))  # a prior of the logits

    def forward(self, tokens, numbers):
        ranks = self.ranks
        local = tokens - ranks.tp_rank * len(self.embedding)
        here = (local >= 0) & (local < len(self.embedding))
        found = F.embedding(local.where(here, 0), self.embedding) * here[..., None]
        hidden = Leave.apply(found, ranks)
        hidden = hidden + (ranks.part(self.positions, 0) if ranks.sp else self.positions)
        hidden = self.drop(hidden, numbers) if self.dropped else hidden
        for layer in self.layers:
            hidden = layer(hidden)
        logits = F.linear(Enter.apply(self.norm(hidden), ranks), self.embedding)
        return Gather.apply(logits, ranks) + 0.1 * self.seen.log1p()

    def drop(self, hidden, numbers):
        seeds = torch.initial_seed() + numbers
        draws = [torch.Generator().manual_seed(int(seed)) for seed in seeds]
        kept = torch.stack([torch.rand(LENGTH, HIDDEN, generator=draw) > 0.1 for draw in draws])
        return hidden * (self.ranks.part(kept, 1) if self.ranks.sp else kept) / 0.9


def batch(step):
    """Rows of different lengths; what is behind a row's end does not count."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    lengths = torch.tensor([16, 5, 13, 9, 3, 11, 2, 6])
    counts = (torch.arange(LENGTH) < lengths[:, None]).float()
    return {"tokens": tokens, "counts": counts, "numbers": step * ROWS + torch.arange(ROWS)}


def clip(model, ranks, largest):
    """Return the norm of all ranks' gradients, and make it no larger than `largest`."""
    gradients = [each.grad for each in model.parameters()]
    cut = [hasattr(each, "cut") and each.cut for each in model.parameters()]
    squares = torch.stack([each.pow(2).sum() for each in gradients])
    cut = torch.tensor(cut)
    norm = (ranks.sum(squares[cut].sum(), ranks.tp_group) + squares[~cut].sum()).sqrt()
    if norm > largest:
        for gradient in gradients:
            gradient *= largest / norm
    return norm


def train(proof):
    ranks, accumulation = Ranks(proof.layout, proof.rank), proof.layout["accumulation"]
    bare = Model(ranks, proof.layout["drop"])
    proof.load(bare)
    matrices = [each for each in bare.parameters() if each.dim() > 1]
    vectors = [each for each in bare.parameters() if each.dim() == 1]
    decayed = {"params": matrices, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW([decayed, {"params": vectors, "weight_decay": 0.0}], lr=2e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 8)
    if proof.resumed:
        saved = torch.load(proof.resumed / f"{proof.rank}.pt")
        bare.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
    model = DistributedDataParallel(bare, process_group=ranks.dp_group)
    proof.watch(model, optimizer)
    for rows in proof.batches():
        mine = proof.rows(rows, ranks.dp_rank, ranks.dp)
        count = ranks.sum(mine["counts"].sum(), ranks.dp_group)
        total = 0.0
        optimizer.zero_grad()
        for number in range(accumulation):
            micro = proof.rows(mine, number, accumulation)
            synced = number == accumulation - 1
            with contextlib.nullcontext() if synced else model.no_sync():
                logits = model(micro["tokens"][:, :-1], micro["numbers"])
                losses = F.cross_entropy(logits.transpose(1, 2), micro["tokens"][:, 1:], reduction="none")
                loss = (losses * micro["counts"]).sum() / count
                (loss * ranks.dp).backward()  # DDP takes the mean over the ranks
            total += loss.detach()
        for parameter in bare.parameters():
            uncut = ranks.sp and not getattr(parameter, "cut", False)
            if uncut or getattr(parameter, "summed", False):
                parameter.grad = ranks.sum(parameter.grad, ranks.tp_group)
        norm = clip(bare, ranks, 0.5 if proof.layout["clip"] else float("inf"))
        optimizer.step()
        schedule.step()
        tokens = mine["tokens"].flatten().bincount(minlength=VOCABULARY)
        bare.seen += ranks.sum(tokens.float(), ranks.dp_group)
        proof.step(ranks.sum(total, ranks.dp_group), norm)
    if proof.checkpoint:
        proof.checkpoint.mkdir(parents=True, exist_ok=True)
        state = {"model": bare, "optimizer": optimizer, "schedule": schedule}
        state = {name: each.state_dict() for name, each in state.items()}
        torch.save(state, proof.checkpoint / f"{proof.rank}.pt")
