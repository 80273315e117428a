"""Eq. 7-11 against torch.distributions, plain autograd in float64, and definitions written another
way; and that what is readable is what trains."""

from dataclasses import replace

import pytest
import torch
from torch.distributions import Categorical, kl_divergence
from torch.testing import assert_close

import losses
from losses import actor_loss, chunked_log_prob, chunked_loss, gae, ppo_loss, reverse_kl
from losses import token_rewards, value_loss, whiten
from pack import action_hidden, pack
from rce import independent_logits
from tiny import random_calls, tiny
from train import Batch, Config, actor_objective, loss_of

VOCABULARIES = [(5, 5), (5, 7), (7, 5)]  # of student and teacher


def case(N=7, V=5, V_T=5, H=4, H_T=3):
    """Hidden states and head of a student, sampled ids, and those of a teacher, in float64."""
    g = torch.Generator().manual_seed(0)
    shapes = ((N, H), (V, H), (N, H_T), (V_T, H_T))
    parts = [torch.randn(*shape, generator=g, dtype=torch.float64) for shape in shapes]
    ids = torch.randint(min(V, V_T), (N,), generator=g)
    return *parts[:2], ids, *parts[2:]


def scores_by_definition(z, ids, teacher_z):
    """log-prob, entropy and KL(p_theta || p_T) on the common vocabulary, by torch.distributions."""
    policy = Categorical(logits=z)
    common = min(z.shape[-1], teacher_z.shape[-1])
    cut = Categorical(logits=z[:, :common])
    teacher = Categorical(logits=teacher_z[:, :common])
    return policy.log_prob(ids), policy.entropy(), kl_divergence(cut, teacher)


# ---- Eq. 7 ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("V, V_T", VOCABULARIES)
def test_readable_forms_are_those_of_torch_distributions(V, V_T):
    """Would catch: cutting the student's vocabulary for log-prob and entropy, too; a softmax before
    the cut; the KL the other way round."""
    hidden, head, ids, teacher_hidden, teacher_head = case(V=V, V_T=V_T)
    z, teacher_z = hidden @ head.T, teacher_hidden @ teacher_head.T
    logp, entropy, kl = scores_by_definition(z, ids, teacher_z)
    assert_close(losses.log_prob(z, ids), logp)
    assert_close(losses.entropy(z), entropy)
    assert_close(reverse_kl(z, teacher_z), kl)


def test_reverse_kl_on_three_tokens_by_hand():
    """KL((1/2, 1/4, 1/4) || (1/4, 1/4, 1/2)) = 1/2 ln 2 - 1/4 ln 2 = ln(2) / 4. The forward KL is
    the same here, so a distribution on two tokens and one on all three tell them apart."""
    p = torch.tensor([[0.5, 0.25, 0.25]]).log()
    q = torch.tensor([[0.25, 0.25, 0.5]]).log()
    assert_close(reverse_kl(p, q), torch.tensor([2.0]).log() / 4)
    narrow = torch.tensor([[0.0, 0.0, -30.0]])
    wide = torch.zeros(1, 3)
    assert_close(reverse_kl(narrow, wide), torch.tensor([1.5]).log())
    assert reverse_kl(wide, narrow) > 9


# ---- Eq. 8 and 9 ---------------------------------------------------------------------------------
def test_token_rewards_penalise_only_growth():
    """Eq. 8: 0 where the policy is less sure than the reference (both signs)."""
    rewards = torch.tensor([0.0, 0.0, 2.0])
    logp_old = torch.tensor([-1.0, -3.0, -1.0])
    logp_ref = torch.tensor([-2.0, -1.0, -1.5])
    out = token_rewards(rewards, logp_old, logp_ref, kl_coef=0.1)
    assert_close(out, torch.tensor([-0.1, 0.0, 1.95]))


