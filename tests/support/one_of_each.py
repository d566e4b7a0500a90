"""What `make test` leaves of the slowest tests to `make test-all`, which runs the whole list: tests of which others
show the parts, and parameters that repeat a shape.

`python -m benchmarks.mutations` says whether faults of the product are found by what is left as by the whole list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

NIGHTLY: Final = {
    "benchmarks/model_families/test_detect.py::test_finds_the_triples_that_torch_ran": (
        "passes/structures/test_exports.py finds the triples of four exports, and test_attention_modules.py of 30 forms"
    ),
    "docs/test_torch_ir_page.py::test_the_examples": (
        "pipeline/torch_ir/; the workflow of the pages runs it with each change of a page"
    ),
    "examples/test_author_digits.py::test_a_model_by_hand_learns_digits_and_goes_on_from_its_file": (
        "pipeline/authoring/test_training.py goes on from files"
    ),
    "examples/test_kimi_numbers.py::test_layers_lie_together_and_the_cache_is_never_the_latent": (
        "pipeline/export/parts/test_pair.py has DeepseekV3, test_kimi_script.py two of these layers"
    ),
    "examples/test_author_digits.py::test_weights_of_4_bits_are_within_a_point_of_floats": (
        "pipeline/commands/test_train_onnx.py trains the same network in 4 bits, for three steps"
    ),
    "package/test_front_door.py::test_a_factory_beside_files_of_our_names": (
        "test_a_script_beside_files_of_our_names; test_a_pass_of_the_users_beside_a_file_of_our_name_is_one_sentence"
    ),
    "package/test_front_door.py::test_rooms_are_imported_beside_files_of_our_names": (
        "test_a_script_beside_files_of_our_names imports two rooms"
    ),
    "passes/bisect/test_lost.py::test_a_search_leaves_no_model_to_the_collector": (
        "passes/run/test_runner.py::test_a_run_leaves_no_model_to_the_collector"
    ),
    "passes/structures/test_attention_modules.py::test_q_k_and_v_of_every_form_stay_apart": (
        "test_tricky_kept.py keeps Q, K and V of sixteen forms"
    ),
    "passes/structures/test_attention_modules.py::test_without_keep_they_are_merged": "test_tricky_kept.py",
    "pipeline/commands/test_guard.py::test_a_script_and_all_that_it_starts": (
        "passes/guard/test_ways_to_start.py, and test_the_exit_code_is_that_of_the_command"
    ),
    "pipeline/export/parts/test_families.py::test_the_graph_is_the_model": ("whole_runs/test_parts.py exports a Llama"),
    "pipeline/export/parts/test_families.py::test_prefill_and_decode_give_the_tokens_of_torch": (
        "test_static.py runs three families in torch, whole_runs/test_parts.py both parts of a Llama"
    ),
    "pipeline/export/parts/test_rotations.py::test_a_decoder_goes_beyond_the_known_length_as_torch_does": (
        "test_the_module_of_a_decoder_computes_what_the_model_does; pipeline/export/test_patches.py traces a rotation"
    ),
    "pipeline/export/parts/test_rotations.py::test_a_prompt_in_chunks_gives_the_tokens_of_torch": (
        "test_the_module_of_a_decoder_computes_what_the_model_does, and what is refused"
    ),
    "pipeline/export/parts/test_rotations.py::test_the_cache_of_a_convolution_is_carried": (
        "pipeline/export/parts/test_families.py has states of a fixed size"
    ),
    "pipeline/export/parts/test_diffusion.py::test_the_graphs_are_the_models": (
        "test_the_image_is_the_same_by_calls_that_stand_for_the_models; whole_runs/test_parts.py exports a Llama"
    ),
    "pipeline/export/parts/test_image_text.py::test_the_graphs_are_the_model": (
        "the other tests of the file compare the parts in torch; test_seq2seq.py exports a decoder with its cache"
    ),
    "whole_runs/test_diffusion.py::test_a_run_of_a_pipeline": (
        "pipeline/export/parts/test_diffusion.py makes the image by other calls, and has what is refused"
    ),
    "whole_runs/test_image_text.py::test_a_run_of_a_model_that_sees_images": (
        "pipeline/parts/test_image_text.py reads texts after images on each backend"
    ),
    "whole_runs/test_encoder_decoder.py::test_a_run_of_a_model_with_an_encoder": (
        "pipeline/export/parts/test_seq2seq.py exports both parts, pipeline/parts/test_seq2seq.py reads texts by them"
    ),
    "pipeline/export/test_mixtures.py::test_a_factory_s_mixture_exports_as_it_was_made": (
        "test_each_token_goes_to_its_own_experts exports such a mixture from its configuration"
    ),
    "pipeline/importers/from_torch/layer_dedup/test_transformers.py::test_both_stacks_of_a_model": (
        "test_plain.py: layers that alternate, two runs in one list, stages of blocks"
    ),
    "pipeline/jobs/test_ray.py::test_what_ran_on_a_node_that_died_is_done_elsewhere": "test_jobs_of_one_node",
    "pipeline/report/test_browser.py::test_drawings_have_one_scale_that_can_be_read_and_are_enlarged_by_keyboard": (
        "test_layout.py; test_click_through_a_run opens each drawing"
    ),
    "pipeline/report/test_browser.py::test_the_memory_of_a_plan_is_drawn_in_colours_with_modules_along_it": (
        "the other tests of test_layout.py"
    ),
    "whole_runs/test_backends.py::test_a_batch_says_which_runs_had_no_plan": (
        "pipeline/commands/test_batch.py reads the same row, of a run with a plan"
    ),
    "whole_runs/test_draws.py::test_a_trace_that_keeps_a_number_of_chunks_says_up_to_which_size_it_holds": (
        "test_a_size_that_the_export_does_not_hold_for_is_left_out_and_said has another such limit"
    ),
    "whole_runs/test_parts.py::test_quantized_parts_have_one_set_of_encodings": (
        "pipeline/quantsim/test_parts.py has the samples of a chain and the ranges of two parts"
    ),
    "whole_runs/test_growth.py::test_passes_pictures_and_diff": (
        "test_import_plan_and_its_check, and passes/external/test_pieces.py, which counts a step"
    ),
    "whole_runs/test_model_families.py::test_separate_projections_survive": (
        "passes/external/test_bert.py keeps them in a BERT, whole_runs/test_run.py in a whole run"
    ),
}
"""Test → what `make test` has in its place."""

ONE_OF_EACH: Final[Mapping[str, Sequence[str]]] = {
    # A dense layer and one that is traced; with four layers the last one is stamped.
    "examples/test_kimi_script.py::test_verify_runs_the_saved_files": ("2",),
    "fuzz/test_fuzz.py::test_broken_files_end_in_a_result_or_in_one_message": ("0",),
    "passes/external/test_bert.py::test_what_destroys_another_kind_is_left_out_alone": (
        "ort_fusions-gelu",
    ),
    "passes/external/test_bert.py::test_keeps_both_triples_at_two_nodes_each": (
        "onnxruntime", "onnxscript", "ort_fusions",
    ),
    "passes/external/test_trained_models.py::test_silero_comes_through_without_the_folding_that_breaks_it": (
        "silero_vad_16k_op15.onnx",
    ),
    "passes/worker/test_client.py::test_a_run_survives_that_its_proofs_are_killed_at_random_moments": ("0",),
    "passes/provenance/test_models.py::test_every_node_of_the_final_model_answers": (
        "LlamaForCausalLM",
    ),
    "passes/provenance/test_models.py::test_survivors_keep_the_module_of_the_node_with_the_same_values": (
        "LlamaForCausalLM",
    ),
    "passes/provenance/test_models.py::test_whatever_the_nodes_are_called": (
        "LlamaForCausalLM-same graph-drop_everything", "LlamaForCausalLM-another input-number_afresh",
        "LlamaForCausalLM-another input-permute_names",
    ),
    "passes/provenance/test_shared_weights.py::test_a_product_belongs_to_the_module_that_owns_its_weight": (
        "biases of zeros-default", "biases that differ-onnxslim",
    ),
    "passes/run/test_runner.py::test_a_run_leaves_no_model_to_the_collector": ("default",),
    # Norms spelled out or not, rope, two stacks with a bias of positions, convolutions with and without BatchNorm.
    "passes/structures/test_exports.py::test_finds_what_the_tree_of_modules_has": (
        "Llama, opset 23", "T5", "ResNet",
    ),
    "passes/structures/test_exports.py::test_keeps_every_kind_of_a_model": (
        "ResNet-loses0-merging0",
    ),
    "passes/structures/test_tricky_kept.py::test_a_verdict_says_what_the_numbers_say": (
        "plain", "weight norm", "DequantizeLinear", "gathered from a stack", "split from a stack",
        "QDQ around activations", "Dropout after", "Einsum of three axes", "Conv and BatchNormalization",
        "ReLU weighs", "everything transposed", "linear attention", "two equal Hadamards", "rope as a product",
        "Linformer", "cache by ScatterND",
    ),
    "pipeline/authoring/test_training.py::test_a_training_that_was_stopped_goes_on_to_the_same_bits": ("2", "13"),
    "package/test_package.py::test_a_starter_runs_as_it_is": ("onnx-file",),
    # The workflow of the pages runs all of them with each change of a page.
    "docs/test_tutorials.py::test_every_command": ("quick-start",),
    "docs/test_readme.py::test_the_python_example_of_a_guide_runs": ("training",),
    "passes/graph/test_inference.py::test_a_constant_that_doubles_ends_in_one_sentence": ("integers",),
    "pipeline/export/test_weight_free.py::test_it_computes_what_the_module_does": (
        "as it is-False", "with a prefix-True",
    ),
    # A buffer that is in the state dict, in each way to write; and one that is not.
    "pipeline/export/test_writes.py::test_a_written_buffer_goes_in_and_out": (
        "True-attend-state0", "True-slide-state1", "True-assign-state2", "True-count-state3", "True-convert-state4",
        "True-remember-state5", "False-attend-state0",
    ),
    "pipeline/export/parts/test_pair.py::test_same_tokens_and_logits_as_the_whole_model": (
        "DeepseekV3-as_it_is", "Llama-export_and_load", "GPT2-in_onnxruntime",
    ),
    "pipeline/export/parts/test_seq2seq.py::test_the_graphs_are_the_model": ("Whisper",),
    "pipeline/export/test_exported_transformers.py::test_agrees_with_onnxruntime": (
        "LlamaForCausalLM", "ResNetModel",
    ),
    "pipeline/export/test_mixtures.py::test_each_token_goes_to_its_own_experts": (
        "Qwen3MoeModel",
    ),
    "pipeline/importers/from_torch/layer_dedup/test_transformers.py::test_a_model_of_transformers": (
        "LlamaForCausalLM-LlamaConfig-settings2",
    ),
    "pipeline/runtime/capture/test_captures.py::test_a_thousand_signatures_leave_the_memory_of_the_last_few": ("200",),
    "pipeline/runtime/capture/test_threads.py::test_eight_threads_replay_many_times_without_a_difference": ("1000",),
    "pipeline/runtime/test_onnx_cases.py::test_none_is_wrong": ("each sixteenth",),
    "pipeline/runtime/test_onnx_cases.py::test_refusals_name_the_node_and_what_to_do": ("each sixteenth",),
    "pipeline/runtime/test_onnx_cases.py::test_what_was_right_stays_right": ("each sixteenth",),
    "pipeline/torch_ir/test_caches.py::test_numbers_of_python_inside_a_cache_are_those_of_the_trace": ("None",),
    "pipeline/torch_ir/test_model_families.py::test_from_meta_to_numbers": (
        "Llama", "LSTM", "CNN that trains",
    ),
    "pipeline/torch_ir/test_writes.py::test_a_write_through_a_view_reaches_its_base": (
        "out=", "setitem",
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
        "int4/block2-uint16",
    ),
    "pipeline/training/test_refusals.py::test_dropout_between_layers_that_torch_leaves_out_is_refused": ("LSTM", "RNN"),
    "pipeline/training/test_schedules.py::test_a_training_changes_between_torch_and_a_program": (
        *(f"torch.float32-{name}LR" for name in ("Lambda", "MultiStep", "OneCycle", "Sequential")),
        "torch.float32-ReduceLROnPlateau", "torch.float32-ChainedScheduler", "torch.float64-SequentialLR",
    ),
    "whole_runs/test_bad_input.py::test_a_stopped_run_goes_on_where_it_was": (
        ".stages/passes.json-kill -9",
    ),
    # Branches, a sequence, half precision, without branches; detection, recognition, and a classifier of bytes.
    "whole_runs/test_packaged_models.py::test_it_runs_as_on_onnxruntime": (
        "silero_vad", "silero_vad_half", "PP-OCRv6_rec_small",
    ),
}  # fmt: skip
"""Test → its parameters, as pytest writes them."""
