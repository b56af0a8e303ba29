"""What a worker reads is what the user has: classes from anywhere, shared tensors, live state."""

from __future__ import annotations

import errno
import functools
import pickle
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from autofit.errors import (
    InvalidArgument,
    WorkerFailed,
    WorkloadFailed,
    is_users,
    mark_users,
)
from autofit.measurement import Measurement, Outcome
from autofit.plan import NoFeasiblePlan, Plan, ResolvedPlan
from autofit.probing.requests import Call, ProbeRequest, Reply
from autofit.probing.serialization import Payload, live_objects, read_payload, write_payload
from autofit.probing.wire import message_of_reply, message_of_request, reply_of, request_of
from autofit.registry import load_strategies
from autofit.testing.digest import differences, digest
from autofit.training.workload import Workload

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def _copied(workload: Workload, folder: Path, device: Any = None) -> Any:
    write_payload(Payload(workload, ()), folder / "workload.pt")
    on = (folder / "workload.pt",) if device is None else (folder / "workload.pt", device)
    return read_payload(*on).workload


def test_hooks_of_a_parameter_come_along_with_what_they_reach(tmp_path: Path) -> None:
    """An optimizer that steps as soon as a gradient is there: all that its training updates by."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(parameter: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    model.weight.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]  # torch
    model.weight.register_hook(lambda gradient: gradient * 0 + 1)  # type: ignore[no-untyped-call]  # torch
    copy = _copied(Workload(model, torch.ones(2, 3)), tmp_path).model
    copy(torch.randn(2, 3)).sum().backward()
    assert torch.allclose(copy.weight, model.weight - 1)
    assert copy.weight.grad is None


def test_a_live_model_and_its_optimizer_arrive_together_and_stay_untouched(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6))
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    groups: Any = [{"params": model[0].parameters(), "lr": 0.5}, {"params": [model[1].bias]}]
    optimizer = torch.optim.AdamW(groups)
    model(X).sum().backward()
    optimizer.step()
    before = digest({"model": model, "optimizer": optimizer})
    copy = _copied(Workload(model, X, optimizer=optimizer), tmp_path)
    assert differences(before, digest({"model": model, "optimizer": optimizer})) == []
    assert copy.model[1].weight is copy.model[0].weight
    assert not copy.model[1].bias.requires_grad
    assert copy.optimizer.param_groups[0]["params"][0] is copy.model[0].weight
    assert copy.optimizer.param_groups[0]["lr"] == 0.5
    for mine, yours in zip(model.parameters(), copy.model.parameters(), strict=True):
        assert torch.equal(mine, yours)
        assert mine.data_ptr() != yours.data_ptr()
        assert yours.grad is None
    ours: Any = optimizer.state[next(model.parameters())]
    theirs: Any = copy.optimizer.state[copy.model[0].weight]
    assert {name: value.tolist() for name, value in ours.items()} == {
        name: value.tolist() for name, value in theirs.items()
    }


def test_a_small_view_of_a_large_tensor_travels_alone(tmp_path: Path) -> None:
    large = torch.zeros(2**22)
    copy = _copied(Workload(nn.Linear(4, 2), large[8:24].view(4, 4)), tmp_path)
    assert (tmp_path / "workload.pt").stat().st_size < 2**20
    assert torch.equal(copy.sample_batch, large[8:24].view(4, 4))


def test_what_a_loss_closes_over_is_what_the_model_has(tmp_path: Path) -> None:
    model = nn.Linear(6, 2)
    teacher = nn.Linear(6, 2)

    def loss(student: nn.Module, batch: Any) -> torch.Tensor:
        distance: torch.Tensor = ((student(batch) - teacher(batch)) ** 2).mean()
        return distance + model.bias.sum()

    copy = _copied(Workload(model, X, loss_fn=loss), tmp_path)
    cells = dict(zip(loss.__code__.co_freevars, copy.loss_fn.__closure__, strict=True))
    assert cells["model"].cell_contents is copy.model
    assert cells["teacher"].cell_contents is not teacher
    assert torch.equal(copy.loss_fn(copy.model, X), loss(model, X))


def test_functions_of_a_script_are_compiled_where_another_script_runs(
    tmp_path: Path, run_python: Any
) -> None:
    """Dynamo reads what an inlined function uses by the name of its module: here another's."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, types, torch\n"
        "from autofit.probing.serialization import Payload, read_payload, write_payload\n"
        "from autofit.training.workload import Workload\n"
        "from pathlib import Path\n"
        "class Block(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.relu(x) + SHIFT\n"
        "SHIFT = 1.0\n"
        "x, at = torch.randn(4, 3), Path('payload')\n"
        "write_payload(Payload(Workload(torch.nn.Sequential(Block()), x), ()), at)\n"
        "main, sys.modules['__main__'] = sys.modules['__main__'], types.ModuleType('__main__')\n"
        "sys.modules['__main__'].SHIFT = 2.0\n"
        "model = read_payload(at).workload.model\n"
        "compiled = torch.compile(model, backend='eager', fullgraph=True)\n"
        "assert torch.equal(compiled(x), x.relu() + 1.0)\n"
    )
    ran = run_python(script, cwd=tmp_path)
    assert not ran.returncode, ran.stderr


