"""Training: what a slot learns is what inference asks of it, and the trainer around it keeps its promises."""

import pytest
import torch
from transformers import TrainerCallback, TrainingArguments

from longspark_hf import LongSparkDrafter
from longspark_hf.compat import checkpointing_argument
from longspark_hf.loss_longspark import slot_weights
from longspark_hf.target_longspark import BorrowedTarget
from longspark_hf.training.data import Sample, read_samples, tokenize
from longspark_hf.training.initialize import fit_block_inputs, initialize_from_target
from longspark_hf.training.metrics import (
    acceptance,
    expected_rounds,
    label_mask,
    possible_anchors,
    slot_targets,
)
from longspark_hf.training.trainer import LongSparkTrainer, last_complete_checkpoint
from longspark_hf.training.views import anchor_groups, run_target

from . import targets


VIEWS = [
    pytest.param("qwen3", {}, id="qwen3"),
    pytest.param("gemma3", {"boundary_residual": -1}, id="gemma3-residual"),
    pytest.param("llama", {"draft_vocab_size": 40, "qk_norm": False}, id="llama-draft-vocabulary"),
]


def make_drafter(target, **overrides):
    drafter = targets.random_drafter(target, **overrides)
    if drafter.draft_token_ids is not None:
        size = len(drafter.draft_token_ids)
        drafter.draft_token_ids = torch.randperm(targets.VOCAB_SIZE)[:size].sort().values
    return drafter


def conversation(length=60, response=40, seed=3):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 90, (length,), generator=generator).tolist()
    return {"input_ids": ids, "response_mask": [i >= length - response for i in range(length)], "temperature": 0.0}


def rows_of(target, drafter, ids):
    ids = torch.tensor([ids])
    borrowed = BorrowedTarget.of(target, drafter.config)
    return borrowed, run_target(target, borrowed, drafter.config, ids, torch.ones_like(ids), drafter.device)[0]


def training_losses(drafter, borrowed, rows, mask, anchors, anchors_per_group):
    """Sum of weighted losses and slot states, as the trainer makes them."""
    total, states = 0.0, []
    for group, views in anchor_groups(drafter, rows, anchors, anchors_per_group):
        slots = slot_targets(rows, group, drafter.config.block_size)
        counted = label_mask(mask, slots.pop("label_rows"))
        output = drafter(
            cache=views,
            target=borrowed,
            target_hidden_states=rows.hidden_states,
            label_mask=counted,
            num_items_in_batch=1.0,
            **slots,
        )
        total, states = total + output.loss, states + [output.hidden_states]
    return total, torch.cat(states)


@pytest.mark.parametrize("name, overrides", VIEWS)
@pytest.mark.parametrize("anchors_per_group", [1, 5, 100])
def test_many_anchors_see_what_a_cache_filled_to_each_shows(name, overrides, anchors_per_group):
    target = targets.build(name).double()
    drafter = make_drafter(target, window_size=12, block_size=4, **overrides).double()
    item = conversation()
    ids, mask = item["input_ids"], torch.tensor(item["response_mask"])
    borrowed, rows = rows_of(target, drafter, ids)
    anchors = possible_anchors(mask).tolist()
    anchors = anchors[:3] + anchors[7:30:3] + anchors[-4:]  # gaps, and blocks that stick out of the response
    total, states = training_losses(drafter, borrowed, rows, mask, anchors, anchors_per_group)

    expected = 0.0
    with torch.no_grad():
        output = target(torch.tensor([ids]), output_hidden_states=True)
        for number, anchor in enumerate(anchors):
            prefix = targets.cache_of(target(torch.tensor([ids[:anchor]]), use_cache=True))
            cache = drafter.new_cache()
            for layer, layer_id in enumerate(drafter.config.target_layer_ids):
                keys, values = (t[layer][None, :, :anchor] for t in (rows.keys, rows.values))
                held = prefix.layers[layer_id].keys  # a sliding layer holds the last rows only
                assert torch.allclose(keys[:, :, -held.shape[2] :], held, atol=1e-8)
                cache.update(keys, values, layer)
            boundary = [output.hidden_states[i + 1][:, anchor - 1] for i in drafter.config.target_layer_ids]
            cache.set_boundary(torch.stack(boundary, dim=1))
            block = drafter.config.block_size
            labels = torch.tensor([(ids + [0] * block)[anchor + 1 : anchor + 1 + block]])
            judges = output.hidden_states[-1][:, [min(anchor + j, len(ids) - 1) for j in range(block)]]
            counts = torch.tensor([[anchor + 1 + j < len(ids) for j in range(block)]])
            one = drafter(torch.tensor([ids[anchor]]), torch.tensor([anchor]), cache, borrowed, labels, judges, counts)
            assert torch.allclose(one.hidden_states[0], states[number], atol=1e-8)
            expected += one.loss.item() * (slot_weights(block, dtype=torch.float64) * counts).sum().item()
    assert total.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name, overrides", VIEWS)
