"""The round budget: every moment of a round is counted once, a profiled call is the call it was, and nothing stays behind."""

import functools
import json
import statistics
import time

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM
from transformers.cache_utils import Cache

from longspark_hf.decoding_longspark import AssistedDecoding
from longspark_hf.evaluation import profile_floor, profile_rows
from longspark_hf.evaluation.profile import DRAFT_PARTS, MODES, PARTS, budget, measure, pace
from longspark_hf.evaluation.profile_clock import Round, RoundProfiler, replaced
from longspark_hf.evaluation.profile_floor import Ceilings, RoundWork
from longspark_hf.inplace_longspark import InPlaceLayer
from longspark_hf.rows_longspark import TargetRows
from longspark_hf.tap_longspark import TargetTap
from longspark_hf.target_longspark import BorrowedTarget

from .targets import left_on, random_drafter
from .test_cli import assert_bad_input, byte_tokenizer, longspark, save_drafter, tiny_config


CPU = torch.device("cpu")
SEEN = {"trunk", "head", "markov", "verify", "acceptance", "upkeep", "rest"}


@pytest.fixture(autouse=True)
def small_probes(monkeypatch):
    monkeypatch.setitem(profile_floor.READ_SIZE, "cpu", 512)
    monkeypatch.setitem(profile_floor.MATMUL_SIZE, "cpu", 64)


@pytest.fixture
def drafter(qwen3):
    return random_drafter(qwen3)


@pytest.fixture
def profiler(qwen3, drafter, prompt):
    made = RoundProfiler(qwen3, drafter)
    with made.prefilled(prompt):
        yield made


def answer(target, drafter, prompt, **arguments):
    torch.manual_seed(3)
    arguments = {"max_new_tokens": 30, "do_sample": False} | arguments
    return target.generate(prompt, attention_mask=torch.ones_like(prompt), assistant_model=drafter, **arguments)


def fixed_ceilings(bandwidth=1e9, peak=1e9):
    return Ceilings(CPU, torch.float32, [bandwidth], [peak])


def test_parts_of_a_round_sum_up_to_it(profiler, qwen3, drafter, prompt):
    inside, one_round = [], AssistedDecoding._round

    def clocked(decoding):
        start = time.perf_counter()
        one_round(decoding)
        inside.append(1e3 * (time.perf_counter() - start))

    with replaced(AssistedDecoding, "_round", clocked), profiler.installed():
        answer(qwen3, drafter, prompt)

    assert len(inside) == len(profiler.rounds) == drafter.stats.rounds
    beyond = [sum(one.ms.values()) - whole for whole, one in zip(inside, profiler.rounds)]
    assert min(beyond) >= 0 and statistics.median(beyond) < 1.0  # the clock's own calls
    for one in profiler.rounds:
        assert set(one.ms) <= set(PARTS) and all(ms >= 0 for ms in one.ms.values())
        assert one.decode_ms > 0
    assert set(profiler.rounds[0].ms) == SEEN


def test_a_moment_belongs_to_the_innermost_part(profiler, qwen3, drafter, prompt, monkeypatch):
    """What is slow shows up in its own part and in no other."""
    slow = {
        "head": (BorrowedTarget, "logits"),
        "upkeep": (TargetTap, "commit"),
        "acceptance": (AssistedDecoding, "_judge"),
        "verify": (type(qwen3), "forward"),
        "trunk": (type(drafter), "forward"),
        "markov": (type(drafter), "corrected_logits"),
    }
    for part, (owner, name) in slow.items():
        method = getattr(owner, name)

        def late(*args, method=method, **kwargs):
            time.sleep(0.05)
            return method(*args, **kwargs)

        profiler.rounds = []
        with replaced(owner, name, functools.update_wrapper(late, method)), profiler.installed():
            answer(qwen3, drafter, prompt, max_new_tokens=11)
        # The best of some rounds: this machine may be busy in one of them.
        best = {name: min(one.ms[name] for one in profiler.rounds if one.drafted) for name in SEEN}
        assert {name for name, ms in best.items() if ms >= 50} == {part}