def gae_by_definition(rewards, values, gamma, lam):
    """A_n = sum_j (gamma lam)^j delta_{n+j} of one trajectory, as a geometric sum."""
    following = [*values[1:], 0.0]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, following)]
    advantages = []
    for n in range(len(rewards)):
        terms = [(gamma * lam) ** j * delta for j, delta in enumerate(deltas[n:])]
        advantages.append(sum(terms))
    return advantages


def test_gae_does_not_leak_between_trajectories():
    """Eq. 9 on two trajectories in a row is Eq. 9 on each. Would catch bootstrapping from the next
    one's value, a nonzero terminal value, and lambda applied across the border."""
    g = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 8, generator=g, dtype=torch.float64)
    last = torch.tensor([0, 0, 0, 0, 1, 0, 0, 1], dtype=torch.bool)
    advantages, returns = gae(rewards, values, last, 0.9, 0.8)
    expected = []
    for part in (slice(0, 5), slice(5, 8)):
        expected += gae_by_definition(rewards[part].tolist(), values[part].tolist(), 0.9, 0.8)
    assert_close(advantages, torch.tensor(expected, dtype=torch.float64))
    assert_close(returns, advantages + values)


def test_gae_terminal_reward_reaches_the_last_action():
    """With gamma = 0 every advantage is r - V: the terminal reward lands on the last action though
    observations would follow it."""
    rewards = torch.tensor([0.0, 0.0, 1.0])
    values = torch.tensor([0.5, 0.5, 0.25])
    last = torch.tensor([False, False, True])
    advantages, _ = gae(rewards, values, last, gamma=0.0, gae_lambda=0.95)
    assert_close(advantages, torch.tensor([-0.5, -0.5, 0.75]))


def test_whitened_advantages_by_hand():
    """Mean 2 and deviation 1, over all tokens (and not over one less)."""
    white = whiten(torch.tensor([1.0, 3.0]))
    assert_close(white, torch.tensor([-1.0, 1.0]))
    assert whiten(torch.tensor([5.0, 5.0])).tolist() == [0.0, 0.0]


# ---- Eq. 10 and 11 -------------------------------------------------------------------------------
def test_ppo_loss_by_hand():
    """Eq. 10 in its four cases: ratio 1.5 and 0.5, advantage of either sign, eps = 0.2. Would catch
    max for min, and a ratio that is always 1 (exp(logp - logp.detach()))."""
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5])
    advantages = torch.tensor([2.0, -2.0, 2.0, -2.0])
    logp_old = torch.zeros(4)
    logp = ratio.log().requires_grad_()
    loss, approx_kl, clipfrac = ppo_loss(logp, logp_old, advantages, 0.2)
    assert_close(loss, torch.tensor([-2.4, 3.0, -1.0, 1.6]))
    assert clipfrac.tolist() == [1, 1, 1, 1]
    assert_close(approx_kl, ratio - 1 - ratio.log())
    loss.sum().backward()
    unclipped_only = torch.tensor([0.0, 3.0, -1.0, 0.0])  # no gradient where the clip binds
    assert_close(logp.grad, unclipped_only)
    loss, _, clipfrac = ppo_loss(logp_old, logp_old, torch.ones(4), 0.2)
    assert loss.tolist() == [-1] * 4 and clipfrac.sum() == 0


def test_value_loss_takes_the_worse_of_plain_and_clipped():
    values, returns = torch.tensor([2.0, 0.2]), torch.tensor([2.0, 1.0])
    found = value_loss(values, torch.zeros(2), returns, value_clip=0.5)
    assert_close(found, torch.tensor([0.5 * 1.5**2, 0.5 * 0.8**2]))


