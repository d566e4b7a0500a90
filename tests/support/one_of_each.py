"""Which parameters of the slowest tests `make test` runs: one of each shape. `make test-all` runs the whole list.

`python -m benchmarks.mutations` says whether faults of the product are found by what is left as by the whole list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

ONE_OF_EACH: Final[Mapping[str, Sequence[str]]] = {
    # Over oneself and across; positions that are projected too; 1×1 Conv; Einsum; K and V from one latent matrix.
    "benchmarks/model_families/test_detect.py::test_finds_the_triples_that_torch_ran": (
        "squeezebert", "deepseek_v3",
    ),
    "examples/test_train_digits_qat.py::test_weights_of_4_bits_are_within_a_point_of_floats": ("4-1",),
    "fuzz/test_fuzz.py::test_broken_files_end_in_a_result_or_in_one_message": ("0",),
    "passes/external/test_bert.py::test_what_destroys_another_kind_is_left_out_alone": (
        "onnxruntime-residual", "ort_fusions-gelu",
    ),
    "passes/provenance/test_models.py::test_every_node_of_the_final_model_answers": (
        "BertModel", "LlamaForCausalLM",
    ),
    "passes/provenance/test_models.py::test_survivors_keep_the_module_of_the_node_with_the_same_values": (
        "BertModel", "LlamaForCausalLM",
    ),
    "passes/provenance/test_models.py::test_whatever_the_nodes_are_called": (
        "BertModel-same graph-drop_everything", "BertModel-another input-number_afresh",
        "LlamaForCausalLM-another input-permute_names",
    ),
    "passes/provenance/test_shared_weights.py::test_a_product_belongs_to_the_module_that_owns_its_weight": (
        "biases of zeros-default", "biases that differ-default", "biases that differ-onnxslim",
    ),
    # Norms spelled out or not, rope, two stacks with a bias of positions, convolutions with and without BatchNorm.
    "passes/structures/test_exports.py::test_finds_what_the_tree_of_modules_has": (
        "Llama, opset 23", "T5", "ResNet",
    ),
    "passes/structures/test_exports.py::test_keeps_every_kind_of_a_model": (
        "ResNet-loses0-merging0", "ViT, opset 18-loses1-merging1", "Llama, opset 23-loses3-merging3",
    ),
    "passes/structures/test_tricky_kept.py::test_a_verdict_says_what_the_numbers_say": (
        "plain", "weight norm", "DequantizeLinear", "gathered from a stack", "split from a stack",
        "QDQ around activations", "Dropout behind", "Einsum of three axes", "Conv and BatchNormalization",
        "ReLU weighs", "everything transposed", "linear attention", "two equal Hadamards", "rope as a product",
        "Linformer", "cache by ScatterND",
    ),
    "pipeline/authoring/test_training.py::test_a_training_that_was_stopped_goes_on_to_the_same_bits": ("2", "13"),
    "docs/test_tutorials.py::test_every_command": ("quick-start", "static-ir"),
    "passes/graph/test_inference.py::test_a_constant_that_doubles_ends_in_one_sentence": ("integers",),
    # whole_runs/test_parts.py exports a Llama.
    "pipeline/export/parts/test_families.py::test_the_graph_is_the_model": (),
    "pipeline/export/parts/test_families.py::test_prefill_and_decode_give_the_tokens_of_torch": (),
    "whole_runs/test_parts.py::test_quantized_parts_have_one_set_of_encodings": (),
    "pipeline/export/parts/test_pair.py::test_same_tokens_and_logits_as_the_whole_model": (
        "DeepseekV3-as_it_is", "Llama-export_and_load", "GPT2-in_onnxruntime",
    ),
    "pipeline/export/test_exported_transformers.py::test_agrees_with_onnxruntime": (
        "LlamaForCausalLM", "ResNetModel",
    ),
    "pipeline/export/test_mixtures.py::test_each_token_goes_to_its_own_experts": (
        "Qwen3MoeModel", "JambaModel",
    ),
    "pipeline/importers/from_torch/layer_dedup/test_transformers.py::test_a_model_of_transformers": (
        "LlamaForCausalLM-LlamaConfig-settings2",
        "DeepseekV3ForCausalLM-DeepseekV3Config-settings4",
    ),
    "pipeline/importers/from_torch/layer_dedup/test_transformers.py::test_both_stacks_of_a_model": (
        "T5ForConditionalGeneration-<lambda>-inputs0",
    ),
    "pipeline/runtime/capture/test_captures.py::test_a_thousand_signatures_leave_the_memory_of_the_last_few": ("200",),
    "pipeline/runtime/test_onnx_cases.py::test_none_is_wrong": ("each fourth",),
    "pipeline/runtime/test_onnx_cases.py::test_refusals_name_the_node_and_what_to_do": ("each fourth",),
    "pipeline/runtime/test_onnx_cases.py::test_what_was_right_stays_right": ("each fourth",),
    "pipeline/torch_ir/test_caches.py::test_numbers_of_python_inside_a_cache_are_those_of_the_trace": ("None",),
    "pipeline/torch_ir/test_model_families.py::test_from_meta_to_numbers": (
        "Llama", "T5", "LSTM", "CNN that trains",
    ),
    "pipeline/torch_ir/test_view_writes.py::test_a_write_through_a_view_reaches_what_is_behind_it": (
        "out=", "setitem", "masked_fill_",
    ),
    # Each model in one dtype, and each dtype.
    "pipeline/training/test_equal_to_torch.py::test_losses_are_those_of_torch_in_every_dtype": (
        "mlp-torch.float32", "mlp-torch.float64", "mlp-torch.bfloat16", "cnn with BatchNorm-torch.float64",
        "ViT-tiny-torch.float32", "GPT-2-tiny-torch.bfloat16",
    ),
    "pipeline/training/test_equal_to_torch.py::test_losses_and_parameters_are_those_of_torch": (
        "mlp-SGD", "mlp-SGD with momentum", "mlp-Adam", "mlp-Adam with AMSGrad", "mlp-Adam that maximizes",
        "mlp-AdamW", "cnn with BatchNorm-AdamW", "transformer with dropout-AdamW",
    ),
    "pipeline/training/test_image_models.py::test_steps_of_a_unet_are_those_of_torch": (
        "modes0-memory_format0-dtype0",
    ),
    "pipeline/training/test_native.py::test_a_hundred_steps": (
        "mlp-Adam with AMSGrad", "cnn with BatchNorm-AdamW",
    ),
    "pipeline/training/test_qdq.py::test_training_lowers_the_loss_and_onnxruntime_runs_what_comes_back": (
        "int8/channel-uint8", "int4/block2-uint16",
    ),
    "pipeline/training/test_refusals.py::test_dropout_between_layers_that_torch_leaves_out_is_refused": ("LSTM", "RNN"),
    "pipeline/training/test_schedules.py::test_a_training_changes_between_torch_and_a_program": (
        *(f"torch.float32-{name}LR" for name in ("Lambda", "MultiStep", "OneCycle", "Sequential")),
        "torch.float32-ReduceLROnPlateau", "torch.float32-ChainedScheduler", "torch.float64-SequentialLR",
    ),
    "whole_runs/test_bad_input.py::test_a_stopped_run_goes_on_where_it_was": (
        ".stages/passes.json-kill -9",
    ),
    "whole_runs/test_model_families.py::test_separate_projections_survive": ("Bert", "Llama"),
    # Branches, a sequence, half precision, without branches; detection, recognition, and a classifier of bytes.
    "whole_runs/test_packaged_models.py::test_it_runs_as_on_onnxruntime": (
        "silero_vad", "silero_vad_half", "PP-OCRv6_rec_small",
    ),
}  # fmt: skip
"""Test → its parameters, as pytest writes them."""
