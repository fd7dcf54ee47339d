"""A family of models as one list of layers, in the plain form and in DeepSpeed's pipeline form.

A `Family` (in `gpt2.py` and `bert.py`) defines its layers once, each with its action on the *stream*, the
value handed from layer to layer. That is one tensor, or a tuple: first the residual stream x (B, S, H), then
integers for later layers, such as lengths and the seeds of hidden dropout, which ride along.
With sequence parallelism x and seeds hold this tensor rank's S/t positions, from the embedding to the head.
`Stack` holds all layers as one module (ZeRO 0-3, with or without tensor parallelism); `Pipeline` hands them
to DeepSpeed (pipeline and 3D).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from modeling.hidden_dropout import HiddenDropout
from modeling.initialization import Init, shared_draws
from modeling.parallel.layers import VocabParallelEmbedding, group_size
from modeling.parallel.process_grid import Group, ProcessGrid
from modeling.transformer import LayerShape, TransformerLayer
from recipes.families import FAMILIES, MicroBatchFields
from recipes.schema import Recipe

Stream = Any  # a tensor, or a tuple of tensors and None
Apply = Callable[[Any, Any], Any]  # (layer, stream) -> stream
# (output of the last layer, targets, group) -> the loss, or (the loss, its parts without gradient)
Loss = Callable[..., Any]
Parts = tuple[str, ...]  # names of parts of the loss
Definitions = Sequence["LayerDefinition"]
# (shape, group=, init=) -> the layers in order
LayerList = Callable[..., list["LayerDefinition"]]
Layers = Sequence[tuple[Apply, nn.Module]]
_Chunks = list[tuple[list[Any], bool]]


def first(module: Callable[[Tensor], Tensor], stream: Stream) -> Stream:
    """Apply the layer to the stream's first tensor; the others ride along."""
    if isinstance(stream, Tensor):
        return module(stream)
    changed, *others = stream
    return (module(changed), *others)


@dataclass(frozen=True)
class LayerDefinition:
    """One layer: its module's class and arguments, and its action on the stream.

    Entries of one name share a module; all of them are marked `tied`.
    """

    name: str
    kind: type[nn.Module]
    arguments: dict[str, Any]
    apply: Apply = first
    tied: bool = False

    def parameters(self) -> list[str]:
        """Return the names of its parameters in the module."""
        module = self.kind(
            **self.arguments | {"init": replace(self.arguments["init"], meta=True)}
        )
        return [name for name, _ in module.named_parameters()]


@dataclass(frozen=True)
class ModelShape:
    """The definition of a model of any family, without its weights."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    padded_vocab: int
    positions: int
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    # layers per recomputed chunk; 0: all activations are kept
    checkpoint_interval: int = 0
    recomputes_core: bool = False  # of attention, in every layer
    sequence_parallel: bool = False  # under tensor parallelism
    shared_layers: bool = False  # all have the parameters of one
    borders: bool = False  # the row of a micro-batch's documents is in the stream

    def layer_at(self, index: int) -> LayerShape:
        """Return the shape of one transformer layer."""
        raise NotImplementedError

    @property
    def of_every_layer(self) -> dict[str, Any]:
        """Arguments common to the shapes of all layers."""
        return dict(
            hidden=self.hidden,
            heads=self.heads,
            hidden_dropout=self.hidden_dropout,
            attention_dropout=self.attention_dropout,
            sequence_parallel=self.sequence_parallel,
            recomputes_core=self.recomputes_core,
        )

    def positions_group(self, group: Group) -> Group:
        """Return the tensor group that shares the stream's positions; None: every rank holds them all."""
        return group if self.sequence_parallel else None


def word_layer(
    shape: ModelShape,
    group: Group,
    init: Init,
    *,
    cut: bool,
    project: bool = False,
    tied: bool = True,
) -> LayerDefinition:
    """Return the word embedding, called "word": tokens -> residual stream; with `project` that -> logits.

    `cut`: the stream's positions are cut over the tensor ranks.
    """

    def use(word: nn.Module, stream: Stream) -> Stream:
        return first(partial(word, project=project, cut=cut), stream)

    sizes = dict(vocab=shape.vocab, padded=shape.padded_vocab, hidden=shape.hidden)
    arguments: dict[str, Any] = dict(**sizes, group=group, init=init.child("word"))
    return LayerDefinition("word", VocabParallelEmbedding, arguments, use, tied)