def test_tensors_that_share_memory_in_the_model_still_do(tmp_path: Path) -> None:
    model: Any = nn.Module()
    model.register_buffer("table", torch.arange(12.0))
    model.window = model.table[2:8]
    copy = _copied(Workload(model, X), tmp_path).model
    copy.table.fill_(7)
    assert torch.equal(copy.window, torch.full((6,), 7.0))


def test_functions_that_name_modules_of_a_class_of_their_own_travel(tmp_path: Path) -> None:
    """`torch.backends.cudnn` is no plain module, and cloudpickle knows only plain ones."""
    code = "lambda model, x: model(x).mean() * (1 + torch.backends.cudnn.enabled)"
    names = {"torch": torch, "__name__": "__main__"}
    loss_fn = eval(code, names)  # a function of a module that the worker cannot import
    model = nn.Linear(6, 2)
    there = _copied(Workload(model, X, loss_fn=loss_fn), tmp_path)
    assert torch.equal(there.loss_fn(there.model, X), loss_fn(model, X))


@pytest.mark.cuda
def test_what_lay_on_the_gpu_comes_to_the_workers_device(tmp_path: Path) -> None:
    loss = functools.partial(
        lambda teacher, m, b: (m(b) - teacher(b)).mean(), nn.Linear(6, 2).cuda()
    )
    workload = Workload(nn.Linear(6, 2), X.cuda(), loss_fn=loss)
    copy = _copied(workload, tmp_path, torch.device("cuda"))
    assert copy.loss_fn.args[0].weight.is_cuda
    assert not copy.model.weight.is_cuda
    assert not copy.sample_batch.is_cuda
    assert not _copied(workload, tmp_path).loss_fn.args[0].weight.is_cuda


COMPILED: list[Any] = []


def noting_backend(graph: Any, inputs: Any) -> Any:
    COMPILED.append(graph)
    return graph.forward


def test_a_compiled_function_travels_by_value_and_is_compiled_there(tmp_path: Path) -> None:
    doubled = torch.compile(lambda x: 2 * x, backend=noting_backend, dynamic=True)
    workload = Workload(nn.Linear(6, 2), X, loss_fn=lambda model, x: doubled(model(x)).sum())
    copy = _copied(workload, tmp_path)
    assert not COMPILED
    assert torch.equal(copy.loss_fn(copy.model, X), 2 * copy.model(X).sum())
    assert COMPILED


def _local_class() -> nn.Module:
    class Local(nn.Linear):
        activation: Any = staticmethod(lambda x: x * 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.activation(super().forward(x))

    return Local(6, 2)


def _hooked() -> nn.Module:
    layer = nn.Linear(6, 2)
    layer.register_forward_hook(lambda module, inputs, output: output * 2)
    return layer


_SPECTRAL: Any = parametrizations.spectral_norm
_WEIGHT: Any = parametrizations.weight_norm


@pytest.mark.parametrize(
    "build",
    [
        _local_class,
        lambda: nn.Sequential(_SPECTRAL(nn.Linear(6, 6)), nn.Linear(6, 2)),
        lambda: _SPECTRAL(_WEIGHT(nn.Linear(6, 6))),
        lambda: _WEIGHT(nn.GRUCell(6, 6), "weight_hh"),
        _hooked,
    ],
    ids=["local class", "spectral norm", "two on one module", "recurrent layer", "forward hook"],
)
def test_models_that_do_not_pickle_by_themselves_compute_the_same(
    build: Any, tmp_path: Path
) -> None:
    model = build().eval()
    copy = _copied(Workload(model, X), tmp_path).model
    assert torch.equal(copy(X), model(X))
    assert [n for n, _ in copy.named_parameters()] == [n for n, _ in model.named_parameters()]
    copy(X).sum().backward()
    assert all(parameter.grad is not None for parameter in copy.parameters())


def _fails_to_pickle(self: Any) -> Any:
    raise KeyError("the user's own way of pickling")


class _Pickled:
    """Is written and read as `reduce` says."""

    def __init__(self, reduce: Callable[[Any], Any]) -> None:
        self.reduce = reduce

    def __reduce__(self) -> Any:
        return self.reduce(self)


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (threading.Lock(), "TypeError"),
        ((n for n in range(3)), "TypeError"),
        (_Pickled(_fails_to_pickle), "KeyError"),
        (_Pickled(lambda self: (functools.partial(int, "no number"), ())), "no number"),
    ],
)
def test_what_cannot_be_written_or_read_names_the_way_out(
    thing: Any, words: str, tmp_path: Path
) -> None:
    model: Any = nn.Linear(6, 2)
    model.thing = thing
    with pytest.raises(InvalidArgument, match="worker") as refusal:
        _copied(Workload(model, X), tmp_path)
    assert "a function that builds the model" in str(refusal.value)
    assert words in str(refusal.value)


