"""train.py with the scripted expert instead of sampling, under torchrun or alone: keeps what each
update saw.

    python tests/ranks.py OUT.pt FLAGS OF train.py

With FORWARD_KL in the environment, KL(p_T || p_theta) takes the place of `losses.reverse_kl`.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch  # noqa: E402
from torch.distributions import Categorical, kl_divergence  # noqa: E402

import losses  # noqa: E402
import train as train_file  # noqa: E402
from env import ToyWiki  # noqa: E402
from rollout import rollout, scripted  # noqa: E402

kept, packs, frozen_models, optimizers = [], [], [], []
check_finite, with_empty_packs = train_file.check_finite, train_file.with_empty_packs
frozen, trainable = train_file.frozen, train_file.trainable


def expert_rollout(sample, tokenizer, envs, *rest):
    """Episodes of several calls that do not depend on a model."""
    return rollout(scripted(ToyWiki.expert, tokenizer, envs), tokenizer, envs, *rest)


def keep(step, metrics, *models):
    """Where train.py looks for what is not finite: the sums over all ranks, whole gradients, and
    dtypes."""
    record = {"metrics": dict(metrics), "buffers": []}
    for name, model in zip(("student", "critic"), models):
        record[name] = {}
        for parameter, p in model.named_parameters():
            record[name][parameter] = train_file.full_tensor(p.grad).clone()
    for model in (*models, *frozen_models):
        record["buffers"] += [(b.dtype, b.clone()) for b in model.buffers()]
    record["frozen"] = {p.dtype for model in frozen_models for p in model.parameters()}
    kept.append(record)
    check_finite(step, metrics, *models)


def count_packs(found, config):
    """How many packs each rank has before all have as many."""
    packs.append(train_file.gather(len(found)))
    return with_empty_packs(found, config)


def keep_frozen(*args):
    """Reference and teacher."""
    frozen_models.append(frozen(*args))
    return frozen_models[-1]


def keep_optimizer(*args):
    """Student and critic."""
    model, optimizer = trainable(*args)
    optimizers.append(optimizer)
    return model, optimizer


def forward_kl(logits, teacher_logits):
    """(N, V), (N, V_T) -> (N,)."""
    common = min(logits.shape[-1], teacher_logits.shape[-1])
    student = Categorical(logits=logits[:, :common])
    teacher = Categorical(logits=teacher_logits[:, :common])
    return kl_divergence(teacher, student)


def moments():
    """Name and dtype of all that the optimizers remember of the gradients."""
    found = set()
    for optimizer in optimizers:
        for state in optimizer.state.values():
            found |= {(name, x.dtype) for name, x in state.items() if name != "step"}
    return found


def main():
    train_file.rollout, train_file.check_finite = expert_rollout, keep
    train_file.with_empty_packs = count_packs
    train_file.frozen, train_file.trainable = keep_frozen, keep_optimizer
    if "FORWARD_KL" in os.environ:
        losses.reverse_kl = forward_kl
    config = train_file.join(train_file.parse_config(sys.argv[2:]))
    train_file.sft(config) if config.stage == "sft" else train_file.train(config)
    if train_file.rank() == 0:
        torch.save({"kept": kept, "packs": packs, "moments": moments()}, sys.argv[1])


if __name__ == "__main__":
    main()
