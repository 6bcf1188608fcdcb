"""
Sampling is lossless: what is committed follows the target's processed distribution, whatever is drafted.

The targets here are soft, so that a wrong q would show; a nearly deterministic target hides almost any mistake.
"""

import inspect
import itertools

import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    Qwen3Config,
    Qwen3ForCausalLM,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.utils import _speculative_sampling

from longspark_hf import LongSparkConfig, LongSparkDrafter
from longspark_hf.generation_longspark import LongSparkCandidateGenerator
from longspark_hf.stopping_longspark import StoppingRules
from longspark_hf.tap_longspark import TargetTap
from longspark_hf.target_longspark import BorrowedTarget


VOCAB, BLOCK, ROUNDS = 7, 3, 20_000
PROMPT = [1, 4, 2, 5]
ANCHOR = 3
FILTERS = {"none": {}, "top-k": {"top_k": 4}, "top-p": {"top_p": 0.8}, "both": {"top_k": 5, "top_p": 0.85}}
TEMPERATURES = [0.7, 1.0, 1.5]


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.25,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    target = Qwen3ForCausalLM(config).eval()
    target.generation_config.pad_token_id = 0
    return target


def make_drafter(target, kind):
    """`random` is untrained; `bad` likes best what the target likes least."""
    torch.manual_seed(1)
    config = LongSparkConfig.from_target(
        target.config,
        mask_token_id=VOCAB - 1,
        block_size=BLOCK,
        window_size=4,
        num_summary_queries=2,
        markov_rank=VOCAB,
        initializer_range=0.25,
    )
    drafter = LongSparkDrafter(config).eval()
    if kind == "bad":
        with torch.no_grad():
            drafter.markov_head.w1.weight.copy_(torch.eye(VOCAB))
            # After each token, a bias against what the target gives after the prompt and that token.
            prompts = torch.tensor([PROMPT + [token] for token in range(VOCAB)])
            drafter.markov_head.w2.weight.copy_(-2 * target(prompts).logits[:, -1].log_softmax(dim=-1).T)
    return drafter


@pytest.fixture(params=["random", "bad"])
def drafter(target, request):
    return make_drafter(target, request.param)


def warpers(temperature=1.0, top_k=None, top_p=None):
    """As `generate` builds them, and in its order."""
    processors = LogitsProcessorList()
    if temperature != 1.0:
        processors.append(TemperatureLogitsWarper(temperature))
    if top_k is not None:
        processors.append(TopKLogitsWarper(top_k))
    if top_p is not None:
        processors.append(TopPLogitsWarper(top_p))
    return processors


@torch.no_grad()
def exact(target, prefix, processors):
    """The target's processed distribution after a prefix."""
    logits = target(torch.tensor([prefix])).logits[:, -1].float()
    return processors(torch.tensor([prefix]), logits).softmax(dim=-1)[0].double()


def p_value(counts, probabilities):
    """Chi-square of counts against exact probabilities; an impossible outcome is a certain failure."""
    counts, probabilities = (torch.as_tensor(x, dtype=torch.float64).flatten() for x in (counts, probabilities))
    if counts[probabilities == 0].sum() > 0:
        return 0.0
    expected = probabilities * counts.sum()
    rare = expected < 5
    if rare.any():  # too few for the approximation one by one, so together
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
        counts, expected = counts[expected > 0], expected[expected > 0]
    return chisquare(counts.numpy(), (expected * counts.sum() / expected.sum()).numpy()).pvalue


# --- rounds through the candidate generator -----------------------------------------------------------------------


@torch.no_grad()
def draft_rounds(target, drafter, prefix, processors, num_rounds, raw=False):
    """
    Candidates and their logits as the candidate generator hands them over, for many independent rounds after the same
    prefix. The rounds are a batch, all else is a `generate` call: the tapped prefill, then the first draft.

    With `raw` the logits are what a careless generator would hand over: the drafter's before temperature and filters.
    """
    input_ids = torch.tensor([prefix]).expand(num_rounds, -1)
    cache = DynamicCache(config=target.config)
    borrowed = BorrowedTarget.of(target, drafter.config)
    generation_config = GenerationConfig(do_sample=True, max_length=64, num_assistant_tokens=BLOCK)
    cache_name = "cache" if "cache" in inspect.signature(target.forward).parameters else "past_key_values"
    with TargetTap(borrowed, drafter.config, cache, drafter.new_cache()) as tap:
        rules = StoppingRules(StoppingCriteriaList(), generation_config, len(prefix), with_scores=False)
        generator = LongSparkCandidateGenerator(drafter, borrowed, tap, generation_config, processors, rules)
        generator.get_candidates(input_ids[:, :-1])
        target(input_ids[:, :-1], logits_to_keep=1, use_cache=True, **{cache_name: cache})
        candidates, candidate_logits = generator.get_candidates(input_ids)
        if raw:
            anchors, positions = input_ids[:, -1], torch.full((num_rounds,), len(prefix) - 1)
            base_logits = target.lm_head(drafter(anchors, positions, tap.state, borrowed).hidden_states)
            candidate_logits = drafter.corrected_logits(base_logits, candidates[:, len(prefix) - 1 : -1])
    return candidates, candidate_logits


