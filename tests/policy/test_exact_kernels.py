"""policy.true_on_policy on CUDA, by Triton's interpreter: the trainer's model against the plugin's operations.

The server's side computes one token at a time with a paged cache, as SGLang decodes. In fp32: the interpreter cannot
multiply bf16. The figures of real GPUs are in docs/concepts.md.
"""

import importlib
import os
import re
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from installed_sglang import ROOT
from long_lists import ALL_CASES, some
from tiny_model import tiny_model
from tiny_run import raw_config

from megatron_dapo.config import check_config, parse_config
from megatron_dapo.config.policy import PolicyConfig
from megatron_dapo.data import save_arithmetic_tokenizer
from megatron_dapo.engines.sglang.server_process import IN_SERVER
from megatron_dapo.policy.batch import TrainBatch
from megatron_dapo.policy.megatron.runtime import initialize
from megatron_dapo.policy.policy import Policy
from megatron_dapo.processes.fork_ranks import run_ranks

PACKAGES = next(ROOT.glob(".venv-sglang-*/lib/python3*/site-packages/triton"), None)
pytestmark = pytest.mark.skipif(PACKAGES is None, reason="needs Triton: a venv of SGLang has it")
LENGTHS = [(3, 4), (1, 2), (6, 1)] if ALL_CASES else [(1, 3), (4, 1)]  # prompt, response


def kernels():
    """In a forked process: Triton is another venv's."""
    os.environ["TRITON_INTERPRET"] = "1"
    for name in [name for name in sys.modules if re.match(r"triton(?!\._C)\b", name)]:
        del sys.modules[name]  # megatron-core 0.19 has imported it without
    sys.path += [str(IN_SERVER), str(PACKAGES.parent)]
    return importlib.import_module("megatron_dapo.engines.sglang.in_server.megatron_dapo_kernels")


def attend_each(query, key, value, cumulative, longest, scale):
    parts = [
        F.scaled_dot_product_attention(
            *(x[a:b].transpose(0, 1) for x in (query, key, value)), is_causal=True, scale=scale, enable_gqa=True
        ).transpose(0, 1)
        for a, b in zip(cumulative.tolist()[:-1], cumulative.tolist()[1:], strict=True)
    ]
    return torch.cat(parts)


class Decoder:
    """As a server with the plugin: fused products, a paged cache, one token at a time."""

    def __init__(self, shared, model):
        self.kernels, self.config = shared, model.config
        self.weights = dict(model.named_parameters())
        self.theta = model.config.rope_parameters["rope_theta"]

    def norm(self, x, name):
        return self.kernels.rms_norm(x, self.weights[f"{name}.weight"], self.config.rms_norm_eps)[0]

    def linear(self, x, *names):
        found = self.kernels.mm(x, torch.cat([self.weights[f"{name}.weight"] for name in names]).t())
        biases = [self.weights.get(f"{name}.bias") for name in names]
        return found if biases[0] is None else found + torch.cat(biases)

    @torch.inference_mode()
    def hidden(self, tokens):
        config, layers = self.config, self.config.num_hidden_layers
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        slots = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))
        cache = torch.zeros(layers, 2, len(tokens), kv_heads, size)
        table, found = self.kernels.rotary_table(torch.arange(len(tokens)), size, self.theta), []
        for place, token in enumerate(tokens):
            residual, x = None, self.weights["model.embed_tokens.weight"][int(token)][None]
            cos, sin = (part[place : place + 1] for part in table)
            for i in range(layers):
                layer = f"model.layers.{i}"
                residual = x if residual is None else x + residual
                x = self.norm(residual, f"{layer}.input_layernorm")
                qkv = self.linear(x, *(f"{layer}.self_attn.{n}_proj" for n in "qkv")).view(1, -1, size)
                q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
                if f"{layer}.self_attn.q_norm.weight" in self.weights:
                    q, k = (self.norm(x, f"{layer}.self_attn.{n}_norm") for x, n in ((q, "q"), (k, "k")))
                q, k = (self.kernels.rotate(x, cos, sin) for x in (q, k))
                cache[i, :, slots[place]] = torch.cat([k, v])
                ends = torch.tensor([0, place + 1], dtype=torch.int32)
                one = torch.tensor([0, 1], dtype=torch.int32)
                x, _ = self.kernels.attend(q, *cache[i], one, ends, 1, size**-0.5, slots=slots)
                residual = self.linear(x.flatten(1), f"{layer}.self_attn.o_proj") + residual
                x = self.norm(residual, f"{layer}.post_attention_layernorm")
                gate, up = self.linear(x, f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj").chunk(2, -1)
                x = self.linear(F.silu(gate) * up, f"{layer}.mlp.down_proj")
            found.append(self.norm(x + residual, "model.norm"))
        return torch.cat(found)

    @torch.inference_mode()
    def logprobs(self, sequences, temperature):
        rows = torch.cat([self.hidden(tokens)[prompt - 1 : -1] for tokens, prompt in sequences])
        targets = torch.from_numpy(np.concatenate([tokens[prompt:] for tokens, prompt in sequences])).long()
        logits = self.kernels.mm(rows, self.weights["lm_head.weight"].t()).float()
        logits.div_(torch.full((len(rows), 1), temperature))
        peak, total, _ = self.kernels.row_stats(logits, logits.shape[1], 1.0)
        return (logits - (peak + total.log())[:, None]).gather(1, targets[:, None])[:, 0].numpy()


def train(rendezvous, raw, kind, mode):
    """With the kernels (exact) or without (ordinary). The difference to the server in scoring, in scoring with a kernel
    that is planted to differ, and in the update; and the gradient norm."""
    shared = kernels()
    from megatron_dapo.policy.model import gpt, local_spec

    exact = mode == "exact"
    PolicyConfig.uses_exact_kernels = property(lambda policy: exact)
    gpt.check_hardware = lambda policy, te: None
    local_spec.can_attend_packed, local_spec.attend_packed = lambda query: exact, attend_each
    config = parse_config(raw)
    policy = Policy(config, check_config(config), initialize(config.policy, rendezvous=rendezvous))
    policy.load_hf(config.policy.model)
    random = np.random.default_rng(0)
    sequences = [(random.integers(0, 300, prompt + response).astype(np.int32), prompt) for prompt, response in LENGTHS]
    counts = np.array([response for _, response in LENGTHS])
    batch = TrainBatch(
        tokens=np.concatenate([tokens for tokens, _ in sequences]),
        prompt_lengths=np.array([prompt for _, prompt in sequences]),
        response_lengths=counts,
        advantages=random.standard_normal(len(counts)).astype(np.float32),
        loss_mask=np.ones(counts.sum(), bool),
        engine_logprobs=np.zeros(counts.sum(), np.float32),
    )
    server = Decoder(shared, tiny_model(kind)) if exact else None
    found = server.logprobs(sequences, config.rollout.temperature) if server else policy.log_probs(batch)[0]
    batch.engine_logprobs = found

    def difference():
        return float(np.abs(policy.log_probs(batch)[0] - batch.engine_logprobs).max())

    scored = difference()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "rms_norm", lambda x, weight, eps: (F.rms_norm(x, weight.shape, weight, eps * 2), None))
        planted = difference()
    metrics = policy.update(batch, first=True)
    return scored, planted, metrics["mismatch_max"], metrics["grad_norm"]


