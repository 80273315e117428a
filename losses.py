"""The objective (Section 3.4), Eq. 7-11, over the N sampled action tokens and nothing else.

    Eq. 7   L_OPD = 1/sum(m_T) sum m_T KL(p_theta || p_T)        reverse_kl
    Eq. 8   r~ = r - beta [log pi_old - log pi_ref]_+            token_rewards
    Eq. 9   delta_n = r~_n + gamma V_{n+1} - V_n, ...            gae
    Eq. 10  L_PPO = -1/N sum min(rho A, clip(rho) A)             ppo_loss
    Eq. 11  L_actor = L_PPO - alpha H + lambda L_OPD             actor_loss

Each is plain PyTorch with one value per token, (N,), until Eq. 11 divides sums by the counts of the
whole batch, so that results do not depend on how it was cut into packs. At a vocabulary of 150,000
the logits of a batch do not fit into memory: `chunked_loss` makes those of a few tokens, calls any
loss on them, takes its gradient at once, and drops them.

Shapes: N sampled action tokens, V vocabulary, H hidden size. Needs torch only.
"""

from collections import defaultdict

import torch


def log_prob(logits, action_ids):
    """log pi(a) of each sampled token: (N, V), (N,) -> (N,)."""
    logp = logits.log_softmax(-1)
    return logp.gather(-1, action_ids[:, None])[:, 0]


def entropy(logits):
    """The policy's entropy H at each token: (N, V) -> (N,)."""
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def reverse_kl(logits, teacher_logits):
    """Eq. 7 per token, KL(p_theta || p_T) over the full vocabulary: (N, V), (N, V_T) -> (N,).
    Vocabularies may be padded differently, so both are cut to the common size first."""
    common = min(logits.shape[1], teacher_logits.shape[1])
    logp = logits[:, :common].log_softmax(-1)
    teacher_logp = teacher_logits[:, :common].log_softmax(-1)
    return (logp.exp() * (logp - teacher_logp)).sum(-1)


def token_rewards(rewards, logp_old, logp_ref, kl_coef):
    """Eq. 8, all (N,): task rewards (on the last token of a call), less the reference penalty."""
    grown = logp_old - logp_ref
    reference_kl = grown.clamp(min=0)  # only where the policy prefers the token more
    return rewards - kl_coef * reference_kl


def gae(rewards, values, last, gamma, gae_lambda):
    """Eq. 9 over whole trajectories, one after the other, a step per sampled token; all (N,).
    `last` marks the final token of each: nothing leaks past it. Returns advantages, returns."""
    rewards, last = rewards.tolist(), last.tolist()
    v = values.tolist()
    advantages = [0.0] * len(v)
    advantage = next_value = 0.0
    for n in reversed(range(len(v))):
        if last[n]:
            advantage = next_value = 0.0
        delta = rewards[n] + gamma * next_value - v[n]
        advantage = delta + gamma * gae_lambda * advantage
        advantages[n] = advantage
        next_value = v[n]
    advantages = torch.tensor(advantages, dtype=values.dtype, device=values.device)
    return advantages, advantages + values


def whiten(advantages):
    """Mean 0 and deviation 1 over the batch's action tokens (MEM1's; not in the paper). Where all
    are equal but for rounding, all are 0."""
    if not len(advantages):
        return advantages
    eps = torch.finfo(advantages.dtype).eps
    rounding = 8 * eps * advantages.abs().max()
    centred = advantages - advantages.mean()
    deviation = advantages.std(correction=0)
    if deviation <= rounding:
        return torch.zeros_like(advantages)
    return centred / (deviation + 1e-8)


def ppo_loss(logp, logp_old, advantages, clip_coef):
    """Eq. 10 per token, all (N,): the loss, and without gradient approx_kl and clipfrac."""
    logratio = logp - logp_old
    logratio = logratio.double()  # 0 times a ratio that overflows, or its gradient, is NaN
    logratio = logratio.clamp(max=700)
    ratio = logratio.exp()
    plain = ratio * advantages
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantages
    loss = -torch.minimum(plain, clipped)
    with torch.no_grad():
        off = ratio - 1
        approx_kl = off - logratio
        clipfrac = (off.abs() > clip_coef).float()
    loss = loss.to(logp.dtype)
    return loss, approx_kl.to(logp.dtype), clipfrac


