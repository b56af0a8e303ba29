"""Does a training fit, and on which GPU? Predicted, without a GPU; exits with 1 if it does not fit.

The same from a shell: autofit check examples/capacity.py:make_workload --gpu L4 --micro-batch 8
"""

import torch
from torch import nn

import autofit


def make_workload() -> autofit.Workload:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    model = nn.Sequential(
        nn.Embedding(10_000, 512), nn.TransformerEncoder(layer, 6), nn.Linear(512, 10_000)
    )
    ids = torch.randint(0, 10_000, (4, 256))
    return autofit.Workload(model, {"ids": ids}, loss_fn=next_token_loss)


def next_token_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    scores = model(batch["ids"][:, :-1])
    return nn.functional.cross_entropy(scores.transpose(1, 2), batch["ids"][:, 1:])


if __name__ == "__main__":
    plan = autofit.Plan(micro_batch=8)
    for gpu in ("L4", "A100-40GB"):  # gpu=["L4", "A100-40GB"] gives a table
        prediction = autofit.predict(make_workload(), plan=plan, gpu=gpu)
        gib = prediction.required_bytes / 2**30
        print(f"{gpu}: needs {gib:.2f} GiB, up to micro-batch {prediction.largest_micro_batch}")
    verdict = autofit.check(make_workload(), plan=plan, gpu="L4", vram_budget="20GiB")
    print(verdict)
    raise SystemExit(0 if verdict.fits else 1)
