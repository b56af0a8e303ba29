"""Fine-tune with LoRA adapters (peft): only they are trained, so memory is mostly activations."""

import peft
import torch
import transformers

import autofit


def build_model() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    model = transformers.LlamaForCausalLM(config)
    lora = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, lora)


def batch_of(samples: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 256, (samples, 64))
    labels = ids.clone()
    labels[:, :16] = -100  # no loss on the prompts
    return {"input_ids": ids, "labels": labels}


def trained_tokens(batch: dict[str, torch.Tensor]) -> int:
    return int((batch["labels"] != -100).sum())  # the loss is a mean over these


if __name__ == "__main__":
    workload = autofit.Workload(
        build_model(), batch_of(4), global_batch=16, loss_weight=trained_tokens
    )
    report = autofit.search(
        workload,
        vram_budget="64MiB",
        device="cpu",  # leave it out on a GPU
        options=autofit.SearchOptions(effort="quick"),
        max_probes=6,
    )
    print(report)

    model = build_model()
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trained = sum(parameter.numel() for parameter in adapters)
    print(f"trains {trained} of {sum(p.numel() for p in model.parameters())} parameters")
    with report.apply(model, torch.optim.AdamW(adapters, lr=1e-3)) as training:
        for step in range(3):
            print(f"step {step}: loss {float(training.step(batch_of(16))):.3f}")
