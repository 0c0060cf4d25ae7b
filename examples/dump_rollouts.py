"""Samples with transformers alone and writes a dump that `concord audit --layout completion` reads.

    python examples/dump_rollouts.py MODEL_DIR OUT.jsonl [raw]

With `raw` the log-probs are those at temperature 1, although the tokens are sampled at 0.8.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TEMPERATURE = 0.8
model_dir, out, *raw = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(model_dir)
model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
torch.manual_seed(0)
with open(out, "w") as file:
    for prompt in ("12+34=", "71+08=", "55+66=", "90+17="):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        sampling = {
            "do_sample": True,
            "temperature": TEMPERATURE,
            "top_k": 0,
            "top_p": 1.0,
            "max_new_tokens": 6,
            "num_return_sequences": 8,
        }
        done = model.generate(ids, **sampling, output_logits=True, return_dict_in_generate=True)
        logprobs = torch.log_softmax(torch.stack(done.logits, dim=1).float() / (1.0 if raw else TEMPERATURE), dim=-1)
        for completion, row in zip(done.sequences[:, ids.shape[1] :], logprobs, strict=True):
            length = next(
                (i + 1 for i, token in enumerate(completion) if token == model.generation_config.eos_token_id),
                len(completion),
            )
            chosen = row[:length].gather(1, completion[:length, None]).squeeze(1)
            record = {
                "prompt_ids": ids[0].tolist(),
                "completion_ids": completion[:length].tolist(),
                "completion_logprobs": chosen.tolist(),
            }
            file.write(json.dumps(record | {"temperature": TEMPERATURE, "top_p": 1.0, "top_k": 0}) + "\n")
