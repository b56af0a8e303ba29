"""Fine-tunes of models of transformers, from a folder with a config alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from huggingface_hub import constants
from huggingface_hub.utils import _http

import autofit
from autofit.errors import InvalidArgument, PredictionUnavailable
from autofit.integrations.hugging_face import workload
from tests.command_line import run_here

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 512,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}


def tokens(labels: Callable[[], torch.Tensor] | None = None) -> dict[str, Any]:
    ids = torch.randint(100, 200, (4, 64))
    return {"input_ids": ids, "labels": ids.clone() if labels is None else labels()}


def images() -> dict[str, Any]:
    return {"pixel_values": torch.randn(4, 3, 64, 64), "labels": torch.tensor([0, 1, 1, 0])}


def spans() -> dict[str, Any]:
    ends = {name: torch.tensor([3, 4, 5, 6]) for name in ("start_positions", "end_positions")}
    return {"input_ids": torch.randint(100, 200, (4, 64)), **ends}


MODELS: dict[str, tuple[str, dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "LlamaForCausalLM": ("LlamaConfig", GROUPED, tokens),
    "MistralForCausalLM": ("MistralConfig", GROUPED, tokens),
    "Qwen2ForCausalLM": ("Qwen2Config", GROUPED, tokens),
    "GemmaForCausalLM": ("GemmaConfig", {**GROUPED, "head_dim": 16}, tokens),
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512},
        tokens,
    ),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", SMALL, tokens),
    "PhiForCausalLM": ("PhiConfig", SMALL, tokens),
    "OPTForCausalLM": (
        "OPTConfig",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 128,
            "vocab_size": 512,
            "word_embed_proj_dim": 64,
        },
        tokens,
    ),
    "MixtralForCausalLM": ("MixtralConfig", GROUPED, tokens),
    "BertForMaskedLM": ("BertConfig", SMALL, tokens),
    "RobertaForSequenceClassification": (
        "RobertaConfig",
        {**SMALL, "max_position_embeddings": 514},
        lambda: tokens(lambda: torch.tensor([0, 1, 1, 0])),
    ),
    "DebertaV2ForTokenClassification": (
        "DebertaV2Config",
        SMALL,
        lambda: tokens(lambda: torch.ones(4, 64, dtype=torch.long)),
    ),
    "DistilBertForQuestionAnswering": (
        "DistilBertConfig",
        {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128, "vocab_size": 512},
        spans,
    ),
    "T5ForConditionalGeneration": (
        "T5Config",
        {
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 512,
            "decoder_start_token_id": 0,
        },
        tokens,
    ),
    "ViTForImageClassification": (
        "ViTConfig",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "image_size": 64,
            "patch_size": 16,
        },
        images,
    ),
}


def config_of(name: str) -> Any:
    kind, sizes, _ = MODELS[name]
    return getattr(transformers, kind)(**sizes, architectures=[name])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """name of a class -> a folder with the config of a small one."""
    root = tmp_path_factory.mktemp("configs")

    def written(name: str, **changes: Any) -> str:
        path = root / "-".join([name, *map(str, changes.values())])
        if not path.exists():
            config = config_of(name)
            for what, value in changes.items():
                setattr(config, what, value)
            config.save_pretrained(path)
        return str(path)

    return written


def by_hand(name: str, dtype: str, lora_rank: int | None = None) -> autofit.Workload:
    """What a user writes who trains that model."""

    def build() -> torch.nn.Module:
        model = getattr(transformers, name)(config_of(name)).to(getattr(torch, dtype)).train()
        if lora_rank is None:
            return model
        adapted = peft.LoraConfig(r=lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
        return peft.get_peft_model(model, adapted)

    batch = MODELS[name][2]()
    if "pixel_values" in batch:
        batch["pixel_values"] = batch["pixel_values"].to(getattr(torch, dtype))
    return autofit.Workload(build, batch, loss_fn=lambda model, batch: model(**batch).loss)


def figures(prediction: autofit.Prediction) -> tuple[Any, ...]:
    return (
        prediction.required_bytes,
        prediction.interval,
        prediction.peak_allocated_bytes,
        prediction.breakdown,
        prediction.parameters,
    )


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_a_config_is_predicted_as_the_model_that_is_built_by_hand(
    name: str, dtype: str, folder: Callable[..., str]
) -> None:
    sequence = None if name.startswith("ViT") else 64
    of_config = workload(folder(name), batch=4, sequence=sequence, dtype=dtype)
    predicted = autofit.predict(of_config, gpu="L4")
    assert not predicted.has_stand_in_loss
    assert figures(predicted) == figures(autofit.predict(by_hand(name, dtype), gpu="L4"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_those_of_peft(dtype: str, folder: Callable[..., str]) -> None:
    name = "LlamaForCausalLM"
    of_config = workload(folder(name), batch=4, sequence=64, dtype=dtype, lora_rank=8)
    predicted = autofit.predict(of_config, gpu="L4")
    assert figures(predicted) == figures(autofit.predict(by_hand(name, dtype, 8), gpu="L4"))
    whole = autofit.predict(workload(folder(name), batch=4, sequence=64, dtype=dtype), gpu="L4")
    assert predicted.breakdown["optimizer_state"] < whole.breakdown["optimizer_state"]
    assert predicted.parameters is not None
    assert whole.parameters is not None
    assert predicted.parameters > whole.parameters


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_model_takes_adapters(name: str, folder: Callable[..., str]) -> None:
    sequence = None if name.startswith("ViT") else 64
    made = workload(folder(name), batch=2, sequence=sequence, lora_rank=4).build_model()
    trained = [each for each in made.parameters() if each.requires_grad]
    assert 0 < len(trained) < len(list(made.parameters()))
    assert any("lora" in name for name, each in made.named_parameters() if each.requires_grad)


def test_a_model_without_a_head_gets_the_one_that_its_type_is_trained_with(
    folder: Callable[..., str],
) -> None:
    for head, bare in (
        ("BertForMaskedLM", "BertModel"),
        ("ViTForImageClassification", "ViTModel"),
        ("LlamaForCausalLM", "LlamaModel"),
        ("T5ForConditionalGeneration", "T5Model"),
    ):
        made = workload(folder(head, architectures=[bare])).build_model()
        assert type(made).__name__ == head


def test_the_type_is_that_of_the_config_where_none_is_asked_for(folder: Callable[..., str]) -> None:
    for dtype in (torch.bfloat16, None):
        made = workload(folder("LlamaForCausalLM", dtype=dtype)).build_model()
        assert {each.dtype for each in made.parameters()} == {dtype or torch.float32}


def test_samples_are_as_long_as_asked_for_and_no_longer_than_the_model_takes(
    folder: Callable[..., str],
) -> None:
    path = folder("RobertaForSequenceClassification")
    assert workload(path).batch(1)["input_ids"].shape == (1, 512)
    assert workload(folder("LlamaForCausalLM")).batch(1)["input_ids"].shape == (1, 2048)
    with pytest.raises(InvalidArgument, match=r"513.*512 positions"):
        workload(path, sequence=513)
    with pytest.raises(InvalidArgument, match="images"):
        workload(folder("ViTForImageClassification"), sequence=64)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LlavaForConditionalGeneration"]}, "LlavaForConditionalGeneration"),
        ({"architectures": ["LlamaForSomethingElse"]}, "LlamaForSomethingElse.*config"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized.*gptq"),
    ],
)
def test_what_a_config_does_not_tell_is_refused_with_the_way_out(
    changes: dict[str, Any], words: str, folder: Callable[..., str]
) -> None:
    with pytest.raises(InvalidArgument, match=rf"(?s){words}.*file\.py:function"):
        workload(folder("LlamaForCausalLM", **changes))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, r"no config\.json"),
        ("{", "config.json"),
        ("{}", "config.json"),
        ('{"model_type": "a_model_of_tomorrow"}', "a_model_of_tomorrow"),
        (
            '{"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}',
            "code of its own.*not run",
        ),
        (
            '{"model_type": "resnet", "architectures": ["ResNetForImageClassification"]}',
            "image_size",
        ),
    ],
)
def test_a_folder_without_a_config_that_can_be_read_is_refused(
    text: str | None, words: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    ran = run_here("predict", str(tmp_path), "--gpu", "L4")
    assert ran.code == 2
    assert ran.out == ""
    with pytest.raises(InvalidArgument, match=words):
        workload(tmp_path)


# -- The hub: a server on this machine that answers as the real one does.

CONFIG = '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512}'


class Hub(BaseHTTPRequestHandler):
    """Answers with the status and the error code that the name of the repository asks for."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        self.asked.append(self.path)
        codes = {"gated": (403, "GatedRepo"), "bare": (404, "EntryNotFound"), "down": (503, None)}
        owner, model = self.path.split("/")[1:3]
        status, code = codes.get(model, (404, "RepoNotFound") if owner != "some" else (200, None))
        body = CONFIG.encode() if status == 200 else b""
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.send_header("ETag", '"0123456789abcdef0123456789abcdef01234567"')
        self.send_header("X-Repo-Commit", "0123456789abcdef0123456789abcdef01234567")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *line: Any) -> None:
        """Say nothing."""


