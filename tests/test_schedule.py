"""How many tokens are drafted: caps, thresholds, and `num_assistant_tokens="auto"`."""

import random
import statistics

import pytest
import torch
from scipy.stats import chisquare

from longspark_hf.schedule_longspark import DraftSchedule

from .targets import random_drafter, scripted_drafter
from .test_batches import answers, generate, make_batch, make_drafter  # noqa: F401


def simulate(schedule, accept, seconds, tokens=256):
    """Rounds of a made-up machine until `tokens` are committed: lengths, and what they took."""
    lengths, total, committed = [], 0.0, 0
    while committed < tokens:
        length = schedule.length()
        took = seconds(length)
        accepted = accept(len(lengths), length)
        schedule.note(length, [accepted], took)
        lengths.append(length)
        total, committed = total + took, committed + accepted + 1
    return lengths, total


def cpu_seconds(length):
    """About what a round takes on a small model on a CPU, a plain step being 1."""
    return 1.0 if length == 0 else 0.35 + 1.1 + 0.11 * length


def test_a_cap_is_a_cap_and_nothing_else():
    assert DraftSchedule(7).length() == 7
    assert DraftSchedule(7, 3).length() == 3
    assert DraftSchedule(7, 20).length() == 7
    assert DraftSchedule(7, 0).length() == 0
    with pytest.raises(ValueError, match='"auto"'):
        DraftSchedule(7, "always")


def test_a_text_that_is_never_accepted_costs_little():
    lengths, total = simulate(DraftSchedule(7, "auto"), lambda *_: 0, cpu_seconds)
    assert total < 1.05 * 256
    assert max(lengths[20:]) <= 2 and any(lengths[20:]), "it must go on trying, at little cost"


def test_a_text_that_is_always_accepted_is_drafted_at_full_length():
    lengths, _ = simulate(DraftSchedule(7, "auto"), lambda _, length: length, cpu_seconds)
    assert lengths[-5:] == [7] * 5


def test_a_text_that_becomes_easy_is_noticed():
    lengths, _ = simulate(DraftSchedule(7, "auto"), lambda n, length: length if n > 60 else 0, cpu_seconds, 600)
    assert lengths[-5:] == [7] * 5


def test_the_length_fits_what_is_accepted():
    lengths, _ = simulate(DraftSchedule(7, "auto"), lambda _, length: min(length, 2), cpu_seconds)
    assert set(lengths[-10:]) <= {2, 3}


@pytest.mark.parametrize("tokens, least", [(64, 1.06), (128, 1.1)])
@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_bad_luck_does_not_end_drafting_that_pays(tokens, least, noise):
    """SmolLM2 at 6K rows with its drafter on code: a whole block is worth 0.93 plain steps, one or two drafts 1.16."""
    took, rates, chance = [1.0, 1.21, 1.29, 1.41, 1.64], [0.4, 0.25, 0.2, 0.1], random.Random(0)

    def accept(_, length):
        return next((i for i, rate in enumerate(rates[:length]) if chance.random() >= rate), length)

    def gain():
        plain, slow, met = [], [1.0], set()  # `plain`: what a plain step beside each round would have taken

        def seconds(length):
            """Slow for a while, now and then for a moment, and where memory is asked for first."""
            slow[0] = 0.95 * slow[0] + 0.05 + 0.3 * noise * chance.gauss(0, 1)
            this = max(slow[0], 0.7) * (1.6 if chance.random() < 0.3 * noise else 1.0)
            plain.append(this)
            first = length not in met
            met.add(length)
            return took[length] * this * (1.3 if first else 1.0)

        took_in_all = simulate(DraftSchedule(4, "auto"), accept, seconds, tokens)[1]
        return tokens * statistics.mean(plain) / took_in_all

    assert statistics.mean(gain() for _ in range(200)) > least


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("kind", ["oracle", "mixed", "random"])
def test_auto_changes_speed_only(qwen3, answers, kind, size):  # noqa: F811
    batch, prompts, truth = answers("qwen3", 4)
    batch = {name: value[:size] for name, value in batch.items()}
    drafter = make_drafter(kind, qwen3, prompts, truth)
    output = generate(qwen3, batch, drafter, num_assistant_tokens="auto")
    assert torch.equal(output[:, batch["input_ids"].shape[1] :], torch.stack(truth[:size]))