def test_gradients_are_those_of_float64(name, overrides):
    gradients = {}
    for dtype in (torch.float64, torch.float32):
        target = targets.build(name).to(dtype)
        torch.manual_seed(0)
        drafter = make_drafter(target, window_size=12, block_size=4, **overrides).to(dtype)
        item = conversation()
        mask = torch.tensor(item["response_mask"])
        borrowed, rows = rows_of(target, drafter, item["input_ids"])
        total, _ = training_losses(drafter, borrowed, rows, mask, possible_anchors(mask).tolist(), 8)
        total.backward()
        gradients[dtype] = {name: p.grad.double() for name, p in drafter.named_parameters()}
    for name, exact in gradients[torch.float64].items():
        assert exact.abs().max() > 0, name
        assert torch.allclose(gradients[torch.float32][name], exact, rtol=1e-3, atol=1e-4 * exact.abs().max()), name


def test_the_gradient_of_the_summary_queries_is_that_of_finite_differences():
    target = targets.build("qwen3").double()
    drafter = make_drafter(target, window_size=4, block_size=3).double()
    item = conversation(length=40, response=25)
    mask = torch.tensor(item["response_mask"])
    borrowed, rows = rows_of(target, drafter, item["input_ids"])
    borrowed.final_norm = torch.nn.Identity()  # transformers' norms compute in float32, too coarse for differences
    anchors = possible_anchors(mask).tolist()[::3]

    def loss():
        return training_losses(drafter, borrowed, rows, mask, anchors, 3)[0]

    loss().backward()
    direction = torch.randn_like(drafter.summary_queries)
    expected = (drafter.summary_queries.grad * direction).sum().item()
    with torch.no_grad():
        drafter.summary_queries.add_(direction, alpha=1e-5)
        above = loss().item()
        drafter.summary_queries.sub_(direction, alpha=2e-5)
        below = loss().item()
    assert (above - below) / 2e-5 == pytest.approx(expected, rel=1e-5)


def arguments(folder, **overrides):
    fields = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": 5,
    }
    return TrainingArguments(**(fields | overrides))


class Items(torch.utils.data.Dataset):
    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def data(count=6):
    return Items(*(conversation(length=40 + 3 * i, response=12 + i, seed=i) for i in range(count)))


OURS = ("num_anchors", "anchors_per_group", "steps_per_batch", "boundary_lr_scale", "eval_dataset", "eval_prompts")


def trainer_for(target, drafter, folder, **overrides):
    ours = {"num_anchors": 6} | {name: overrides.pop(name) for name in OURS if name in overrides}
    return LongSparkTrainer(
        drafter,
        target,
        arguments(folder, **overrides),
        train_dataset=data(),
        **ours,
    )


def test_every_trained_parameter_changes_and_none_of_the_target(tmp_path):
    target = targets.build("qwen3")
    drafter = make_drafter(target, block_size=4)
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    before_target = {name: p.detach().clone() for name, p in target.state_dict().items()}
    trainer_for(target, drafter, tmp_path).train()
    for name, parameter in drafter.named_parameters():
        assert not torch.equal(parameter, before[name]), name
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, before_target[name]), name
    assert targets.left_on(target) == []


def test_the_loss_of_a_step_does_not_depend_on_how_it_is_split(tmp_path):
    target, losses, norms, weights = targets.build("qwen3"), [], [], []
    for batch_size, accumulation in ((1, 6), (3, 2), (6, 1)):
        drafter = make_drafter(target, block_size=4)
        trainer = trainer_for(
            target,
            drafter,
            tmp_path,
            num_anchors=100,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            optim="sgd",
            max_grad_norm=1e9,
        )
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
        norms.append(trainer.state.log_history[0]["grad_norm"])
        weights.append(drafter.input_mapping.fc1.weight.detach())
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)
    assert torch.allclose(weights[0], weights[1], atol=1e-6) and torch.allclose(weights[0], weights[2], atol=1e-6)


