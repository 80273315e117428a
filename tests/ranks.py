"""train.py with the scripted expert in place of sampling, started by torchrun or alone: keeps what each update saw.

python tests/ranks.py OUT.pt FLAGS OF train.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch  # noqa: E402

import train as train_file  # noqa: E402
from env import ToyWiki  # noqa: E402
from rollout import rollout, scripted  # noqa: E402

kept = []


def expert(sample, tokenizer, envs, *rest):
    """Episodes of several calls that do not depend on a model."""
    return rollout(scripted(ToyWiki.expert, tokenizer, envs), tokenizer, envs, *rest)


def keep(metrics, *models):
    """Where train.py looks for what is not finite: the sums over all ranks, whole gradients, and dtypes."""
    record = {"metrics": dict(metrics)}
    for name, model in zip(("student", "critic"), models):
        parameters = dict(model.named_parameters())
        record[name] = {n: train_file.whole(p.grad).clone() for n, p in parameters.items()}
    every = [*models, *frozen_models]
    record["buffers"] = [(b.dtype, b.clone()) for model in every for _, b in model.named_buffers()]
    record["frozen"] = {p.dtype for model in frozen_models for p in model.parameters()}
    kept.append(record)
    check_finite(metrics, *models)


def count(found, config):
    """How many packs each rank has before they are made even."""
    packs.append(train_file.gather(len(found)))
    return even(found, config)


def freeze(*args):
    """Reference and teacher."""
    frozen_models.append(frozen(*args))
    return frozen_models[-1]


packs, frozen_models = [], []
frozen, train_file.frozen = train_file.frozen, freeze
train_file.rollout, check_finite, train_file.check_finite = expert, train_file.check_finite, keep
even, train_file.even = train_file.even, count
out, flags = sys.argv[1], sys.argv[2:]
config = train_file.join(train_file.parse_config(flags))
adam, states = torch.optim.AdamW, []
torch.optim.AdamW = lambda *args, **kwargs: states.append(adam(*args, **kwargs)) or states[-1]
(train_file.sft if config.stage == "sft" else train_file.train)(config)
if not train_file.rank():
    moments = {(k, v.dtype) for o in states for s in o.state.values() for k, v in s.items() if k != "step"}
    torch.save({"kept": kept, "packs": packs, "moments": moments}, out)
