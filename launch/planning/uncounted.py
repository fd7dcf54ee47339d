"""Models by their config (model.config): their sizes are counted, their activations are not."""

from __future__ import annotations

from ds_configs.plan import Plan
from launch.console.text_table import Page
from launch.machine.memory import describe_states
from launch.planning.prediction.hardware import Node
from modeling import cost
from recipes.problems import Problem, amount, counted

REFUSAL = Problem(
    "model.config",
    "a model of transformers by its config",
    "its activations are not counted, so nothing says what fits or how long a step takes",
    "plan.py --recipe TABLE/ROW --hardware NODE, without other questions, shows what is counted",
)


def page(plan: Plan, name: str, node: Node, width: int | None) -> Page:
    """Describe what is counted of a plan."""
    recipe = plan.recipe
    size = cost.parameters(recipe.model, recipe.positions)
    each = cost.operations_of(recipe, plan.layout.global_batch, plan.padded_vocab)
    operations = f"{each:,} in the products of a step, by torch's counter"
    layout = plan.layout
    shown = Page(width)
    shown.facts(
        ("recipe", name),
        ("layout", f"{layout.degrees()} = {counted(layout.world, 'process')}"),
        ("parameters", f"{size:,}"),
        ("operations", operations if each else "not counted: they depend on numbers"),
        ("memory", describe_states(plan)),
        ("node", f"{node.name}: {amount(node.gpu.memory_bytes)} for each process"),
    )
    shown.notes(plan.notices)
    return shown