def trained(target, folder, **overrides):
    """Losses by step and the drafter after a short run; steps have several passes of it."""
    drafter = make_drafter(target, block_size=4)
    trainer = trainer_for(target, drafter, folder, anchors_per_group=4, **({"max_steps": 2} | overrides))
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], drafter


def test_gradient_checkpointing_changes_no_gradient(tmp_path):
    target = targets.build("llama")
    losses, drafter = trained(target, tmp_path)
    same_losses, same = trained(target, tmp_path, **{checkpointing_argument(): True})
    assert same.layers[0].gradient_checkpointing
    assert same_losses == losses
    for (name, parameter), other in zip(drafter.named_parameters(), same.parameters()):
        assert torch.equal(parameter, other), name


def test_a_compiled_run_trains_saves_and_evaluates_as_any(tmp_path, monkeypatch):
    for name in ("BACKEND", "USE_REGIONAL_COMPILATION", "USE_DYNAMIC"):  # the Trainer sets them for good
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", "no")
    target = targets.build("llama")
    losses, drafter = trained(target, tmp_path / "plain")
    compiled = make_drafter(target, block_size=4)
    options = {"max_steps": 2, "anchors_per_group": 4, "save_strategy": "steps", "save_steps": 2}
    options |= {"torch_compile": True, "torch_compile_backend": "eager"}
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # `reset` keeps the counts of the tests before
    trainer = trainer_for(target, compiled, tmp_path / "compiled", **options)
    trainer.train()
    assert [e["loss"] for e in trainer.state.log_history if "loss" in e] == pytest.approx(losses, rel=1e-5)
    # Fusions, a layer and the Markov head, each once more where shapes change: not anew in every pass.
    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 8
    saved = LongSparkDrafter.from_pretrained(tmp_path / "compiled" / "checkpoint-2")
    for (name, parameter), other in zip(drafter.named_parameters(), saved.parameters()):
        assert torch.allclose(parameter, other, atol=1e-5), name
    assert "eval_accepted_1" in trainer.evaluate(data(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_bf16_autocast_the_loss_is_fp32_and_close(tmp_path, monkeypatch, dtype):
    target, seen = targets.build("llama"), []
    losses, _ = trained(target, tmp_path)
    in_full = LongSparkDrafter.weighted_loss
    monkeypatch.setattr(LongSparkDrafter, "weighted_loss", lambda *a: seen.append(in_full(*a)) or seen[-1])
    close_losses, drafter = trained(target.to(dtype), tmp_path, bf16=True)
    assert {loss.dtype for loss in seen} == {torch.float32} and drafter.dtype == torch.float32
    assert close_losses == pytest.approx(losses, rel=0.02)
    assert all(parameter.isfinite().all() for parameter in drafter.parameters())


def test_memory_of_a_step_does_not_grow_with_the_anchors(tmp_path):
    class Saved:
        """A tensor kept for the backward pass, counted as long as it is."""

        now = peak = 0

        def __init__(self, tensor):
            self.tensor, self.size = tensor, tensor.numel() * tensor.element_size()
            Saved.now += self.size
            Saved.peak = max(Saved.peak, Saved.now)

        def __del__(self):
            Saved.now -= self.size

    target, peaks = targets.build("llama"), []
    options = {"gradient_accumulation_steps": 1, "max_steps": 1, "anchors_per_group": 8}
    for num_anchors in (32, 128):
        drafter = make_drafter(target, block_size=4)
        trainer = trainer_for(target, drafter, tmp_path, num_anchors=num_anchors, **options)
        trainer.train_dataset = Items(conversation(length=160, response=140))
        Saved.now = Saved.peak = 0
        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            trainer.train()
        assert trainer.num_anchors_seen == num_anchors and Saved.now == 0
        peaks.append(Saved.peak)
        assert trainer.state.log_history[-1]["peak_rss_bytes"] > 2**20
    assert peaks[1] < 1.05 * peaks[0]


def test_a_target_with_a_device_map_stays_where_it_is(tmp_path, monkeypatch):
    target = targets.build("llama")
    target.hf_device_map = {"": "cpu"}  # `from_pretrained` leaves it where it splits a target over devices
    monkeypatch.setattr(target, "to", lambda *_: pytest.fail("the target was moved"))
    losses, _ = trained(target, tmp_path)
    assert len(losses) == 2


def test_further_gpus_of_one_process_do_not_widen_its_batches(tmp_path):
    target = targets.build("llama")
    args = arguments(tmp_path)
    args._n_gpu = 2  # as on a machine with two, without a launcher
    trainer = LongSparkTrainer(make_drafter(target), target, args, train_dataset=data())
    assert len(next(iter(trainer.get_train_dataloader()))["input_ids"]) == 1


@pytest.mark.parametrize("steps_per_batch, accumulation", [(1, 2), (3, 2), (3, 4)])
def test_a_resumed_run_ends_bit_equal_even_after_a_broken_checkpoint(tmp_path, steps_per_batch, accumulation):
    target, ends = targets.build("llama"), []
    # Six conversations: 9 steps; with an accumulation of 4 every other step is cut by the end of an epoch.
    options = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 9 / -(-6 // accumulation)}
    options |= {"steps_per_batch": steps_per_batch, "gradient_accumulation_steps": accumulation, "max_steps": -1}
    for folder, steps in ((tmp_path / "whole", None), (tmp_path / "parts", 5)):
        drafter = make_drafter(target, block_size=4, draft_vocab_size=40)
        token_ids = drafter.draft_token_ids.clone()
        trainer = trainer_for(target, drafter, folder, **options)
        if steps is not None:
            trainer_for(target, drafter, folder, **(options | {"max_steps": steps})).train()
            newest = folder / f"checkpoint-{steps}"
            (newest / "complete.json").unlink()  # as if killed while writing it
            torch.manual_seed(99)
            drafter = make_drafter(target, block_size=4, draft_vocab_size=40)
            trainer = trainer_for(target, drafter, folder, **options)
            checkpoint = last_complete_checkpoint(folder)
            assert checkpoint.endswith("checkpoint-3") and newest.exists()
            (newest / "trainer_state.json").unlink()
            trainer.train(resume_from_checkpoint=True)
            assert torch.equal(drafter.draft_token_ids, token_ids)
        else:
            trainer.train()
        assert trainer.state.global_step == 9
        ends.append(drafter.state_dict())
    for name, tensor in ends[0].items():
        assert torch.equal(tensor, ends[1][name]), name


def test_resuming_without_a_complete_checkpoint_says_so(tmp_path):
    target = targets.build("llama")
    (tmp_path / "checkpoint-3").mkdir()
    trainer = trainer_for(target, make_drafter(target), tmp_path)
    with pytest.raises(ValueError, match="no complete checkpoint in .*`output_dir`"):
        trainer.train(resume_from_checkpoint=True)


@pytest.fixture
def evaluable(tmp_path, prompt):
    """Makes trainers by what they evaluate on."""

    def make(**overrides):
        target = targets.build("llama")
        return trainer_for(target, make_drafter(target, block_size=4), tmp_path, **overrides)

    return make


def test_several_datasets_are_evaluated_by_name_and_prompts_once(evaluable, prompt):
    two = {"a": data(2), "b": data(1)}
    trainer = evaluable(eval_dataset=two, eval_prompts=[prompt], eval_strategy="steps", eval_steps=2, max_steps=2)
    trainer.train()
    metrics = trainer.evaluate()
    assert {"eval_a_simulated_tau_greedy", "eval_b_simulated_tau_greedy", "eval_tau"} <= metrics.keys()
    alone = evaluable(eval_dataset=two["b"])
    alone.model.load_state_dict(trainer.model.state_dict())
    assert alone.evaluate()["eval_simulated_tau_greedy"] == metrics["eval_b_simulated_tau_greedy"]


def test_prompts_alone_are_enough_to_evaluate(evaluable, prompt):
    trainer = evaluable(eval_prompts=[prompt], eval_strategy="steps", eval_steps=2, max_steps=2)
    trainer.train()
    assert [e["eval_tau"] >= 1 for e in trainer.state.log_history if "eval_tau" in e] == [True]
    assert not any("accepted" in name for name in trainer.evaluate())


def test_what_a_trainer_cannot_do_says_what_to_pass(evaluable):
    with pytest.raises(ValueError, match="nothing to evaluate on. Pass `eval_dataset`"):
        evaluable().evaluate()
    with pytest.raises(ValueError, match=r"Use `evaluate\(dataset\)`"):
        evaluable().predict(data(1))
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}
    with pytest.raises(ValueError, match='reports no loss.*`metric_for_best_model="tau"`'):
        evaluable(eval_dataset=data(1), **best)


class PassesPerStep(TrainerCallback):
    """Batches that went into each optimizer step."""

    def __init__(self):
        self.counts, self.now = [], 0

    def on_substep_end(self, args, state, control, **_):
        self.now += 1

    def on_optimizer_step(self, args, state, control, **_):
        self.counts.append(self.now + 1)
        self.now = 0


@pytest.mark.parametrize("accumulation", [4, 5, 8])
def test_steps_that_share_a_batch_are_whole_at_the_end_of_an_epoch(tmp_path, accumulation):
    target = targets.build("llama")
    options = {"steps_per_batch": 3, "gradient_accumulation_steps": accumulation, "max_steps": 9}
    options |= {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
    drafter = make_drafter(target, block_size=4)
    trainer = trainer_for(target, drafter, tmp_path, eval_dataset=data(1), **options)
    passes = PassesPerStep()
    trainer.add_callback(passes)

    trainer.train()

    # Six batches an epoch, the last step of which has what is left.
    epoch = [min(accumulation, 6 - start) for start in range(0, 6, accumulation)]
    assert passes.counts == (epoch * 9)[:9] and passes.now == 0
    assert trainer.state.global_step == 9
    assert [e["step"] for e in trainer.state.log_history if "eval_accepted_1" in e] == [3, 6, 9]
    assert (tmp_path / "checkpoint-9" / "complete.json").exists()


@torch.no_grad()
def test_the_weights_of_a_cut_step_are_those_of_its_own_batches(tmp_path):
    target = targets.build("llama")
    trainer = trainer_for(target, make_drafter(target, block_size=4), tmp_path, steps_per_batch=3, num_anchors=99)
    trainer.state.global_step, batches = 0, [trainer.data_collator([item]) for item in data().items]

    def counted(step, batches, number):
        trainer.state.global_step = step
        chosen, total = trainer.get_batch_samples(iter(batches), number, torch.device("cpu"))
        weights = (trainer._label_weights(b["response_mask"][0], b["anchors"][0]).sum() for b in chosen)
        assert total == pytest.approx(sum(weights).item(), rel=1e-6)
        return [b["input_ids"].shape[1] for b in chosen]

    assert counted(0, batches[:4], 4) == [40, 43, 46, 49]
    assert counted(1, batches[4:], 2) == [40, 43]  # of what the group shares, as many as are left in the epoch
    assert counted(2, batches[:4], 4) == [40, 43, 46, 49]
    assert counted(3, batches[4:], 2) == [52, 55]
    assert counted(4, batches[:4], 4) == [40, 43, 46, 49]  # two cannot serve for four


def answered(target, prompt, length=48):
    """A conversation whose response is the target's own greedy one."""
    ids = target.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=length, do_sample=False)[0]
    return {
        "input_ids": ids.tolist(),
        "response_mask": [i >= prompt.shape[1] for i in range(len(ids))],
        "temperature": 0.0,
    }


def test_overfitting_one_sequence_fills_every_block_in_generate(tmp_path, prompt):
    target = targets.build("llama")
    drafter = make_drafter(target, block_size=4, boundary_residual=-1)
    initialize_from_target(drafter, target, [prompt])
    item = answered(target, prompt)
    trainer = LongSparkTrainer(
        drafter,
        target,
        arguments(tmp_path, max_steps=60, learning_rate=3e-3, gradient_accumulation_steps=1),
        train_dataset=Items(item),
        eval_dataset=Items(item),
        eval_prompts=[prompt],
        eval_new_tokens=48,
    )
    for steps in (12, 60):
        trainer.args.max_steps = steps
        trainer.train()
        metrics = trainer.evaluate()
        # The metric of training is what the inference path does, half trained as well.
        assert metrics["eval_tau"] == pytest.approx(metrics["eval_simulated_tau_greedy"])
    assert metrics["eval_tau"] > drafter.config.block_size + 0.5


def entering_states(target, layer_id, input_ids):
    """What the target feeds into a layer, `(length, hidden_size)`."""
    kept = []
    hook = target.model.layers[layer_id].register_forward_pre_hook(lambda _module, args: kept.append(args[0][0]))
    target(input_ids)
    hook.remove()
    return kept[0]


@pytest.mark.parametrize("without", ["window_size", "num_summary_queries"])
def test_a_drafter_without_a_view_starts_and_trains(tmp_path, prompt, without):
    target = targets.build("llama")
    drafter = make_drafter(target, **{without: 0})
    initialize_from_target(drafter, target, [prompt])
    trainer_for(target, drafter, tmp_path, max_steps=1).train()
    assert all(p.isfinite().all() for p in drafter.parameters())


@pytest.mark.parametrize("residual", [None, -1])
@torch.no_grad()
def test_fitted_block_inputs_resemble_what_enters_the_paired_layer(residual):
    target = targets.build("llama")
    drafter = make_drafter(target, boundary_residual=residual)
    sequences = [torch.randint(0, 90, (1, 60)) for _ in range(20)]
    explained = fit_block_inputs(drafter, target, sequences)

    captured = []
    drafter.layers[0].register_forward_pre_hook(lambda _module, args: captured.append(args[0][:, 0]))
    unseen = torch.randint(0, 90, (60,))
    borrowed, rows = rows_of(target, drafter, unseen.tolist())
    anchors = list(range(1, 60))
    ((_, views),) = anchor_groups(drafter, rows, anchors, 64)
    drafter(unseen[1:], torch.tensor(anchors), views, borrowed)
    true = entering_states(target, drafter.config.target_layer_ids[0], unseen[None])[1:]
    added = true if residual is None else true - rows.boundaries[:-1, residual]
    rest = (true - captured[0]).square().sum() / (added - added.mean(dim=0)).square().sum()
    assert rest < 0.5
    assert explained == pytest.approx(1 - rest.item(), abs=0.2)


def test_a_scale_of_zero_keeps_the_matrix_that_reads_the_boundary(tmp_path, prompt):
    target = targets.build("llama")
    drafter = make_drafter(target)
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    trainer_for(target, drafter, tmp_path, max_steps=2, boundary_lr_scale=0.0).train()
    kept = [name for name, p in drafter.named_parameters() if torch.equal(p, before[name])]
    assert kept == ["boundary_fusion.fc1.weight"]


def test_simulated_tau_agrees_with_sampling_generate(tmp_path, prompt):
    target = targets.build("llama")
    drafter = make_drafter(target, block_size=3)
    initialize_from_target(drafter, target, [prompt])
    trainer_for(target, drafter, tmp_path, learning_rate=3e-3, max_steps=20).train()
    drafter.eval()
    length, sums, generated = 24, [0, 0.0], [0, 0]
    for _ in range(30):
        output = target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            assistant_model=drafter,
            max_new_tokens=length,
            do_sample=True,
            top_k=0,
        )
        generated[0] += drafter.stats.tokens
        generated[1] += drafter.stats.rounds
        mask = torch.arange(output.shape[1]) >= prompt.shape[1]
        borrowed, rows = rows_of(target, drafter, output[0].tolist())
        result = acceptance(drafter, borrowed, rows, mask)
        tokens, rounds = expected_rounds(result["on_path"], result["mask"])
        sums[0] += tokens
        sums[1] += rounds
    assert generated[0] == sums[0]
    assert generated[0] / generated[1] == pytest.approx(sums[0] / sums[1], rel=0.05)


def test_a_draft_vocabulary_leaves_the_output_alone_and_survives_saving(tmp_path, qwen3, prompt):
    drafter = make_drafter(qwen3, draft_vocab_size=30)
    inputs = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 30, "do_sample": False}
    expected = qwen3.generate(prompt, **inputs)
    assert torch.equal(qwen3.generate(prompt, assistant_model=drafter, **inputs), expected)
    drafter.save_pretrained(tmp_path)
    loaded = LongSparkDrafter.from_pretrained(tmp_path)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name