@torch.no_grad()
def verify_rounds(target, candidates, processors):
    """Processed target logits at the anchor and every candidate, `(rounds, BLOCK + 1, VOCAB)`, as the stock loop makes them."""
    unique, inverse = torch.unique(candidates, dim=0, return_inverse=True)
    logits = target(unique).logits[:, -BLOCK - 1 :].float()
    start = candidates.shape[1] - BLOCK
    for i in range(BLOCK + 1):
        logits[:, i] = processors(unique[:, : start + i], logits[:, i])
    return logits[inverse]


def accept_stock(candidates, candidate_logits, target_logits):
    """`transformers`' own acceptance, round by round: committed tokens `(rounds, BLOCK + 1)`, padded with -1."""
    committed = torch.full((len(candidates), BLOCK + 1), -1)
    with torch.inference_mode():
        for i in range(len(candidates)):
            row = slice(i, i + 1)
            tokens, _ = _speculative_sampling(candidates[row], candidate_logits[row], BLOCK, target_logits[row])
            committed[i, : tokens.shape[1]] = tokens[0]
    return committed


def acceptance(candidates, candidate_logits, target_logits, uniform):
    """`_speculative_sampling` for a batch of rounds: matches, and the distribution of the token that follows them."""
    drafted = candidates[:, -BLOCK:, None]
    q, p = candidate_logits.softmax(dim=-1), target_logits.softmax(dim=-1)
    ratio = (p[:, :-1].gather(-1, drafted) / q.gather(-1, drafted))[..., 0]
    num_matches = ((~(uniform <= ratio)).cumsum(dim=-1) < 1).sum(dim=-1)
    rows = torch.arange(len(candidates))
    rejected = num_matches < BLOCK
    following = p[rows, num_matches]
    residual = (following - q[rows, num_matches.clamp(max=BLOCK - 1)]).clamp(min=0)
    residual = residual / residual.sum(dim=-1, keepdim=True)
    return num_matches, torch.where(rejected[:, None], residual, following)


def accept_batched(candidates, candidate_logits, target_logits):
    """As [`accept_stock`], all rounds at once; `test_batched_acceptance_is_the_stock_one` holds the two together."""
    uniform = torch.rand(len(candidates), BLOCK)
    num_matches, following = acceptance(candidates, candidate_logits, target_logits, uniform)
    last = torch.multinomial(following, 1)
    slots = torch.arange(BLOCK + 1)
    committed = torch.cat([candidates[:, -BLOCK:], last], dim=1)
    committed = torch.where(slots == num_matches[:, None], last, committed)
    return committed.masked_fill(slots > num_matches[:, None], -1)


def play(target, drafter, prefix, processors, num_rounds=ROUNDS, accept=accept_batched, raw=False):
    """Committed tokens of many rounds after the same prefix."""
    candidates, candidate_logits = draft_rounds(target, drafter, prefix, processors, num_rounds, raw)
    assert candidates.shape == (num_rounds, len(prefix) + BLOCK)
    assert candidate_logits.shape == (num_rounds, BLOCK, VOCAB)
    return accept(candidates, candidate_logits, verify_rounds(target, candidates, processors))


def first_token_p_value(target, committed, processors):
    counts = committed[:, 0].bincount(minlength=VOCAB)
    return p_value(counts, exact(target, PROMPT + [ANCHOR], processors))


def test_the_target_is_soft(target):
    distribution = exact(target, PROMPT + [ANCHOR], warpers())
    assert distribution.min() > 0.01 and distribution.max() < 0.6


def test_the_bad_drafter_is_bad(target):
    lengths = {}
    for kind in ("random", "bad"):
        torch.manual_seed(0)
        committed = play(target, make_drafter(target, kind), PROMPT + [ANCHOR], warpers(), num_rounds=2000)
        lengths[kind] = (committed >= 0).sum().item() / len(committed)
    assert lengths["bad"] < 1.7 < 2.4 < lengths["random"]


