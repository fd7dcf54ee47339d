"""Bytes of a rank's activations for the backward pass.

Symbols besides those of the package: b samples of a micro-batch, S tokens of each, a heads, t tensor ranks,
w bytes of a number (2 in half precision). Derived as in Korthikanti et al. 2022 (arXiv 2205.05198, sections
4.1 and 4.2), with w in the place of their 2; dropout masks, of one byte, count only if there is dropout.
"""

from __future__ import annotations

from dataclasses import dataclass

from recipes.schema import Dropout, Model


@dataclass(frozen=True)
class LayerActivations:
    """Activations of a model's layers on one of t tensor ranks.

    Attributes:
        tokens: b S, of a micro-batch.
        length: S.
        width: w, bytes of a number.
        sequence_parallel: tensors otherwise whole on every tensor rank are cut over them (section 4.2.2).
        keeps_scores: attention keeps its S x S scores, as softmax kernels do; false for kernels that compute
            them again from queries and keys (Dao et al. 2022, arXiv 2205.14135).
        dropout_bytes: per element, of a residual stream's dropout during its computation.
    """

    model: Model
    dropout: Dropout
    tokens: int
    length: int
    width: int
    tp: int = 1
    sequence_parallel: bool = False
    keeps_scores: bool = False
    gelu_copies: int = 0
    dropout_bytes: float = 1

    @property
    def stream(self) -> float:
        """Bytes of the residual stream of a micro-batch, w b S h: all that a recomputed chunk keeps.

        With sequence parallelism a rank has 1/t of it.
        """
        return self.width * self.tokens * self.model.hidden / self._cut

    @property
    def scores(self) -> float:
        """Bytes of one matrix of attention scores of all heads of a rank: w a b S^2 / t."""
        return self.width * self.model.heads * self.tokens * self.length / self.tp

    @property
    def kept(self) -> float:
        """Bytes kept by a layer without recomputation.

        Whole on every rank: the inputs of both LayerNorms, of QKV and of the MLP, 4 w, and two dropout masks;
        cut over t: queries, keys, values and the input of the projection, 4 w, and both sides of the GELU of
        4 h, 8 w: w = 2 gives the paper's 10 + 24 / t. Scores, if kept, add w, and with dropout their masks,
        1, and the result, w: 5 a b S^2 / t. Each of `gelu_copies` adds 4 w / t.
        """
        masks = 2 if self.dropout.hidden else 0
        whole = (4 * self.width + masks) / self._cut
        per_element = whole + (12 + 4 * self.gelu_copies) * self.width / self.tp
        return per_element * self.tokens * self.model.hidden + (
            self.kept_scores if self.keeps_scores else 0.0
        )

    @property
    def kept_scores(self) -> float:
        """Bytes of the softmax, its mask and its dropout: the saving of selective recomputation."""
        return self.scores * (2 + 1 / self.width if self.dropout.attention else 1)

    @property
    def transient(self) -> float:
        """Approximate further bytes of a layer's backward pass: the gradients of its widest step.

        These are the gradients of both sides of the GELU, 8 w h / t, and of the stream, 2 w h; or of kept
        scores before and after the softmax; or the memory of a dropout's mask.
        """
        mlp = (
            self.width * self.tokens * self.model.hidden * (8 / self.tp + 2 / self._cut)
        )
        dropped = (
            self.dropout_bytes * self.tokens * self.model.hidden
            if self.dropout.hidden
            else 0.0
        )
        scores = 2 * self.scores if self.keeps_scores else 0.0
        return max(mlp, dropped, scores)

    @property
    def _cut(self) -> int:
        return self.tp if self.sequence_parallel else 1