def test_a_loaded_drafter_can_be_limited_to_a_token_list(qwen3, prompt):
    drafter = make_drafter(qwen3)
    borrowed = BorrowedTarget.of(qwen3, drafter.config)
    ids = torch.tensor([5, 80, 7, 33])
    with torch.no_grad():
        hidden, previous = torch.randn(2, 48), torch.tensor([3, 80])
        expected = drafter.corrected_logits(borrowed.logits(hidden), previous)[:, ids.sort().values]
        drafter.set_draft_vocabulary(ids)
        limited = drafter.corrected_logits(borrowed.logits(hidden, drafter.draft_token_ids), previous)
    assert torch.allclose(limited, expected, atol=1e-5)
    qwen3.generate(prompt, attention_mask=torch.ones_like(prompt), assistant_model=drafter, max_new_tokens=12)
    with pytest.raises(ValueError, match="distinct tokens among the 4"):
        drafter.set_draft_vocabulary([5, 6])


LINES = [
    pytest.param('{"prompt": "a"', "not valid JSON", id="json"),
    pytest.param("[1]", "expected an object", id="list"),
    pytest.param('{"response": "b"}', "exactly one of", id="no-prompt"),
    pytest.param('{"prompt": "a", "messages": [], "response": "b"}', "exactly one of", id="both"),
    pytest.param('{"prompt": "a", "response": ""}', "must be a text that is not empty", id="empty-response"),
    pytest.param('{"prompt": "a", "response": "b", "temperature": -1}', "at least 0, got -1", id="temperature"),
    pytest.param('{"messages": [{"role": "user"}], "response": "b"}', 'needs "role" and "content"', id="message"),
    pytest.param(
        '{"messages": [{"role": "user", "content": 5}], "response": "b"}', "must be a text, got int", id="number"
    ),
    pytest.param('{"messages": [{"role": "user", "content": [{}]}], "response": "b"}', "got list", id="parts"),
    pytest.param('{"messages": [{"role": "u\\udfff", "content": "a"}], "response": "b"}', "surrogate pair", id="role"),
    pytest.param(
        '{"prompt": "a\\ud800", "response": "b"}', '"prompt" has half a surrogate pair', id="prompt-surrogate"
    ),
    pytest.param('{"prompt": "a", "response": "b\\ud800"}', '"response" has half a surrogate pair', id="surrogate"),
    pytest.param('{"prompt": ' + "[" * 100000 + "]" * 100000 + "}", "nested too deeply", id="deep"),
    pytest.param(
        '{"prompt": "a", "response": "b", "temperature": ' + "1" * 400 + "}", "of at least 0, got 1", id="huge"
    ),
    pytest.param(
        '{"prompt": "a", "response": "b", "temperature": ' + "1" * 5000 + "}", "digits", id="too-many-digits"
    ),
    pytest.param('{"prompt": "a", "response": "b", "temperature": 1e999}', "got inf", id="infinite"),
]


