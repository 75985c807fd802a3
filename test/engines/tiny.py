"""tiny.py DIR: makes a random Llama of 33M parameters, with a tokenizer and a chat template, as DIR/tiny5 (transformers 5)
and DIR/tiny4 (transformers 4). Its answers are noise; its load, its token counts and its errors are those of any model."""

import glob
import json
import os
import shutil
import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

out = sys.argv[1]

# The tokenizer learns from Python's own library: text that is on every machine that runs this.
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
special = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
tokenizer.train(
    sorted(glob.glob(os.path.join(os.path.dirname(os.__file__), "*.py")))[:60],
    trainers.BpeTrainer(vocab_size=2000, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
)
fast = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>",
    additional_special_tokens=special[3:],
)
fast.chat_template = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% if not (loop.last and continue_final_message) %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
new, old = out + "/tiny5", out + "/tiny4"
os.makedirs(new, exist_ok=True)
fast.save_pretrained(new)

config = LlamaConfig(
    vocab_size=len(fast), hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=4, head_dim=64, max_position_embeddings=4096, bos_token_id=fast.bos_token_id,
    eos_token_id=fast.eos_token_id, pad_token_id=fast.pad_token_id, tie_word_embeddings=True,
)
torch.manual_seed(0)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(new)

# transformers 4 names the same facts differently.
shutil.rmtree(old, ignore_errors=True)
shutil.copytree(new, old)
with open(old + "/tokenizer_config.json") as f:
    facts = json.load(f)
facts["tokenizer_class"] = "PreTrainedTokenizerFast"
facts.pop("backend", None)
facts.pop("extra_special_tokens", None)
facts["chat_template"] = fast.chat_template
with open(old + "/tokenizer_config.json", "w") as f:
    json.dump(facts, f)
with open(old + "/config.json") as f:
    facts = json.load(f)
facts["torch_dtype"] = facts.pop("dtype", "bfloat16")
facts["rope_theta"] = (facts.pop("rope_parameters", None) or {}).get("rope_theta", 10000.0)
with open(old + "/config.json", "w") as f:
    json.dump(facts, f)
