"""Which architectures of transformers run on packs and sample in batches, exactly?

    python -m experiments.architectures                  # all of AutoModelForCausalLM, a row each
    python -m experiments.architectures llama mamba      # some

Each is built small, with random weights, and goes through what a real model goes through when it is
loaded: `check_model` and `check_sampling`, which accept it or refuse it with a reason. What they
accept is then compared, on longer calls than theirs, with the same weights under transformers' own
eager attention, one call at a time. A row that says "wrong" is one that they should have refused.
What cannot be built small is counted at the end.
"""

import argparse
import logging
import re
import signal
import warnings

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from eval import markdown
from pack import action_hidden, check_model, pack
from rollout import check_sampling, command, generate

V = 96
# By the end of a name, the first that fits: whatever a config calls them.
SIZES = {
    "vocab_size": V, "moe_intermediate_size": 32, "intermediate_size": 64, "ffn_dim": 64,
    "n_inner": 64, "d_ff": 64, "hidden_size": 64, "n_embd": 64, "d_model": 64, "dim_model": 64,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "decoder_layers": 2,
    "encoder_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 32,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "word_embed_proj_dim": 64, "embedding_size": 64, "pad_token_id": 0, "bos_token_id": 1,
    "rotary_dim": 8, "qk_head_dim": 16, "eos_token_id": 2,
    "max_position_embeddings": 256, "n_positions": 256, "max_seq_len": 256,
}  # fmt: skip
EXTRA = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"num_heads": 8},
    "reformer": {"is_decoder": True, "axial_pos_shape": [16, 16], "axial_pos_embds_dim": [32, 32]},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "bert": {"is_decoder": True},
}


def small_config(kind, fill):
    """The architecture's own config, in which all that is a size is small; with `fill` also what
    is None in it."""
    full = AutoConfig.for_model(kind)
    settings = dict(EXTRA.get(kind, {}))
    for name, value in full.to_dict().items():
        if name in SIZES and (fill or value is not None or name.endswith("token_id")):
            settings.setdefault(name, SIZES[name])
    if "qk_rope_head_dim" in settings:  # latent attention has as many keys as queries
        settings["head_dim"] = settings["qk_rope_head_dim"]
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    kinds = full.to_dict().get("layer_types")
    if kinds:
        settings["layer_types"] = list(dict.fromkeys(kinds)) * (1 + (len(set(kinds)) == 1))
        settings["num_hidden_layers"] = len(settings["layer_types"])
    return AutoConfig.for_model(kind, **settings)


def build(config, attention):
    """The model with random weights of a size that makes attention matter, in eval mode."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for p in model.parameters():
        if p.is_floating_point():
            p.data += 0.1 * torch.randn_like(p)
    return model.eval()


@torch.no_grad()
def alone(model, prompt, action):
    """(len(a), V): the logits of one call, by itself."""
    out = model(input_ids=torch.tensor([prompt + action[:-1]]), use_cache=False)
    return out.logits[0, -len(action) :]


def verdicts(kind):
    """What is said of packs and of sampling: exact, wrong, or refused and why."""
    for fill in (False, True):
        try:
            config = small_config(kind, fill)
            with torch.device("meta"):
                n = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
            if n > 2e7:
                raise ValueError(f"{n} weights are not small")
            truth = build(config, "eager")
            alone(truth, [5, 6], [7])
            break
        except Exception:
            if fill:
                raise
    try:
        model = build(config, "packed")
    except Exception as error:  # what `rollout.load` would say, too
        reason = f"refused: {type(error).__name__}: {str(error).splitlines()[0]}"
        return reason, reason
    model.load_state_dict(truth.state_dict())
    rng = torch.Generator().manual_seed(1)
    ids = torch.randint(3, V, (120,), generator=rng).tolist()
    prompts = [ids[:10], ids[:10] + ids[20:40], ids[:10] + ids[50:57]]
    actions = [ids[60:70], ids[70:75], ids[80:100]]
    found = []
    for check, measure in ((check_model, pack_error), (check_sampling, sampling_error)):
        try:
            check(model)
        except ValueError as error:
            reason = re.split("on packs: |in batches: ", str(error))[-1]
            found.append(f"refused: {reason[:120].replace('|', '/')}")
            continue
        off = measure(model, truth, prompts, actions)
        found.append("exact" if off < 1e-4 else f"wrong by {off:.0e} of the largest logit")
    return found


def pack_error(model, truth, prompts, actions):
    """How far logits in a pack are off, as a share of the largest."""
    with torch.no_grad():
        hidden = action_hidden(model, pack(prompts, actions))
        logits = hidden @ model.get_output_embeddings().weight.T
    right = torch.cat([alone(truth, *call) for call in zip(prompts, actions)])
    return ((logits - right).abs().max() / right.abs().max()).item()


def sampling_error(model, truth, prompts, actions):
    """How far recorded log-probs are off, on the same scale."""
    noise = [torch.Generator().manual_seed(i) for i in range(len(prompts))]
    sampled, logprobs = generate(model, prompts, 12, 1.0, lambda new: new[-1] % 7 == 0, noise)
    off, largest = 0.0, 0.0
    for prompt, new, recorded in zip(prompts, sampled, logprobs):
        logits = alone(truth, prompt, new)
        right = logits.log_softmax(-1).gather(1, torch.tensor(new)[:, None])[:, 0]
        off = max(off, (torch.tensor(recorded) - right).abs().max().item())
        largest = max(largest, logits.abs().max().item())
    return off / largest


def rows(kinds):
    """A row for each architecture that can be built, and a count of the others."""
    unbuilt = []
    for kind in tqdm(kinds):
        signal.alarm(120)
        try:
            yield kind, *verdicts(kind)
        except (Exception, SystemExit) as error:
            unbuilt.append(f"{kind} ({type(error).__name__}: {str(error).splitlines()[:1]})")
        finally:
            signal.alarm(0)
    for line in unbuilt:
        tqdm.write(f"not built: {line}"[:200])


@command("experiments.architectures")
def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("kinds", nargs="*", help="model types; default: all of them")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    for line in markdown(
        ["architecture", "packs", "sampling"],
        rows(args.kinds or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)),
    ):
        print(line, flush=True)


if __name__ == "__main__":
    main()