def transformer_layers(
    shape: ModelShape, group: Group, init: Init, apply: Apply
) -> list[LayerDefinition]:
    """Return the layers between the embeddings and the final norm or the heads, called "layers.N".

    Shared ones are all called "layers.0", and know the number of each use.
    """

    def use(number: int, layer: nn.Module, stream: Stream) -> Stream:
        return apply(partial(layer, use=number), stream)

    layers = []
    for i in range(shape.layers):
        name = "layers.0" if shape.shared_layers else f"layers.{i}"
        arguments = dict(shape=shape.layer_at(i), group=group, init=init.child(name))
        how = partial(use, i) if shape.shared_layers else apply
        layers.append(
            LayerDefinition(
                name, TransformerLayer, arguments, how, tied=shape.shared_layers
            )
        )
    return layers


def build(definitions: Definitions) -> dict[str, nn.Module]:
    """Make each module once; return them by name."""
    modules: dict[str, nn.Module] = {}
    for d in definitions:
        if d.name not in modules:
            modules[d.name] = d.kind(**d.arguments)
    return modules


def recomputation(shared_layers: bool) -> Callable[..., Any]:
    """Return DeepSpeed's checkpointing, which restores both streams of attention dropout.

    Its reentrant form adds to a shared layer's gradient chunk by chunk, and ZeRO reduces the first sum.
    """
    form = "non_reentrant_checkpoint" if shared_layers else "checkpoint"
    # DeepSpeed has no types
    return getattr(deepspeed.checkpointing, form)  # type: ignore[no-any-return]


def share_draws(
    init: Init, layers: Callable[..., Definitions], group: Group, device: str
) -> Init:
    """Return `init` for these layers, whose draws the ranks of `group` share on `device`."""
    recording = replace(init, meta=True, draws=[])
    build(layers(init=recording))
    return replace(init, shared=shared_draws(recording.draws or (), group, device))


class Stack(nn.Module):
    """The plain form: one module of all layers; `layers` holds the transformer layers.

    `loss` is the family's function of the last layer's output; `loss_parts` are the names of its parts;
    `inputs` is the number of tensors, without seeds, for the first layer.
    """

    def __init__(
        self,
        definitions: Definitions,
        shape: ModelShape,
        *,
        group: Group,
        loss: Loss,
        loss_parts: Parts,
        inputs: int,
    ):
        super().__init__()
        self.inputs = inputs
        self.shape = shape
        self.group = group
        self.loss = loss
        self.loss_parts = loss_parts
        # The length of the inputs is a multiple of it.
        self.position_ranks = group_size(shape.positions_group(group))
        built = build(definitions)
        for name, module in built.items():
            if not isinstance(module, TransformerLayer):
                self.add_module(name, module)
        self.layers = nn.ModuleList(
            m for m in built.values() if isinstance(m, TransformerLayer)
        )
        self._in_order = [(d.apply, built[d.name]) for d in definitions]

    def forward(
        self, *tensors: Any, dropout_seeds: Tensor | None = None, places: Any = None
    ) -> Any:
        """Return a micro-batch's loss, or (the loss, its parts); without targets the last layer's output.

        tensors: inputs, then targets, in the order of the family's `fields`; missing inputs at the end are
        None. dropout_seeds (B, S, 2): of hidden dropout in training. places: of documents with borders, a
        `PackedRow`; None: a sample is one document. On one rank the output has only the logits of tokens; in
        a tensor group it is this rank's block, -inf at padding of the vocabulary.
        """
        given = [*tensors[: self.inputs], *[None] * (self.inputs - len(tensors))]
        if self.shape.borders:
            given.append(places)
        if dropout_seeds is not None:
            given.append(dropout_seeds)
        stream = tuple(given) if len(given) > 1 else given[0]
        outcome = self.run(stream)
        outputs = outcome if isinstance(outcome, tuple) else (outcome,)
        if len(tensors) > self.inputs:
            return self.loss(*outputs, *tensors[self.inputs :], self.group)
        if self.group is not None:
            return outcome
        return first(lambda logits: logits[..., : self.shape.vocab], outcome)

    def run(self, stream: Stream) -> Stream:
        """Run every layer in turn."""
        interval = self.shape.checkpoint_interval if self.training else 0
        return run_layers(
            self._in_order, stream, interval, recomputation(self.shape.shared_layers)
        )


