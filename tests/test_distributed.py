"""Training in several processes: two of them learn what one learns from the same conversations."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from accelerate.state import DistributedType, PartialState

from longspark_hf.training.trainer import LongSparkTrainer

from . import targets
from .test_training import Items, arguments, conversation, make_drafter


ROOT = Path(__file__).parents[1]
TIMEOUT = 600  # seconds, for a busy machine; a process that waits for another one would wait for ever
LAYERS = {"version": 2, "transformer_layer_cls_to_wrap": ["LongSparkDraftLayer"]}
MODES = {
    "ddp": {},
    "fsdp": {"fsdp": True, "fsdp_config": LAYERS},
}


def train(folder, **overrides):
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
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Folder with the outcomes of two processes, started as `accelerate launch` starts them, on a free port."""
    folder = tmp_path_factory.mktemp("distributed")
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    work(sys.argv[1])