def _have_hub_at(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    place = f"http://127.0.0.1:{port}"
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, place)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", place)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """What was asked of a hub on this machine, whose cache is empty; no retry waits."""
    asked: list[str] = []
    handler = type("Asked", (Hub,), {"asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    _have_hub_at(monkeypatch, server.server_port)
    monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda seconds: None, time=time.time))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_of_a_model_of_the_hub_the_config_alone_is_read(hub: list[str]) -> None:
    made = workload("hf:some/model", batch=2, sequence=64)
    assert made.batch(made.sample_batch_size)["input_ids"].shape == (2, 64)
    files = [path for path in hub if not path.startswith("/api/")]
    assert files
    assert all(path == "/some/model/resolve/main/config.json" for path in files)


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("hf:nobody/nothing", 2, "no model 'nobody/nothing'.*private"),
        ("hf:some/gated", 2, "access to some/gated.*log in"),
        ("hf:some/bare", 2, r"some/bare has no config\.json"),
        ("hf:some/down", 5, "some/down"),
        ("hf:a/b/c", 2, "hf:ORG/MODEL"),
        ("hf:", 2, "hf:ORG/MODEL"),
    ],
)
def test_what_the_hub_refuses_is_told_in_a_line(
    hub: list[str], name: str, code: int, words: str
) -> None:
    for command in ("predict", "check"):
        ran = run_here(command, name, "--gpu", "L4")
        assert ran.code == code, ran.err
        assert ran.out == ""
        assert "Traceback" not in ran.err
    with pytest.raises((InvalidArgument, PredictionUnavailable), match=words):
        workload(name)


def test_without_a_connection_the_way_out_is_a_folder(
    hub: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PredictionUnavailable, match=r"some/model.*cannot be reached.*folder"):
        workload("hf:some/model")
    assert hub == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    _have_hub_at(monkeypatch, 9)  # where nothing listens
    ran = run_here("predict", "hf:some/model", "--gpu", "L4")
    assert ran.code == 5, ran.err
    assert "cannot be reached" in ran.err


# -- The commands.


def test_the_verdict_names_the_size_and_the_precision(folder: Callable[..., str]) -> None:
    path = folder("LlamaForCausalLM")
    of_size = (path, "--sequence", "64", "--batch", "4")
    fitting = run_here("predict", *of_size, "--gpu", "L4")
    assert fitting.code == 0, fitting.err
    verdict = " ".join(fitting.out.partition("\n\n")[0].split())
    assert verdict.startswith("LlamaForCausalLM, 4 x 64 tokens: fits L4 in float32, mixed bfloat16")
    told = run_here("predict", *of_size, "--gpu", "L4", "--json").json
    for weights, precision in (("float32", "float32"), ("bfloat16", "pure bfloat16")):
        by_itself = autofit.predict(
            workload(path, batch=4, sequence=64, dtype=weights), gpu="L4"
        ).required_bytes
        assert told["precisions"][precision]["gpus"][0]["required_bytes"] == by_itself
    settings = {"precision.dtype": "bfloat16"}
    of_float32 = workload(path, batch=4, sequence=64, dtype="float32")
    mixed = autofit.predict(of_float32, plan=of_float32.plan(settings=settings), gpu="L4")
    told_of_mixed = told["precisions"]["mixed bfloat16"]["gpus"][0]
    assert told_of_mixed["required_bytes"] == mixed.required_bytes

    too_large = run_here("predict", path, "--sequence", "64", "--batch", "400000", "--gpu", "L4")
    assert too_large.code == 1
    assert "does not fit L4; a micro-batch of" in " ".join(too_large.out.split())


def test_a_gpu_is_asked_for_the_types_that_it_computes(folder: Callable[..., str]) -> None:
    of_size = ("predict", folder("LlamaForCausalLM"), "--sequence", "64", "--json", "--gpu")
    told = run_here(*of_size, "T4,P100,L4").json["precisions"]
    by_precision = {
        precision: [row["gpu"] for row in found["gpus"]] for precision, found in told.items()
    }
    assert by_precision == {
        "float32": ["T4", "P100-16GB", "L4"],
        "mixed bfloat16": ["L4"],
        "mixed float16": ["T4"],
        "pure bfloat16": ["L4"],
    }
    lora = run_here(*of_size, "T4", "--lora-rank", "4").json["precisions"]
    assert list(lora) == ["float32", "mixed float16", "pure float16"]
    asked = run_here(*of_size, "L4", "--dtype", "float16").json["precisions"]
    assert list(asked) == ["pure float16"]
    some = run_here(*of_size, "T4,L4", "--dtype", "bfloat16")
    assert (some.json["lacking"], "1 of 2 GPUs" in some.json["verdict"]) == (["T4"], True)
    refused = run_here(*of_size, "T4", "--dtype", "bfloat16")
    assert (refused.code, refused.out) == (2, "")
    assert "T4" in refused.err


def test_a_classifier_without_a_token_for_padding_takes_more_than_one_sample(
    folder: Callable[..., str],
) -> None:
    path = folder("LlamaForCausalLM", architectures=["LlamaForSequenceClassification"])
    told = run_here("predict", path, "--sequence", "64", "--gpu", "L4", "--json").json
    rows = [row for found in told["precisions"].values() for row in found["gpus"]]
    assert all(row["largest_micro_batch"] > 100 for row in rows)


def test_check_answers_for_the_type_of_the_config(folder: Callable[..., str]) -> None:
    path = folder("LlamaForCausalLM", dtype=torch.bfloat16)
    of_size = ("check", path, "--gpu", "L4", "--sequence", "64", "--batch", "4", "--json")
    pure = autofit.predict(workload(path, batch=4, sequence=64, dtype="bfloat16"), gpu="L4")
    told = run_here(*of_size).json
    assert told["required_bytes"] == pure.required_bytes
    assert "4 x 64 tokens, weights in bfloat16" in told["notes"][0]
    # autocast is of float32 weights
    of_float32 = workload(path, batch=4, sequence=64, dtype="float32")
    plan = of_float32.plan(settings={"precision.dtype": "bfloat16"})
    mixed = run_here(*of_size, "--set", "precision.dtype=bfloat16").json
    assert (
        mixed["required_bytes"] == autofit.predict(of_float32, plan=plan, gpu="L4").required_bytes
    )
    refused = run_here("check", path, "--gpu", "L4", "--batch", "400000", "--sequence", "64")
    assert refused.code == 1


@pytest.mark.parametrize("option", ["--batch", "--sequence", "--lora-rank"])
def test_options_of_a_model_are_refused_for_python_code(option: str) -> None:
    ran = run_here("predict", "train.py:make", "--gpu", "L4", option, "8")
    assert ran.code == 2
    assert option in ran.err


@pytest.mark.parametrize("command", ["search", "probe"])
def test_what_runs_a_training_takes_no_config(command: str) -> None:
    ran = run_here(command, "hf:some/model", "--device", "cpu")
    assert ran.code == 2
    assert "predict and check" in ran.err