def test_actor_loss_is_additive_over_parts_of_a_batch():
    """Eq. 11: parts divided by the counts of the whole batch sum to the whole. A mask selects
    before it sums, so that what it leaves out may be NaN; an all-masked part gives 0, not NaN."""
    g = torch.Generator().manual_seed(0)
    ppo, entropy, kl = torch.randn(3, 6, generator=g)
    mask = torch.tensor([True, False, True, True, False, False])
    kl[1] = torch.nan

    def part(rows):
        return actor_loss(ppo[rows], entropy[rows], kl[rows], 0.1, 0.5, 6, 3, mask[rows])

    whole = part(slice(0, 6))
    parts = [part(slice(*bounds)) for bounds in ((0, 1), (1, 4), (4, 6))]
    assert_close(sum(parts), whole)
    expected = ppo.mean() - 0.1 * entropy.mean() + 0.5 * kl[mask].mean()
    assert_close(whole, expected)
    nothing = torch.zeros(6, dtype=torch.bool)
    assert actor_loss(ppo, entropy, kl, 0.0, 1.0, 6, 0, nothing) == ppo.mean()


# ---- a few tokens at a time ----------------------------------------------------------------------
def weighted_loss(ids, teacher_logits, weights, sizes=None):
    """A loss for `chunked_loss` in which every token has its own weight on log-prob, entropy and
    KL, (3, N), and the three as metrics. sizes: notes how many tokens came at a time."""

    def loss(logits, rows):
        if sizes is not None:
            sizes.append(len(logits))
        logp = losses.log_prob(logits, ids[rows])
        entropy = losses.entropy(logits)
        kl = reverse_kl(logits, teacher_logits[rows])
        weighted = weights[:, rows] * torch.stack([logp, entropy, kl])
        return weighted.sum(), {"logp": logp, "entropy": entropy, "kl": kl}

    return loss


def random_weights(N):
    g = torch.Generator().manual_seed(1)
    return torch.randn(3, N, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("V, V_T", VOCABULARIES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 3, 7, 100, None])
def test_chunked_loss_is_the_loss_of_all_tokens_at_once(V, V_T, temperature, chunk):
    """Value, metrics of each token, and gradients to hidden states and head, against plain autograd
    on whole logits and torch.distributions. Would catch a lost temperature, chunks that lose rows
    or take them twice, and the gradient of a sampled KL (k1, k3) instead of the exact one."""
    hidden, head, ids, teacher_hidden, teacher_head = case(V=V, V_T=V_T)
    teacher_z, weights, sizes = teacher_hidden @ teacher_head.T, random_weights(7), []
    ours = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
    loss = weighted_loss(ids, teacher_z, weights, sizes)
    total, metrics = chunked_loss(loss, *ours, temperature, chunk)
    total.backward()
    assert sum(sizes) == 7 and max(sizes) <= (chunk or 7)

    whole = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
    scores = scores_by_definition(whole[0] @ whole[1].T / temperature, ids, teacher_z)
    expected = (weights * torch.stack(scores)).sum()
    expected.backward()
    assert_close(total, expected)
    for name, score in zip(("logp", "entropy", "kl"), scores):
        assert_close(metrics[name], score.detach())
        assert not metrics[name].requires_grad
    for x, y in zip(ours, whole):
        assert_close(x.grad, y.grad)


@pytest.mark.parametrize("V, V_T", VOCABULARIES)
def test_chunked_loss_has_the_gradient_of_finite_differences(V, V_T):
    """Each of log-prob, entropy and KL alone, and all together."""
    hidden, head, ids, teacher_hidden, teacher_head = case(V=V, V_T=V_T)
    teacher_z, weights = teacher_hidden @ teacher_head.T, random_weights(7)
    for used in ([0], [1], [2], [0, 1, 2]):
        some = torch.zeros_like(weights)
        some[used] = weights[used]
        loss = weighted_loss(ids, teacher_z, some)

        def value(hidden, head):
            return chunked_loss(loss, hidden, head, temperature=0.7, chunk=3)[0]

        assert torch.autograd.gradcheck(value, (hidden.requires_grad_(), head.requires_grad_()))