def test_a_threshold_cuts_where_the_drafter_is_unsure(qwen3, answers):  # noqa: F811
    batch, prompts, truth = answers("qwen3", 3)
    drafter = random_drafter(qwen3)
    for threshold, most in ((0.05, 7.0), (0.999, 0.0)):
        output = generate(qwen3, batch, drafter, assistant_confidence_threshold=threshold)
        assert torch.equal(output[:, -40:], torch.stack(truth))
        if most == 0.0:
            assert drafter.stats.accepted_by_position == [0] * 7
    oracle = scripted_drafter(qwen3, [torch.cat(pair) for pair in zip(prompts, truth)])
    generate(qwen3, batch, oracle, assistant_confidence_threshold=0.999)
    assert oracle.stats.mean_acceptance_length > 6, "a point mass is sure"


@pytest.mark.parametrize("slow", range(6))
@pytest.mark.parametrize("accepted, most", [(0, 290), (7, 100)])
def test_one_slow_round_decides_nothing(slow, accepted, most):
    """256 tokens, in plain steps: at best 256, and 71 where everything is accepted."""
    count = iter(range(10**6))

    def seconds(length):
        return cpu_seconds(length) * (3 if next(count) == slow else 1)

    _, total = simulate(DraftSchedule(7, "auto"), lambda _, length: min(length, accepted), seconds)
    assert total < most


def test_a_clock_may_stand_still():
    lengths, _ = simulate(DraftSchedule(7, "auto"), lambda _, length: length, lambda length: 0.0)
    assert lengths


def test_drafts_that_a_threshold_cuts_to_nothing_are_given_up(qwen3, prompt, monkeypatch):
    """They take as long as any; counted as no drafts, they would be made in every round."""
    drafter, drafts = random_drafter(qwen3), []
    draft = drafter.draft
    monkeypatch.setattr(drafter, "draft", lambda *args, **kwargs: drafts.append(1) or draft(*args, **kwargs))
    options = {"num_assistant_tokens": "auto", "assistant_confidence_threshold": 0.999, "max_new_tokens": 200}
    qwen3.generate(prompt, assistant_model=drafter, do_sample=False, **options)
    assert drafter.stats.rounds == 199 and drafter.stats.accepted_by_position == [0] * 7
    assert len(drafts) < 60


@pytest.mark.parametrize("options", [{"assistant_confidence_threshold": 0.3}, {}])
@pytest.mark.parametrize("proposal", ["sampled", "likeliest"])
def test_every_proposal_is_lossless(proposal, options):
    from .test_batches import processed, soft_target

    target, vocabulary, copies = soft_target(), 7, 4000
    drafter = random_drafter(target, mask_token_id=0, window_size=4, block_size=3, initializer_range=0.5)
    drafter.config.proposal = proposal
    prompt = torch.tensor([1, 4, 2, 5])
    output = target.generate(
        prompt.expand(copies, -1),
        assistant_model=drafter,
        do_sample=True,
        temperature=0.8,
        top_k=5,
        max_new_tokens=4,
        **options,
    )[:, 4:]
    assert 1.0 < drafter.stats.mean_acceptance_length < 3.9
    counts = torch.bincount(output[:, 0] * vocabulary + output[:, 1], minlength=vocabulary**2).double()
    first = processed(target, prompt[None])[0]
    after = [processed(target, torch.cat([prompt, torch.tensor([a])])[None])[0] for a in range(vocabulary)]
    expected = torch.stack([p * q for p, q in zip(first, after)]).flatten().double() * copies
    likely = expected > 5
    assert bool((counts[expected == 0] == 0).all())
    observed, wanted = counts[likely], expected[likely]
    assert chisquare(observed, wanted * (observed.sum() / wanted.sum())).pvalue > 1e-4


def test_an_unknown_proposal_is_refused(qwen3):
    with pytest.raises(ValueError, match="likeliest"):
        random_drafter(qwen3, proposal="best")


def test_batches_of_the_tests_differ_in_length():
    assert len(set(make_batch(8)[0]["attention_mask"].sum(dim=1).tolist())) == 8