def test_batched_acceptance_is_the_stock_one(target, drafter):
    processors = warpers(0.7, top_k=4)
    candidates, candidate_logits = draft_rounds(target, drafter, PROMPT + [ANCHOR], processors, 300)
    target_logits = verify_rounds(target, candidates, processors)
    seen = set()
    for i in range(len(candidates)):
        row = candidates[i : i + 1], candidate_logits[i : i + 1], target_logits[i : i + 1]
        torch.default_generator.manual_seed(i)
        stock = accept_stock(*row)
        torch.default_generator.manual_seed(i)
        ours = accept_batched(*row)
        assert torch.equal(ours, stock)
        seen.add((ours >= 0).sum().item())
    assert {1, 2} <= seen


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_committed_token_follows_the_targets_distribution(target, drafter, temperature, filters):
    # One seed for all settings. Its predecessor, 11, gave p = 8e-4 in one of these 24 (bad, 1.0, top-p), which happens
    # once in forty times; over 30 seeds that setting's 600,000 rounds gave p = 0.58.
    processors = warpers(temperature, **FILTERS[filters])
    # The acceptance of transformers takes one round at a time, which is slow: it has the most demanding setting.
    accept = accept_stock if (temperature, filters) == (1.5, "both") else accept_batched
    torch.manual_seed(2026)
    committed = play(target, drafter, PROMPT + [ANCHOR], processors, accept=accept)
    assert first_token_p_value(target, committed, processors) > 1e-3


@pytest.mark.parametrize(
    "temperature, filters", [(0.7, "none"), (1.5, "none"), (1.0, "top-k"), (1.0, "top-p"), (0.7, "both")]
)
def test_unprocessed_logits_would_be_noticed(target, drafter, temperature, filters):
    processors = warpers(temperature, **FILTERS[filters])
    torch.manual_seed(11)
    committed = play(target, drafter, PROMPT + [ANCHOR], processors, raw=True)
    assert first_token_p_value(target, committed, processors) < 1e-6


def test_unprocessed_logits_are_as_good_where_nothing_is_processed(target, drafter):
    torch.manual_seed(11)
    committed = play(target, drafter, PROMPT + [ANCHOR], warpers(), raw=True)
    assert first_token_p_value(target, committed, warpers()) > 1e-3


@pytest.mark.parametrize("temperature, filters", [(0.7, "top-k"), (1.5, "top-p")])
def test_first_two_committed_tokens_follow_their_joint_distribution(target, drafter, temperature, filters):
    processors = warpers(temperature, **FILTERS[filters])
    prefix = PROMPT + [ANCHOR]
    torch.manual_seed(13)
    committed = play(target, drafter, prefix, processors)
    more = committed[:, 1] >= 0
    counts = (committed[more, 0] * VOCAB + committed[more, 1]).bincount(minlength=VOCAB**2).view(VOCAB, VOCAB)
    # Rounds that committed one token only go on with a round after it.
    for token, number in enumerate(committed[~more, 0].bincount(minlength=VOCAB).tolist()):
        if number:
            following = play(target, drafter, prefix + [token], processors, num_rounds=number)
            counts[token] += following[:, 0].bincount(minlength=VOCAB)

    assert counts.sum() == ROUNDS
    first = exact(target, prefix, processors)
    second = torch.stack([exact(target, prefix + [token], processors) for token in range(VOCAB)])
    assert p_value(counts, first[:, None] * second) > 1e-3


# --- through generate ---------------------------------------------------------------------------------------------

BATCH_SIZES = [1] * 100 + [100] * 20


@pytest.mark.parametrize(
    "kind, settings",
    [
        # Far from one and sharply filtered: where a q that was not processed shows within a few hundred runs.
        ("random", {"temperature": 0.5, "top_k": 0}),
        ("random", {"temperature": 1.5, "top_k": 4}),
        ("bad", {"temperature": 1.5, "top_k": 5, "top_p": 0.85}),
    ],
)
def test_generate_samples_from_the_targets_joint_distribution(target, kind, settings):
    drafter, length = make_drafter(target, kind), 3
    processors = warpers(settings["temperature"], settings["top_k"] or None, settings.get("top_p"))
    torch.manual_seed(14)
    counts = torch.zeros((VOCAB,) * length)
    for batch_size in BATCH_SIZES:
        prompts = torch.tensor([PROMPT] * batch_size)
        output = target.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            assistant_model=drafter,
            do_sample=True,
            max_new_tokens=length,
            **settings,
        )
        for tokens in output[:, len(PROMPT) :]:
            counts[tuple(tokens)] += 1

    joint = torch.ones((1,), dtype=torch.float64)
    for n in range(length):
        prefixes = itertools.product(range(VOCAB), repeat=n)
        conditional = torch.stack([exact(target, PROMPT + list(prefix), processors) for prefix in prefixes])
        joint = (joint[:, None] * conditional).flatten()
        so_far = counts.sum(dim=tuple(range(n + 1, length))) if n + 1 < length else counts
        assert p_value(so_far, joint) > 1e-3, f"the first {n + 1} tokens"
