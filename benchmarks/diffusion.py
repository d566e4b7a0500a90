"""Images of pipelines of diffusers by their parts: a run of each family, and its image against that of diffusers.

    python -m benchmarks.diffusion [--families "SD 1.5" SDXL …]

The models are small and random, made from their configurations. The table is in RESULTS.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.parts_table import print_table, run_in_parts

CLIP: Final[dict[str, Any]] = {
    **{"vocab_size": 99, "hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"max_position_embeddings": 24, "bos_token_id": 0, "eos_token_id": 2, "projection_dim": 32},
}
T5: Final[dict[str, Any]] = {
    **{"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4},
}
VAE: Final[dict[str, Any]] = {
    **{"block_out_channels": [8, 16], "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4},
    **{"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2, "sample_size": 16},
}
VAE_16: Final[dict[str, Any]] = {
    **VAE,
    "shift_factor": 0.06,
    "scaling_factor": 1.5,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
UNET: Final[dict[str, Any]] = {
    **{"sample_size": 8, "block_out_channels": [8, 16], "layers_per_block": 1, "norm_num_groups": 4},
    **{"down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"], "attention_head_dim": 4},
    **{"up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"]},
}
FLOW: Final[dict[str, Any]] = {"scheduler": ("FlowMatchEulerDiscreteScheduler", {})}

Component = tuple[str, dict[str, Any]]

FAMILIES: Final[dict[str, tuple[str, dict[str, Component]]]] = {
    "SD 1.5": (
        "StableDiffusionPipeline",
        {
            "text_encoder": ("CLIPTextModel", CLIP),
            "unet": ("UNet2DConditionModel", {**UNET, "cross_attention_dim": 32}),
            "vae": ("AutoencoderKL", VAE),
            "scheduler": ("DDIMScheduler", {"clip_sample": False}),
        },
    ),
    "SDXL": (
        "StableDiffusionXLPipeline",
        {
            "text_encoder": ("CLIPTextModel", CLIP),
            "text_encoder_2": ("CLIPTextModelWithProjection", CLIP),
            "unet": (
                "UNet2DConditionModel",
                {
                    **{**UNET, "cross_attention_dim": 64, "addition_embed_type": "text_time"},
                    **{"addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 32 + 6 * 8},
                    **{"transformer_layers_per_block": 1, "use_linear_projection": True},
                },
            ),
            "vae": ("AutoencoderKL", VAE),
            "scheduler": ("EulerDiscreteScheduler", {}),
        },
    ),
    "SD 3": (
        "StableDiffusion3Pipeline",
        {
            "text_encoder": ("CLIPTextModelWithProjection", CLIP),
            "text_encoder_2": ("CLIPTextModelWithProjection", CLIP),
            "text_encoder_3": ("T5EncoderModel", T5),
            "transformer": (
                "SD3Transformer2DModel",
                {
                    **{"sample_size": 8, "patch_size": 1, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8},
                    **{"num_attention_heads": 4, "caption_projection_dim": 32, "joint_attention_dim": 32},
                    **{"pooled_projection_dim": 64, "out_channels": 4},
                },
            ),
            "vae": ("AutoencoderKL", VAE_16),
            **FLOW,
        },
    ),
    "Flux": (
        "FluxPipeline",
        {
            "text_encoder": ("CLIPTextModel", CLIP),
            "text_encoder_2": ("T5EncoderModel", T5),
            "transformer": (
                "FluxTransformer2DModel",
                {
                    **{"patch_size": 1, "in_channels": 16, "num_layers": 1, "num_single_layers": 1},
                    **{"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32},
                    **{"pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8], "guidance_embeds": True},
                },
            ),
            "vae": ("AutoencoderKL", VAE_16),
            **FLOW,
        },
    ),
    "PixArt": (
        "PixArtAlphaPipeline",
        {
            "text_encoder": ("T5EncoderModel", T5),
            "transformer": (
                "PixArtTransformer2DModel",
                {
                    **{"sample_size": 8, "num_layers": 2, "patch_size": 2, "attention_head_dim": 8},
                    **{"num_attention_heads": 3, "caption_channels": 32, "in_channels": 4, "out_channels": 8},
                    **{"cross_attention_dim": 24, "use_additional_conditions": False},
                },
            ),
            "vae": ("AutoencoderKL", VAE),
            "scheduler": ("DPMSolverMultistepScheduler", {}),
        },
    ),
}
"""Family → class of diffusers, and its components: class and configuration of each."""


def configuration(family: str, **sections: Any) -> dict[str, Any]:
    """A configuration of a run in parts, with random weights."""
    name, components = FAMILIES[family]
    made = {part: {"class": kind, "config": config} for part, (kind, config) in components.items()}
    return {"model": {"diffusers": {"class": name, "components": made, "height": 16, "width": 16}}, **sections}


def main() -> None:
    print_table(__doc__, FAMILIES, "pipeline | parts: nodes | Q/K/V kept | run | image after 4 steps", row)


def row(family: str, folder: Path) -> Iterator[str]:
    """The cells of a family: its parts, and how far its image is from that of diffusers."""
    settings = configuration(family, passes={"keep": ["qkv?"]}, runtime={"backends": ["onnxruntime", "plan"]})
    result, structures, seconds = run_in_parts(settings, family, folder)
    yield ", ".join(f"{name} {part.export.nodes} → {part.optimize.nodes}" for name, part in result.parts.items())
    yield structures
    yield seconds
    yield ", ".join(chain.sentence for chain in result.chain)


if __name__ == "__main__":
    main()