@pytest.mark.parametrize(
    "arguments", [{}, {"do_sample": True, "temperature": 1.2, "top_k": 0}], ids=["greedy", "sampled"]
)
def test_a_profiled_call_says_what_it_would_have_said(arguments, profiler, qwen3, drafter, prompt):
    expected = answer(qwen3, drafter, prompt, **arguments)
    with profiler.installed():
        profiled = answer(qwen3, drafter, prompt, **arguments)
    assert torch.equal(profiled, expected)
    assert profiler.cache.get_seq_length() == profiler.cache_in_place.get_seq_length() == prompt.shape[1] - 1


def test_an_answer_goes_on_from_the_prefill(qwen3, drafter, prompt):
    expected, profiler = answer(qwen3, drafter, prompt), RoundProfiler(qwen3, drafter)
    with profiler.installed(), profiler.prefilled(prompt) as go_on:
        for _ in range(2):
            profiler.rounds = []
            assert torch.equal(go_on(max_new_tokens=30, do_sample=False), expected)
            assert sum(one.committed for one in profiler.rounds) == drafter.stats.tokens == 29
    assert profiler.cache is profiler.cache_in_place is None


def test_everything_is_put_back_after_an_error(profiler, qwen3, drafter, prompt):
    owners = (AssistedDecoding, TargetTap, TargetRows, Cache, BorrowedTarget, qwen3, drafter)
    before = [dict(vars(owner)) for owner in owners]
    attention = qwen3.config._attn_implementation
    tokens = []

    def fails(input_ids, scores, **_):
        tokens.append(input_ids.shape[1])
        if len(tokens) == 4:
            raise RuntimeError("in the middle of a round")
        return torch.zeros(1, dtype=torch.bool)

    with pytest.raises(RuntimeError, match="middle of a round"), profiler.installed():
        answer(qwen3, drafter, prompt, stopping_criteria=[fails])

    after = [dict(vars(owner)) for owner in owners]
    assert [list(one) for one in after] == [list(one) for one in before]
    assert all(one[name] is other[name] for one, other in zip(after, before) for name in one if callable(one[name]))
    assert vars(TargetTap)["state"] is before[1]["state"]
    assert left_on(qwen3) == [] and qwen3.config._attn_implementation == attention
    with profiler.installed():  # and it can go on
        answer(qwen3, drafter, prompt)
    assert profiler.rounds


def test_measure_gives_a_row_for_every_prompt(qwen3, drafter):
    prompts = {length: [torch.randint(2, 90, (1, length)) for _ in range(2)] for length in (40, 20)}

    found = measure(qwen3, drafter, prompts, max_new_tokens=16, repeats=2, temperature=0.7)

    assert found["ceilings"]["bytes_per_second"] > 0 and found["ceilings"]["operations_per_second"] > 0
    assert [row["context"] for row in found["rows"]] == [40, 20]
    for row in found["rows"]:
        assert (row["prompt_tokens"], row["prompts"]) == (row["context"], 2)
        assert row["drafted_tokens"] == drafter.config.block_size == row["verified_tokens"] - 1
        assert set(row["parts"]) == SEEN and row["rounds"] >= 2
        # Medians of parts need not sum up to the median of their sums, but nearly do.
        assert sum(part["ms"] for part in row["parts"].values()) == pytest.approx(row["round_ms"], rel=0.4)
        assert {part for part, numbers in row["parts"].items() if "floor_ms" in numbers} == {
            "verify",
            "trunk",
            "head",
            "markov",
        }
        assert row["round_over_passes"] >= 1 and row["verify_over_decode"] > 0
        assert row["break_even_tau"] > 0 and list(row["pace"]) == list(MODES)
        for found_pace in row["pace"].values():
            assert found_pace["tau"] >= 1 and found_pace["speedup"] > 0 and found_pace["speedup_in_place"] > 0
            assert len(found_pace["speedup_in_place_by_prompt"]) == 2
            assert found_pace["rounds"] * found_pace["tau"] == pytest.approx(2 * 2 * 15)
        assert row["pace"]["auto"]["drafted"] < row["pace"]["whole blocks"]["drafted"]
    assert qwen3.generation_config.eos_token_id is None


def test_the_pace_is_that_of_plain_steps_beside_each_round():
    slow, fast = Round({"verify": 8.0}, 6.0, 4.0, 4, committed=4), Round({"verify": 2.0}, 3.0, 1.0, 0, committed=1)
    found = pace([[slow, fast], [fast]])
    assert (found["rounds"], found["tau"], found["drafted"]) == (3, 2, pytest.approx(4 / 3))
    assert found["speedup"] == pytest.approx((4 * 6 + 3 + 3) / 12)
    assert found["speedup_in_place"] == pytest.approx((4 * 4 + 1 + 1) / 12)
    assert found["speedup_in_place_by_prompt"] == [pytest.approx(17 / 10), pytest.approx(1 / 2)]


