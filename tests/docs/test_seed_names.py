"""The page on the names of the documents that others wrote: it has each of their names, and ours exist."""

from __future__ import annotations

import re
from functools import reduce
from importlib import import_module

import pytest

from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "reference" / "seed-names.md").read_text(encoding="utf-8")

NAMES = {
    "000": """
        MAX_CACHE_LEN MODEL_ID OUTPUT_DIR PREFILL_SEQ_LEN KimiK25TextForCausalLM KimiPrefillWrapper KimiDecodeWrapper
        _IndexCopyCache prepare_text_config load_default_config build_model make_additive_causal_mask
        build_prefill_meta_inputs build_decode_meta_inputs save_kv_mapping num_layers prefill_key_output
        decode_key_input decode_key_output extract_ir graph_inputs graph_outputs model_name save
        kimi_k25_text_local extract_kimi_k25_text_ir.py
    """,
    "001": """
        extract_ir execute_ir verify_ir_with_state_dict ExecutionError constants weight_name_mapping weights nodes
        op_type inputs outputs attrs producer_node producer_output_idx effective_constants inputs_to_parameters
        inputs_to_buffers inputs_to_lifted_tensor_constants _tensor_list_sizes _tensor_list_none_masks test_inputs
        original_model state_dict
    """,
    "002": """
        third_party.prepare_model onnxsim.simplify skipped_optimizers skip_optimizers perform_optimization skip_fuse_bn
        skip_constant_folding skip_shape_inference tensor_size_threshold overwrite_input_shapes test_input_shapes
        input_shapes check_n dynamic_input_shape custom_lib include_subgraph unused_output mutable_initializer
        input_data GetFuseAndEliminationPass GetAvailablePasses GlobalPassRegistry pass_names FuseQKV AdjustAdd
        RewriteInputDtype eliminate_identity getPassName getPassType PassType PassEfficiency PassOptimizationType
        C.simplify Simplify onnxsim_cpp2py_export simplify_path InitEnv ParseProtoFromPyBytes registerPass
        PredicateBasedPass
    """,
    "003": """
        backend/base.py basy.py backend/torch_backend.py backend/aicf_backend.py core/tensor.py module.py functional.py
        core/autograd.py trace.py core/ir.py compile.py core/warmup.py nn/linear.py relu.py losses.py sequential.py
        optim/base.py optim/sgd.py adam.py requires_grad grad
    """,
    "004": """
        Model.add Layer.emit ctx Builder m.b Builder.ops b.ops Builder.input param state value Builder.emit vid name
        spec role producer_op users TensorSpec kind inputs outputs attrs constraints hints saved Op.kind_id attr_schema
        attr_blob OpKind compile_cuda optimize_ir optimize_plan lower_ir_cuda LoweredOp in_vids out_vids
        make_exec_plan_cuda ExecPlan plan.alias plan.lowered CompiledProgram CudaExecutor.run run_compiled
        bind_and_alloc_slots slots feed externals contig() _C.op_call stream mode plan_key static_roles copy_roles
        feed_signature
    """,
}
"""Names of code in each document: classes, functions, fields, options and files; no local variable."""

OURS = sorted(set(re.findall(r"`((?:onnxline|pipeline)(?:\.\w+)+)", PAGE)))


@pytest.mark.parametrize("document", NAMES)
def test_the_page_has_every_name(document: str) -> None:
    left = "\n".join(line.split(" | ")[0] for line in PAGE.splitlines() if line.startswith("|"))
    assert [name for name in NAMES[document].split() if not re.search(rf"(?<!\w){re.escape(name)}", left)] == []


@pytest.mark.parametrize("name", OURS)
def test_each_name_of_ours_exists(name: str) -> None:
    module, _, last = name.rpartition(".")
    try:
        getattr(import_module(module), last)
    except ModuleNotFoundError:  # a method of a class at a door
        package, *parts = name.split(".")
        reduce(getattr, parts, import_module(package))