def value_loss(values, values_old, returns, value_clip):
    """The critic's squared error, all (N,), with clipped values (MEM1's; not in the paper)."""
    change = (values - values_old).clamp(-value_clip, value_clip)
    clipped = values_old + change
    plain_error = (values - returns) ** 2
    clipped_error = (clipped - returns) ** 2
    return 0.5 * torch.maximum(plain_error, clipped_error)


def actor_loss(
    ppo, entropy, kl, entropy_coef, distill_coef, n_actions, n_teacher, teacher_mask=None
):
    """Eq. 11, the part of these tokens, a scalar, from (N,) values. n_actions, n_teacher: tokens of
    the *whole batch*, in all and in m_T; teacher_mask: m_T, (N,) bool; by default all."""
    if teacher_mask is not None:
        kl = kl[teacher_mask]  # select, then sum: 0 * NaN would be NaN
    policy = (ppo - entropy_coef * entropy).sum() / max(n_actions, 1)
    guidance = kl.sum() / max(n_teacher, 1)
    return policy + distill_coef * guidance


def head_logits(hidden, head, temperature=1.0):
    """(N, H), (V, H) -> (N, V) in at least float32, divided by the sampling temperature."""
    logits = hidden @ head.T
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(dtype) / temperature


def chunks(n_tokens, vocab_size, chunk=None):
    """Rows to take at a time; an empty slice if there are none, so that all ranks do the same."""
    chunk = chunk or max(64, 2**23 // vocab_size)
    for start in range(0, max(n_tokens, 1), chunk):
        stop = min(start + chunk, n_tokens)
        yield slice(start, stop)


@torch.no_grad()
def chunked_log_prob(hidden, head, action_ids, temperature=1.0, chunk=None):
    """`log_prob` without gradient, (N,), from hidden states (N, H) and the head (V, H), in the
    chunks of `chunked_loss`: before an update the ratio of Eq. 10 is exactly 1."""
    parts = []
    for rows in chunks(len(hidden), len(head), chunk):
        logits = head_logits(hidden[rows], head, temperature)  # (n, V)
        parts.append(log_prob(logits, action_ids[rows]))
    return torch.cat(parts)


def chunked_loss(loss, hidden, head, temperature=1.0, chunk=None):
    """The sum of a loss over all tokens, in memory for the logits of a few.

    hidden: (N, H), head: (V, H). loss(logits, rows) gets the (n, V) logits of the tokens in a slice
    and returns their part of the loss, a scalar, and per-token metrics, {name: (n,)}. Gradients are
    taken chunk by chunk in the forward pass, the head's summed in at least float32; backward only
    scales them. Returns the scalar and the metrics, (N,) each, without gradient."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    total = hidden.new_zeros((), dtype=dtype)
    grad_hidden = torch.empty_like(hidden)
    grad_head = torch.zeros_like(head, dtype=dtype)
    metrics = defaultdict(list)
    for rows in chunks(len(hidden), len(head), chunk):
        h = hidden[rows].detach()
        w = head.detach()
        logits = head_logits(h, w, temperature)  # (n, V)
        logits.requires_grad_()
        with torch.enable_grad():
            part, found = loss(logits, rows)
        (grad,) = torch.autograd.grad(part, logits)
        grad = grad / temperature
        grad = grad.to(w.dtype)
        grad_hidden[rows] = grad @ w
        if w.dtype == dtype:
            grad_head.addmm_(grad.T, h)  # without a second tensor of the head's size
        else:
            grad_head += grad.T @ h
        total += part.detach()
        for name, x in found.items():
            metrics[name].append(x.detach())
    metrics = {name: torch.cat(parts) for name, parts in metrics.items()}
    # its value cancels; its gradient, to hidden states and head, is what was taken above
    grad_head = grad_head.to(head.dtype)
    known = torch.dot(hidden.flatten(), grad_hidden.flatten())
    known += torch.dot(head.flatten(), grad_head.flatten())
    return total + (known - known.detach()), metrics
