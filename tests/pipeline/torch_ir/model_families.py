"""The families that the IR has to take: how each is made, tiny, and what it is called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Call = dict[str, Tensor]
Family = Callable[[], tuple[Callable[[], nn.Module], Call]]

TEXT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
IMAGE = {**TEXT, "image_size": 16, "patch_size": 8}
IDS = torch.tensor([[3, 7, 1, 9, 4, 2]])
PIXELS = torch.linspace(-1, 1, 3 * 16 * 16).view(1, 3, 16, 16)


def hugging(name: str, config: str, settings: dict[str, Any], call: Call) -> Family:
    """A class of `transformers`, with its default cache and its own kind of output."""

    def family() -> tuple[Callable[[], nn.Module], Call]:
        import transformers

        config_object = getattr(transformers, config)(**settings)
        return lambda: getattr(transformers, name)(config_object).eval(), call

    return family


def unet() -> tuple[Callable[[], nn.Module], Call]:
    from diffusers import UNet2DConditionModel

    settings: dict[str, Any] = {
        "sample_size": 8,
        "layers_per_block": 1,
        "block_out_channels": (8, 16),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 8,
        "attention_head_dim": 4,
        "norm_num_groups": 4,
    }
    noise = torch.linspace(-1, 1, 256).view(1, 4, 8, 8)
    call = {"sample": noise, "timestep": torch.tensor(3), "encoder_hidden_states": noise.view(1, 32, 8)[:, :3]}
    return lambda: UNet2DConditionModel(**settings).eval(), call


class Recurrent(nn.Module):
    """Two layers of LSTM, both ways, and a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, 2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, state = self.lstm(x)
        return self.gru(y)[0], state


def recurrent() -> tuple[Callable[[], nn.Module], Call]:
    return lambda: Recurrent().eval(), {"x": torch.randn(2, 5, 4)}


def training_cnn() -> tuple[Callable[[], nn.Module], Call]:
    """A CNN whose BatchNorm trains: it writes its running statistics."""

    def make() -> nn.Module:
        head = (nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), *head).train()

    return make, {"input": PIXELS.repeat(2, 1, 1, 1)}


SPEECH = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "vocab_size": 50,
    "num_mel_bins": 8,
    "max_source_positions": 10,
    "max_target_positions": 20,
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}
PAIR = {
    "text_config": {**TEXT, "max_position_embeddings": 10, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "vision_config": IMAGE,
    "projection_dim": 8,
}
BOTH = {"input_ids": IDS, "pixel_values": PIXELS, "attention_mask": torch.ones_like(IDS)}

FAMILIES: dict[str, Family] = {
    "BERT": hugging("BertModel", "BertConfig", TEXT, {"input_ids": IDS}),
    "GPT-2": hugging(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2},
        {"input_ids": IDS},
    ),
    "Llama": hugging("LlamaForCausalLM", "LlamaConfig", TEXT, {"input_ids": IDS}),
    "Mixtral": hugging(
        "MixtralForCausalLM",
        "MixtralConfig",
        {**TEXT, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"input_ids": IDS},
    ),
    "T5": hugging(
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 50},
        {"input_ids": IDS, "decoder_input_ids": IDS},
    ),
    "Whisper": hugging(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        SPEECH,
        {"input_features": torch.linspace(-1, 1, 160).view(1, 8, 20), "decoder_input_ids": IDS},
    ),
    "ViT": hugging("ViTModel", "ViTConfig", IMAGE, {"pixel_values": PIXELS}),
    "CLIP": hugging("CLIPModel", "CLIPConfig", PAIR, BOTH),
    "UNet": unet,
    "LSTM": recurrent,
    "CNN that trains": training_cnn,
}
