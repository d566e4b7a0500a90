"""What torch's exporter cannot translate, in a sentence: the operator, the module that calls it, and the way out."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from pipeline.export.blame import call_frames, first_line

__all__ = ["explain_untranslatable"]


def explain_untranslatable(error: Exception) -> str:
    """The message for `error`, which `torch.onnx.export` raised; its second line is torch's own reason."""
    chain = list(_causes(error))
    reason = first_line(chain[-1])
    node = _failed_node(chain)
    if node is None:
        return f"torch.onnx cannot translate the model; another opset (export.opset) may do\n  {reason}"
    operator = _operator_name(node)
    return f"torch.onnx has no translation for {operator}{_caller(node)}; {_way_out(operator, reason)}\n  {reason}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _failed_node(chain: list[BaseException]) -> Node | None:
    """The node that torch's exporter was at. It names the node in prose only, and after its own decompositions."""
    for error in reversed(chain):
        for frame, _ in reversed(list(call_frames(error))):
            node = frame.f_locals.get("node")
            if isinstance(node, Node) and node.op == "call_function":
                return node
    return None


def _operator_name(node: Node) -> str:
    """`aten.unsqueeze.default`, or `_operator.floordiv` of a Python function."""
    target = node.target
    if isinstance(target, str) or "OpOverload" in type(target).__name__:
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def _caller(node: Node) -> str:
    """`, which module 'layers.0.mlp' (MLP) calls at model.py:12`."""
    stack = node.meta.get("nn_module_stack") or {}
    path, kind = list(stack.values())[-1] if stack else ("", "")
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if "File" in line]
    place = f" at {lines[-1]}" if lines else ""
    who = f"module {path!r} ({name.rpartition('.')[2]})" if path else f"the model ({name.rpartition('.')[2]})"
    return f", which {who if name else 'the model'} calls{place}"


def _way_out(operator: str, reason: str) -> str:
    if operator.partition(".")[0] not in TORCHS_OWN:
        return (
            "it is an operator of a library's own: let the module compute the same by torch's operators where "
            "torch.compiler.is_exporting() is true"
        )
    if "complex-valued" in reason:
        return "on complex numbers it has none: compute with their parts (torch.view_as_real)"
    return "try another opset (export.opset), or other torch operators that compute the same"


TORCHS_OWN = frozenset({"aten", "prims", "_operator", "math", "higher_order"})