def test_an_answer_goes_on_behind_an_eos_token(qwen3, drafter, prompt):
    first = int(answer(qwen3, None, prompt, max_new_tokens=1)[0, -1])
    with replaced(qwen3.generation_config, "eos_token_id", first):
        row = measure(qwen3, drafter, {20: [prompt]}, max_new_tokens=24, repeats=1)["rows"][0]
        assert qwen3.generation_config.eos_token_id == first
    assert row["rounds"] >= 2


def test_answers_without_a_whole_round_are_refused(qwen3, drafter, prompt):
    least = drafter.config.block_size + 2
    with pytest.raises(ValueError, match=f"--max-new-tokens {least - 1} .* Use --max-new-tokens {least} or more"):
        measure(qwen3, drafter, {20: [prompt]}, max_new_tokens=least - 1)
    assert measure(qwen3, drafter, {20: [prompt]}, max_new_tokens=least, repeats=1)["rows"]


def test_rounds_that_drafted_less_are_left_out(qwen3, drafter, profiler):
    work = RoundWork.of(qwen3, drafter, profiler.cache, 1000)
    usual = {"trunk": 2.0, "head": 1.0, "markov": 1.0, "verify": 4.0, "rest": 0.8}
    rounds = [Round(usual, 3.0, 2.0, drafted=7)] * 2 + [Round({"verify": 100.0, "rest": 1.0}, 3.0)]
    row = budget(rounds, work, fixed_ceilings())
    assert (row["rounds"], row["round_ms"], row["parts"]["verify"]["percent"]) == (
        2,
        8.8,
        pytest.approx(100 * 4 / 8.8),
    )
    assert row["round_over_passes"] == pytest.approx(1.1)
    assert row["verify_over_decode"] == pytest.approx(4 / 3) and row["break_even_tau"] == pytest.approx(8.8 / 3)
    assert (row["decode_ms"], row["decode_in_place_ms"]) == (3.0, 2.0)


def test_nothing_drafted_or_seen_is_an_error_that_says_why(qwen3, drafter, profiler):
    work = RoundWork.of(qwen3, drafter, profiler.cache, 1000)
    with pytest.raises(ValueError, match="not finite"):
        budget([Round({"verify": 1.0}, 1.0)], work, fixed_ceilings())
    with pytest.raises(ValueError, match="loop of transformers"):
        budget([], work, fixed_ceilings())


def test_a_draft_pass_in_one_piece_is_shown_as_one(qwen3, drafter, profiler):
    """A compiled pass does not come by where its parts are told apart."""
    work = RoundWork.of(qwen3, drafter, profiler.cache, 1000)
    row = budget(
        [Round({"markov": 3.0, "head": 1.0, "verify": 5.0, "rest": 1.0}, 3.0, drafted=7)], work, fixed_ceilings()
    )
    assert set(row["parts"]) == {"draft", "verify", "rest"}
    assert row["parts"]["draft"]["ms"] == 4.0 and row["round_over_passes"] == pytest.approx(10 / 9)
    apart = [work.demand(part, 7) for part in DRAFT_PARTS[:3]]
    assert row["parts"]["draft"]["bytes"] == sum(one[0] for one in apart)


def test_floors_count_what_must_be_moved_and_computed(drafter, qwen3, prompt, profiler):
    """By hand: 6 layers, hidden 48, 4 query heads and 2 key/value heads of 16, MLP 64, vocabulary 97, 19 rows, fp32."""
    work = RoundWork.of(qwen3, drafter, profiler.cache, 1000)
    layer = 48 * 64 * 2 + 48 * 32 * 2 + 3 * 48 * 64  # q and o, k and v, MLP
    matrices, norms = 6 * layer + 97 * 48, 6 * (2 * 48 + 2 * 16) + 48
    rows = 6 * 2 * 2 * 19 * 16  # layers, keys and values, heads, rows, head_dim
    moved, computed = work.demand("verify", 7)
    assert moved == 4 * (matrices + norms + rows + 8 * 97)
    assert computed == 2 * 8 * (matrices + 2 * rows)  # two query heads share a key/value head

    assert work.demand("head", 7) == (4 * (97 * 48 + 7 * 97), 2 * 7 * 97 * 48)
    assert work.demand("markov", 7) == (7 * 97 * 8 * 4 + 7 * 97 * 8, 2 * 7 * 97 * 8)  # rank 8
    parameters = sum(p.nbytes for n, p in drafter.named_parameters() if not n.startswith("markov_head"))
    assert work.demand("trunk", 7)[0] == parameters + 1000
    assert work.demand("acceptance", 7) is None


