"""What a configuration of AIMET means for one model: its entries in AIMET's order of precedence, as rules of tensors.

AIMET's order: defaults, params, op_type, supergroups, model_input, model_output, then supergroup_pass_list, and last
what its QuantizationSimModel does whatever the file says: for norms, and for products of two computed values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import onnx
from onnx import NodeProto

from passes.encodings.aimet import WITHOUT_QUANTIZER
from passes.encodings.encoding import BIAS
from passes.graph.op_facts import MATRIX_PRODUCTS, ONNX_DOMAINS, PRODUCTS, attribute_of
from passes.structures.norms import NormPattern, find_norm_patterns
from passes.structures.view import GraphView
from passes.weights.detached import DetachedModel
from pipeline.config.quantsim import FLOAT, Precision
from pipeline.errors import UsageError
from pipeline.quantsim.aimet_config import AimetConfig, AimetKernel, AimetTensor
from pipeline.quantsim.placement import UNIT_OPS, PlacementRule
from pipeline.quantsim.sites import Site


@dataclass(frozen=True, slots=True)
class Conventions:
    """What a configuration of AIMET comes down to in one model. `notes`: where AIMET and onnxline differ."""

    rules: tuple[PlacementRule, ...]
    notes: tuple[str, ...]


def apply_conventions(
    config: AimetConfig, weight_bits: int, activation_bits: int, model: DetachedModel, sites: Sequence[Site]
) -> Conventions:
    """Make rules for the tensors of `model`; one rule for each entry of `config` that decides one.

    Raises:
        UsageError: a kernel of the target needs fewer bits than are asked for.
    """
    reader = _ConventionReader(config, weight_bits, activation_bits, model, sites)
    reader.read()
    return Conventions(tuple(reader.rules()), tuple(reader.notes()))


@dataclass(frozen=True, slots=True)
class _Decision:
    """The state of one tensor. `entry` is the last entry that has changed it, and `place` the order of entries."""

    is_quantized: bool
    is_symmetric: bool
    bits: int
    entry: str
    place: int
    is_per_channel: bool = False
    limits: tuple[float, float] | None = None
    reason: str = ""


class _ConventionReader:
    """Reads the entries in order; each method is one section of the configuration."""

    def __init__(
        self, config: AimetConfig, weight_bits: int, activation_bits: int, model: DetachedModel, sites: Sequence[Site]
    ) -> None:
        self._config, self._weight_bits, self._activation_bits = config, weight_bits, activation_bits
        self._view = GraphView(model)
        self._sites = {site.tensor: site for site in sites}
        self._sources = {value: site.tensor for site in sites for value in site.moved_to}
        self._outputs = [info.name for info in model.proto.graph.output]
        self._decisions: dict[str, _Decision] = {}
        self._place = 0

    def read(self) -> None:
        self._read_defaults()
        self._read_params()
        for node in self._view.own:
            self._read_operator(node)
        patterns = [*self._find_norms(), *self._find_biased_products()]
        self._read_supergroups({id(node) for found in patterns for node in found.nodes})
        self._read_inputs_and_outputs()
        for pattern in patterns:
            self._read_pattern(pattern)
        self._read_kernels()
        self._put_joins_last()
        for node in self._view.own:
            self._read_norm_parameters(node)
            self._read_computed_factor(node)

    def rules(self) -> Iterator[PlacementRule]:
        """A rule for each entry and format. An operator that only moves elements has no rule, and shares the encoding
        of its input."""
        grouped: dict[tuple[object, ...], set[str]] = {}
        for tensor, decision in self._decisions.items():
            key = (decision.place, decision.entry, self._format(tensor, decision), decision.limits, decision.reason)
            grouped.setdefault(key, set()).add(tensor)
        for (_, entry, precision, limits, reason), tensors in sorted(grouped.items(), key=lambda item: item[0][:2]):
            yield PlacementRule(entry, precision, precision, frozenset(tensors), limits, reason)  # type: ignore[arg-type]

    def notes(self) -> Iterator[str]:
        config = self._config
        operators = {node.op_type for node in self._view.own}
        if not config.defaults.strict_symmetric:
            yield (
                "strict_symmetric is not True: AIMET uses the lowest number (-128) of symmetric formats; "
                "here it stays unused, as in onnxruntime"
            )
        unknown = [name for name in config.op_type if not onnx.defs.has(name)]
        if unknown:
            yield f"op_type names {', '.join(unknown)}, which ONNX does not have"
        for name in sorted(operators - CHANNELWISE):
            if config.operator(name).per_channel_quantization:
                yield f"op_type.{name}.per_channel_quantization: its parameters have one scale here"
        unlimited = sorted(name for name in operators & UNIT_OPS if config.operator(name).encoding_constraints is None)
        if unlimited:
            yield f"{', '.join(unlimited)}: results have the range 0 to 1 here, which AIMET measures under this file"
        if self._has_quantized_biases():
            yield "params.bias is quantized: a bias of Conv or Gemm has 32 bits here, whatever the file says"
        if "MaskedSoftmax" in config.supergroup_pass_list:
            yield "supergroup_pass_list: MaskedSoftmax changes no placement, in AIMET neither"

    def _has_quantized_biases(self) -> bool:
        setting = self._config.params.get("bias", self._config.defaults.params)
        found = any(site.role == "bias" for site in self._sites.values())
        return found and bool(setting.is_quantized)

    def _read_defaults(self) -> None:
        defaults = self._config.defaults
        for tensor, site in self._sites.items():
            if site.parameter:
                is_symmetric = bool(defaults.params.is_symmetric)
                decision = _Decision(
                    bool(defaults.params.is_quantized), is_symmetric, self._weight_bits, "defaults.params", 0
                )
                self._decisions[tensor] = replace(decision, is_per_channel=self._config.is_per_channel(site.op))
            elif not site.moves or len(site.shares) > 1:
                is_made = site.role == "activation"
                self._decisions[tensor] = _Decision(
                    is_made, defaults.ops.is_symmetric, self._activation_bits, "defaults.ops", 0
                )

    def _read_params(self) -> None:
        self._place = 1
        for tensor, site in self._sites.items():
            if site.parameter in self._config.params:
                self._change_parameter(tensor, f"params.{site.parameter}", self._config.params[site.parameter])

    def _read_operator(self, node: NodeProto) -> None:
        self._place = 2
        entry, operator = f"op_type.{node.op_type}", self._config.operator(node.op_type)
        if node.domain not in ONNX_DOMAINS:
            return
        if node.op_type not in self._config.op_type:
            if node.op_type in WITHOUT_QUANTIZER:
                self._change(node.output, MOVED, is_quantized=False, reason=f"{MOVED}: AIMET has no quantizer there")
            return
        reads = [name for name in node.input if name in self._sites and not self._sites[name].parameter]
        if operator.is_input_quantized:
            self._change(reads, entry, is_quantized=True)
        if operator.is_output_quantized is not None:
            reason = "" if operator.is_output_quantized else f"{entry}.is_output_quantized is False"
            self._change(node.output, entry, is_quantized=operator.is_output_quantized, reason=reason)
        if operator.is_symmetric is not None:
            self._change((*reads, *node.output), entry, is_symmetric=operator.is_symmetric)
        limits = operator.encoding_constraints
        if limits is not None and limits.max is not None:
            symmetric = {"is_symmetric": True} if math.isclose(limits.min, -limits.max) else {}
            self._change(node.output, entry, limits=(limits.min, limits.max), **symmetric)
        for tensor in self._parameters_of(node):
            kind = self._sites[tensor].parameter
            if kind in operator.params:
                self._change_parameter(tensor, f"{entry}.params.{kind}", operator.params[kind])

    def _parameters_of(self, node: NodeProto) -> list[str]:
        """The stored tensors that are parameters of `node`, also after layout operators, as AIMET finds them."""
        stored = (self._sources.get(name, name) for name in node.input)
        return [name for name in stored if name in self._sites and self._sites[name].parameter]

    def _read_supergroups(self, taken: set[int]) -> None:
        """Longer rows come first, and no operator is in two of them."""
        self._place = 3
        rows = sorted((group.op_list for group in self._config.supergroups), key=len, reverse=True)
        for row in rows:
            for node in self._view.own:
                found = self._match_row(node, row)
                if found and id(node) not in taken and not taken & {id(member) for member in found}:
                    taken |= {id(member) for member in found}
                    self._keep_float(found[:-1], f"supergroups: {', '.join(row)}")

    def _match_row(self, first: NodeProto, row: Sequence[str]) -> list[NodeProto]:
        """The nodes, beginning with `first`, that are the operators of `row`, each read by the next one alone."""
        found = [first]
        if first.op_type != row[0] or _is_depthwise_or_3d(first, self._view):
            return []
        for op in row[1:]:
            consumer = self._only_consumer(found[-1])
            if consumer is None or consumer.op_type != op:
                return []
            found.append(consumer)
        return found

    def _read_inputs_and_outputs(self) -> None:
        self._place = 4
        is_quantized = self._config.model_input.is_input_quantized
        reason = "" if is_quantized else "model_input does not say that inputs and constants are quantized"
        begins = [name for name, site in self._sites.items() if site.role in ("input", "constant")]
        self._change(
            (name for name in begins if not self._sites[name].parameter),
            "model_input",
            is_quantized=is_quantized,
            reason=reason,
        )
        read = {name for node in self._view.own for name in node.input}
        inner = [name for name in begins if self._sites[name].role == "input" and name not in read]
        self._change(inner, "model_input", is_quantized=False, reason="only the bodies of If, Loop or Scan read it")
        if self._config.model_output.is_output_quantized:
            self._place = 5
            self._change(self._outputs, "model_output", is_quantized=True, reason="")

    def _find_norms(self) -> Iterator[_Pattern]:
        listed = self._config.supergroup_pass_list
        for norm in find_norm_patterns(self._view):
            name = "LayerNormalization" if norm.centred else "RMSNormalization"
            nodes, scale = norm.nodes, self._scale_of(norm)
            if all(node.op_type != "ReduceMean" for node in nodes):
                continue  # AIMET 2.42 knows no mean by a sum
            means = [node for node in nodes if node.op_type == "ReduceMean" and node.input[0] == norm.x]
            if norm.centred and "RMSNormalization" in listed and any(len(node.input) > 1 for node in means):
                name, nodes = "RMSNormalization", self._without_mean(norm, scale)
            if name in listed:
                yield _Pattern(name, nodes, scale)

    def _without_mean(self, norm: NormPattern, scale: str) -> tuple[NodeProto, ...]:
        """What AIMET 2.42 fuses of a norm in parts whose mean has its axes as an input, as it has at opset 18 or later:
        the division of what the mean was subtracted from, and the scale."""
        inner = [node for node in norm.nodes if node.op_type != "Sub" and node.input[0] != norm.x]
        scaled = [index for index, node in enumerate(inner) if scale in node.input]
        return tuple(inner[: scaled[0] + 1] if scaled else inner)

    def _find_biased_products(self) -> Iterator[_Pattern]:
        """MatMul with a constant, and the Add of a constant vector that alone reads it."""
        if "MatmulAdd" not in self._config.supergroup_pass_list:
            return
        constants = self._view.initializers
        for node in self._view.by_op.get("MatMul", ()):
            add = self._only_consumer(node)
            if add is None or add.op_type != "Add" or not self._parameters_of(node):
                continue
            biases = [name for name in add.input if name in constants and len(constants[name].dims) == 1]
            if biases and add.input[0] != add.input[1]:
                yield _Pattern("MatmulAdd", (node, add))

    def _read_pattern(self, pattern: _Pattern) -> None:
        """Inner results and constants stay in float, but for the scale of a norm."""
        self._place = 6
        entry = f"supergroup_pass_list: {pattern.name}"
        self._keep_float(pattern.nodes[:-1], entry)
        reads = {name for node in pattern.nodes for name in node.input if name in self._view.initializers}
        constants = [name for name in reads if name in self._sites and not self._sites[name].parameter]
        self._change(
            (name for name in constants if name != pattern.scale),
            entry,
            is_quantized=False,
            reason=f"{entry}: a constant inside, which the target does not round",
        )
        if pattern.scale and pattern.name == "LayerNormalization" and self._activation_bits == HALF_WORD:
            self._change([pattern.scale], entry, is_symmetric=True)

    def _scale_of(self, norm: NormPattern) -> str:
        """The constant that the quotient of a norm is multiplied by; empty if there is none."""
        for node in norm.nodes:
            if node.op_type == "Mul" and norm.quotient in node.input:
                return next((name for name in node.input if name in self._view.initializers), "")
        return ""

    def _read_kernels(self) -> None:
        self._place = 7
        for node in self._view.own:
            kernels = self._config.kernels_of(node.op_type) if node.domain in ONNX_DOMAINS else ()
            parameters = self._parameters_of(node)
            if not kernels or any(self._takes(kernel, parameters) for kernel in kernels):
                continue
            entry, kernel = f"supported_kernels of {node.op_type}", kernels[0]
            self._use_kernel(node.output, entry, kernel.activation.dtype, kernel.activation.bitwidth)
            if kernel.param is not None:
                self._use_kernel(parameters, entry, kernel.param.dtype, kernel.param.bitwidth)

    def _takes(self, kernel: AimetKernel, parameters: Sequence[str]) -> bool:
        def is_like(dtype: str, bits: int, asked: int) -> bool:
            return dtype == "int" and bits == asked

        fits = is_like(kernel.activation.dtype, kernel.activation.bitwidth, self._activation_bits)
        if not parameters or kernel.param is None:
            return fits
        return fits and is_like(kernel.param.dtype, kernel.param.bitwidth, self._weight_bits)

    def _use_kernel(self, tensors: Iterable[str], entry: str, dtype: str, bits: int) -> None:
        """The first kernel of the list, as AIMET has it: more bits, or float."""
        for tensor in tensors:
            decision = self._decisions.get(tensor)
            if decision is None or not decision.is_quantized:
                continue
            if dtype == "float":
                self._change([tensor], entry, is_quantized=False, reason=f"{entry}: float{bits} is the first one")
            elif bits < decision.bits:
                raise UsageError(
                    f"quantsim.profile: {entry} begins with {bits} bits, and {decision.bits} are asked for {tensor!r}; "
                    "lower weight_bits or activation_bits, since AIMET only goes to kernels of more bits"
                )
            else:
                self._change([tensor], entry, bits=bits)

    def _put_joins_last(self) -> None:
        """Where several tensors come together, as in a Concat, they take over the format of the result, which AIMET
        ties them to; an entry of the operator of one of them, such as a range around zero, does not decide it."""
        self._place = 8
        for tensor, site in self._sites.items():
            decision = self._decisions.get(tensor)
            if len(site.shares) > 1 and decision is not None and decision.is_quantized:
                self._change([tensor], decision.entry)

    def _read_norm_parameters(self, node: NodeProto) -> None:
        self._place = 9
        if node.op_type not in NORMS or node.domain not in ONNX_DOMAINS:
            return
        made = self._decisions.get(node.output[0])
        for tensor in node.input:
            decision = self._decisions.get(tensor)
            if decision is None or not self._sites[tensor].parameter or not decision.is_quantized:
                continue
            bits = max(decision.bits, 8)
            if node.op_type in ("LayerNormalization", "BatchNormalization"):
                bits = 8 if self._config.defaults.hw_version in OLD_HARDWARE else bits
                wanted = (bits, bits >= HALF_WORD)
            elif made is not None and made.is_quantized:
                wanted = (made.bits, made.is_symmetric)
            else:
                wanted = (bits, False)
            if wanted != (decision.bits, decision.is_symmetric):
                self._change([tensor], f"norms: {node.op_type}", bits=wanted[0], is_symmetric=wanted[1])

    def _read_computed_factor(self, node: NodeProto) -> None:
        """The second factor of a product, where both are computed, is like a weight: symmetric."""
        self._place = 10
        if node.op_type not in PRODUCTS or node.domain not in ONNX_DOMAINS or len(node.input) < 2:
            return
        factors = [self._sites.get(name) for name in node.input[:2]]
        if any(site is None or site.parameter for site in factors):
            return
        first, second = (site.group for site in factors if site is not None)
        decision = self._decisions.get(second)
        if decision is None or not decision.is_quantized:
            return
        own = self._config.operator(node.op_type).params.get("weight", AimetTensor()).is_symmetric
        is_symmetric = bool(self._config.defaults.params.is_symmetric if own is None else own)
        bits, hardware = decision.bits, self._config.defaults.hw_version
        other = self._decisions.get(first)
        if node.op_type == "MatMul" and hardware and other is not None and other.is_quantized:
            if hardware in OLD_HARDWARE:
                bits, is_symmetric = 8, True
            elif bits == HALF_WORD:
                is_symmetric = True
                if other.bits != HALF_WORD:
                    self._change([first], "products of computed values", bits=HALF_WORD)
        if (bits, is_symmetric) != (decision.bits, decision.is_symmetric):
            self._change([second], "products of computed values", bits=bits, is_symmetric=is_symmetric)

    def _keep_float(self, nodes: Iterable[NodeProto], entry: str) -> None:
        """The results of `nodes` stay in float, also the results of nodes that only move elements."""
        results = [name for node in nodes for name in node.output if name in self._sites]
        self._change(results, entry, is_quantized=False, reason=f"{entry}: the target does not round it")

    def _change(self, tensors: Iterable[str], entry: str, **change: object) -> None:
        """Take over what an entry says of tensors. A tensor whose elements are only moved has no state of its own."""
        for tensor in tensors:
            if tensor in self._decisions:
                decision = self._decisions[tensor]
                self._decisions[tensor] = replace(decision, **change, entry=entry, place=self._place)  # type: ignore[arg-type]

    def _change_parameter(self, tensor: str, entry: str, setting: AimetTensor) -> None:
        if setting.is_quantized is not None:
            reason = "" if setting.is_quantized else f"{entry}.is_quantized is False"
            self._change([tensor], entry, is_quantized=setting.is_quantized, reason=reason)
        if setting.is_symmetric is not None:
            self._change([tensor], entry, is_symmetric=setting.is_symmetric)

    def _format(self, tensor: str, decision: _Decision) -> Precision | str:
        site = self._sites[tensor]
        if site.role == "bias":  # of a product, which has 32 bits in AIMET's files too, whatever an entry says
            return BIAS
        if not decision.is_quantized:
            return FLOAT
        is_symmetric = decision.is_symmetric
        granularity = "channel" if decision.is_per_channel and site.role == "weight" else "tensor"
        return Precision(decision.bits, is_symmetric, is_symmetric, granularity)

    def _only_consumer(self, node: NodeProto) -> NodeProto | None:
        """The one node that reads the only result of `node`, where that is no output of the model."""
        consumers = [consumer for name in node.output for consumer in self._view.consumers.get(name, ())]
        is_output = not set(self._outputs).isdisjoint(node.output)
        return consumers[0] if len(consumers) == 1 and not is_output else None


@dataclass(frozen=True, slots=True)
class _Pattern:
    """Nodes that the target computes as one; `scale` is the constant among what they read that is rounded."""

    name: str
    nodes: tuple[NodeProto, ...]
    scale: str = ""


def _is_depthwise_or_3d(node: NodeProto, view: GraphView) -> bool:
    """AIMET takes no supergroup that begins with such a convolution."""
    weight = view.initializers.get(node.input[1]) if node.op_type in PRODUCTS - MATRIX_PRODUCTS else None
    if weight is None:
        return False
    groups = attribute_of(node, "group", 1)
    return len(weight.dims) == 5 or (groups > 1 and groups == weight.dims[0])


MOVED: Final = "elements that are only moved or chosen"
"""What the report calls the rule of results in which AIMET has no quantizer whatever the file says."""

HALF_WORD: Final = 16

OLD_HARDWARE: Final = frozenset({"V66", "V68", "V69"})
"""Versions of the processor without kernels for weights of 16 bits."""


NORMS: Final = frozenset({f"{name}Normalization" for name in ("Batch", "Layer", "Group", "Instance", "RMS")})

CHANNELWISE: Final = PRODUCTS