def outcome(tmp_path, kind, mode="exact", **policy):
    tiny_model(kind).save_pretrained(tmp_path / kind)
    save_arithmetic_tokenizer(tmp_path / kind)
    settings = {f"policy__{name}": value for name, value in policy.items()}
    raw = raw_config(tmp_path / kind, tmp_path / "run", rollout__temperature=0.7, **settings)
    return run_ranks(1, train, raw, kind, mode, timeout=600)[0]


KINDS = [("qwen2", "none"), ("qwen3", "full"), ("qwen3", "selective")]


@pytest.mark.parametrize(("kind", "recompute"), some(KINDS, KINDS[0]))
def test_the_trainer_has_a_decoding_servers_bits_and_the_ordinary_gradient(kind, recompute, tmp_path):
    scored, planted, trained, norm = outcome(tmp_path, kind, recompute=recompute)
    assert (scored, trained) == (0.0, 0.0)
    assert planted > 0
    assert norm == pytest.approx(outcome(tmp_path, kind, "ordinary", recompute=recompute)[-1], rel=1e-4)


def invariant_parts(rendezvous):
    shared, random = kernels(), torch.Generator().manual_seed(0)
    left, right = (torch.randn(rows, 100, generator=random) for rows in (70, 37))
    whole = shared.mm(left, right.t())
    parts = [torch.equal(shared.mm(left[i : i + n], right[j:].t()), whole[i : i + n, j:]) for i, n, j in PARTS]
    starts = torch.tensor([0, 70, 75], dtype=torch.int32)
    query, key, value = (torch.randn(75, heads, 16, generator=random) for heads in (4, 2, 2))
    packed, _ = shared.attend(query, key, value, starts, starts, 70, 0.25)
    alone, _ = shared.attend(query[70:], key[70:], value[70:], *[torch.tensor([0, 5], dtype=torch.int32)] * 2, 5, 0.25)
    close = [
        torch.allclose(whole, left @ right.t(), atol=1e-3),
        torch.allclose(packed, attend_each(query, key, value, starts, 70, 0.25), atol=1e-5),
    ]
    return [*parts, torch.equal(alone, packed[70:]), *close]


PARTS = [(0, 1, 0), (3, 66, 5), (69, 1, 30)]  # first row, rows, first column


def test_an_element_depends_on_its_own_row_alone():
    assert run_ranks(1, invariant_parts)[0] == [True] * 6
