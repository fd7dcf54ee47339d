"""Formulas of claims.yaml: arithmetic over rows, counts and cost arithmetic, read as Python expressions and nothing else of Python."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Pow: operator.pow,
}  # fmt: skip


def evaluate(text: str, functions: Mapping[str, Callable[..., Any]], names: Mapping[str, Any]) -> Any:
    """The value of an expression of numbers, texts, + - * / **, names and calls of `functions`.

    Raises:
        ValueError: anything else, with the expression.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise ValueError(
            f"formula {text!r}: {error.msg}: write numbers, + - * / **, parentheses and calls"
        ) from None

    def value(node: ast.AST) -> Any:
        if isinstance(node, ast.Expression):
            return value(node.body)
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, str)):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            return _BINARY[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Name) and node.id in names:
            return names[node.id]
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in functions
            and not node.keywords
        ):
            return functions[node.func.id](*(value(argument) for argument in node.args))
        known = ", ".join([*functions, *names])
        raise ValueError(
            f"formula {text!r}: {ast.unparse(node)!r} is not known: there are numbers, + - * / ** and {known}"
        )

    return value(tree)