@pytest.mark.parametrize("line, reason", LINES)
def test_a_bad_line_is_named_with_its_reason(tmp_path, line, reason):
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "a", "response": "b"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match="data.jsonl, line 3: .*" + reason):
        read_samples(file)


def test_a_line_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "data.jsonl").write_bytes(
        b'{"prompt": "a", "response": "b"}\n\n{"prompt": "caf\xe9", "response": "b"}\n'
    )
    with pytest.raises(ValueError, match="data.jsonl, line 3: not UTF-8 .byte 0xe9 at column 16"):
        read_samples(tmp_path / "data.jsonl")


class Letters:
    """A tokenizer of letters with a chat template, enough for `tokenize`."""

    eos_token, eos_token_id, chat_template = "|", ord("|"), "yes"

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids):
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, enable_thinking):
        turns = "".join(f"{m['role'][0]}:{m['content']}|\n" for m in messages)
        return turns + "a:"


def test_responses_are_masked_up_to_and_including_the_end_token():
    samples = [Sample([{"role": "user", "content": text}], text.upper()) for text in ("hi", "yo")]
    item = tokenize(samples, Letters())
    assert "".join(map(chr, item["input_ids"])) == "u:hi|\na:HI|\nu:yo|\na:YO|"
    learned = [chr(i) for i, counts in zip(item["input_ids"], item["response_mask"]) if counts]
    assert "".join(learned) == "HI|YO|"
    cut = tokenize(samples, Letters(), max_response_length=2)
    assert "".join(map(chr, cut["input_ids"])) == "u:hi|\na:HI|\nu:yo|\na:YO"
    learned = [chr(i) for i, counts in zip(cut["input_ids"], cut["response_mask"]) if counts]
    assert "".join(learned) == "HIYO"  # the end token between the turns stands there, but is not what the target said
