"""Training in several processes: two of them learn what one learns from the same conversations."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from accelerate.state import DistributedType, PartialState

from longspark_hf.training import plan
from longspark_hf.training.trainer import LongSparkTrainer

from . import targets
from .test_train_cli import answers, byte_tokenizer, save_target
from .test_training import Items, arguments, conversation, make_drafter


ROOT = Path(__file__).parents[1]
TIMEOUT = 600  # seconds, for a busy machine; a process that waits for another one would wait for ever
LAYERS = {"version": 2, "transformer_layer_cls_to_wrap": ["LongSparkDraftLayer"]}
MODES = {
    "ddp": {},
    "fsdp": {"fsdp": True, "fsdp_config": LAYERS},
}
# Three steps share their batches, and an epoch ends in the middle of them.
SHARED = {"steps_per_batch": 3, "max_steps": 5}


def train(folder, steps_per_batch=1, **overrides):
    """Three steps of two conversations each. With SGD, so that a gradient of twice the size is seen."""
    # One process of two meets many groups of anchors, the other few, and none in the last step.
    lengths = [(50, 30), (24, 4), (44, 26), (20, 8), (47, 36), (12, 1)]
    items = Items(*(conversation(length, response, seed=i) for i, (length, response) in enumerate(lengths)))
    target = targets.build("qwen3")
    options = {
        "max_steps": 3,
        "optim": "sgd",
        "learning_rate": 0.3,
        "max_grad_norm": 1e9,
        "train_sampling_strategy": "sequential",
    }
    args = arguments(folder, **(options | overrides))
    if args.fsdp and args.device.type == "cpu":
        # accelerate (1.15) shards for accelerators only and takes DDP on CPUs, though FSDP2 itself runs there.
        PartialState().distributed_type = DistributedType.MULTI_GPU
    trainer = LongSparkTrainer(
        make_drafter(target, block_size=4, draft_vocab_size=40),
        target,
        args,
        train_dataset=items,
        eval_dataset=items,
        num_anchors=100,
        anchors_per_group=8,
        steps_per_batch=steps_per_batch,
    )
    trainer.train()
    return trainer


def outcome(trainer):
    metrics = {name: value for name, value in trainer.evaluate().items() if "simulated" in name or "accepted" in name}
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"metrics": metrics, "losses": losses, "drafter": trainer.whole_drafter().state_dict()}


def work(folder):
    """What each of the processes does."""
    for mode, options in MODES.items():
        trainer = train(Path(folder) / mode, gradient_accumulation_steps=1, **options)
        result = outcome(trainer) | {"wrapped": [base.__name__ for base in type(trainer.model_wrapped).__mro__]}
        torch.save(result, Path(folder) / f"{mode}-{trainer.args.process_index}.pt")
    trainer = train(Path(folder) / "shared", gradient_accumulation_steps=2, **SHARED)
    torch.save(outcome(trainer), Path(folder) / f"shared-{trainer.args.process_index}.pt")
    torch.save(fitted_options(Path(folder)), Path(folder) / f"minutes-{trainer.args.process_index}.pt")
    torch.distributed.destroy_process_group()


def fitted_options(folder):
    """Options of a plan with a time limit, which measures for longer in one process than in the other."""
    made = plan.make_plan(str(folder / "target"), str(folder / "data.jsonl"), str(folder / "run"), minutes=0.2)

    def measure(*_):
        time.sleep(int(os.environ["RANK"]))
        return plan.Speed(step=0.01, simulation=0.01, token=0.001)

    plan.measure = measure
    made.get_ready(lambda message: None)
    return made.options


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Folder with the outcomes of two processes, started as `accelerate launch` starts them, on a free port."""
    folder = tmp_path_factory.mktemp("distributed")
    save_target(folder / "target", byte_tokenizer())
    (folder / "data.jsonl").write_text("\n".join(answers(folder / "target", ["one", "two"]) * 12))
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "tests.test_distributed"]
    with open(folder / "log.txt", "w") as log:
        process = subprocess.Popen([sys.executable, "-m", *launcher, folder], cwd=ROOT, stdout=log, stderr=log)
        try:
            code = process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            code = "timeout"
        finally:
            if process.poll() is None:
                for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                    one.kill()
                process.wait()
    assert code == 0, (folder / "log.txt").read_text()[-4000:]
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Outcome of one process that accumulates the two conversations of a step."""
    return outcome(train(tmp_path_factory.mktemp("alone"), gradient_accumulation_steps=2))


@pytest.mark.parametrize("mode, wrapper", [("ddp", "DistributedDataParallel"), ("fsdp", "FSDPModule")])
def test_two_processes_learn_what_one_does(launched, alone, mode, wrapper):
    for rank in range(2):
        result = torch.load(launched / f"{mode}-{rank}.pt")
        assert wrapper in result["wrapped"]
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert result["metrics"] == pytest.approx(alone["metrics"], rel=1e-5)
        assert result["drafter"].keys() == alone["drafter"].keys()
        for name, expected in alone["drafter"].items():
            assert torch.allclose(result["drafter"][name], expected, atol=1e-5), name


def test_steps_that_share_a_batch_are_those_of_one_process_past_the_end_of_an_epoch(launched, tmp_path):
    alone = outcome(train(tmp_path, gradient_accumulation_steps=4, **SHARED))
    results = [torch.load(launched / f"shared-{rank}.pt") for rank in range(2)]
    assert len(alone["losses"]) == 5 and results[0]["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    for name, expected in alone["drafter"].items():
        assert torch.equal(results[0]["drafter"][name], results[1]["drafter"][name]), name
        assert torch.allclose(results[0]["drafter"][name], expected, atol=1e-4), name


def test_processes_with_clocks_of_their_own_fit_a_run_into_the_same_steps(launched):
    first, second = (torch.load(launched / f"minutes-{rank}.pt") for rank in range(2))
    assert first == second and 0.1 < first["max_minutes"] < 0.2


if __name__ == "__main__":
    torch.set_num_threads(1)
    work(sys.argv[1])