class Lying(nn.Linear):
    """Its pickle makes something else."""

    def __reduce__(self) -> Any:
        return dict, ()


def test_a_model_whose_pickle_is_no_model_is_named_as_the_cause(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="pickle"):
        _copied(Workload(Lying(6, 2), X), tmp_path).build_model()


def test_where_descriptors_have_no_paths_it_is_said(tmp_path: Path) -> None:
    """As without /proc, to which /dev/fd leads."""
    with pytest.raises(WorkerFailed, match="proc"):
        write_payload(Payload(Workload(nn.Linear(6, 2), X), ()), tmp_path / "fd" / "7")


# -- What a copy copies is found, so that looks at one model can put it back


class Judge:
    def __init__(self, critic: nn.Module) -> None:
        self.critic = critic

    def __call__(self, model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
        return self.critic(model(samples)).mean()

    def method(self, model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
        return self(model, samples)


SCRIPT = """
def helper(output):
    return (lambda: critic(output).mean())()


def loss_fn(model, samples):
    return helper(model(samples))
"""


def _of_a_script(critic: nn.Module) -> Any:
    names: dict[str, Any] = {"__name__": "__main__", "critic": critic}
    exec(SCRIPT, names)
    return names["loss_fn"]


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda critic: lambda model, samples: critic(model(samples)).mean(),
        lambda critic: lambda model, samples, critic=critic: critic(model(samples)).mean(),
        lambda critic: functools.partial(lambda c, model, x: Judge(c)(model, x), critic),
        Judge,
        lambda critic: Judge(critic).method,
        _of_a_script,
    ],
    ids=["closure", "default", "partial", "object", "method", "script"],
)
def test_a_critic_that_the_loss_reaches_is_found(loss_of: Any) -> None:
    critic = nn.Linear(2, 1)
    workload = Workload(nn.Linear(6, 2), X, loss_fn=loss_of(critic))
    found = live_objects(workload, but=("model",))
    assert any(each is critic for each in found.values())


def test_members_of_containers_are_found_and_what_is_beside_what_cannot_be_pickled() -> None:
    judges: dict[str, list[Any]] = {"of images": [nn.Linear(2, 1)], "of nothing": []}
    model, lock = nn.Linear(6, 2), threading.Lock()

    def locked(model: nn.Module, optimizer: Any) -> None:
        with lock:
            model.requires_grad_()

    workload = Workload(
        model, X, before_step=locked, loss_fn=lambda m, x: judges["of images"][0](m(x)).mean()
    )
    found = list(live_objects(workload).values())
    assert {id(each) for each in found} == {id(model), id(X), id(judges["of images"][0])}


# -- Requests and exceptions cross between processes and come out the same.


class Strict(Exception):
    """Wants more than its text, as many classes do, and so cannot be pickled as it is."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class Holding(ValueError):
    """Holds what cannot be pickled, or is large."""

    held: object = None


def holding(held: object) -> Holding:
    error = Holding("with something")
    error.held = held
    return error


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def _there_and_back(exception: BaseException, traceback: str | None = "where it was") -> Any:
    sent = message_of_reply(Reply(exception=exception, traceback=traceback))
    return reply_of(sent).exception


@pytest.mark.parametrize(
    "exception",
    [
        ValueError("plain", 3),
        KeyError("missing"),
        OSError(errno.ENOENT, "no such file", "x.txt"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad byte"),
        torch.OutOfMemoryError("CUDA out of memory"),
        InvalidArgument("not that"),
        SystemExit(3),
    ],
    ids=lambda exception: type(exception).__name__,
)
def test_exceptions_keep_type_arguments_and_text(exception: BaseException) -> None:
    back = _there_and_back(exception)
    assert type(back) is type(exception)
    assert back.args == exception.args
    assert str(back) == str(exception)


def test_what_init_wants_does_not_matter() -> None:
    with pytest.raises(TypeError):
        pickle.loads(pickle.dumps(Strict(3, "bad sample")))
    back = _there_and_back(Strict(3, "bad sample"))
    assert (type(back), str(back), back.code) == (Strict, "3: bad sample", 3)
    refused = NoFeasiblePlan("none", plan=Plan(2), required_bytes=None, allowed_bytes=7)
    assert _there_and_back(refused).plan == Plan(2)


@pytest.mark.parametrize("held", [(n for n in range(3)), torch.zeros(2**20)], ids=type)
def test_what_cannot_travel_stays_behind_and_the_type_does_not(held: object) -> None:
    exception = holding(held)
    assert len(message_of_reply(Reply(exception=exception))) < 2**20
    back = _there_and_back(exception)
    assert type(back) is Holding
    assert str(back) == str(exception)


def test_the_workers_traceback_is_the_cause_but_not_of_our_own_errors() -> None:
    assert "where it was" in str(_there_and_back(ValueError("x")).__cause__)
    assert _there_and_back(ValueError("x"), None).__cause__ is None
    assert _there_and_back(InvalidArgument("x")).__cause__ is None


def test_that_an_exception_is_the_users_travels() -> None:
    theirs = ValueError("x")
    mark_users(theirs)
    assert is_users(_there_and_back(theirs))
    assert not is_users(_there_and_back(ValueError("x")))


class OfAFile(Exception):
    """Reads a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return of_file, (self.args[0],)


