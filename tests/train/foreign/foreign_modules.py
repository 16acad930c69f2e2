"""Small modules with random weights that are not ours: on them `initialize` is compared with plain PyTorch.

Every subject gives a module and, for a number, a micro-batch as its forward takes it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

_TEXT: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_IMAGE: dict[str, Any] = {"image_size": 8, "patch_size": 4, "num_channels": 3}


@dataclass(frozen=True, slots=True)
class Subject:
    """A module to train.

    Attributes:
        make: called with a seed set.
        batch: number -> micro-batch; other numbers, other data.
        one_dtype: whether torch wants its buffers in the parameters' dtype.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    one_dtype: bool = False


def _generator(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + number)


def _floats(*shape: int) -> Callable[[int], torch.Tensor]:
    return lambda number: torch.randn(*shape, generator=_generator(number))


def _tokens(number: int, high: int = 40) -> torch.Tensor:
    return torch.randint(4, high, (2, 6), generator=_generator(number))


def _causal(number: int) -> dict[str, torch.Tensor]:
    return {"input_ids": _tokens(number), "labels": _tokens(number)}


def _images(number: int) -> dict[str, torch.Tensor]:
    labels = torch.randint(0, 2, (2,), generator=_generator(number))
    return {"pixel_values": _floats(2, 3, 8, 8)(number), "labels": labels}


def _hub(model: str, config: str, batch: Callable[[int], Any] = _causal, **sizes: Any) -> Subject:
    """A model of transformers without dropout."""

    def make() -> nn.Module:
        options = getattr(transformers, config)(**sizes)
        module: nn.Module = getattr(transformers, model)(options)
        for part in module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        return module

    return Subject(make, batch)


class Blocks(nn.Module):
    """An embedding with padding, residual blocks in a ModuleDict, a tied head, a part that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 8, padding_idx=5)
        self.parts = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("a", "b", "c")})
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for part in self.parts.values():
            hidden = hidden + torch.tanh(part(hidden))
        logits = self.head(self.frozen(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


class Residual(nn.Module):
    """Convolutions with batch statistics, as ResNet's (arXiv 1512.03385), in a ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU()) for _ in range(2)
        )
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        output: torch.Tensor = self.head(x.mean((2, 3)))
        return output


class Recurrent(nn.Module):
    """Two layers of an LSTM, which holds its parameters in a list as well."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.lstm(x)[0])
        return output


class Translator(nn.Module):
    """torch's own Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(8, 2, 2, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.body(source, target)
        return output


class Shifting(nn.Module):
    """Parametrized and normalized weights, a buffer that forward makes anew, a scalar parameter."""

    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.second = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x)))
        self.shift = 0.9 * self.shift + 0.1 * x.detach().mean(0)
        return x * self.scale


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 3))


def _clip(number: int) -> dict[str, Any]:
    return {"input_ids": _tokens(number), "pixel_values": _floats(2, 3, 8, 8)(number), "return_loss": True}


def _whisper(number: int) -> dict[str, Any]:
    return {"input_features": _floats(2, 8, 20)(number), "labels": _tokens(number)}


_T5: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
_LLAMA = _TEXT | {"intermediate_size": 24, "num_key_value_heads": 1, "max_position_embeddings": 16}
_BERT = _TEXT | {"intermediate_size": 24, "max_position_embeddings": 16}
_TOWER: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
_WHISPER: dict[str, Any] = {
    "vocab_size": 40,
    "d_model": 16,
    "num_mel_bins": 8,
    "max_source_positions": 10,
    "max_target_positions": 16,
}
_WHISPER |= {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
_WHISPER |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_WHISPER |= {"decoder_start_token_id": 3, "suppress_tokens": [], "begin_suppress_tokens": []}

SUBJECTS: dict[str, Subject] = {
    "T5": _hub("T5ForConditionalGeneration", "T5Config", vocab_size=40, decoder_start_token_id=0, **_T5),
    "BERT": _hub("BertForMaskedLM", "BertConfig", **_BERT),
    "ViT": _hub("ViTForImageClassification", "ViTConfig", _images, **_TOWER, **_IMAGE),
    "Mixtral": _hub("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, output_router_logits=True, **_LLAMA),
    "Llama": _hub("LlamaForCausalLM", "LlamaConfig", **_LLAMA),
    "Llama, tied": _hub("LlamaForCausalLM", "LlamaConfig", tie_word_embeddings=True, **_LLAMA),
    "GPT-2": _hub("GPT2LMHeadModel", "GPT2Config", vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=16),
    "Whisper": _hub("WhisperForConditionalGeneration", "WhisperConfig", _whisper, **_WHISPER),
    "CLIP": _hub(
        "CLIPModel",
        "CLIPConfig",
        _clip,
        text_config=_TOWER | {"vocab_size": 40, "max_position_embeddings": 8, "eos_token_id": 2},
        vision_config=_TOWER | _IMAGE,
        projection_dim=8,
    ),
    "Mamba": _hub("MambaForCausalLM", "MambaConfig", vocab_size=40, hidden_size=16, num_hidden_layers=2, state_size=4),
    "OPT": _hub(
        "OPTForCausalLM",
        "OPTConfig",
        ffn_dim=24,
        max_position_embeddings=16,
        word_embed_proj_dim=16,
        dropout=0.0,
        **_TEXT,
    ),
    "Qwen3": _hub("Qwen3ForCausalLM", "Qwen3Config", head_dim=8, **_LLAMA),
    "Gemma 2": _hub("Gemma2ForCausalLM", "Gemma2Config", head_dim=8, **_LLAMA),
    "convolutions with BatchNorm": Subject(Residual, _floats(4, 3, 6, 6), one_dtype=True),
    "LSTM": Subject(Recurrent, _floats(3, 4, 5)),
    "nn.Transformer": Subject(Translator, lambda number: (_floats(2, 4, 8)(number), _floats(2, 3, 8)(number + 7))),
    "nn.Sequential": Subject(_mlp, _floats(4, 6)),
    "ModuleDict, tied, frozen, padding_idx": Subject(Blocks, _tokens),
    "parametrizations, reassigned buffer": Subject(Shifting, _floats(4, 6), one_dtype=True),
    "nn.TransformerEncoder": Subject(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        ),
        _floats(2, 4, 8),
    ),
    "Conv1d and GroupNorm": Subject(
        lambda: nn.Sequential(nn.Conv1d(4, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(), nn.Linear(8, 5)),
        _floats(2, 4, 8),
    ),
}