def test_the_incoming_gradient_scales_that_of_chunked_loss():
    """What comes after it counts: a loss that is multiplied by 3, and one that is added to
    others."""
    hidden, head, ids, teacher_hidden, teacher_head = case()
    loss = weighted_loss(ids, teacher_hidden @ teacher_head.T, random_weights(7))
    grads = []
    for factor in (1, 3):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        total, _ = chunked_loss(loss, h, w, chunk=3)
        (factor * total + h.sum() + w.sum()).backward()
        grads.append((h.grad - 1, w.grad - 1))
    for once, thrice in zip(*grads):
        assert_close(3 * once, thrice)


def test_the_head_gradient_of_bfloat16_models_is_summed_in_float32():
    """512 tokens, four at a time, and all pull the head the same way. Against the gradient in
    float64, ours is off by the rounding of one result. The same chunks one by one, whose gradients
    autograd adds up in bfloat16, are several times as far off."""
    g = torch.Generator().manual_seed(0)
    hidden = (1 + torch.randn(512, 16, generator=g)).bfloat16()
    head = (0.1 * torch.randn(32, 16, generator=g)).bfloat16()
    ids = torch.zeros(512, dtype=torch.long)

    def head_gradient(parts):
        w = head.clone().requires_grad_()
        for rows in parts:
            wanted = ids[rows]

            def loss(logits, rows):
                return -losses.log_prob(logits, wanted[rows]).sum(), {}

            chunked_loss(loss, hidden[rows], w, chunk=4)[0].backward()
        return w.grad.double()

    exact = head.double().requires_grad_()
    z = hidden.double() @ exact.T
    torch.nn.functional.cross_entropy(z, ids, reduction="sum").backward()
    in_float32 = head_gradient([slice(0, 512)])
    in_bfloat16 = head_gradient([slice(i, i + 4) for i in range(0, 512, 4)])
    ours = (in_float32 - exact.grad).norm() / exact.grad.norm()
    theirs = (in_bfloat16 - exact.grad).norm() / exact.grad.norm()
    assert ours < 2**-8 and theirs > 3 * ours


def test_no_tokens_are_a_loss_of_zero_and_not_an_error():
    """A rank without tasks goes through the same operations as the others."""
    hidden, head, ids, teacher_hidden, teacher_head = case(N=0)
    hidden.requires_grad_()
    head.requires_grad_()
    loss = weighted_loss(ids, teacher_hidden @ teacher_head.T, random_weights(0))
    total, metrics = chunked_loss(loss, hidden, head)
    total.backward()
    assert total == 0 and hidden.grad.shape == (0, 4)
    assert head.grad.shape == head.shape and not head.grad.any()
    assert [len(x) for x in metrics.values()] == [0, 0, 0]
    assert chunked_log_prob(hidden, head, ids).shape == (0,)


def test_the_teacher_gets_no_gradient():
    hidden, head, ids, teacher_hidden, teacher_head = case()
    models = [x.requires_grad_() for x in (hidden, head, teacher_hidden, teacher_head)]
    loss = weighted_loss(ids, teacher_hidden @ teacher_head.T, random_weights(7))
    chunked_loss(loss, hidden, head)[0].backward()
    assert [x.grad is None for x in models] == [False, False, True, True]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 3, None])
def test_chunked_log_prob_is_the_log_prob_that_training_sees(chunk, dtype):
    """That of whole logits, within rounding; and bit for bit that of `chunked_loss` in the same
    chunks, or the first ratio of Eq. 10 would not be 1."""
    hidden, head, ids, *_ = case(N=50, V=300, H=16)
    hidden, head, seen = hidden.to(dtype), head.to(dtype), []

    def loss(logits, rows):
        seen.append(losses.log_prob(logits, ids[rows]).detach())
        return logits.sum(), {}

    found = chunked_log_prob(hidden, head, ids, 0.7, chunk)
    chunked_loss(loss, hidden.requires_grad_(), head, 0.7, chunk)
    assert torch.equal(found, torch.cat(seen)) and not found.requires_grad
    assert found.dtype == torch.promote_types(dtype, torch.float32)  # softmax in float32 at least
    z = (hidden @ head.T).detach().double() / 0.7
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    if dtype == torch.bfloat16:
        tolerance = 0.1  # logits of 10 are rounded to 0.03, and a chunk may round another way
    expected = Categorical(logits=z).log_prob(ids)
    assert_close(found.double(), expected, rtol=0, atol=tolerance)