def test_floor_is_the_larger_of_moving_and_computing(qwen3, drafter, profiler):
    work = RoundWork.of(qwen3, drafter, profiler.cache, 1000)
    moved, computed = work.demand("verify", 7)
    slow_memory = work.floor("verify", 7, fixed_ceilings(bandwidth=1e6, peak=1e15))
    slow_matmul = work.floor("verify", 7, fixed_ceilings(bandwidth=1e15, peak=1e6))
    assert slow_memory["floor_ms"] == pytest.approx(moved / 1e3)
    assert slow_matmul["floor_ms"] == pytest.approx(computed / 1e3)


def test_plain_steps_run_on_the_cache_of_plain_generate(profiler, qwen3, drafter, prompt):
    """No layers of ours: they would make the step cheaper than the one that drafting has to beat."""
    assert type(profiler.cache) is DynamicCache
    with profiler.installed():
        answer(qwen3, drafter, prompt)
    assert {type(layer).__module__ for layer in profiler.cache.layers} == {"transformers.cache_utils"}
    assert {type(layer) for layer in profiler.cache_in_place.layers} == {InPlaceLayer}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_config()).save_pretrained(folder / "target")
    byte_tokenizer().save_pretrained(folder / "target")
    return folder / "target", save_drafter(tiny_config(), folder / "drafter")


def test_profile_writes_and_prints_a_budget(folders, tmp_path):
    target, drafter = folders
    output = tmp_path / "new" / "profile.json"
    arguments = ("--contexts", "200,300", "--max-new-tokens", 16, "--repeats", 1, "--device", "cpu")

    result = longspark("profile", "--target", target, "--drafter", drafter, *arguments, "--output", output)

    assert result.exit_code == 0, result.output
    found = json.loads(output.read_text())
    assert found["kind"] == "profile" and [row["context"] for row in found["rows"]] == [200, 300]
    assert {"command", "date", "torch", "transformers", "dtype", "device"} <= set(found["provenance"])
    for part in found["rows"][0]["parts"]:
        assert profile_rows.LABELS[part] in result.stdout
    assert "break-even τ" in result.stdout and "GB/s" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert "prompt 2 of 2 of 300 tokens: auto, 1 of 1" in result.stderr

    section = profile_rows.markdown(found)
    assert "| part of a round | ms at 200 | % of the round | floor ms | ms at 300 |" in section
    assert (
        "- At 300 tokens a round takes" in section
        and "- At 300 tokens, auto: τ" in section
        and "Measured on" in section
    )


def test_profile_prints_json_for_machines(folders):
    target, drafter = folders
    arguments = ("--contexts", "200", "--max-new-tokens", 12, "--repeats", 1, "--device", "cpu", "--json")
    result = longspark("profile", "--target", target, "--drafter", drafter, *arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rows"][0]["context"] == 200


@pytest.mark.parametrize(
    "arguments, hints",
    [
        (("--contexts", "many"), ("--contexts", "many")),
        (("--contexts", "200,10"), ("--contexts", "at least 128", "10")),
        (("--contexts", "1020"), ("1024 positions", "--contexts of 960 or less")),
        (("--contexts", "200", "--max-new-tokens", "4"), ("--max-new-tokens 4", "--max-new-tokens 9")),
        (("--temperature", "-1"), ("--temperature", "-1")),
        (("--contexts", "200", "--output", "."), ("--output", ".")),
        (("--contexts", "200", "--dtype", "int3"), ("int3", "float32")),
    ],
)
def test_bad_input_is_told_in_one_line(arguments, hints, folders):
    target, drafter = folders
    assert_bad_input(
        longspark("profile", "--target", target, "--drafter", drafter, "--device", "cpu", *arguments), *hints
    )


def test_profile_names_a_target_that_is_none(tmp_path):
    assert_bad_input(longspark("profile", "--target", tmp_path / "missing"), "missing", "config.json")
