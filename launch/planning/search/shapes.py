"""Shapes of models by their size: GPT-3's, with interpolation, and those of the published tables.

GPT-3's: Brown et al. 2020 (arXiv 2005.14165), table 2.1.
"""

from __future__ import annotations

from typing import NamedTuple

from recipes import catalog
from recipes.problems import Problem, ProblemsError, did_you_mean

# of each family, for other sizes
RECIPES = {"gpt2": "openwebtext/gpt2-124m", "bert": "wikipedia/bert-336m"}
WIDE = 2048  # hidden size from which heads are of 128, as in GPT-3; below 64


class Size(NamedTuple):
    """A model by its size.

    Attributes:
        batch: samples of a step: the table's 0.5 to 3.2 million tokens in multiples of 256 samples.
        rate: peak learning rate.
    """

    layers: int
    hidden: int
    heads: int
    batch: int
    rate: float
    length: int = 2048  # tokens of a sample (section 2.1)
    family: str = "gpt2"

    def settings(self, precision: str) -> list[str]:
        """Return the model as overrides of a recipe of its family."""
        return [
            f"model.layers={self.layers}",
            f"model.hidden={self.hidden}",
            f"model.heads={self.heads}",
            f"sequence_length={self.length}",
            f"batch.global={self.batch}",
            f"optimizer.lr={self.rate}",
            f"precision={precision}",
        ]


# The table's 24 heads of 128 (XL) and hidden size of 5140 (13B) are slips: heads x their size is not hidden.
SIZES = {
    "125m": Size(12, 768, 12, 256, 6e-4),
    "350m": Size(24, 1024, 16, 256, 3e-4),
    "760m": Size(24, 1536, 16, 256, 2.5e-4),
    "1.3b": Size(24, 2048, 16, 512, 2e-4),
    "2.7b": Size(32, 2560, 32, 512, 1.6e-4),
    "6.7b": Size(32, 4096, 32, 1024, 1.2e-4),
    "13b": Size(40, 5120, 40, 1024, 1e-4),
    "175b": Size(96, 12288, 96, 1536, 0.6e-4),
}
NAMES = {**SIZES, "345m": SIZES["350m"]}  # GPT-2's label of the same shape


def size(name: str) -> Size:
    """Return the size, of GPT-3 or else as a published table prints it. Raises ProblemsError."""
    label = name.lower()
    came = f"--model {name[:100]}"
    if label in NAMES:
        return NAMES[label]
    rows = rows_by_size()
    if label not in rows:
        rule = "no size of GPT-3 or of the published tables"
        fix = did_you_mean(label, {**NAMES, **rows})
        raise ProblemsError([Problem("--model", came, rule, fix)])
    if len(rows[label]) > 1:
        models = [
            f"{row} ({layers} x {hidden})"
            for (_, layers, hidden, _), row in rows[label].items()
        ]
        rule = f"tables print it for several models: {', '.join(models)}"
        raise ProblemsError(
            [Problem("--model", came, rule, "name one as --recipe, without --model")]
        )
    (row,) = rows[label].values()
    recipe = catalog.load(row)
    model = recipe.model
    batch = recipe.batch.global_
    rate = recipe.optimizer.lr
    return Size(
        model.layers,
        model.hidden,
        model.heads,
        batch,
        rate,
        recipe.sequence_length,
        model.family,
    )


def rows_by_size() -> dict[str, dict[tuple[str, int, int, int], str]]:
    """Map each printed size to its models, as family, layers, hidden size and heads, with a row of each."""
    found: dict[str, dict[tuple[str, int, int, int], str]] = {}
    for table in catalog.tables():
        for row in table.rows:
            values = table.row(row)
            label = (values.get("published") or {}).get("size_label")
            if label and not any(
                key.startswith("model") for key in values.get("unknown") or ()
            ):
                model = values["model"]
                shape = (
                    model.get("family", "gpt2"),
                    model["layers"],
                    model["hidden"],
                    model["heads"],
                )
                found.setdefault(label.lower(), {}).setdefault(
                    shape, f"{table.name}/{row}"
                )
    return found


def usual_layers(hidden: int) -> int:
    """Interpolate the table's layers for a hidden size: even, at least 2."""
    rows = [(0, 0), *((size.hidden, size.layers) for size in SIZES.values())]
    if hidden >= rows[-1][0]:
        return rows[-1][1]
    above = next(index for index, row in enumerate(rows) if row[0] > hidden)
    (low, few), (high, many) = rows[above - 1], rows[above]
    return max(2, 2 * round((few + (many - few) * (hidden - low) / (high - low)) / 2))
