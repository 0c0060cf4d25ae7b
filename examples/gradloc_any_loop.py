"""GradLoc in a loop of one's own, with any loss that is a sum of weighted token terms. torchrun --nproc-per-node 2
examples/gradloc_any_loop.py"""

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM

from trainer.gradloc import (
    BackwardRecord,
    CalibratedTau,
    GradLoc,
    GradLocConfig,
    StepData,
    SumOfTerms,
    micro_batch,
    ranks_of,
)
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import sum_gradients

ROWS, WIDTH, VOCABULARY = 4, 32, 64
dist.init_process_group(
    "gloo", **({} if dist.is_torchelastic_launched() else {"store": dist.HashStore(), "rank": 0, "world_size": 1})
)
ranks = ranks_of(torch.device("cpu"))
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
model = PolicyModel(Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, **sizes, **heads)), chunk_tokens=256)
for unit in (*model.blocks(), model):
    fully_shard(unit, mesh=ranks.mesh)
sum_gradients(model)
optimizer, record = torch.optim.AdamW(model.parameters(), lr=1e-3), BackwardRecord(model, ranks)
loss = SumOfTerms(lambda logprobs, tokens: -torch.exp(logprobs - tokens.old_logprobs) * tokens.advantages)
gradloc = GradLoc(GradLocConfig(threshold=CalibratedTau(warmup_steps=5)), model, loss, ranks)
for step in range(8):
    ids = np.random.default_rng((step, ranks.rank)).integers(VOCABULARY, size=(2, ROWS, WIDTH))
    old = np.full(ids.shape, -np.log(VOCABULARY), dtype=np.float32)
    if step == 6 and ranks.rank == ranks.world - 1:
        old[1, 2, 17] -= 10.0  # planted: a log-prob that is 10 nats off makes a ratio of 22,000
    mask = np.tile(np.arange(WIDTH) > 0, (ROWS, 1))
    batches = [micro_batch(ids[m], mask, 1 / (2 * mask.sum() * ranks.world), old_logprobs=old[m]) for m in range(2)]
    for number, micro in enumerate(batches):
        with record.recording(number):
            loss.of(model, micro).backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).full_tensor().item()
    report = gradloc.observe(norm, StepData(micro_batches=batches), record=record)
    print(f"rank {ranks.rank} step {step}: norm {norm:.3g}", f"{report.outcome}: {report.hits}" if report else "")
    if report is None:  # a real loop acts on report.outcome
        optimizer.step()
    optimizer.zero_grad()