def of_file(path: Path) -> OfAFile:
    path.read_text()
    return OfAFile(path)


def test_an_unreadable_exception_is_described_in_words(tmp_path: Path) -> None:
    path = tmp_path / "needed"
    path.touch()
    message = message_of_reply(Reply(exception=OfAFile(path)))
    assert type(reply_of(message).exception) is OfAFile
    path.unlink()
    back = reply_of(message).exception
    assert isinstance(back, WorkloadFailed)
    assert f"OfAFile: {path}" in str(back)
    assert type(_there_and_back(Mute())) is Mute


def test_a_class_that_comes_home_is_left_as_it_was() -> None:
    """cloudpickle fills a class that it reads by value, also one that was here first."""

    class Mine(ValueError):
        limit = 3

        def hello(self) -> str:
            return f"hello {self}"

    before = {name: id(value) for name, value in vars(Mine).items()}
    back = _there_and_back(Mine("from afar"))
    assert type(back) is Mine
    assert back.hello() == "hello from afar"
    assert {name: id(value) for name, value in vars(Mine).items()} == before


@pytest.mark.parametrize("detail", ["its file is gone", None])
def test_a_user_error_without_an_exception_is_the_workloads(detail: str | None) -> None:
    error = Reply(Measurement(Outcome.USER_ERROR, detail)).user_exception
    assert isinstance(error, WorkloadFailed)
    assert (detail or "workload") in str(error)


@pytest.mark.parametrize("outcome", sorted(set(Outcome) - {Outcome.USER_ERROR}))
def test_every_other_outcome_is_not_an_error_of_the_users_code(outcome: Outcome) -> None:
    assert Reply(Measurement(outcome), KeyError("x")).user_exception is None


@pytest.mark.parametrize(
    "request_",
    [
        ProbeRequest(ResolvedPlan(Plan(4))),
        ProbeRequest(
            ResolvedPlan(Plan.split(10, 4, {"a.x": 1}), {"a.x": ["layer.0", "layer.1"]}),
            vram_budget_bytes=2**30,
            incumbent_samples_per_second=12.5,
            full_accumulation=True,
            steps=40,
        ),
    ],
)
def test_requests_arrive_as_they_were(request_: ProbeRequest) -> None:
    assert request_of(message_of_request(request_, ()), ()) == request_


@pytest.mark.parametrize("make", [ProbeRequest, lambda resolved: Call(partial(print, resolved), 1)])
def test_strategies_are_those_of_the_receiver(make: Any) -> None:
    (sent,), (received,) = load_strategies(["precision"]), load_strategies(["precision"])
    data = message_of_request(make(ResolvedPlan(Plan(4), strategies=[sent])), [sent])
    arrived: Any = request_of(data, [received])
    resolved = arrived.resolved if make is ProbeRequest else arrived.function.args[0]
    assert resolved.strategies == [received]
    assert resolved.strategies[0] is received is not sent


def test_a_storage_arrives() -> None:
    held = torch.arange(5.0)
    error = LookupError("this storage", held.untyped_storage())
    arrived = _there_and_back(error)
    assert type(arrived) is LookupError
    assert torch.equal(torch.empty(0).set_(arrived.args[1]), held)


@pytest.mark.cuda
def test_tensors_on_a_gpu_arrive_on_the_host() -> None:
    held = torch.ones(3, device="cuda", requires_grad=True)
    error = LookupError("this batch", {"batch": held, "weight": torch.nn.Parameter(held.detach())})
    vars(error)["storage"] = held.untyped_storage()
    arrived = _there_and_back(error)
    assert type(arrived) is LookupError
    assert arrived.args[1]["batch"].tolist() == [1.0, 1.0, 1.0]
    parts = (*arrived.args[1].values(), vars(arrived)["storage"])
    assert {part.device.type for part in parts} == {"cpu"}