class PipelineLoss:
    """The loss of the last stage; keeps its parts for `take_parts`."""

    def __init__(self, function: Loss, group: Group, part_names: Parts):
        self.function = function
        self.group = group
        self.part_names = part_names
        self.parts: list[Tensor] = []  # of the micro-batches since `take_parts`

    def __call__(self, stream: Stream, targets: tuple[Tensor, ...]) -> Tensor:
        outputs = stream if isinstance(stream, tuple) else (stream,)
        outcome = self.function(*outputs, *targets, self.group)
        loss: Tensor
        loss, *parts = outcome if isinstance(outcome, tuple) else (outcome,)
        self.parts += parts
        return loss

    def take_parts(self) -> Tensor | None:
        """Return the parts (micro-batches, parts) since the last call; None on the other stages."""
        taken = self.parts
        self.parts = []
        return torch.stack(taken) if taken else None


def _layer_spec(definition: LayerDefinition) -> LayerSpec:
    """Return the layer as DeepSpeed takes it."""
    kind = definition.kind
    if not definition.tied:
        return LayerSpec(kind, **definition.arguments)
    key = definition.name.replace(".", " ")
    return TiedLayerSpec(
        key, kind, tied_weight_attr=definition.parameters(), **definition.arguments
    )


class Pipeline(PipelineModule):  # type: ignore[misc]  # DeepSpeed has no types
    """DeepSpeed's stage, with recomputed chunks of only transformer layers.

    DeepSpeed itself cuts chunks from the stage's first layer on and recomputes none with an embedding.
    Documents with borders are no part of what stages exchange: the host of each has the step's batches.
    """

    def __init__(
        self,
        definitions: Definitions,
        loss: PipelineLoss,
        grid: ProcessGrid,
        shape: ModelShape,
        stages: Sequence[int],
    ):
        """Build this rank's stage; `stages`: transformer layers of each stage."""
        self._bounds = stage_bounds(definitions, stages)
        self._borders = shape.borders
        # of the documents in the next micro-batches, in the order of their passes
        self.rows: Iterator[Any] = iter(())
        layers = [_layer_spec(definition) for definition in definitions]
        with grid.lend_groups():
            super().__init__(
                layers,
                loss_fn=loss,
                topology=PipeModelDataParallelTopology(
                    num_pp=grid.pp, num_mp=grid.tp, num_dp=grid.dp
                ),
                activation_checkpoint_interval=shape.checkpoint_interval,
                activation_checkpoint_func=recomputation(shape.shared_layers),
                checkpointable_layers=[TransformerLayer.__name__],
            )
        self.loss_parts = loss.part_names
        self.takes_dropout_seeds = any(
            isinstance(m, HiddenDropout) and m.probability > 0 for m in self.modules()
        )
        self._applies = [
            d.apply for d in definitions[self._local_start : self._local_stop]
        ]

    def _partition_layers(self, method: str = "") -> None:
        """Take this rank's layers; DeepSpeed's own cuts ignore the output layer's time."""
        self.parts = self._bounds
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    def forward(self, stream: Stream) -> Stream:
        interval = self.activation_checkpoint_interval if self.training else 0
        layers: Layers = list(zip(self._applies, self.forward_funcs, strict=True))
        if self._borders:
            x, *dropout_seeds = stream if isinstance(stream, tuple) else (stream,)
            stream = x, next(self.rows), *dropout_seeds
        stream = run_layers(layers, stream, interval, self.activation_checkpoint_func)
        if self._borders and isinstance(stream, tuple):
            x, _, *dropout_seeds = stream
            stream = (x, *dropout_seeds) if dropout_seeds else x
        return stream


def stage_bounds(definitions: Definitions, stages: Sequence[int]) -> list[int]:
    """Return each stage's first index in `definitions`, and the end.

    Embeddings are on the first stage, norm and heads on the last.
    """
    layers = [
        index for index, d in enumerate(definitions) if d.kind is TransformerLayer
    ]
    assert sum(stages) == len(layers), f"stages of {stages} layers for {len(layers)}"
    firsts = [layers[before] for before in accumulate(stages[:-1])]
    return [0, *firsts, len(definitions)]


