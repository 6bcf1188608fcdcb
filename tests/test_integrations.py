"""Drafters meet the rest of the ecosystem: pipelines, PEFT, multimodal targets, the auto classes."""

import warnings

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast, pipeline

from longspark_hf import LongSparkConfig, LongSparkDrafter

from .targets import VOCAB_SIZE, build, left_on, random_drafter, scripted_drafter


def tiny_tokenizer():
    words = {f"w{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", unk_token="w2")


def test_a_text_generation_pipeline_takes_the_drafter():
    target = build("qwen3")
    options = {"do_sample": False, "max_new_tokens": 16, "return_full_text": True}
    text = "w5 w7 w9 w11"
    plain = pipeline("text-generation", model=target, tokenizer=tiny_tokenizer())(text, **options)
    drafter = random_drafter(target)
    assisted = pipeline("text-generation", model=target, tokenizer=tiny_tokenizer(), assistant_model=drafter)
    assert assisted(text, **options) == plain
    assert drafter.stats.tokens == 15


def test_a_lora_target_is_drafted_for(prompt):
    peft = pytest.importorskip("peft")
    target = build("llama")
    drafter = random_drafter(target)
    with warnings.catch_warnings():  # from inside peft, which is not ours to fix
        warnings.simplefilter("ignore", FutureWarning)
        wrapped = peft.get_peft_model(
            target, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        )
    wrapped.eval()
    options = {"do_sample": False, "max_new_tokens": 20}
    plain = wrapped.generate(input_ids=prompt, **options)
    assert torch.equal(wrapped.generate(input_ids=prompt, assistant_model=drafter, **options), plain)
    oracle = scripted_drafter(target, plain[0])
    assert torch.equal(wrapped.generate(input_ids=prompt, assistant_model=oracle, **options), plain)
    assert oracle.stats.rounds == 3 and left_on(target) == []


def test_the_text_decoder_of_a_multimodal_target_is_drafted_for(built, prompt):
    target = built("gemma3-multimodal")
    config = LongSparkConfig.from_target(target.config, mask_token_id=96)
    assert config.vocab_size == VOCAB_SIZE and config.num_target_layers == 6
    plain = target.generate(prompt, do_sample=False, max_new_tokens=20)
    oracle = scripted_drafter(target, plain[0])
    assert torch.equal(target.generate(prompt, assistant_model=oracle, do_sample=False, max_new_tokens=20), plain)
    assert oracle.stats.rounds == 3


def test_auto_classes_load_a_saved_drafter(qwen3, prompt, tmp_path):
    drafter = random_drafter(qwen3)
    drafter.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), LongSparkConfig)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert isinstance(loaded, LongSparkDrafter)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])
    options = {"do_sample": True, "max_new_tokens": 12}
    outputs = []
    for assistant in (drafter, loaded):
        torch.manual_seed(0)
        outputs.append(qwen3.generate(prompt, assistant_model=assistant, **options))
    assert torch.equal(*outputs)


def test_a_warning_names_another_target_or_other_rotary_parameters(qwen3, prompt, caplog):
    from transformers.utils import logging

    drafter = random_drafter(qwen3, target_name_or_path="Qwen/Qwen3-8B")
    qwen3.config._name_or_path = "someone/Qwen3-8B-tuned"
    drafter.config.rope_parameters = {"rope_type": "default", "rope_theta": 12345.0}
    logging.enable_propagation()
    try:
        drafter.check_target(qwen3)
    finally:
        qwen3.config._name_or_path = ""
        logging.disable_propagation()
    messages = " ".join(record.message for record in caplog.records)
    assert "made for Qwen/Qwen3-8B, the target is someone/Qwen3-8B-tuned" in messages and "12345" in messages
