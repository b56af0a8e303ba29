"""Models that nobody here wrote, for `benchmarks.emulation_models`: sizes, batches and losses.

They are as wide as they are used, or nearly, and not as deep, so that their peaks are of
activations as well as weights, and a step is a second or less of launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from benchmarks.library_models import (
    MakeBatch,
    MakeModel,
    Scale,
    labelled,
    pairs,
    pixels,
    spectrogram,
    speech,
    squares,
    tokens,
    transformers_model,
)

SCALE = Scale(
    vocabulary=8192,
    width=256,
    inner_width=768,
    layers=4,
    heads=8,
    positions=160,
    image_size=96,
    channels=64,
)
_TOKENS = tokens(4, 64, SCALE.vocabulary)
_WIDE = SCALE.text(hidden_size=SCALE.width, n_layer=SCALE.layers, n_head=SCALE.heads)
_SPEECH = SCALE.speech(apply_spec_augment=False, layerdrop=0.0)


@dataclass(frozen=True)
class Model:
    """A model and what it is trained with.

    Attributes:
        make: returns the model.
        batch: returns what `loss_fn` takes.
        loss_fn: of model and batch; None: the model returns its loss.
        switchable: whether the library can checkpoint it.
    """

    make: MakeModel
    batch: MakeBatch
    loss_fn: Callable[[nn.Module, Any], Tensor] | None = None
    switchable: bool = False


def _hf(
    name: str, batch: MakeBatch, *, loss_fn: Any = None, switch: bool = True, **options: Any
) -> Model:
    make = transformers_model(name, **options)
    return Model(make, batch, loss_fn, switch)


MODELS: dict[str, Model] = {
    "gpt2": _hf("GPT2LMHeadModel", _TOKENS, **SCALE.gpt()),
    "gptj": _hf("GPTJForCausalLM", _TOKENS, rotary_dim=16, **SCALE.gpt()),
    "gpt_neox": _hf("GPTNeoXForCausalLM", _TOKENS, **SCALE.encoder()),
    "gpt_bigcode": _hf("GPTBigCodeForCausalLM", _TOKENS, **SCALE.gpt()),
    "llama": _hf("LlamaForCausalLM", _TOKENS, **SCALE.decoder()),
    "mistral": _hf("MistralForCausalLM", _TOKENS, sliding_window=64, **SCALE.decoder()),
    "gemma2": _hf("Gemma2ForCausalLM", _TOKENS, head_dim=32, **SCALE.decoder()),
    "gemma3": _hf("Gemma3ForCausalLM", _TOKENS, head_dim=32, **SCALE.decoder()),
    "qwen2": _hf("Qwen2ForCausalLM", _TOKENS, **SCALE.decoder()),
    "qwen3": _hf("Qwen3ForCausalLM", _TOKENS, head_dim=32, **SCALE.decoder()),
    "phi": _hf("PhiForCausalLM", _TOKENS, **SCALE.decoder()),
    "phi3": _hf("Phi3ForCausalLM", _TOKENS, **SCALE.decoder()),
    "olmo2": _hf("Olmo2ForCausalLM", _TOKENS, **SCALE.decoder()),
    "cohere": _hf("CohereForCausalLM", _TOKENS, **SCALE.decoder()),
    "starcoder2": _hf("Starcoder2ForCausalLM", _TOKENS, **SCALE.decoder()),
    "stablelm": _hf("StableLmForCausalLM", _TOKENS, **SCALE.decoder()),
    "granite": _hf("GraniteForCausalLM", _TOKENS, **SCALE.decoder()),
    "falcon": _hf("FalconForCausalLM", _TOKENS, **SCALE.text(), **SCALE.blocks()),
    "bloom": _hf("BloomForCausalLM", _TOKENS, hidden_dropout=0.1, **_WIDE),
    "mpt": _hf("MptForCausalLM", _TOKENS, d_model=256, n_heads=8, n_layers=4, **SCALE.text()),
    "opt": _hf(
        "OPTForCausalLM",
        _TOKENS,
        ffn_dim=768,
        word_embed_proj_dim=256,
        dropout=0.1,
        **{k: v for k, v in SCALE.encoder().items() if k != "intermediate_size"},
    ),
    "mamba": _hf(
        "MambaForCausalLM",
        tokens(2, 64, SCALE.vocabulary),
        state_size=8,
        num_hidden_layers=2,
        hidden_size=256,
        **SCALE.text(),
    ),
    "bert": _hf("BertForMaskedLM", _TOKENS, **SCALE.encoder()),
    "roberta": _hf("RobertaForMaskedLM", _TOKENS, **SCALE.encoder()),
    "albert": _hf("AlbertForMaskedLM", _TOKENS, switch=False, embedding_size=64, **SCALE.encoder()),
    "distilbert": _hf(
        "DistilBertForMaskedLM",
        _TOKENS,
        dim=256,
        hidden_dim=768,
        n_layers=4,
        n_heads=8,
        **SCALE.text(),
    ),
    "electra": _hf("ElectraForMaskedLM", _TOKENS, embedding_size=64, **SCALE.encoder()),
    "deberta_v2": _hf(
        "DebertaV2ForMaskedLM",
        _TOKENS,
        relative_attention=True,
        pos_att_type="c2p|p2c",
        **SCALE.encoder(),
    ),
    "mpnet": _hf("MPNetForMaskedLM", _TOKENS, switch=False, **SCALE.encoder()),
    "modernbert": _hf("ModernBertForMaskedLM", _TOKENS, **SCALE.encoder()),
    "t5": _hf("T5ForConditionalGeneration", _TOKENS, **SCALE.t5()),
    "bart": _hf("BartForConditionalGeneration", _TOKENS, **SCALE.sequence_to_sequence()),
    "pegasus": _hf("PegasusForConditionalGeneration", _TOKENS, **SCALE.sequence_to_sequence()),
    "m2m_100": _hf("M2M100ForConditionalGeneration", _TOKENS, **SCALE.sequence_to_sequence()),
    "whisper": _hf(
        "WhisperForConditionalGeneration",
        spectrogram(4, (80, 256), 48, SCALE.vocabulary),
        max_source_positions=128,
        max_target_positions=64,
        **SCALE.sequence_to_sequence(),
    ),
    "wav2vec2": _hf("Wav2Vec2ForCTC", speech(4, 8000, 12), **_SPEECH),
    "hubert": _hf("HubertForCTC", speech(4, 8000, 12), **_SPEECH),
    "vit": _hf(
        "ViTForImageClassification", labelled(8, SCALE.image_size), num_labels=10, **SCALE.patches()
    ),
    "dinov2": _hf(
        "Dinov2ForImageClassification",
        labelled(8, SCALE.image_size),
        num_labels=10,
        **SCALE.patches(),
    ),
    "segformer": _hf(
        "SegformerModel",
        pixels(8, SCALE.image_size),
        loss_fn=squares,
        hidden_sizes=[32, 64, 128, 256],
    ),
    "convnext": _hf(
        "ConvNextForImageClassification", labelled(8, SCALE.image_size), switch=False, num_labels=10
    ),
    "clip": _hf(
        "CLIPModel",
        pairs(8, SCALE.image_size, 48, SCALE.vocabulary),
        text_config=SCALE.encoder(),
        vision_config=SCALE.patches(),
        projection_dim=128,
    ),
}