def run_layers(
    layers: Layers, stream: Stream, interval: int, checkpoint: Callable[..., Any]
) -> Stream:
    """Run every layer in turn; `checkpoint` recomputes chunks of `interval` transformer layers (0: none)."""
    for chunk, recomputed in recomputed_chunks(layers, interval):
        if not recomputed:
            stream = _apply_all(chunk, stream)
        elif isinstance(stream, Tensor):
            stream = checkpoint(partial(_apply_all, chunk), stream)
        # a transformer layer changes only x; the others are no output of the recomputation
        else:
            x, *others = stream
            stream = (
                checkpoint(
                    partial(_apply_all_to_x, chunk, others),
                    x,
                    *filter(_is_tensor, others),
                ),
                *others,
            )
    return stream


def _apply_all_to_x(
    layers: Layers, others: list[Any], x: Tensor, *given: Tensor
) -> Tensor:
    """Return x after the layers; `given`: the tensors among `others` (a recomputation takes no others)."""
    tensors = iter(given)
    x, *_ = _apply_all(
        layers,
        (x, *(next(tensors) if _is_tensor(other) else other for other in others)),
    )
    return x


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _apply_all(layers: Layers, stream: Stream) -> Stream:
    for apply, layer in layers:
        stream = apply(layer, stream)
    return stream


def recomputed_chunks(layers: Layers, interval: int) -> _Chunks:
    """Group consecutive layers, with True for a chunk of `interval` transformer layers to recompute."""
    chunks: _Chunks = []
    for apply, layer in layers:
        recomputed = interval > 0 and isinstance(layer, TransformerLayer)
        if recomputed and chunks and chunks[-1][1] and len(chunks[-1][0]) < interval:
            chunks[-1][0].append((apply, layer))
        else:
            chunks.append(([(apply, layer)], recomputed))
    return chunks


@dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes:
        name: `model.family` of its recipes.
        shape: (recipe, rows of the embedding) -> the shape of its model, a `ModelShape`.
        layer_list: (shape, group=, init=) -> the layers in order, for both forms.
        loss: (output of the last layer, targets, group) -> the loss, or (the loss, its parts).
        loss_parts: shape -> names of these parts.
    """

    name: str
    shape: Callable[[Recipe, int], ModelShape]
    layer_list: LayerList
    loss: Loss
    loss_parts: Callable[[Any], tuple[str, ...]] = lambda shape: ()

    @property
    def fields(self) -> MicroBatchFields:
        """Names of the inputs and targets of a micro-batch."""
        return FAMILIES[self.name].fields

    def plain(self, shape: Any, *, group: Group, init: Init) -> Stack:
        """Build the plain form: it takes `fields.inputs`, then `fields.targets`."""
        layers = self.layer_list(shape, group=group, init=init)
        parts = self.loss_parts(shape)
        inputs = len(self.fields.inputs)
        return Stack(
            layers, shape, group=group, loss=self.loss, loss_parts=parts, inputs=inputs
        )

    def pipeline(
        self,
        shape: Any,
        *,
        grid: ProcessGrid,
        group: Group,
        init: Init,
        stages: Sequence[int],
    ) -> Pipeline:
        """Build the pipeline form: the first stage takes `fields.inputs`, the last one `fields.targets`.

        `stages`: transformer layers of each stage.
        """
        loss = PipelineLoss(self.loss, group, self.loss_parts(shape))
        layers = self.layer_list(shape, group=group, init=init)
        return Pipeline(layers, loss, grid, shape, stages)


def common_shape(recipe: Recipe, padded_vocab: int) -> dict[str, Any]:
    """Return the fields common to every `ModelShape`, from a recipe and the rows of the embedding."""
    model = recipe.model
    return dict(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        vocab=model.vocab_size,
        padded_vocab=padded_vocab,
        positions=recipe.positions,
        hidden_dropout=recipe.dropout.hidden,
        attention_dropout=recipe.dropout.attention,
        checkpoint_interval=recipe.checkpoint_interval,
        recomputes_core=recipe.recomputes_core,
        sequence_parallel=recipe.parallel.sequence,
        shared_layers=model.shared_layers,
        borders=recipe.data.borders,
    )