# ---- what is readable is what trains -------------------------------------------------------------
def single_call_scores(model, teacher, prompts, actions, temperature):
    """Log-softmax of student and teacher at every action token, from single calls: (N, V) each."""
    ours, theirs = [], []
    for prompt, action in zip(prompts, actions):
        ids = torch.tensor([prompt + action[:-1]])
        ours.append(model(input_ids=ids).logits[0, len(prompt) - 1 :])
        theirs.append(independent_logits(teacher, prompt, action))
    ours, theirs = torch.cat(ours) / temperature, torch.cat(theirs) / temperature
    return ours.log_softmax(-1), theirs.log_softmax(-1)


def forward_kl(logits, teacher_logits):
    """The other one, KL(p_T || p_theta)."""
    return reverse_kl(teacher_logits, logits)


@pytest.mark.parametrize("direction", ["reverse", "forward", "no teacher"])
def test_editing_reverse_kl_changes_training(direction, monkeypatch):
    """What `train.actor_objective` trains is Eq. 7 as it stands in losses.py: with the forward KL
    in its place, the student's gradient is that of the forward KL, and without a teacher that of
    PPO alone. All three are worked out from single calls by plain autograd, and differ by far."""
    prompts, actions, _ = random_calls(tasks=2, calls=2)
    packed = pack(prompts, actions)
    N, T = len(packed.action_ids), 0.7
    student, loop = tiny().double(), tiny().double()
    teacher = tiny(seed=1).double()
    g = torch.Generator().manual_seed(0)
    advantages = 0.3 * torch.randn(N, generator=g, dtype=torch.float64)
    p, t = single_call_scores(loop, teacher, prompts, actions, T)
    logp = p.gather(1, packed.action_ids[:, None])[:, 0]
    ppo = -(logp - logp.detach()).exp() * advantages  # ratios of 1: nothing is clipped
    entropy = -(p.exp() * p).sum(-1)
    kl = {
        "reverse": (p.exp() * (p - t)).sum(-1),
        "forward": (t.exp() * (t - p)).sum(-1),
        "no teacher": torch.zeros_like(logp),
    }
    expected = {}
    for name, guidance in kl.items():
        loop.zero_grad()
        loss = (ppo - 0.01 * entropy + 0.5 * guidance).sum() / N
        loss.backward(retain_graph=True)
        expected[name] = torch.cat([x.grad.flatten() for x in loop.parameters()])

    if direction == "forward":
        monkeypatch.setattr(losses, "reverse_kl", forward_kl)
    with torch.no_grad():
        teacher_hidden = action_hidden(teacher, packed) if direction != "no teacher" else None
    batch = Batch(logp.detach(), advantages, advantages, advantages, teacher_hidden, logp == logp)
    config = replace(Config(), temperature=T, entropy_coef=0.01, distill_coef=0.5)
    objective = actor_objective(packed, batch, teacher.lm_head.weight, (N, N), config)
    loss, metrics = loss_of(student, packed, T, objective)
    loss.backward()
    assert_close(metrics["teacher_kl"], kl[direction].detach())
    found = torch.cat([x.grad.flatten() for x in student.parameters()])
    for name, gradient in expected.items():
        distance = (found - gradient).norm() / gradient.norm()
        # transformers computes norms in float32, whatever the model's precision is
        assert distance < 1e-6 if name == direction else distance > 0.1, name
